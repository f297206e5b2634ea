"""Rotary embedding with sections of several grids (M-RoPE, arXiv:2409.12191).

The kernel reads each pair's angles from its grid.
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
    sections: str,
    chunked: bool,
    style: str,
    head_axis: int,
    rotary_dim: int,
    casting: str,
    q_order: str,
    k_order: str,
) -> tuple[Tensor, Tensor]:
    """Rotate q and k; products and sums in fp32, rounded once."""
    interleaved = style == "interleaved"
    dtypes = (output_dtype(q, cos, sin, casting), output_dtype(k, cos, sin, casting))
    rotation = angles(
        "", cos, sin, rotary_dim, interleaved=interleaved, sections=sections, chunked=chunked
    )
    orders = (q_order, k_order)
    return rotate(
        "rope_multimodal",
        (q, k),
        orders,
        dtypes,
        head_axis,
        rotation,
        (interleaved, interleaved),
        False,
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
    """Gradients of q and k; empty where not needed, or where nothing upstream has one."""
    interleaved = style == "interleaved"
    upstream = (dq_out if needs_q else None, dk_out if needs_k else None)
    rotation = angles(
        "", cos, sin, rotary_dim, interleaved=interleaved, sections=sections, chunked=chunked
    )
    return rotate(
        "rope_multimodal",
        upstream,
        (q_order, k_order),
        (q_dtype, k_dtype),
        head_axis,
        rotation,
        (interleaved, interleaved),
        True,
    )
