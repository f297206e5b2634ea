"""Rotary embedding of integer positions, whose angles the kernel makes and never stores."""

import torch
from torch import Tensor

from liger_multi.backends.triton.rope.angles import Angles, rotate

ROUNDED = {torch.bfloat16: "bf16", torch.float16: "fp16"}


def _position_angles(
    dtype: torch.dtype,
    position_ids: Tensor,
    inv_freq: Tensor,
    scaling: float,
    sections: str,
    chunked: bool,
    casting: str,
) -> Angles:
    rounded = "" if casting == "cohere" else ROUNDED.get(dtype, "")
    return Angles(
        "positions",
        position_ids,
        inv_freq.contiguous(),
        2 * inv_freq.numel(),
        sections=sections,
        chunked=chunked,
        scaling=scaling,
        round=rounded,
    )


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
    """Rotate q and k; products and sums in fp32, rounded once."""
    interleaved, orders = style == "interleaved", (q_order, k_order)
    out_dtype = k.dtype if casting == "cohere" else torch.promote_types(k.dtype, q.dtype)
    rotation = _position_angles(
        q.dtype, position_ids, inv_freq, scaling, sections, chunked, casting
    )
    return rotate(
        "rope_positions",
        (q, k),
        orders,
        (q.dtype, out_dtype),
        head_axis,
        rotation,
        (interleaved, interleaved),
        False,
    )


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
    """Gradients of q and k; empty where not needed, or where nothing upstream has one."""
    interleaved, upstream = (
        style == "interleaved",
        (dq_out if needs_q else None, dk_out if needs_k else None),
    )
    rotation = _position_angles(
        q_dtype, position_ids, inv_freq, scaling, sections, chunked, casting
    )
    return rotate(
        "rope_positions",
        upstream,
        (q_order, k_order),
        (q_dtype, k_dtype),
        head_axis,
        rotation,
        (interleaved, interleaved),
        True,
    )
