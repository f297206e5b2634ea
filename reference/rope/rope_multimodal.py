"""RoPE with sections of several grids (M-RoPE): merged angles, then plain ``rope``."""

import torch
from torch import Tensor

from liger_multi.reference.rope import rope
from liger_multi.reference.rope.sections import merged


def _merged(
    cos: Tensor, sin: Tensor, sections: str, chunked: bool, style: str, order: str
) -> tuple[Tensor, Tensor]:
    angles = [merged(t, sections, chunked, style) for t in (cos, sin)]
    return (angles[0], angles[1]) if len(order) == 4 else (angles[0][0], angles[1][0])


def forward(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    sections: str,
    chunked: bool,
    style: str,
    head_axis: int,
    rotary_dim: int,
    casting: str,
    q_order: str,
    k_order: str,
) -> tuple[Tensor, Tensor]:
    """Rotate q and k."""
    cos, sin = _merged(cos, sin, sections, chunked, style, q_order)
    return rope.forward(
        q, k, cos, sin, style, head_axis, rotary_dim, casting, q_order=q_order, k_order=k_order
    )


def backward(
    dq_out: Tensor | None,
    dk_out: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    sections: str,
    chunked: bool,
    style: str,
    head_axis: int,
    rotary_dim: int,
    casting: str,
    q_order: str,
    k_order: str,
    q_dtype: torch.dtype,
    k_dtype: torch.dtype,
    needs_q: bool,
    needs_k: bool,
) -> tuple[Tensor, Tensor]:
    """Rotate the gradients by the transposed matrix."""
    cos, sin = _merged(cos, sin, sections, chunked, style, q_order)
    options = (style, head_axis, rotary_dim, casting, q_order, k_order, q_dtype, k_dtype)
    return rope.backward(dq_out, dk_out, cos, sin, *options, needs_q, needs_k)
