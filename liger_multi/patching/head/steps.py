"""Operations on logits that :class:`DeferredLogits` can record, by PyTorch function.

* :data:`ROWS`: selecting or shaping rows of logits is the same operation on the hidden states. A
  function takes hidden states, the size of the vocabulary and the arguments of the call. It returns
  the hidden states of the result (a tuple for several tensors), or None if the call involves the
  vocabulary axis or has an unknown form.
* :data:`RECORDED`: elementwise operations become steps. A function takes deferred logits and the
  arguments of the call. It returns the deferred logits of the result, the same object if nothing
  changes, or None if the operation cannot be recorded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_multi.checks import autocast_dtype
from liger_multi.patching.head.deferred import DeferredLogits

# --- rows ---

Hidden: TypeAlias = "Tensor | tuple[Tensor, ...] | None"


def getitem(hidden: Tensor, index: Any) -> Hidden:
    """``logits[index]`` if the index keeps the whole last axis."""
    items = index if isinstance(index, tuple) else (index,)
    axes_used, open_ended = 0, False
    for item in items:
        if item is None:
            continue
        if item is Ellipsis:
            open_ended = True
        elif isinstance(item, Tensor) and item.dtype in (torch.bool, torch.uint8):
            axes_used += item.ndim
        elif isinstance(item, (int, slice, Tensor)) and not isinstance(item, bool):
            axes_used += 1
        else:
            return None
    if open_ended or axes_used == hidden.ndim:
        # the last index may apply to the vocabulary, of which only a full slice keeps all
        last = items[-1]
        is_full_slice = isinstance(last, slice) and last == slice(None)
        if not is_full_slice and not (last is Ellipsis and axes_used < hidden.ndim):
            return None
    elif axes_used > hidden.ndim:
        return None
    return hidden[index]


def reshape(
    hidden: Tensor, vocabulary: int, sizes: Sequence[int], function: Any = Tensor.reshape
) -> Hidden:
    """``logits.reshape(sizes)`` if the last axis stays the vocabulary.

    Args:
        hidden: The hidden states.
        vocabulary: Length of the logits' last axis.
        sizes: The requested shape.
        function: ``Tensor.reshape``, or ``Tensor.view``, which raises if logits need a copy.
    """
    row_sizes = sizes_of_rows(hidden, vocabulary, sizes)
    return None if row_sizes is None else function(hidden, row_sizes)


def sizes_of_rows(hidden: Tensor, vocabulary: int, sizes: Sequence[int]) -> tuple[int, ...] | None:
    """The shape of hidden states whose logits have the shape ``sizes``; None if there is none."""
    if not sizes or [size for size in sizes if not isinstance(size, int)]:
        return None
    resolved, total = list(sizes), _product(hidden.shape[:-1]) * vocabulary
    free_axes = [axis for axis, size in enumerate(resolved) if size == -1]
    if len(free_axes) > 1:
        return None
    for axis in free_axes:
        elements = _product(resolved[:axis]) * _product(resolved[axis + 1 :])
        if not elements or total % elements:
            return None
        resolved[axis] = total // elements
    if resolved[-1] != vocabulary or _product(resolved) != total:
        return None
    return (*resolved[:-1], hidden.shape[-1])


def is_view(hidden: Tensor, sizes: Sequence[int]) -> bool:
    """Whether ``hidden.reshape(sizes)`` is a view, computed from sizes and strides.

    Adjacent axes without gaps in memory form a block. A view may split and join axes within a
    block, not across blocks. Compiled graphs cannot ask PyTorch for this.
    """
    shape, strides, axis_of_sizes = hidden.shape, hidden.stride(), len(sizes) - 1
    block, base = 1, strides[-1]
    for axis in reversed(range(len(shape))):
        block = block * shape[axis]
        is_contiguous = axis > 0 and (shape[axis - 1] == 1 or strides[axis - 1] == block * base)
        if is_contiguous:
            continue
        covered = 1
        while axis_of_sizes >= 0 and (covered < block or sizes[axis_of_sizes] == 1):
            covered, axis_of_sizes = covered * sizes[axis_of_sizes], axis_of_sizes - 1
        if covered != block:
            return False
        block, base = 1, strides[axis - 1]
    return axis_of_sizes == -1


def _product(sizes: Sequence[int]) -> int:
    result = 1  # compilers trace no math.prod of symbolic sizes
    for size in sizes:
        result = result * size
    return result


def row_axis(dim: int, ndim: int) -> int | None:
    """``dim`` counted from the front; None for the vocabulary axis or out of range."""
    dim = dim + ndim if dim < 0 else dim
    return dim if 0 <= dim < ndim - 1 else None


def flatten(hidden: Tensor, vocabulary: int, start_dim: int = 0, end_dim: int = -1) -> Hidden:
    """``logits.flatten(start, end)`` over row axes."""
    start, end = row_axis(start_dim, hidden.ndim), row_axis(end_dim, hidden.ndim)
    return None if start is None or end is None or start > end else hidden.flatten(start, end)


def squeeze(hidden: Tensor, vocabulary: int, dim: int | None = None) -> Hidden:
    """``logits.squeeze(dim)`` of a row axis."""
    axis = None if dim is None else row_axis(dim, hidden.ndim)
    return None if axis is None else hidden.squeeze(axis)


def unsqueeze(hidden: Tensor, vocabulary: int, dim: int) -> Hidden:
    """``logits.unsqueeze(dim)`` before the vocabulary axis."""
    axis = row_axis(dim, hidden.ndim + 1)
    return None if axis is None else hidden.unsqueeze(axis)


def transpose(hidden: Tensor, vocabulary: int, dim0: int, dim1: int) -> Hidden:
    """``logits.transpose(a, b)`` of row axes."""
    a, b = row_axis(dim0, hidden.ndim), row_axis(dim1, hidden.ndim)
    return None if a is None or b is None else hidden.transpose(a, b)


def pieces(function: Callable[..., Any], default: int | None) -> Callable[..., Hidden]:
    """``split``, ``chunk``, ``unbind``, ``narrow``, ``select``, ``index_select`` of a row axis.

    Args:
        function: The method of Tensor; its axis is the argument ``dim``.
        default: The axis of a call without one; None if the axis is the first argument.
    """

    def run(hidden: Tensor, vocabulary: int, *args: Any, **kwargs: Any) -> Hidden:
        positional = list(args)
        index = 1 if function in (Tensor.split, Tensor.chunk) else 0
        if "dim" in kwargs:
            dim = kwargs.pop("dim")
        elif len(positional) > index:
            dim = positional.pop(index)
        elif default is not None:
            dim = default
        else:
            return None
        axis = row_axis(dim, hidden.ndim) if isinstance(dim, int) else None
        if axis is None:
            return None
        positional.insert(index, axis)
        return function(hidden, *positional, **kwargs)  # type: ignore[no-any-return]

    return run


def _shaped(function: Any) -> Callable[..., Hidden]:
    def run(hidden: Tensor, vocabulary: int, *sizes: Any, **kwargs: Any) -> Hidden:
        sizes = sizes or (kwargs.get("shape", kwargs.get("size", ())),)
        flat = sizes[0] if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)) else sizes
        return reshape(hidden, vocabulary, tuple(flat), function)

    return run


ROWS: dict[Any, Callable[..., Hidden]] = {
    Tensor.__getitem__: lambda hidden, vocabulary, index: getitem(hidden, index),
    Tensor.view: _shaped(Tensor.view),
    **dict.fromkeys((Tensor.reshape, torch.reshape), _shaped(Tensor.reshape)),
    **dict.fromkeys((Tensor.flatten, torch.flatten), flatten),
    **dict.fromkeys((Tensor.squeeze, torch.squeeze), squeeze),
    **dict.fromkeys((Tensor.unsqueeze, torch.unsqueeze), unsqueeze),
    **dict.fromkeys((Tensor.transpose, torch.transpose), transpose),
    **dict.fromkeys((Tensor.split, torch.split), pieces(Tensor.split, 0)),
    **dict.fromkeys((Tensor.chunk, torch.chunk), pieces(Tensor.chunk, 0)),
    **dict.fromkeys((Tensor.unbind, torch.unbind), pieces(Tensor.unbind, 0)),
    **dict.fromkeys((Tensor.narrow, torch.narrow), pieces(Tensor.narrow, None)),
    **dict.fromkeys((Tensor.select, torch.select), pieces(Tensor.select, None)),
    **dict.fromkeys((Tensor.index_select, torch.index_select), pieces(Tensor.index_select, None)),
}


# --- elementwise ---


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def with_number(name: str, sign: int = 1) -> Callable[..., DeferredLogits | None]:
    """A step with a number: ``mul``, ``div`` or ``add``."""

    def run(deferred: DeferredLogits, number: Any, **options: Any) -> DeferredLogits | None:
        recorded = _is_number(number) and not options and not (name == "div" and number == 0)
        return deferred.step(name, sign * number) if recorded else None

    return run


_multiply, _divide = with_number("mul"), with_number("div")


def elementwise(
    name: str, function: Callable[[Tensor], Tensor]
) -> Callable[..., DeferredLogits | None]:
    """A function of every element, without arguments."""

    def run(deferred: DeferredLogits, **options: Any) -> DeferredLogits | None:
        same_dtype = _dtype_of(function, deferred) == deferred.dtype
        return deferred.step(name) if same_dtype and not options else None

    return run


def _dtype_of(function: Callable[[Tensor], Tensor], deferred: DeferredLogits) -> torch.dtype | None:
    """The dtype of a result under the current autocast; None if a graph cannot know it."""
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
    """The same from a run on one element: autocast's lists differ by device and release."""
    with torch.no_grad():
        return function(torch.ones(1, device=device, dtype=dtype)).dtype


