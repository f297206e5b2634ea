"""RMSNorm: npu_rms_norm within its limits, else an Ascend kernel.

npu_gemma_rms_norm gives no gradient, and no error either. ``offset + weight`` serves as the
weight where that sum is exact.
"""

import torch
from torch import Tensor

from liger_multi.backends.npu.common.limits import norm
from liger_multi.backends.npu.norms.rows import gradients, normalize


def supports(casting: str) -> str | None:
    """Refuse ``casting="factor"``, which neither kernel implements."""
    return "has no rounding of the factor" if casting == "factor" else None


def forward(
    x: Tensor, weight: Tensor | None, eps: float, offset: float, casting: str
) -> tuple[Tensor, Tensor]:
    """Normalize the last axis; return y and rstd (fp32)."""
    if weight is None or norm(x, weight, offset) is not None:
        y, _, rstd = normalize(x, None, weight, eps, offset, casting)
        return y, rstd
    gamma = (weight + offset if offset else weight).contiguous()
    y, rstd = torch.ops.npu.npu_rms_norm(x.contiguous(), gamma, eps)
    return y, rstd.view(x.shape[:-1])


def backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    offset: float,
    casting: str,
    needs_x: bool,
    needs_weight: bool,
) -> tuple[Tensor, Tensor]:
    """Gradients of x and weight; empty tensors if not needed."""
    return gradients(dy, None, x, weight, rstd, offset, casting, needs_x, needs_weight=needs_weight)
