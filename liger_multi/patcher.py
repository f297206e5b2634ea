"""Patches of models, for tools that stand below :mod:`liger_multi.patching`.

Memory estimates, plans and bisections patch the models that they run. None of them imports
patching: the package's ``__init__``, which stands above all, says here how it is loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol


class Patcher(Protocol):
    """What the tools need of :mod:`liger_multi.patching`."""

    @property
    def patch(self) -> Callable[..., Any]:
        """Patch a model, with options by name."""

    @property
    def unpatch(self) -> Callable[..., Any]:
        """Restore a model."""

    @property
    def patched(self) -> Callable[..., AbstractContextManager[Any]]:
        """A block in which a model is patched."""


_loaders: list[Callable[[], Any]] = []


def provide(loader: Callable[[], Any]) -> None:
    """Name the function that loads the patcher."""
    _loaders[:] = [loader]


def patcher() -> Patcher:
    """The patcher, loaded when it is first needed."""
    return _loaders[0]()  # type: ignore[no-any-return]
