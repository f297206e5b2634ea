"""Sum of two tensors and its RMSNorm, by the kernels of ``rms_norm``.

One pass each way: forward reads x and residual and writes their sum and its norm; backward
reads dy, the sum and the gradient of its other uses, and writes the gradient of both terms.
"""

import torch
from torch import Tensor

from liger_multi.backends.triton.norms.rms_norm import gradients, normalize


def forward(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float,
    offset: float,
    casting: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """The norm of x + residual, the sum as it was rounded, and rstd (fp32)."""
    return normalize("fused_add_rms_norm", x, residual, weight, eps, offset, casting)


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
    needs_sum = needs_x or needs_residual
    if dy is not None:
        return gradients(
            "fused_add_rms_norm",
            dy,
            dnew_residual,
            new_residual,
            weight,
            rstd,
            offset=offset,
            casting=casting,
            needs_x=needs_sum,
            needs_weight=needs_weight,
        )
    dx = torch.empty(
        new_residual.shape if needs_sum else 0, dtype=new_residual.dtype, device=new_residual.device
    )
    if needs_sum and dnew_residual is not None:
        dx.copy_(dnew_residual)  # the norm was not used; a result must not be an input
    if weight is None or not needs_weight:
        return dx, new_residual.new_empty(0)
    return dx, torch.zeros_like(weight)
