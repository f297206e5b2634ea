"""RMSNorm of queries or keys and their rotation: the operators of both, one after the other.

What comes out of the norm exists for a moment; backward rotates back in fp32 into what the norm's
backward reads.
"""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor

from liger_multi.backends.npu.norms.operators import RMSNorm
from liger_multi.backends.npu.rope.rope import rotate, rotate_within_limits
from liger_multi.reference.rope.rms_norm_rope import heads_of, of_tokens, output_dtype, rows_of
from liger_multi.reference.rope.rope import dense


def supports(casting: str) -> Optional[str]:
    """As of the norm."""
    return RMSNorm.supports(casting)


def forward(
    x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float, offset: float, casting: str,
    rope_casting: str, head_axis: int, x_order: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Normalize, then rotate."""
    whole = of_tokens(x, weight)
    u, rstd = RMSNorm.forward(rows_of(x, head_axis, whole), weight, eps, offset, casting)
    dtype = output_dtype(x, weight, cos, sin, casting, rope_casting)
    how = ("half", head_axis, x.shape[-1], rope_casting, x_order, dtype, False)
    return rotate_within_limits(heads_of(u, x, head_axis, whole), cos, sin, *how), rstd


def backward(
    dy: Tensor, x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, rstd: Tensor, offset: float,
    casting: str, rope_casting: str, head_axis: int, x_order: str, needs_x: bool,
    needs_weight: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Rotate the gradient back, then differentiate the norm."""
    whole = of_tokens(x, weight)
    how = ("half", head_axis, x.shape[-1], rope_casting, x_order, torch.float32, True)
    g, rows = (rows_of(t, head_axis, whole) for t in (rotate(dy, cos, sin, *how), x))
    needs = (needs_x, needs_weight)
    dx, dweight = RMSNorm.backward(g, rows, weight, rstd, offset, casting, *needs)
    if not needs_x:
        return dx, dweight
    return dense(x, x_order, x.dtype).copy_(heads_of(dx, x, head_axis, whole)), dweight
