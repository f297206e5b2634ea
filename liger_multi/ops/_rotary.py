"""Checks of arguments that the rotary operators share."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from liger_multi import checks
from liger_multi.ops._work import Options, Shapes, Work
from liger_multi.testing.samples import Tensor as T

STYLES = ("half", "interleaved")
CASTINGS = ("llama", "cohere")
ARRANGEMENTS = ("chunked", "interleaved")


def head_axis(name: str, q: Tensor, unsqueeze_dim: int) -> int:
    """The axis of the heads, from what callers name ``unsqueeze_dim``."""
    if q.ndim not in (3, 4):
        checks.refuse(name, "q must have shape (B, H, S, D), (B, S, H, D) or (S, H, D)", q)
    value = checks.integer(name, "unsqueeze_dim", unsqueeze_dim)
    axis = value + q.ndim if value < 0 else value
    if not 1 <= axis <= q.ndim - 2:
        allowed = "1 or 2" if q.ndim == 4 else "1"
        checks.refuse(
            name,
            f"unsqueeze_dim, the axis of the heads, must be {allowed} for q with {q.ndim} axes",
            f"{value}",
        )
    return axis


def check_queries_and_keys(name: str, q: Tensor, k: Tensor, heads: int) -> None:
    """Queries and keys differ in their heads only."""
    a, b, channel_axis = q.shape, k.shape, heads + 1
    if k.ndim != q.ndim or a[:heads] != b[:heads] or a[channel_axis:] != b[channel_axis:]:
        checks.refuse(
            name,
            f"q and k must have the same shape except for the heads (axis {heads})",
            f"{tuple(q.shape)} and {tuple(k.shape)}",
        )


def check_angles(name: str, q: Tensor, cos: Tensor, sin: Tensor, heads: int) -> None:
    """Cos and sin have a row for every token."""
    checks.same_shape(name, cos=cos, sin=sin)
    tokens = q.shape[3 - heads] if q.ndim == 4 else q.shape[0]
    fits = cos.ndim > 1 and cos.ndim in (2, q.ndim - 1) and cos.shape[-2] == tokens
    if not fits or (cos.ndim == 3 and cos.shape[0] != 1 and cos.shape[0] != q.shape[0]):
        expected = f"({tokens}, R)"
        if q.ndim == 4:
            expected += f", (1, {tokens}, R) or ({q.shape[0]}, {tokens}, R)"
        checks.refuse(
            name,
            f"cos and sin must have shape {expected} for q of shape {tuple(q.shape)} "
            f"with heads at axis {heads}",
            cos,
        )


def rotary_width(name: str, q: Tensor, cos: Tensor, rotary_dim: int | None) -> int:
    """Number of channels that are rotated."""
    if cos.ndim == 0:
        raise ValueError(f"{name}: cos and sin must have an axis of channels, got a number")
    width = cos.shape[-1]
    value = width if rotary_dim is None else checks.integer(name, "rotary_dim", rotary_dim)
    if value != width and (value % 2 or value // 2 != width):  # 2 * width leaves int64 in graphs
        checks.refuse(
            name,
            "rotary_dim must be the width of cos (one value a channel) or twice "
            "that (one value a pair)",
            f"{value} for {checks.describe(cos)}",
        )
    if value % 2 or not 0 < value <= q.shape[-1]:
        raise ValueError(
            f"{name}: rotary_dim must be even and at most {q.shape[-1]}, the last axis of q, got "
            f"{value}"
        )
    return value


def order(x: Tensor) -> str:
    """Axes from the outermost in memory to the innermost; the last axis is taken as that."""
    strides, last = x.stride(), x.ndim - 1
    if last == 3 and strides[0] >= strides[1] >= strides[2] > 0:  # both common layouts
        return "0123"
    if last == 3 and strides[0] >= strides[2] >= strides[1] > 0:
        return "0213"
    # an axis of one element, or expanded, has no place of its own: outermost
    is_free = [x.shape[i] == 1 or strides[i] == 0 for i in range(last)]
    axes = [i for i in range(last) if is_free[i]]
    for i in range(last):
        if not is_free[i]:
            outer = [j for j in axes if is_free[j] or strides[j] >= strides[i]]
            axes = [*outer, i, *[j for j in axes if j not in outer]]
    return "".join(str(i) for i in (*axes, last))


def tokens_of(q: Tensor, heads: int) -> int:
    """Length of the sequences."""
    return q.shape[3 - heads] if q.ndim == 4 else q.shape[0]


def sections_word(name: str, sections: object, pairs: int) -> tuple[str, int]:
    """Sections as one comma-joined word, and how many."""
    if isinstance(sections, str) or not isinstance(sections, Sequence):
        raise TypeError(
            f"{name}: sections must be a sequence of integers, got {checks.describe(sections)}"
        )
    # an index, which a compiler takes for a constant where it keeps integers symbolic
    value = [
        operator.index(checks.integer(name, f"sections[{i}]", s)) for i, s in enumerate(sections)
    ]
    if len(value) not in (2, 3) or min(value) < 0 or sum(value) != pairs:
        raise ValueError(
            f"{name}: sections must be two or three numbers of pairs that add up to {pairs}, got "
            f"{tuple(value)}"
        )
    return ",".join(map(str, value)), len(value)


def run(
    op: Any,
    q: Tensor,
    k: Tensor,
    angles: tuple[Tensor, ...],
    options: tuple[Any, ...],
    casting: str,
) -> tuple[Tensor, Tensor]:
    """Call the operator; if only some tensors are fp64, all are cast to it.

    Backends are chosen by one dtype, so part of a mixed call would be computed in fp32. Results are
    cast back.
    """
    orders = (order(q), order(k))
    input_dtypes = {x.dtype for x in (q, k, *angles) if x.is_floating_point()}
    if torch.float64 not in input_dtypes or len(input_dtypes) == 1:
        result: tuple[Tensor, Tensor] = op(q, k, *angles, *options, *orders)
        return result
    wide = [x.double() if x.is_floating_point() else x for x in (q, k, *angles)]
    output = op(*wide, *options, *orders)
    dtypes = [q.dtype, k.dtype]
    if casting == "llama":
        for x in angles:
            dtypes = [torch.promote_types(d, x.dtype) for d in dtypes]
    return output[0].to(dtypes[0]), output[1].to(dtypes[1])


def checked(name: str, q: Tensor, k: Tensor, unsqueeze_dim: int, **constants: Tensor) -> int:
    """Check queries, keys and what has no gradient; the axis of the heads."""
    for argument, x in (("k", k), *constants.items()):
        if x is None:  # which passes for an optional tensor elsewhere
            raise TypeError(f"{name}: {argument} must be a floating-point tensor, got None")
    heads = head_axis(name, q, unsqueeze_dim)
    check_queries_and_keys(name, q, k, heads)
    for argument, x in constants.items():
        checks.constant(name, argument, x)
    return heads


def gradients(**kwargs: Any) -> tuple[Tensor, ...]:
    """Shape rule of backward; empty where a gradient is not needed or has nothing to come from."""
    from liger_multi.reference.rope.rope import dense

    tensor = next(x for n, x in kwargs.items() if n not in ("dq_out", "dk_out"))
    return tuple(
        dense(kwargs[f"d{n}_out"], kwargs[f"{n}_order"], kwargs[f"{n}_dtype"])
        if kwargs[f"needs_{n}"] and kwargs[f"d{n}_out"] is not None
        else tensor.new_empty(0, dtype=kwargs[f"{n}_dtype"])
        for n in "qk"
    )


def queries_and_keys(
    batch: int,
    heads: tuple[int, int],
    tokens: int,
    width: int,
    *,
    axis: int = 1,
    layout: str = "contiguous",
) -> dict[str, T]:
    """Tensors of a sample; without a batch, ``(S, H, D)``."""

    def shape(count: int) -> tuple[int, ...]:
        axes = (count, tokens) if axis == 1 else (tokens, count)
        return (batch, *axes, width) if batch else (tokens, count, width)

    return {n: T(shape(h), layout=layout) for n, h in zip("qk", heads, strict=True)}


def rope_work(shapes: Shapes, size: int, options: Options) -> Work:
    heads = (math.prod(shapes["q"]) + math.prod(shapes["k"])) * size
    angles = sum(math.prod(shape) for name, shape in shapes.items() if name in ("cos", "sin"))
    angles = angles * size + math.prod(shapes.get("freqs", (0,))) * 4
    # an integer a token
    angles += math.prod(shapes.get("position_ids", (0,))) * 8
    return Work(2 * heads + angles, 4 * heads + 2 * angles)
