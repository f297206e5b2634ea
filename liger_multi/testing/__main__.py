"""Run the suite on a backend: ``python -m liger_multi.testing --backend NAME``.

Other arguments go to pytest: ``-k rms_norm``, ``-n 4``, ``--junitxml FILE``. No ``conftest.py`` is
loaded: one of the current folder serves other tests, and may have options of the same names.
"""

from __future__ import annotations

import sys


def main() -> int:
    """Run pytest and return its exit code."""
    try:
        import pytest
    except ImportError:
        sys.exit("liger_multi.testing needs pytest: pip install pytest")
    suite = "liger_multi.testing.suite"
    plugin = ["--noconftest", "-p", f"{suite}.plugin"]
    return pytest.main([*plugin, "--pyargs", suite, *sys.argv[1:]])


if __name__ == "__main__":
    raise SystemExit(main())
