"""Start a trainer as a user does: ``python -m tests.trainers.runs.launch CALLS MODULE ARGUMENTS``.

With a file for ``CALLS`` the import names of Liger-Kernel are served first, and how often each
operator was called is written there as JSON, by the first of several processes. With ``-`` the
trainer starts as it is. Nothing else happens to it. Calls within a patch, which tries operators on
modules to recognize them, do not count.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any


def patching() -> bool:
    """Whether a model is being patched now."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == "liger_multi.patching.apply":
            return True
        frame = frame.f_back
    return False


def served() -> Counter[str]:
    """Serve the import names; the calls of operators from now on, by whatever function."""
    from liger_multi.compat import liger_kernel
    from liger_multi.dispatch.op import Op

    liger_kernel.install(force=True)  # some trainers bring the package itself
    calls: Counter[str] = Counter()
    call = Op.__call__

    def counted(self: Op, *args: Any, **kwargs: Any) -> Any:
        calls[self.name] += not patching()
        return call(self, *args, **kwargs)

    Op.__call__ = counted  # type: ignore[method-assign]
    return calls


def main(file: str, module: str, *arguments: str) -> None:
    """Run the module."""
    calls = None if file == "-" else served()
    sys.argv = [module, *arguments]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        if calls is not None and os.environ.get("RANK", "0") == "0":
            Path(file).write_text(json.dumps(+calls), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
