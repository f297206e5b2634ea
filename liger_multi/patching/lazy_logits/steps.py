"""Elementwise operations that a recipe can remember, by the PyTorch function that asks for them.

Every function answers for ``func(logits, ...)`` with the recipe of the result, with the same recipe
when nothing changes, or with None when the operation cannot be remembered.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_multi.checks import autocast_dtype
from liger_multi.patching.lazy_logits.deferred import Recipe


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def multiply(recipe: Recipe, other: Any, **rest: Any) -> Recipe | None:
    """``logits * number``."""
    return recipe.step("mul", other) if _number(other) and not rest else None


def divide(recipe: Recipe, other: Any, **rest: Any) -> Recipe | None:
    """``logits / number``."""
    return recipe.step("div", other) if _number(other) and other != 0 and not rest else None


def add(recipe: Recipe, other: Any, **rest: Any) -> Recipe | None:
    """``logits + number``, for losses that are made of probabilities."""
    return recipe.step("add", other) if _number(other) and not rest else None


def subtract(recipe: Recipe, other: Any, **rest: Any) -> Recipe | None:
    """``logits - number``."""
    return recipe.step("add", -other) if _number(other) and not rest else None


def negative(recipe: Recipe) -> Recipe:
    """``-logits``."""
    return recipe.step("mul", -1)


def simple(name: str, function: Callable[[Tensor], Tensor]) -> Callable[..., Recipe | None]:
    """A function of every element, without arguments."""

    def run(recipe: Recipe, **rest: Any) -> Recipe | None:
        kept = _dtype_of(function, recipe) == recipe.dtype
        return recipe.step(name) if kept and not rest else None

    return run


def _dtype_of(function: Callable[[Tensor], Tensor], recipe: Recipe) -> torch.dtype | None:
    """The dtype that autocast gives a result now; None where a graph cannot ask."""
    device = recipe.hidden.device
    autocast = autocast_dtype(device.type)
    if autocast is None:
        return recipe.dtype
    if torch.compiler.is_compiling():
        return None
    return _autocast_result(function, device, recipe.dtype, autocast)


@functools.lru_cache(maxsize=256)
def _autocast_result(
    function: Callable[[Tensor], Tensor],
    device: torch.device,
    dtype: torch.dtype,
    autocast: torch.dtype,
) -> torch.dtype:
    """Asked of PyTorch, whose lists of operations differ between devices and releases."""
    with torch.no_grad():
        return function(torch.ones(1, device=device, dtype=dtype)).dtype


def tanh(recipe: Recipe, **rest: Any) -> Recipe | None:
    """``tanh(logits)``."""
    return None if rest else recipe.step("tanh")


def cast(recipe: Recipe, dtype: torch.dtype) -> Recipe | None:
    """``logits.to(dtype)``."""
    if not dtype.is_floating_point:
        return None
    return recipe if dtype == recipe.dtype else recipe.step("to", dtype)


def to(recipe: Recipe, *args: Any, **kwargs: Any) -> Recipe | None:
    """``logits.to(...)`` without a change of device."""
    dtype = kwargs.pop("dtype", None)
    device = kwargs.pop("device", None)
    kwargs.pop("non_blocking", None)
    for value in args:
        if isinstance(value, torch.dtype):
            dtype = value
        elif isinstance(value, Tensor):
            dtype, device = value.dtype, value.device
        elif isinstance(value, (str, torch.device)):
            device = value
        elif value is not None:
            return None
    if kwargs or (device is not None and torch.device(device) != recipe.hidden.device):
        return None
    return recipe if dtype is None else cast(recipe, dtype)


def contiguous(recipe: Recipe, memory_format: Any = torch.contiguous_format) -> Recipe | None:
    """``logits.contiguous()``: themselves, or a copy without gaps."""
    if memory_format is not torch.contiguous_format:
        return None
    return recipe if recipe.hidden.is_contiguous() else recipe.rows(recipe.hidden.contiguous())


def clone(recipe: Recipe, **rest: Any) -> Recipe | None:
    """``logits.clone()``."""
    return None if rest else recipe.packed().copy()


def normalized(name: str, along: Callable[..., Tensor]) -> Callable[..., Recipe | None]:
    """``softmax`` or ``log_softmax`` over the vocabulary."""

    def function(logits: Tensor) -> Tensor:
        return along(logits, -1)

    def run(
        recipe: Recipe, dim: Any = None, _stacklevel: int = 3, dtype: Any = None
    ) -> Recipe | None:
        kept = dtype or _dtype_of(function, recipe)
        if dim not in (-1, recipe.hidden.ndim - 1) or kept is None or not kept.is_floating_point:
            return None
        return recipe.step(name, kept)

    return run


RECORDED: dict[Any, Callable[..., Recipe | None]] = {
    **dict.fromkeys(
        (Tensor.mul, Tensor.__mul__, Tensor.__rmul__, torch.mul, torch.multiply), multiply
    ),
    **dict.fromkeys(
        (Tensor.div, Tensor.__truediv__, torch.div, torch.divide, torch.true_divide), divide
    ),
    **dict.fromkeys((Tensor.tanh, torch.tanh), tanh),
    **dict.fromkeys((Tensor.neg, Tensor.__neg__, torch.neg), negative),
    **dict.fromkeys((Tensor.exp, torch.exp), simple("exp", torch.exp)),
    **dict.fromkeys((Tensor.log, torch.log), simple("log", torch.log)),
    **dict.fromkeys((Tensor.add, Tensor.__add__, Tensor.__radd__, torch.add), add),
    **dict.fromkeys((Tensor.sub, Tensor.__sub__, torch.sub), subtract),
    Tensor.float: lambda recipe: cast(recipe, torch.float32),
    Tensor.double: lambda recipe: cast(recipe, torch.float64),
    Tensor.half: lambda recipe: cast(recipe, torch.float16),
    Tensor.bfloat16: lambda recipe: cast(recipe, torch.bfloat16),
    Tensor.to: to,
    Tensor.type_as: lambda recipe, other: to(recipe, other),
    Tensor.contiguous: contiguous,
    **dict.fromkeys((Tensor.clone, torch.clone), clone),
    **dict.fromkeys(
        (Tensor.softmax, torch.softmax, F.softmax), normalized("softmax", torch.softmax)
    ),
    **dict.fromkeys(
        (Tensor.log_softmax, torch.log_softmax, F.log_softmax),
        normalized("log_softmax", torch.log_softmax),
    ),
}
JOINS: dict[Any, str] = {
    **dict.fromkeys((Tensor.mul, Tensor.__mul__, torch.mul, torch.multiply), "times"),
    **dict.fromkeys((Tensor.add, Tensor.__add__, torch.add), "plus"),
}
"""Operations on two lazy logits of the same rows, as ``p * log(p)`` in an entropy is."""

WRITES: dict[Any, Callable[..., Recipe | None]] = {
    **dict.fromkeys((Tensor.mul_, Tensor.__imul__), multiply),
    **dict.fromkeys((Tensor.div_, Tensor.__itruediv__), divide),
    **dict.fromkeys((Tensor.tanh_, torch.tanh_), tanh),
}
"""The same in place."""
