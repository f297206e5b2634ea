"""Outputs of models that also have the share of right tokens and the likeliest tokens.

Each class derives from the one of transformers that its name ends with.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import sys
from typing import Any

from torch import Tensor

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
NAMES = {f"{_PREFIX}{name}{_SUFFIX}": home for name, home in _HOMES.items()}
"""Class to the module of the one that it derives from."""
_EXTENDED: dict[type, type[Any]] = {}
"""Class of transformers to the one here, of those that were made."""


@functools.cache
def _made(name: str) -> type[Any]:
    stock = name.removeprefix(_PREFIX)
    base = getattr(importlib.import_module(NAMES[name]), stock)
    fields = [
        (field, Tensor | None, dataclasses.field(default=None))
        for field in ("token_accuracy", "predicted_tokens")
    ]
    names = {"__module__": __name__, "__doc__": f"``{stock}`` of transformers, and two fields."}
    output_class = dataclasses.make_dataclass(name, fields, bases=(base,), namespace=names)
    return _EXTENDED.setdefault(base, output_class)


def __getattr__(name: str) -> Any:
    if name not in NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _made(name)


def functions(path: str, names: str) -> dict[str, type[Any]]:
    """The classes whose models this transformers has."""
    output_classes = {}
    for name in NAMES:
        with contextlib.suppress(ImportError, AttributeError):
            output_classes[name] = _made(name)
    return output_classes


def make_loaded() -> None:
    """Make the classes whose models are imported: compilers cannot trace that."""
    for name, home in NAMES.items():
        if home in sys.modules:
            with contextlib.suppress(AttributeError):
                _made(name)


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
