"""``import liger_kernel`` without such a package: a finder on ``sys.meta_path``."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, DistributionFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from liger_multi.compat.liger_kernel.names import DYNAMIC, LAZY, TREE

HERE = "liger_multi.compat.liger_kernel"
VERSION = "0.8.5+liger.multi"
"""What is stood in for, with a local part that tells whose it is."""
NAME = "liger_kernel"


_FILES = {
    "METADATA": f"Metadata-Version: 2.1\nName: liger_kernel\nVersion: {VERSION}\n"
    "Summary: import names of Liger-Kernel, served by liger_multi\n",
    "top_level.txt": f"{NAME}\n",
}


class _Metadata(Distribution):
    """What ``importlib.metadata`` knows of the replica; no file of it is on disk."""

    def read_text(self, filename: str) -> str | None:
        return _FILES.get(filename)

    def locate_file(self, path: Any) -> Any:
        return Path(__file__).parent / path


class _Loader(Loader):
    """Fills a module with names from this package."""

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        path = module.__name__.partition(".")[2]
        module.__doc__ = "Replica of liger_multi; see liger_multi.compat.liger_kernel."
        names = vars(module)
        names["__file__"], names["logger"] = __file__, logging.getLogger(module.__name__)
        if not path:
            names["__version__"] = VERSION
        for name in TREE[path]:  # a function of a module's name goes before the module
            if path and f"{path}.{name}" in TREE:
                importlib.import_module(f"{module.__name__}.{name}")
        for name, home in TREE[path].items():
            names[name] = getattr(importlib.import_module(f"{HERE}.{home}"), name)
        more = {}
        if path in DYNAMIC:
            home, contents = DYNAMIC[path]
            more = importlib.import_module(f"{HERE}.{home}").functions(path, contents)
            names.update(more)
        lazy = LAZY.get(path, {})
        if lazy:
            names["__getattr__"] = _looked_up(module, lazy)
        names["__all__"] = [*TREE[path], *more, *lazy]


def _looked_up(module: ModuleType, lazy: dict[str, str]) -> Callable[[str], Any]:
    """The module's ``__getattr__``; the package itself also finds its submodules."""
    path = module.__name__.partition(".")[2]

    def get(name: str) -> Any:
        if not path and name in TREE:
            return importlib.import_module(f"{NAME}.{name}")
        if name not in lazy:
            raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"{HERE}.{lazy[name]}"), name)
        vars(module)[name] = value
        return value

    return get


class _Finder(MetaPathFinder):
    """Finds the tree, and what ``importlib.metadata`` says of it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        top, _, rest = fullname.partition(".")
        if top != NAME or rest not in TREE:
            return None
        package = not rest or any(other.startswith(f"{rest}.") for other in TREE)
        return ModuleSpec(fullname, _LOADER, origin=__file__, is_package=package)

    def find_distributions(
        self, context: DistributionFinder.Context | None = None
    ) -> Iterable[Distribution]:
        asked = getattr(context, "name", None)
        if asked is None or asked.replace("-", "_").lower() == NAME:
            yield _Metadata()


_LOADER = _Loader()
_FINDER = _Finder()


def installed() -> bool:
    """Whether ``import liger_kernel`` gets this library's names now."""
    return _FINDER in sys.meta_path


def install(*, force: bool = False) -> None:
    """Serve ``import liger_kernel`` and its submodules in this process, from now on.

    ``LIGER_KERNEL_IMPL`` is read: ``pytorch`` configures the reference, and a name of Liger-Kernel
    that this library has no backend for warns.

    Args:
        force: Also where the real package is installed, which is then hidden until
            :func:`uninstall`; objects that somebody imported of it before stay what they are.

    Raises:
        ImportError: The real package is installed, or imported already, and ``force`` is False.
    """
    if installed():
        return
    real = sys.modules.get(NAME) or importlib.util.find_spec(NAME)
    if real is not None and not force:
        where = getattr(real, "__file__", None) or getattr(real, "origin", None)
        raise ImportError(
            f"{NAME} is installed ({where}); uninstall it (pip uninstall liger-kernel), or hide it "
            "in this process with install(force=True)"
        )
    _forget()
    sys.meta_path.insert(0, _FINDER)
    _look_again()
    if os.environ.get("LIGER_KERNEL_IMPL"):
        importlib.import_module(f"{HERE}.choosing").read_variables()


def uninstall() -> None:
    """Take the names away again, and stop patching model types that were patched through them.

    Patched models stay patched: :func:`liger_multi.unpatch` takes that back.
    """
    if not installed():
        return
    models = sys.modules.get(f"{HERE}.models")
    if models is not None:
        models.forget_types()
    choosing = sys.modules.get(f"{HERE}.choosing")
    if choosing is not None:
        choosing.set_impl(None)
    megatron = sys.modules.get(f"{HERE}.megatron")
    if megatron is not None:
        megatron.restore()
    sys.meta_path.remove(_FINDER)
    _forget()
    _look_again()


def _forget() -> None:
    for name in [n for n in sys.modules if n == NAME or n.startswith(f"{NAME}.")]:
        del sys.modules[name]


def _look_again() -> None:
    """Let transformers ask again whether the package is there."""
    importlib.invalidate_caches()
    utils = sys.modules.get("transformers.utils.import_utils")
    asked: Any = getattr(utils, "is_liger_kernel_available", None)
    if hasattr(asked, "cache_clear"):
        asked.cache_clear()
