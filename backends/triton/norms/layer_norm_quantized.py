"""Layer norm that also rounds its rows to FP8, from registers."""

from __future__ import annotations

from typing import Optional

from torch import Tensor

from liger_multi.backends.triton.float8.rows import code_buffers
from liger_multi.backends.triton.norms import layer_norm


def forward(
    x: Tensor, weight: Optional[Tensor], bias: Optional[Tensor], eps: float, writes_y: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Y where it is needed, its codes and scales, mean and rstd (fp32)."""
    buffers = code_buffers(x, writes_y)
    y, mean, rstd = layer_norm.normalize(x, weight, bias, eps, buffers)
    return *buffers.outputs(y), mean, rstd


backward = layer_norm.backward