def tanh(deferred: DeferredLogits, **options: Any) -> DeferredLogits | None:
    """``tanh(logits)``."""
    return None if options else deferred.step("tanh")


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
    """``logits.contiguous()``: the same object, or a dense copy."""
    if memory_format is not torch.contiguous_format:
        return None
    return (
        deferred if deferred.hidden.is_contiguous() else deferred.rows(deferred.hidden.contiguous())
    )


def clone(deferred: DeferredLogits, **options: Any) -> DeferredLogits | None:
    """``logits.clone()``."""
    return None if options else deferred.packed().after(deferred.steps)


def normalized(name: str, softmax: Callable[..., Tensor]) -> Callable[..., DeferredLogits | None]:
    """``softmax`` or ``log_softmax`` over the vocabulary."""

    def function(logits: Tensor) -> Tensor:
        return softmax(logits, -1)

    def run(
        deferred: DeferredLogits, dim: Any = None, _stacklevel: int = 3, dtype: Any = None
    ) -> DeferredLogits | None:
        result = dtype or _dtype_of(function, deferred)
        last = dim in (-1, deferred.hidden.ndim - 1)
        if not last or result is None or not result.is_floating_point:
            return None
        return deferred.step(name, result)

    return run


RECORDED: dict[Any, Callable[..., DeferredLogits | None]] = {
    **dict.fromkeys(
        (Tensor.mul, Tensor.__mul__, Tensor.__rmul__, torch.mul, torch.multiply), _multiply
    ),
    **dict.fromkeys(
        (Tensor.div, Tensor.__truediv__, torch.div, torch.divide, torch.true_divide), _divide
    ),
    **dict.fromkeys((Tensor.tanh, torch.tanh), tanh),
    **dict.fromkeys(
        (Tensor.neg, Tensor.__neg__, torch.neg), lambda deferred: deferred.step("mul", -1)
    ),
    **dict.fromkeys((Tensor.exp, torch.exp), elementwise("exp", torch.exp)),
    **dict.fromkeys((Tensor.log, torch.log), elementwise("log", torch.log)),
    **dict.fromkeys((Tensor.add, Tensor.__add__, Tensor.__radd__, torch.add), with_number("add")),
    **dict.fromkeys((Tensor.sub, Tensor.__sub__, torch.sub), with_number("add", -1)),
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
"""Operations on two lazy logits of the same rows, such as ``p * log(p)``."""

WRITES: dict[Any, Callable[..., DeferredLogits | None]] = {
    **dict.fromkeys((Tensor.mul_, Tensor.__imul__), _multiply),
    **dict.fromkeys((Tensor.div_, Tensor.__itruediv__), _divide),
    **dict.fromkeys((Tensor.tanh_, torch.tanh_), tanh),
}
"""In-place operations."""
