"""What imports transformers or TRL: classes and versions that are looked up at first access."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import inspect
from collections.abc import Callable
from typing import Any

from liger_multi.compat.liger_kernel import models
from liger_multi.errors import loading
from liger_multi.patching.options import BUILT_IN

TRL_HOMES = ("trl.experimental.orpo", "trl.trainer", "trl")
"""Where versions of TRL have their trainer, the newest first."""


def _patched(build: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What ``build`` makes, patched by those keywords that are operators or flags of the table."""
    table = models.MODEL_TYPE_TO_APPLY_LIGER_FN.values()
    named = {name for function in table for name in inspect.signature(function).parameters}
    known = (named | {*BUILT_IN}) - {"model", "args", "kwargs"}
    flags = {name: kwargs.pop(name) for name in known & {*kwargs}}
    model = build(*args, **kwargs)
    models._apply_liger_kernel_to_instance(model, **flags)
    return model


@functools.cache
def _auto_model() -> type[Any]:
    from transformers import AutoModelForCausalLM

    class AutoLigerKernelForCausalLM(AutoModelForCausalLM):  # type: ignore[misc]
        """``AutoModelForCausalLM`` whose models are patched.

        Keywords that are operators go to the function of the model's type, the others to
        transformers.
        """

        @classmethod
        def from_pretrained(
            cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any
        ) -> Any:
            return _patched(super().from_pretrained, pretrained_model_name_or_path, *args, **kwargs)

        @classmethod
        def from_config(cls, config: Any, **kwargs: Any) -> Any:
            return _patched(super().from_config, config, **kwargs)

    return AutoLigerKernelForCausalLM


def _trainer_of_trl() -> Any:
    for home in TRL_HOMES:
        try:
            return importlib.import_module(home).ORPOTrainer
        except (ImportError, AttributeError):
            continue
    raise ImportError(
        f"LigerORPOTrainer needs the ORPOTrainer of TRL, which none of {', '.join(TRL_HOMES)} has"
    )


@functools.cache
def _trainer() -> type[Any]:
    from liger_multi.integrations import TrainerCallback

    class LigerORPOTrainer(_trainer_of_trl()):  # type: ignore[misc]
        """TRL's ``ORPOTrainer`` whose model is patched when the trainer is made.

        The losses are TRL's; logits are computed only where they are read.
        """

        def __init__(self, *args: Any, callbacks: Any = None, **kwargs: Any) -> None:
            super().__init__(*args, callbacks=[*(callbacks or ()), TrainerCallback()], **kwargs)

    return LigerORPOTrainer


def _versions() -> tuple[Any, Any]:
    """The installed transformers, and the oldest one that Liger-Kernel supports."""
    from packaging.version import parse

    return parse(importlib.metadata.version("transformers")), parse("5.0.0")


_NAMES: dict[str, Callable[[], Any]] = {
    "AutoLigerKernelForCausalLM": _auto_model,
    "LigerORPOTrainer": _trainer,
    "transformer_version": lambda: _versions()[0],
    "MIN_SUPPORTED_TRANSFORMERS_VERSION": lambda: _versions()[1],
    "IS_TRANSFORMERS_V5_OR_LATER": lambda: _versions()[0] >= _versions()[1],
}


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with loading(f"{__name__}.{name}"):
        value = _NAMES[name]()
    if isinstance(value, type):  # pickles find it by this name
        value.__qualname__ = name
    return value
