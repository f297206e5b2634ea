"""RMSNorm of queries or keys and their rotation: the operators of both, one after the other.

What comes out of the norm exists for a moment; backward rotates back in fp32 into what the norm's
backward reads. Rows of the norm are taken in the order that they have in memory, so that neither x
nor a gradient is copied into another one.
"""

import torch
from torch import Tensor

from liger_multi.backends.npu.norms import rms_norm
from liger_multi.backends.npu.rope.rope import rotate, rotate_within_limits
from liger_multi.reference.rope.rms_norm_rope import heads_of, of_tokens, output_dtype, rows_of
from liger_multi.reference.rope.rope import dense


def supports(casting: str) -> str | None:
    """Refuse what the norm refuses."""
    return rms_norm.supports(casting)


def _ordered(x: Tensor, axes: list[int]) -> Tensor:
    """A tensor whose axes stand in the order of ``axes``, a view."""
    return x.permute(axes[: x.dim()])


def _orders(x_order: str) -> tuple[list[int], list[int]]:
    """Axes from the outermost in memory to the innermost, and the way back."""
    axes = [int(digit) for digit in x_order]
    return axes, sorted(range(len(axes)), key=axes.__getitem__)


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
    if of_tokens(x, weight):
        rows, rstd = rms_norm.forward(rows_of(x, head_axis, True), weight, eps, offset, casting)
        u = heads_of(rows, x, head_axis, True)
    else:
        to_memory, from_memory = _orders(x_order)
        rows, rstd = rms_norm.forward(_ordered(x, to_memory), weight, eps, offset, casting)
        u, rstd = _ordered(rows, from_memory), _ordered(rstd, from_memory).contiguous()
    dtype = output_dtype(x, weight, cos, sin, casting, rope_casting)
    options = ("half", head_axis, x.shape[-1], rope_casting, x_order, dtype, False)
    return rotate_within_limits(u, cos, sin, *options), rstd


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
    """Rotate the gradient back, then differentiate the norm."""
    over_heads, (to_memory, from_memory) = of_tokens(x, weight), _orders(x_order)
    options = ("half", head_axis, x.shape[-1], rope_casting, x_order, torch.float32, True)
    g = rotate(dy, cos, sin, *options)
    if over_heads:
        g, rows = (rows_of(t, head_axis, True) for t in (g, x))
    else:
        g, rows, rstd = (_ordered(t, to_memory) for t in (g, x, rstd))
    needs = (needs_x, needs_weight)
    dx, dweight = rms_norm.backward(g, rows, weight, rstd.contiguous(), offset, casting, *needs)
    if not needs_x:
        return dx, dweight
    dx = heads_of(dx, x, head_axis, True) if over_heads else _ordered(dx, from_memory)
    if _ordered(dx, to_memory).is_contiguous():
        return dx, dweight
    return dense(x, x_order, x.dtype).copy_(dx), dweight
