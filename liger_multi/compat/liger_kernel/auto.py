"""``AutoModelForCausalLM`` whose models are patched; the class is created on first access."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from liger_multi.compat.liger_kernel import models
from liger_multi.errors import loading
from liger_multi.patching.options import BUILT_IN


def _flags() -> set[str]:
    """Operators, and what the functions of the table take."""
    table = models.MODEL_TYPE_TO_APPLY_LIGER_FN.values()
    named = {name for function in table for name in inspect.signature(function).parameters}
    return (named | {*BUILT_IN}) - {"model", "args", "kwargs"}


def _patched(build: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What ``build`` makes, patched by those keywords that are flags."""
    flags = {name: kwargs.pop(name) for name in _flags() & {*kwargs}}
    model = build(*args, **kwargs)
    models._apply_liger_kernel_to_instance(model, **flags)
    return model


@functools.cache
def _made() -> type[Any]:
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
            """Load a model and patch it."""
            return _patched(super().from_pretrained, pretrained_model_name_or_path, *args, **kwargs)

        @classmethod
        def from_config(cls, config: Any, **kwargs: Any) -> Any:
            """Build a model and patch it."""
            return _patched(super().from_config, config, **kwargs)

    AutoLigerKernelForCausalLM.__qualname__ = AutoLigerKernelForCausalLM.__name__
    return AutoLigerKernelForCausalLM


def __getattr__(name: str) -> Any:
    if name != "AutoLigerKernelForCausalLM":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with loading(f"{__name__}.{name}"):
        return _made()
