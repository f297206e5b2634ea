"""Liger-Kernel's signatures, derived from the one function that does the work.

A loss stands in Liger-Kernel as a function, as a class with ``apply``, as a module and in
``liger_kernel.functional``, with other names and another order of the same arguments. Here one
function has the defaults, and the others are lists of names.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Call = Callable[..., Any]


def parameters(names: str, like: Call, **defaults: Any) -> dict[str, inspect.Parameter]:
    """Parameters by name, with the defaults of ``like``; what it does not know defaults to None.

    Args:
        names: In order. ``theirs:ours`` renames one.
        like: Has the defaults.
        defaults: Defaults that differ.
    """
    known_parameters, parameters = inspect.signature(like).parameters, {}
    for name, _, our_name in (entry.partition(":") for entry in names.split()):
        parameter = known_parameters.get(our_name or name)
        default = defaults.get(name, parameter.default if parameter else None)
        parameters[name] = inspect.Parameter(
            name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default
        )
    return parameters


def adapter(call: Call, names: str, like: Call | None = None, **defaults: Any) -> Call:
    """A function that hands its arguments to ``call`` by name.

    Args:
        call: Does the work.
        names: As for :func:`parameters`. What neither ``like`` nor ``defaults`` knows is taken and
            left out.
        like: Has the signature of ``call``, where that takes any keywords.
        defaults: Defaults that differ.
    """
    like = like or call
    known_names = {*inspect.signature(like).parameters, *defaults}
    our_names = {n: o or n for n, _, o in (entry.partition(":") for entry in names.split())}
    order, idle = (
        tuple(our_names),
        frozenset(n for n, o in our_names.items() if o not in known_names),
    )

    def run(*args: Any, **kwargs: Any) -> Any:
        if len(args) > len(order):
            raise TypeError(f"takes {len(order)} arguments ({', '.join(order)}), got {len(args)}")
        arguments = {**defaults, **dict(zip(order, args)), **kwargs}
        return call(
            **{our_names.get(n, n): value for n, value in arguments.items() if n not in idle}
        )

    shown_parameters = parameters(names, like, **defaults).values()
    run.__signature__ = _signature(shown_parameters)  # type: ignore[attr-defined]
    run.__doc__ = call.__doc__
    return run


def _signature(parameters_in_order: Any) -> inspect.Signature:
    """One whose required arguments may stand behind optional ones, which then are required too."""
    parameters, empty = [*parameters_in_order], inspect.Parameter.empty
    last = max((i for i, p in enumerate(parameters) if p.default is empty), default=-1)
    return inspect.Signature(
        [p.replace(default=empty) if i < last else p for i, p in enumerate(parameters)]
    )


class _Traced(type(torch.autograd.Function)):  # type: ignore[misc]
    """The metaclass of ``autograd.Function``, by another name.

    ``torch.compile`` takes over ``apply`` of classes of exactly that metaclass, and traces their
    forward, which these do not have. Of others it traces ``apply`` as it does any function.
    """


def function_class(name: str, call: Call) -> type[torch.autograd.Function]:
    """A class whose ``apply`` is a function; autograd is that of the operator."""
    names = {"apply": staticmethod(call), "__doc__": call.__doc__, "__module__": call.__module__}
    return _Traced(name, (torch.autograd.Function,), names)


# --- what losses and models return besides a loss, and the errors of losses ---


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
MODEL_OUTPUTS = {f"{_PREFIX}{name}{_SUFFIX}": module_name for name, module_name in _HOMES.items()}
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
    for name, module_name in MODEL_OUTPUTS.items():
        if module_name in sys.modules:
            with contextlib.suppress(AttributeError):
                _output_class(name)


def extended(output: Any, token_accuracy: Any = None, predicted_tokens: Any = None) -> Any:
    """A model's output in the class here that derives from its own; a tuple gets what there is."""
    if isinstance(output, tuple):
        extra = (token_accuracy, predicted_tokens)
        return (*output, *(x for x in extra if x is not None))
    output_class = _EXTENDED.get(type(output))
    if output_class is None:
        return output
    fields = {field.name: getattr(output, field.name) for field in dataclasses.fields(output)}
    return output_class(**fields, token_accuracy=token_accuracy, predicted_tokens=predicted_tokens)
