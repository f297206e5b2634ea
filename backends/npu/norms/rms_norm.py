"""RMSNorm: npu_rms_norm within its limits, else an Ascend kernel.

npu_gemma_rms_norm gives no gradient, and no error either. ``offset + weight`` serves as the weight
where that sum is exact.
"""

from typing import Optional

import torch
from torch import Tensor

from liger_multi.backends.npu.common.limits import norm
from liger_multi.backends.npu.norms import norm_kernels


def forward(
    x: Tensor, weight: Optional[Tensor], eps: float, offset: float, casting: str
) -> tuple[Tensor, Tensor]:
    """Normalize the last axis; return y and rstd (fp32)."""
    if weight is None or norm(x, weight, offset) is not None:
        y, _, rstd = norm_kernels.normalize(x, None, weight, eps, offset, casting)
        return y, rstd
    gamma = (weight + offset if offset else weight).contiguous()
    y, rstd = torch.ops.npu.npu_rms_norm(x.contiguous(), gamma, eps)
    return y, rstd.view(x.shape[:-1])


def backward(
    dy: Tensor, x: Tensor, weight: Optional[Tensor], rstd: Tensor, offset: float, casting: str,
    needs_x: bool, needs_weight: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradients of x and weight; one that nobody needs is an empty tensor."""
    return gradients(dy, None, x, weight, rstd, offset, casting, needs_x, needs_weight)


def gradients(
    dy: Tensor, ds: Optional[Tensor], x: Tensor, weight: Optional[Tensor], rstd: Tensor,
    offset: float, casting: str, needs_x: bool, needs_weight: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The same; ``ds``, from other uses of x, is added before dx is rounded.

    So is not what npu_rms_norm_backward returns: with ``ds``, it serves fp32 alone.
    """
    exact = ds is None or dy.dtype == torch.float32
    fits = exact and dy.dtype == x.dtype and norm(x, weight, offset) is None
    if weight is None or not fits or not (needs_x and needs_weight):
        return norm_kernels.gradients(
            dy, ds, x, weight, rstd, offset, casting, needs_x, needs_weight
        )
    gamma = (weight + offset if offset else weight).contiguous()
    dx, dweight = torch.ops.npu.npu_rms_norm_backward(
        dy.contiguous(), x.contiguous(), gamma, rstd.reshape(*x.shape[:-1], 1)
    )
    return dx if ds is None else dx + ds, dweight.to(weight.dtype)
