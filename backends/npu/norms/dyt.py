"""Dynamic tanh by Ascend kernels: torch_npu has no operator for it."""

from typing import Optional

import torch
from torch import Tensor

from liger_multi.backends.npu.norms import dyt_kernels


def forward(x: Tensor, alpha: Tensor, weight: Optional[Tensor], bias: Optional[Tensor]) -> Tensor:
    """In fp32, rounded once."""
    dtype = x.dtype
    for t in (alpha, weight, bias):
        dtype = dtype if t is None else torch.promote_types(dtype, t.dtype)
    y = x.new_empty(x.shape, dtype=dtype)
    if y.numel():
        dyt_kernels.run_forward(x, alpha, weight, bias, y)
    return y


def backward(
    dy: Tensor, x: Tensor, alpha: Tensor, weight: Optional[Tensor],
    bias_dtype: Optional[torch.dtype], needs_x: bool, needs_alpha: bool, needs_weight: bool,
    needs_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients; one that nobody needs is an empty tensor."""
    dx = x.new_empty(x.shape if needs_x else 0)
    wanted, cols = (needs_alpha, needs_weight, needs_bias), x.shape[-1]
    sums = [x.new_zeros(cols if w else 0, dtype=torch.float32) for w in wanted]
    if x.numel():
        sums = dyt_kernels.run_backward(dy, x, alpha, weight, dx if needs_x else None, wanted)
    dalpha = sums[0].sum().to(alpha.dtype).view(alpha.shape) if needs_alpha else None
    return (
        dx,
        alpha.new_empty(0) if dalpha is None else dalpha,
        x.new_empty(0) if weight is None else sums[1].to(weight.dtype),
        sums[2].to(bias_dtype or x.dtype),
    )
