"""Which rows an operation on logits selects, said as the same operation on the hidden states.

Every function answers for a call ``func(logits, ...)``: the hidden states of the result (a tuple of
them where the call returns several tensors), or None when the call touches the vocabulary axis or
is not understood.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

Hidden: TypeAlias = "Tensor | tuple[Tensor, ...] | None"


def getitem(hidden: Tensor, index: Any) -> Hidden:
    """``logits[index]`` when the index leaves the last axis whole."""
    items = index if isinstance(index, tuple) else (index,)
    used, open_ended = 0, False
    for item in items:
        if item is None:
            continue
        if item is Ellipsis:
            open_ended = True
        elif isinstance(item, Tensor) and item.dtype in (torch.bool, torch.uint8):
            used += item.ndim
        elif isinstance(item, (int, slice, Tensor)) and not isinstance(item, bool):
            used += 1
        else:
            return None
    if open_ended or used == hidden.ndim:
        # The last index may fall on the vocabulary, which only a full slice leaves whole.
        last = items[-1]
        whole = isinstance(last, slice) and last == slice(None)
        if not whole and not (last is Ellipsis and used < hidden.ndim):
            return None
    elif used > hidden.ndim:
        return None
    return hidden[index]


def reshape(
    hidden: Tensor, vocabulary: int, sizes: Sequence[int], function: Any = Tensor.reshape
) -> Hidden:
    """``logits.reshape(sizes)`` when the last axis stays the vocabulary.

    Args:
        hidden: The hidden states.
        vocabulary: Length of the logits' last axis.
        sizes: The shape that was asked for.
        function: ``Tensor.view`` raises where logits would need a copy.
    """
    wanted = sizes_of_rows(hidden, vocabulary, sizes)
    return None if wanted is None else function(hidden, wanted)


def sizes_of_rows(hidden: Tensor, vocabulary: int, sizes: Sequence[int]) -> tuple[int, ...] | None:
    """The shape of hidden states whose logits have the shape ``sizes``, if there is one."""
    if not sizes or not all(isinstance(s, int) for s in sizes):
        return None
    resolved, total = list(sizes), _product(hidden.shape[:-1]) * vocabulary
    free = [at for at, size in enumerate(resolved) if size == -1]
    if len(free) > 1:
        return None
    for at in free:
        known = _product(resolved[:at]) * _product(resolved[at + 1 :])
        if not known or total % known:
            return None
        resolved[at] = total // known
    if resolved[-1] != vocabulary or _product(resolved) != total:
        return None
    return (*resolved[:-1], hidden.shape[-1])


def is_view(hidden: Tensor, sizes: Sequence[int]) -> bool:
    """Whether ``hidden.reshape(sizes)`` shares memory, from sizes and strides alone.

    Axes of the tensor that lie in memory without gaps between them form a block; a view may cut
    axes within a block, and none that spans two. For compiled graphs, where nobody can be asked.
    """
    shape, strides, at = hidden.shape, hidden.stride(), len(sizes) - 1
    block, base = 1, strides[-1]
    for axis in reversed(range(len(shape))):
        block = block * shape[axis]
        inside = axis > 0 and (shape[axis - 1] == 1 or strides[axis - 1] == block * base)
        if inside:
            continue
        covered = 1
        while at >= 0 and (covered < block or sizes[at] == 1):
            covered, at = covered * sizes[at], at - 1
        if covered != block:
            return False
        block, base = 1, strides[axis - 1]
    return at == -1


def _product(sizes: Sequence[int]) -> int:
    result = 1
    for size in sizes:
        result = result * size
    return result


def along(dim: int, ndim: int) -> int | None:
    """``dim`` counted from the front, or None when it is the vocabulary axis or out of range."""
    dim = dim + ndim if dim < 0 else dim
    return dim if 0 <= dim < ndim - 1 else None


def flatten(hidden: Tensor, vocabulary: int, start_dim: int = 0, end_dim: int = -1) -> Hidden:
    """``logits.flatten(start, end)`` over row axes."""
    start, end = along(start_dim, hidden.ndim), along(end_dim, hidden.ndim)
    return None if start is None or end is None or start > end else hidden.flatten(start, end)


def squeeze(hidden: Tensor, vocabulary: int, dim: int | None = None) -> Hidden:
    """``logits.squeeze(dim)`` of a row axis."""
    at = None if dim is None else along(dim, hidden.ndim)
    return None if at is None else hidden.squeeze(at)


def unsqueeze(hidden: Tensor, vocabulary: int, dim: int) -> Hidden:
    """``logits.unsqueeze(dim)`` before the vocabulary axis."""
    at = along(dim, hidden.ndim + 1)
    return None if at is None else hidden.unsqueeze(at)


def transpose(hidden: Tensor, vocabulary: int, dim0: int, dim1: int) -> Hidden:
    """``logits.transpose(a, b)`` of row axes."""
    a, b = along(dim0, hidden.ndim), along(dim1, hidden.ndim)
    return None if a is None or b is None else hidden.transpose(a, b)


def pieces(function: Callable[..., Any], default: int | None) -> Callable[..., Hidden]:
    """``split``, ``chunk``, ``unbind``, ``narrow``, ``select``, ``index_select`` of a row axis.

    Args:
        function: The method of Tensor; its axis is the argument ``dim``.
        default: The axis when none is given; None if the axis comes first.
    """

    def run(hidden: Tensor, vocabulary: int, *args: Any, **kwargs: Any) -> Hidden:
        positional = list(args)
        at = 1 if function in (Tensor.split, Tensor.chunk) else 0
        if "dim" in kwargs:
            dim = kwargs.pop("dim")
        elif len(positional) > at:
            dim = positional.pop(at)
        elif default is not None:
            dim = default
        else:
            return None
        axis = along(dim, hidden.ndim) if isinstance(dim, int) else None
        if axis is None:
            return None
        positional.insert(at, axis)
        return function(hidden, *positional, **kwargs)  # type: ignore[no-any-return]

    return run


_split, _chunk, _unbind = pieces(Tensor.split, 0), pieces(Tensor.chunk, 0), pieces(Tensor.unbind, 0)
_narrow, _select, _take = (
    pieces(Tensor.narrow, None),
    pieces(Tensor.select, None),
    pieces(Tensor.index_select, None),
)


def _shaped(function: Any) -> Callable[..., Hidden]:
    def run(hidden: Tensor, vocabulary: int, *sizes: Any, **kwargs: Any) -> Hidden:
        sizes = sizes or (kwargs.get("shape", kwargs.get("size", ())),)
        flat = sizes[0] if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)) else sizes
        return reshape(hidden, vocabulary, tuple(flat), function)

    return run


def _item(hidden: Tensor, vocabulary: int, index: Any) -> Hidden:
    return getitem(hidden, index)


ROWS: dict[Any, Callable[..., Hidden]] = {
    Tensor.__getitem__: _item,
    Tensor.view: _shaped(Tensor.view),
    **dict.fromkeys((Tensor.reshape, torch.reshape), _shaped(Tensor.reshape)),
    **dict.fromkeys((Tensor.flatten, torch.flatten), flatten),
    **dict.fromkeys((Tensor.squeeze, torch.squeeze), squeeze),
    **dict.fromkeys((Tensor.unsqueeze, torch.unsqueeze), unsqueeze),
    **dict.fromkeys((Tensor.transpose, torch.transpose), transpose),
    **dict.fromkeys((Tensor.split, torch.split), _split),
    **dict.fromkeys((Tensor.chunk, torch.chunk), _chunk),
    **dict.fromkeys((Tensor.unbind, torch.unbind), _unbind),
    **dict.fromkeys((Tensor.narrow, torch.narrow), _narrow),
    **dict.fromkeys((Tensor.select, torch.select), _select),
    **dict.fromkeys((Tensor.index_select, torch.index_select), _take),
}
