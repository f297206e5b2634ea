"""Rotary embedding by npu_rotary_mul within its limits, else an Ascend kernel.

npu_apply_rotary_pos_emb has no derivative, and npu_rotary_mul_backward wants the queries: the
gradient is a rotation too, with the sines of each pair exchanged and negated.
"""

from typing import Optional

import torch
from torch import Tensor

from liger_multi.backends.npu.common.limits import rotation
from liger_multi.backends.npu.rope import rope_kernels
from liger_multi.reference.rope import rope as reference

MODES = {"half": "half", "interleaved": "interleave"}


def _exchanged(sin: Tensor, style: str) -> Tensor:
    """The sines of a rotation back."""
    if style == "half":
        return -sin.roll(sin.shape[-1] // 2, -1)
    return -sin.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)


def _rotate(
    x: Tensor, cos: Tensor, sin: Tensor, style: str, head_axis: int, rotary_dim: int, casting: str,
    order: str, dtype: torch.dtype, inverse: bool,
) -> Tensor:  # fmt: skip
    fits = dtype == x.dtype and rotation(x, _batched(cos), sin, style, rotary_dim, order) is None
    if not fits:
        how = (style, head_axis, rotary_dim, casting, order, dtype, inverse)
        return rope_kernels.rotate(x, cos, sin, *how)
    sin = _exchanged(sin, style) if inverse else sin
    axes = [int(digit) for digit in order]  # its own inverse
    angles = [_batched(a).unsqueeze(head_axis).permute(axes).contiguous() for a in (cos, sin)]
    made = torch.ops.npu.npu_rotary_mul(x.permute(axes).contiguous(), *angles, MODES[style])
    return made.permute(axes)


def _batched(angle: Tensor) -> Tensor:
    return angle if angle.dim() == 3 else angle.unsqueeze(0)


def forward(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, style: str, head_axis: int, rotary_dim: int,
    casting: str, q_order: str, k_order: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Rotate q and k."""
    how = (cos, sin, style, head_axis, rotary_dim, casting)
    dtypes = [reference.output_dtype(x, cos, sin, casting) for x in (q, k)]
    return (
        _rotate(q, *how, q_order, dtypes[0], False),
        _rotate(k, *how, k_order, dtypes[1], False),
    )


def backward(
    dq_out: Optional[Tensor], dk_out: Optional[Tensor], cos: Tensor, sin: Tensor, style: str,
    head_axis: int, rotary_dim: int, casting: str, q_order: str, k_order: str,
    q_dtype: torch.dtype, k_dtype: torch.dtype, needs_q: bool, needs_k: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Rotate the gradients back."""
    how = (cos, sin, style, head_axis, rotary_dim, casting)
    dq, dk = cos.new_empty(0, dtype=q_dtype), cos.new_empty(0, dtype=k_dtype)
    if needs_q and dq_out is not None:
        dq = _rotate(dq_out, *how, q_order, q_dtype, True)
    if needs_k and dk_out is not None:
        dk = _rotate(dk_out, *how, k_order, k_dtype, True)
    return dq, dk
