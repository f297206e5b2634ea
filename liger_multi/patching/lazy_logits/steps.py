"""Elementwise operations that deferred logits can remember, by the PyTorch function that asks for them.

Every function answers for ``func(logits, ...)`` with the deferred logits of the result, with the
same deferred logits when nothing changes, or with None when the operation cannot be remembered.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_multi.checks import autocast_dtype
from liger_multi.patching.lazy_logits.deferred import DeferredLogits


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def multiply(deferred: DeferredLogits, other: Any, **rest: Any) -> DeferredLogits | None:
    """``logits * number``."""
    return deferred.step("mul", other) if _number(other) and not rest else None


def divide(deferred: DeferredLogits, other: Any, **rest: Any) -> DeferredLogits | None:
    """``logits / number``."""
    return deferred.step("div", other) if _number(other) and other != 0 and not rest else None


def add(deferred: DeferredLogits, other: Any, **rest: Any) -> DeferredLogits | None:
    """``logits + number``, for losses that are made of probabilities."""
    return deferred.step("add", other) if _number(other) and not rest else None


def subtract(deferred: DeferredLogits, other: Any, **rest: Any) -> DeferredLogits | None:
    """``logits - number``."""
    return deferred.step("add", -other) if _number(other) and not rest else None


def negative(deferred: DeferredLogits) -> DeferredLogits:
    """``-logits``."""
    return deferred.step("mul", -1)


def simple(name: str, function: Callable[[Tensor], Tensor]) -> Callable[..., DeferredLogits | None]:
    """A function of every element, without arguments."""

    def run(deferred: DeferredLogits, **rest: Any) -> DeferredLogits | None:
        kept = _dtype_of(function, deferred) == deferred.dtype
        return deferred.step(name) if kept and not rest else None

    return run


def _dtype_of(function: Callable[[Tensor], Tensor], deferred: DeferredLogits) -> torch.dtype | None:
    """The dtype that autocast gives a result now; None where a graph cannot ask."""
    device = deferred.hidden.device
    autocast = autocast_dtype(device.type)
    if autocast is None:
        return deferred.dtype
    if torch.compiler.is_compiling():
        return None
    return _autocast_result(function, device, deferred.dtype, autocast)


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


def tanh(deferred: DeferredLogits, **rest: Any) -> DeferredLogits | None:
    """``tanh(logits)``."""
    return None if rest else deferred.step("tanh")


def cast(deferred: DeferredLogits, dtype: torch.dtype) -> DeferredLogits | None:
    """``logits.to(dtype)``."""
    if not dtype.is_floating_point:
        return None
    return deferred if dtype == deferred.dtype else deferred.step("to", dtype)


def to(deferred: DeferredLogits, *args: Any, **kwargs: Any) -> DeferredLogits | None:
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
    if kwargs or (device is not None and torch.device(device) != deferred.hidden.device):
        return None
    return deferred if dtype is None else cast(deferred, dtype)


def contiguous(
    deferred: DeferredLogits, memory_format: Any = torch.contiguous_format
) -> DeferredLogits | None:
    """``logits.contiguous()``: themselves, or a copy without gaps."""
    if memory_format is not torch.contiguous_format:
        return None
    return (
        deferred if deferred.hidden.is_contiguous() else deferred.rows(deferred.hidden.contiguous())
    )


def clone(deferred: DeferredLogits, **rest: Any) -> DeferredLogits | None:
    """``logits.clone()``."""
    return None if rest else deferred.packed().copy()


def normalized(name: str, along: Callable[..., Tensor]) -> Callable[..., DeferredLogits | None]:
    """``softmax`` or ``log_softmax`` over the vocabulary."""

    def function(logits: Tensor) -> Tensor:
        return along(logits, -1)

    def run(
        deferred: DeferredLogits, dim: Any = None, _stacklevel: int = 3, dtype: Any = None
    ) -> DeferredLogits | None:
        kept = dtype or _dtype_of(function, deferred)
        if dim not in (-1, deferred.hidden.ndim - 1) or kept is None or not kept.is_floating_point:
            return None
        return deferred.step(name, kept)

    return run


RECORDED: dict[Any, Callable[..., DeferredLogits | None]] = {
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
    Tensor.float: lambda deferred: cast(deferred, torch.float32),
    Tensor.double: lambda deferred: cast(deferred, torch.float64),
    Tensor.half: lambda deferred: cast(deferred, torch.float16),
    Tensor.bfloat16: lambda deferred: cast(deferred, torch.bfloat16),
    Tensor.to: to,
    Tensor.type_as: lambda deferred, other: to(deferred, other),
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

WRITES: dict[Any, Callable[..., DeferredLogits | None]] = {
    **dict.fromkeys((Tensor.mul_, Tensor.__imul__), multiply),
    **dict.fromkeys((Tensor.div_, Tensor.__itruediv__), divide),
    **dict.fromkeys((Tensor.tanh_, torch.tanh_), tanh),
}
"""The same in place."""
