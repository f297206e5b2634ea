"""Patch models that do not exist yet: a hook after Hugging Face constructors, by model type."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from typing import Any

from torch import nn

from liger_multi.errors import PatchError, unknown


class Request:
    """A request to patch models of a type; requests are compared by identity."""

    def __init__(self, action: Callable[[nn.Module], Any], lasting: bool) -> None:
        self.action, self.lasting = action, lasting


_lock = threading.Lock()
_requests: dict[str, tuple[Request, ...]] = {}
"""By model type, the newest last; it is the one that acts."""
_installed: tuple[Any, Any] | None = None
"""The wrapper that stands in ``PreTrainedModel.post_init`` and the function that stood there."""


def register(model_type: str, action: Callable[[nn.Module], Any]) -> None:
    """Call ``action`` with every model of ``model_type`` that is built from now on.

    An earlier action that was registered so gives way; those of open blocks stay behind it.

    Raises:
        PatchError: A model type that the installed transformers does not know, with the nearest
            one.
    """
    _known(model_type)
    with _lock:
        blocks = [r for r in _requests.get(model_type, ()) if not r.lasting]
        _hold(model_type, (*blocks, Request(action, lasting=True)))


def begin(model_type: str, action: Callable[[nn.Module], Any]) -> Callable[[], None]:
    """The same until the returned function is called, in any order with others.

    Raises:
        PatchError: As :func:`register`.
    """
    _known(model_type)
    request = Request(action, lasting=False)
    with _lock:
        _hold(model_type, (*_requests.get(model_type, ()), request))

    def end() -> None:
        with _lock:
            _hold(model_type, tuple(r for r in _requests.get(model_type, ()) if r is not request))

    return end


def unregister(model_type: str) -> None:
    """Stop, also within blocks; the constructor's hook goes with the last type.

    Raises:
        PatchError: The type is not registered.
    """
    with _lock:
        if model_type not in _requests:
            raise PatchError(
                f"model type {model_type!r} is not patched; patched types: "
                f"{', '.join(sorted(_requests)) or 'none'}"
            )
        _hold(model_type, ())


def registered(model_type: str) -> bool:
    """Whether models of the type are being patched."""
    return model_type in _requests


def _known(model_type: str) -> None:
    from transformers import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:
        raise PatchError(_place(model_type) or unknown("model type", model_type, CONFIG_MAPPING))


def _place(name: str) -> str:
    """The message for the name of a model on the hub or of a folder; empty for other names."""
    if "/" not in name and os.sep not in name and not os.path.isdir(name):
        return ""
    return (
        f"{name!r} names a model's files: load it first, patch("
        f"AutoModelForCausalLM.from_pretrained({name!r})), or patch a model type such as 'llama' "
        "for the models of that type built from now on"
    )


def _hold(model_type: str, requests: tuple[Request, ...]) -> None:
    """Set the requests of a type; the hook stands while there are any."""
    if requests:
        _requests[model_type] = requests
        _install()
    else:
        _requests.pop(model_type, None)
        if not _requests:
            _remove()


def _install() -> None:
    global _installed
    from transformers import PreTrainedModel

    if _installed is not None:
        return
    stock = PreTrainedModel.post_init

    @functools.wraps(stock)
    def post_init(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = stock(self, *args, **kwargs)
        requests = _requests.get(getattr(getattr(self, "config", None), "model_type", ""))
        if requests:
            requests[-1].action(self)
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
