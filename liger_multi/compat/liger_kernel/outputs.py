"""What losses and models return besides a loss, and the errors of losses."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import sys
from typing import Any

from torch import Tensor


@dataclasses.dataclass
class CrossEntropyOutput:
    """Losses, the share of right tokens and the likeliest tokens; None: not asked for."""

    loss: Tensor
    z_loss: Tensor | None = None
    token_accuracy: Tensor | None = None
    predicted_tokens: Tensor | None = None


NAMES = tuple(field.name for field in dataclasses.fields(CrossEntropyOutput))
"""Its fields; compilers do not trace the function that lists them."""


def unpack_cross_entropy_result(result: Any) -> tuple[Any, Any, Any, Any]:
    """The loss, the z-loss, the share of right tokens and the likeliest ones; None: not there."""
    if isinstance(result, CrossEntropyOutput):
        return result.loss, result.z_loss, result.token_accuracy, result.predicted_tokens
    return result, None, None, None


class ArgumentError(ValueError, AssertionError):
    """An argument that Liger-Kernel asserts and this library checks."""


class TargetError(IndexError, AssertionError):
    """A target outside of the vocabulary, which Liger-Kernel asserts."""


# --- outputs of models ---

_PREFIX, _SUFFIX = "Liger", "CausalLMOutputWithPast"
_MODELS = {
    "Gemma3": "gemma3",
    "Gemma4": "gemma4",
    "Glm4vMoe": "glm4v_moe",
    "InternVL": "internvl",
    "Llava": "llava",
    "MuseGlimmer": "muse_glimmer",
    "PaliGemma": "paligemma",
    "Qwen2VL": "qwen2_vl",
    "Qwen2_5_VL": "qwen2_5_vl",
    "Qwen3VL": "qwen3_vl",
    "Qwen3VLMoe": "qwen3_vl_moe",
    "Qwen3_5": "qwen3_5",
    "Qwen3_5Moe": "qwen3_5_moe",
}
_HOMES = {
    **dict.fromkeys(("", "Moe"), "transformers.modeling_outputs"),
    **{name: f"transformers.models.{at}.modeling_{at}" for name, at in _MODELS.items()},
}
MODEL_OUTPUTS = {f"{_PREFIX}{name}{_SUFFIX}": home for name, home in _HOMES.items()}
"""Outputs of models that also have the share of right tokens and the likeliest ones.

Class to the module of the one of transformers that it derives from.
"""
_EXTENDED: dict[type, type[Any]] = {}
"""Class of transformers to the one here, of those that were made."""


@functools.cache
def _output_class(name: str) -> type[Any]:
    stock = name.removeprefix(_PREFIX)
    base = getattr(importlib.import_module(MODEL_OUTPUTS[name]), stock)
    fields = [
        (field, Tensor | None, dataclasses.field(default=None))
        for field in ("token_accuracy", "predicted_tokens")
    ]
    names = {"__module__": __name__, "__doc__": f"``{stock}`` of transformers, and two fields."}
    output_class = dataclasses.make_dataclass(name, fields, bases=(base,), namespace=names)
    return _EXTENDED.setdefault(base, output_class)


def __getattr__(name: str) -> Any:
    if name not in MODEL_OUTPUTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _output_class(name)


def functions(path: str, names: str) -> dict[str, type[Any]]:
    """The classes whose models this transformers has."""
    output_classes = {}
    for name in MODEL_OUTPUTS:
        with contextlib.suppress(ImportError, AttributeError):
            output_classes[name] = _output_class(name)
    return output_classes


def make_loaded() -> None:
    """Make the classes whose models are imported: compilers cannot trace that."""
    for name, home in MODEL_OUTPUTS.items():
        if home in sys.modules:
            with contextlib.suppress(AttributeError):
                _output_class(name)


def extended(output: Any, token_accuracy: Any = None, predicted_tokens: Any = None) -> Any:
    """A model's output in the class here that derives from its own; a tuple gets what there is."""
    if isinstance(output, tuple):
        more = (token_accuracy, predicted_tokens)
        return (*output, *(x for x in more if x is not None))
    output_class = _EXTENDED.get(type(output))
    if output_class is None:
        return output
    fields = {field.name: getattr(output, field.name) for field in dataclasses.fields(output)}
    return output_class(**fields, token_accuracy=token_accuracy, predicted_tokens=predicted_tokens)
