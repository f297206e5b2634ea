"""The sum of two scaled tensors and its RMSNorm, in the order of a pre-norm block."""

import torch
from torch import Tensor

from liger_multi.reference.norms import fused_add_rms_norm


def forward(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float,
    offset: float,
    casting: str,
    x_scale: float,
    residual_scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Scale what is not scaled by 1, then as the plain sum."""
    x = x if x_scale == 1.0 else x * x_scale
    residual = residual if residual_scale == 1.0 else residual * residual_scale
    return fused_add_rms_norm.forward(x, residual, weight, eps, offset, casting)


def backward(
    new_residual: Tensor,
    dy: Tensor | None,
    dnew_residual: Tensor | None,
    weight: Tensor | None,
    rstd: Tensor,
    offset: float,
    casting: str,
    x_scale: float,
    residual_scale: float,
    x_dtype: torch.dtype,
    residual_dtype: torch.dtype,
    needs_x: bool,
    needs_residual: bool,
    needs_weight: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of the sum, scaled for each term."""
    needs = (needs_x, needs_residual, needs_weight)
    ds, dweight = fused_add_rms_norm.backward(
        new_residual, dy, dnew_residual, weight, rstd, offset, casting, *needs
    )
    dx, dresidual = (
        (ds * scale).to(dtype) if is_needed else ds.new_empty(0, dtype=dtype)
        for scale, dtype, is_needed in (
            (x_scale, x_dtype, needs_x),
            (residual_scale, residual_dtype, needs_residual),
        )
    )
    return dx, dresidual, dweight
