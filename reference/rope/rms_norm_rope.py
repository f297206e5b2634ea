"""RMSNorm of queries or keys and their rotation: both references, one after the other.

A norm of a token takes the heads of a token as one row.
"""

import torch
from torch import Tensor

from liger_multi.reference.common.chunking import statistics_dtype
from liger_multi.reference.norms import rms_norm
from liger_multi.reference.rope import rope


def norm_dtype(x: Tensor, weight: Tensor, casting: str) -> torch.dtype:
    """What the norm returns."""
    return torch.promote_types(x.dtype, weight.dtype) if casting == "llama" else x.dtype


def output_dtype(
    x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, casting: str, rope_casting: str
) -> torch.dtype:
    """What the rotation of what the norm returns returns."""
    dtype = norm_dtype(x, weight, casting)
    if rope_casting == "cohere":
        return dtype
    return torch.promote_types(dtype, torch.promote_types(cos.dtype, sin.dtype))


def of_tokens(x: Tensor, weight: Tensor) -> bool:
    """Whether the norm is that of all heads of a token."""
    return weight.shape[0] != x.shape[-1]


def statistics_shape(x: Tensor, weight: Tensor, head_axis: int) -> tuple[int, ...]:
    """One number for every head of every token, or for every token."""
    if of_tokens(x, weight):
        return (x.shape[0], x.shape[3 - head_axis])
    return tuple(x.shape[:-1])


def rows_of(x: Tensor, head_axis: int, over_heads: bool) -> Tensor:
    """The rows of the norm on the last axis."""
    return x.movedim(head_axis, 2).flatten(2) if over_heads else x


def heads_of(rows: Tensor, x: Tensor, head_axis: int, over_heads: bool) -> Tensor:
    """The way back."""
    if not over_heads:
        return rows
    heads: Tensor = rows.unflatten(2, (x.shape[head_axis], x.shape[-1]))
    return heads.movedim(2, head_axis)


def forward(
    x: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    offset: float,
    casting: str,
    rope_casting: str,
    head_axis: int,
    x_order: str,
) -> tuple[Tensor, Tensor]:
    """Normalize, then rotate."""
    over_heads = of_tokens(x, weight)
    u, rstd = rms_norm.forward(rows_of(x, head_axis, over_heads), weight, eps, offset, casting)
    u = heads_of(u, x, head_axis, over_heads)
    options = ("half", head_axis, x.shape[-1], rope_casting, x_order)
    dtype = output_dtype(x, weight, cos, sin, casting, rope_casting)
    return rope.rotate(u, cos, sin, *options, dtype), rstd


def backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    rstd: Tensor,
    offset: float,
    casting: str,
    rope_casting: str,
    head_axis: int,
    x_order: str,
    needs_x: bool,
    needs_weight: bool,
) -> tuple[Tensor, Tensor]:
    """Rotate the gradient back, in fp32 at least, then differentiate the norm."""
    over_heads = of_tokens(x, weight)
    wide = dy.to(statistics_dtype(dy.dtype))
    options = ("half", head_axis, x.shape[-1], rope_casting, x_order)
    g = rope.rotate(wide, cos, sin, *options, wide.dtype, inverse=True)
    g, rows = rows_of(g, head_axis, over_heads), rows_of(x, head_axis, over_heads)
    how_norm = (offset, casting, needs_x, needs_weight)
    dx, dweight = rms_norm.backward(g, rows, weight, rstd, *how_norm)
    if not needs_x:
        return dx, dweight
    dx = heads_of(dx, x, head_axis, over_heads)
    return rope.dense(x, x_order, x.dtype).copy_(dx), dweight
