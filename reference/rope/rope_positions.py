"""Rotary embedding of integer positions: their angles, then plain ``rope``."""

import torch
from torch import Tensor

from liger_multi.reference.rope import rope
from liger_multi.reference.rope.sections import merged


def of_positions(
    position_ids: Tensor, inv_freq: Tensor, scaling: float, sections: str, chunked: bool
) -> tuple[Tensor, Tensor]:
    """Cos and sin ``(batch, tokens, pairs)`` of positions ``(grids, batch, tokens)``.

    Every product and every function in the dtype of the frequencies, fp32 at least.
    """
    acc_dtype = torch.float64 if inv_freq.dtype == torch.float64 else torch.float32
    turns = position_ids[..., None].to(acc_dtype) * inv_freq.to(acc_dtype)
    turns = merged(turns, sections, chunked, "half") if sections else turns.squeeze(0)
    return turns.cos() * scaling, turns.sin() * scaling


def _position_angles(
    dtype: torch.dtype,
    position_ids: Tensor,
    inv_freq: Tensor,
    scaling: float,
    sections: str,
    chunked: bool,
    casting: str,
    order: str,
) -> tuple[Tensor, Tensor]:
    """In the dtype of q, as the rotary modules make them; in fp32 where that is inside anyway."""
    angles = of_positions(position_ids, inv_freq, scaling, sections, chunked)
    cos, sin = (t if casting == "cohere" else t.to(dtype) for t in angles)
    return (cos, sin) if len(order) == 4 else (cos[0], sin[0])


def forward(
    q: Tensor,
    k: Tensor,
    position_ids: Tensor,
    inv_freq: Tensor,
    scaling: float,
    sections: str,
    chunked: bool,
    style: str,
    head_axis: int,
    casting: str,
    q_order: str,
    k_order: str,
) -> tuple[Tensor, Tensor]:
    """Rotate q and k."""
    angles = (scaling, sections, chunked, casting, q_order)
    cos, sin = _position_angles(q.dtype, position_ids, inv_freq, *angles)
    options = (style, head_axis, 2 * inv_freq.numel(), casting, q_order, k_order)
    return rope.forward(q, k, cos, sin, *options)


def backward(
    dq_out: Tensor | None,
    dk_out: Tensor | None,
    inv_freq: Tensor,
    position_ids: Tensor,
    scaling: float,
    sections: str,
    chunked: bool,
    style: str,
    head_axis: int,
    casting: str,
    q_order: str,
    k_order: str,
    q_dtype: torch.dtype,
    k_dtype: torch.dtype,
    needs_q: bool,
    needs_k: bool,
) -> tuple[Tensor, Tensor]:
    """Rotate the gradients by the transposed matrix."""
    angles = (scaling, sections, chunked, casting, q_order)
    cos, sin = _position_angles(q_dtype, position_ids, inv_freq, *angles)
    options = (style, head_axis, 2 * inv_freq.numel(), casting, q_order, k_order, q_dtype, k_dtype)
    gradients: tuple[Tensor, Tensor] = rope.backward(
        dq_out, dk_out, cos, sin, *options, needs_q, needs_k
    )
    if dq_out is None and dk_out is None:
        return inv_freq.new_empty(0, dtype=q_dtype), inv_freq.new_empty(0, dtype=k_dtype)
    return gradients
