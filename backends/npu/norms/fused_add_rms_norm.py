"""The sum of two tensors and its norm: npu_add_rms_norm within limits, else an Ascend kernel.

torch_npu has no derivative of it: the gradient is that of the norm, to which the sum's is
added.
"""

import torch
from torch import Tensor

from liger_multi.backends.npu.common.limits import norm
from liger_multi.backends.npu.norms.rows import gradients, normalize
from liger_multi.reference.norms import fused_add_rms_norm as reference


def forward(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float,
    offset: float,
    casting: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """The norm of x + residual, the sum as it was rounded, and rstd (fp32)."""
    if weight is None or x.dtype != residual.dtype or norm(x, weight, offset) is not None:
        return normalize(x, residual, weight, eps, offset, casting)
    gamma = (weight + offset if offset else weight).contiguous()
    y, rstd, s = torch.ops.npu.npu_add_rms_norm(x.contiguous(), residual.contiguous(), gamma, eps)
    return y, s, rstd.view(x.shape[:-1])


def backward(
    new_residual: Tensor,
    dy: Tensor | None,
    dnew_residual: Tensor | None,
    weight: Tensor | None,
    rstd: Tensor,
    offset: float,
    casting: str,
    needs_x: bool,
    needs_residual: bool,
    needs_weight: bool,
) -> tuple[Tensor, Tensor]:
    """The gradient of both terms, and that of weight."""
    if dy is None:  # the norm was not used
        return reference.backward(
            new_residual,
            dy,
            dnew_residual,
            weight,
            rstd,
            offset=offset,
            casting=casting,
            needs_x=needs_x,
            needs_residual=needs_residual,
            needs_weight=needs_weight,
        )
    return gradients(
        dy,
        dnew_residual,
        new_residual,
        weight,
        rstd,
        offset=offset,
        casting=casting,
        needs_x=needs_x or needs_residual,
        needs_weight=needs_weight,
    )
