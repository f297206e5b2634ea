"""The sum of two tensors and its RMSNorm, in the order of a pre-norm block."""

import torch
from torch import Tensor

from liger_multi.reference.norms import rms_norm


def forward(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float,
    offset: float,
    casting: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """``s = x + residual``, rounded to its dtype; then the norm of what was rounded."""
    s = x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, residual.dtype))
    torch.add(x, residual, out=s)
    y, rstd = rms_norm.forward(s, weight, eps, offset, casting)
    return y, s, rstd


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
    """``ds = d(norm) / ds + dnew_residual`` is the gradient of both terms."""
    s, needs_sum = new_residual, needs_x or needs_residual
    if dy is not None:
        return rms_norm.gradients(
            dy,
            dnew_residual,
            s,
            weight,
            rstd,
            offset=offset,
            casting=casting,
            needs_x=needs_sum,
            needs_weight=needs_weight,
        )
    ds = s.new_empty(s.shape if needs_sum else (0,))
    if needs_sum and dnew_residual is not None:
        ds.copy_(dnew_residual)
    if weight is None or not needs_weight:
        return ds, s.new_empty(0)
    return ds, torch.zeros_like(weight)
