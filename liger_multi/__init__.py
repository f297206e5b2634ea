"""Fused training kernels with one patch call, on any accelerator and on a CPU.

Importing touches no driver, no Triton and no transformers; names that need more are loaded on
first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

from liger_multi import ops, patcher
from liger_multi._version import __version__
from liger_multi.dispatch.config import configure, use
from liger_multi.dispatch.explain import explain
from liger_multi.errors import loading

if TYPE_CHECKING:
    from liger_multi import distributed, losses, memory, nn, routes, trees
    from liger_multi.patching import patch, patched, unpatch

__all__ = [
    "__version__",
    "configure",
    "distributed",
    "explain",
    "losses",
    "memory",
    "nn",
    "ops",
    "patch",
    "patched",
    "routes",
    "trees",
    "unpatch",
    "use",
]


patcher.provide(
    lambda: importlib.import_module("liger_multi.patching"),
    lambda: importlib.import_module("liger_multi.distributed"),
)


def __getattr__(name: str) -> Any:
    """Load modules and the patching layer on first use; what is found then stands in globals."""
    if name in ("distributed", "losses", "memory", "nn", "routes", "trees"):
        with loading(f"liger_multi.{name}"):
            return importlib.import_module(f"liger_multi.{name}")
    if name in ("patch", "patched", "unpatch"):
        with loading(f"liger_multi.{name}"):
            from liger_multi import patching

            globals()[name] = getattr(patching, name)
        return globals()[name]
    raise AttributeError(f"module 'liger_multi' has no attribute {name!r}")


def __dir__() -> list[str]:
    """The public names; submodules that something imported are found by their own import."""
    return __all__
