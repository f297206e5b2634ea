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


class Sharder(Protocol):
    """What the tools need of :mod:`liger_multi.distributed`."""

    @property
    def shard_on_meta(self) -> Callable[..., Any]:
        """Spread the tokens of a model on the meta device over so many ranks."""


_loaders: list[Callable[[], Any]] = []


def provide(patching: Callable[[], Any], distributed: Callable[[], Any]) -> None:
    """Name the functions that load the patcher and the sharder."""
    _loaders[:] = [patching, distributed]


def patcher() -> Patcher:
    """The patcher, loaded when it is first needed."""
    return _loaders[0]()  # type: ignore[no-any-return]


def sharder() -> Sharder:
    """The same of what spreads tokens over ranks."""
    return _loaders[1]()  # type: ignore[no-any-return]
