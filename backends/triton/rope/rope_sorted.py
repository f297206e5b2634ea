"""Rotary embedding of interleaved pairs with half-split output, in one pass (arXiv:2412.19437).

Pairs are loaded side by side, and stored half-split.
"""

import torch
from torch import Tensor

from liger_multi.backends.triton.rope.angles import angles, rotate
from liger_multi.reference.rope.rope import output_dtype


def forward(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    head_axis: int,
    rotary_dim: int,
    casting: str,
    q_order: str,
    k_order: str,
) -> tuple[Tensor, Tensor]:
    """Rotate q and k; products and sums in fp32, rounded once."""
    dtypes = (output_dtype(q, cos, sin, casting), output_dtype(k, cos, sin, casting))
    orders, rotation = (q_order, k_order), angles("", cos, sin, rotary_dim)
    return rotate("rope_sorted", (q, k), orders, dtypes, head_axis, rotation, (True, False), False)


def backward(
    dq_out: Tensor | None,
    dk_out: Tensor | None,
    cos: Tensor,
    sin: Tensor,
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
    """Gradients of q and k; empty where not needed, or where nothing upstream has one."""
    upstream = (dq_out if needs_q else None, dk_out if needs_k else None)
    orders, dtypes, rotation = (
        (q_order, k_order),
        (q_dtype, k_dtype),
        angles("", cos, sin, rotary_dim),
    )
    return rotate("rope_sorted", upstream, orders, dtypes, head_axis, rotation, (False, True), True)
