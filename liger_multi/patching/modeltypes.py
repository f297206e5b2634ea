"""Patch models that do not exist yet: a hook after Hugging Face constructors, by model type."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from liger_multi.errors import PatchError, unknown

_wanted: dict[str, Callable[[nn.Module], Any]] = {}
_installed: tuple[Any, Any] | None = None
"""The wrapper that stands in ``PreTrainedModel.post_init`` and the function that stood there."""


def register(model_type: str, action: Callable[[nn.Module], Any]) -> None:
    """Call ``action`` with every model of ``model_type`` that is built from now on.

    Raises:
        PatchError: A model type that the installed transformers does not know, with the nearest
            one.
    """
    from transformers import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:
        raise PatchError(unknown("model type", model_type, CONFIG_MAPPING.keys()))
    _wanted[model_type] = action
    _install()


def unregister(model_type: str) -> None:
    """Stop; the constructor's hook goes with the last type.

    Raises:
        PatchError: The type is not registered.
    """
    if model_type not in _wanted:
        raise PatchError(
            f"model type {model_type!r} is not patched; patched types: "
            f"{', '.join(sorted(_wanted)) or 'none'}"
        )
    del _wanted[model_type]
    if not _wanted:
        _remove()


def registered(model_type: str) -> bool:
    """Whether models of the type are being patched."""
    return model_type in _wanted


def snapshot() -> Callable[[], None]:
    """Remember the registered types; the returned function brings them back."""
    before = dict(_wanted)

    def bring_back() -> None:
        _wanted.clear()
        _wanted.update(before)
        if not _wanted:
            _remove()

    return bring_back


def _install() -> None:
    global _installed
    from transformers import PreTrainedModel

    if _installed is not None:
        return
    stock = PreTrainedModel.post_init

    @functools.wraps(stock)
    def post_init(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = stock(self, *args, **kwargs)
        action = _wanted.get(getattr(getattr(self, "config", None), "model_type", ""))
        if action is not None:
            action(self)
        return result

    PreTrainedModel.post_init = post_init
    _installed = (post_init, stock)


def _remove() -> None:
    """Put the function back; if somebody wrapped it once more, ours stays, without effect."""
    global _installed
    if _installed is None:
        return
    from transformers import PreTrainedModel

    ours, stock = _installed
    if PreTrainedModel.post_init is ours:
        PreTrainedModel.post_init = stock
        _installed = None
