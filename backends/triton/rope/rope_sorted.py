"""Rotary embedding of interleaved pairs that leave as halves, in one pass (arXiv:2412.19437).

The kernel stands in rope_kinds_kernel.py: pairs are loaded side by side, and stored as halves.
"""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor

from liger_multi.backends.triton.rope.rope_kinds import angles, rotate
from liger_multi.reference.rope.rope import output_dtype


def forward(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, head_axis: int, rotary_dim: int, casting: str,
    q_order: str, k_order: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Rotate q and k; products and sums in fp32, rounded once."""
    dtypes = (output_dtype(q, cos, sin, casting), output_dtype(k, cos, sin, casting))
    orders, turn = (q_order, k_order), angles("", cos, sin, rotary_dim)
    return rotate("rope_sorted", (q, k), orders, dtypes, head_axis, turn, (True, False), False)


def backward(
    dq_out: Optional[Tensor], dk_out: Optional[Tensor], cos: Tensor, sin: Tensor, head_axis: int,
    rotary_dim: int, casting: str, q_order: str, k_order: str, q_dtype: torch.dtype,
    k_dtype: torch.dtype, needs_q: bool, needs_k: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradients of q and k; empty where not needed, or where nothing upstream has one."""
    given = (dq_out if needs_q else None, dk_out if needs_k else None)
    orders, dtypes, turn = (q_order, k_order), (q_dtype, k_dtype), angles("", cos, sin, rotary_dim)
    return rotate("rope_sorted", given, orders, dtypes, head_axis, turn, (False, True), True)
