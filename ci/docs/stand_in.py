"""Stands in for Triton where it is not installed, so that pages can read what kernels export.

Modules of kernels are imported and nothing of them is run: decorators return what they decorate,
and everything else is an object that takes any use.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Iterator, MutableSequence
from types import ModuleType
from typing import Any

NAME = "triton"


class _Anything:
    """A decorator, a dtype, a number: whatever a module does with it while it is imported."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) and not options else self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __getitem__(self, index: Any) -> Any:
        return self

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return (object,)


class _Module(ModuleType):
    """A module of which every name is there."""

    __version__ = "0.0.0"
    __path__: MutableSequence[str] = []  # noqa: RUF012 (as of any package)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything()


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds Triton and all of its modules."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] != NAME:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing to run."""


def install() -> None:
    """Where Triton cannot be imported."""
    if importlib.util.find_spec(NAME) is None:
        sys.modules.pop(NAME, None)  # None there hides a package that is installed
        sys.meta_path.insert(0, _Finder())
