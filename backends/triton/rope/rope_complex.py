"""Rotary embedding by complex numbers; the kernel is in angles.py."""

import torch
from torch import Tensor

from liger_multi.backends.triton.rope.angles import Angles, rotate


def _complex_angles(freqs: Tensor, rotary_dim: int) -> Angles:
    flat = freqs.contiguous().flatten(-2)
    flat = flat.view((1,) * (4 - flat.ndim) + flat.shape)
    return Angles("complex", flat, flat, rotary_dim)


def forward(
    q: Tensor,
    k: Tensor,
    freqs: Tensor,
    head_axis: int,
    rotary_dim: int,
    q_order: str,
    k_order: str,
) -> tuple[Tensor, Tensor]:
    """Rotate q and k; products and sums in fp32, rounded once."""
    orders, dtypes, rotation = (
        (q_order, k_order),
        (q.dtype, k.dtype),
        _complex_angles(freqs, rotary_dim),
    )
    return rotate("rope_complex", (q, k), orders, dtypes, head_axis, rotation, (True, True), False)


def backward(
    dq_out: Tensor | None,
    dk_out: Tensor | None,
    freqs: Tensor,
    head_axis: int,
    rotary_dim: int,
    q_order: str,
    k_order: str,
    q_dtype: torch.dtype,
    k_dtype: torch.dtype,
    needs_q: bool,
    needs_k: bool,
) -> tuple[Tensor, Tensor]:
    """Gradients of q and k; empty where not needed, or where nothing upstream has one."""
    upstream = (dq_out if needs_q else None, dk_out if needs_k else None)
    orders, dtypes, rotation = (
        (q_order, k_order),
        (q_dtype, k_dtype),
        _complex_angles(freqs, rotary_dim),
    )
    return rotate("rope_complex", upstream, orders, dtypes, head_axis, rotation, (True, True), True)
