"""Rotary embedding of interleaved pairs with half-split output."""

import torch
from torch import Tensor

from liger_multi.reference.rope import rope


def _halves(x: Tensor, rotary_dim: int) -> Tensor:
    """Even channels first; those that do not turn stay."""
    front = x[..., :rotary_dim].unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    return front if rotary_dim == x.shape[-1] else torch.cat((front, x[..., rotary_dim:]), -1)


def _pairs(x: Tensor, rotary_dim: int) -> Tensor:
    """The way back."""
    front = x[..., :rotary_dim].unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
    return front if rotary_dim == x.shape[-1] else torch.cat((front, x[..., rotary_dim:]), -1)


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
    """Sort the channels, then rotate halves."""
    q, k = _halves(q, rotary_dim), _halves(k, rotary_dim)
    return rope.forward(
        q, k, cos, sin, "half", head_axis, rotary_dim, casting, q_order=q_order, k_order=k_order
    )


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
    """Rotate halves back, then put the channels of each pair side by side."""
    options = ("half", head_axis, rotary_dim, casting, q_order, k_order, q_dtype, k_dtype)
    gradients = rope.backward(dq_out, dk_out, cos, sin, *options, needs_q, needs_k)
    outs = []
    for grad, order in zip(gradients, (q_order, k_order), strict=True):
        if grad.numel():
            buffer = rope.dense(grad, order, grad.dtype)
            outs.append(buffer.copy_(_pairs(grad, rotary_dim)))
        else:
            outs.append(grad)
    return outs[0], outs[1]
