"""Rotary embedding by complex numbers: interleaved pairs in fp32, cast back."""

import torch
from torch import Tensor

from liger_multi.reference.rope import rope


def forward(
    q: Tensor,
    k: Tensor,
    freqs: Tensor,
    head_axis: int,
    rotary_dim: int,
    q_order: str,
    k_order: str,
) -> tuple[Tensor, Tensor]:
    """Multiply every pair of channels by its number."""
    options = ("interleaved", head_axis, rotary_dim, "cohere", q_order, k_order)
    return rope.forward(q, k, freqs[..., 0], freqs[..., 1], *options)


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
    """Multiply the gradients by the conjugated numbers."""
    options = ("interleaved", head_axis, rotary_dim, "cohere", q_order, k_order, q_dtype, k_dtype)
    return rope.backward(dq_out, dk_out, freqs[..., 0], freqs[..., 1], *options, needs_q, needs_k)
