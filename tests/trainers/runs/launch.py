"""Start a trainer as a user does: ``python -m tests.trainers.runs.launch CALLS MODULE ARGUMENTS``.

With a file for ``CALLS`` the import names of Liger-Kernel are served first, and how often each
operator was called is written there as JSON, by the first of several processes. With ``-`` the
trainer starts as it is. Nothing else happens to it. Calls within a patch, which tries operators on
modules to recognize them, do not count.
"""

from __future__ import annotations

import functools
import json
import os
import runpy
import sys
from collections import Counter
from collections.abc import Callable
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


def counted(calls: Counter[str], name: str, op: Callable[..., Any]) -> Callable[..., Any]:
    """An operator that counts its calls."""

    @functools.wraps(op)
    def run(*args: Any, **kwargs: Any) -> Any:
        calls[name] += not patching()
        return op(*args, **kwargs)

    return run


def served() -> Counter[str]:
    """Serve the import names; the calls of operators from now on."""
    from liger_multi import ops
    from liger_multi.compat import liger_kernel

    liger_kernel.install(force=True)  # some trainers bring the package itself
    calls: Counter[str] = Counter()
    for name in ops.__all__:
        op = getattr(ops, name)
        if callable(op) and not isinstance(op, type):
            setattr(ops, name, counted(calls, name, op))
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
