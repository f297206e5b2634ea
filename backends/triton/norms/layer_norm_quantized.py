"""Layer norm that also rounds its rows to FP8, from registers."""

from torch import Tensor

from liger_multi.backends.triton.float8.rows import code_buffers
from liger_multi.backends.triton.norms import layer_norm


def forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, writes_y: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Y where it is needed, its codes and scales, mean and rstd (fp32)."""
    buffers = code_buffers(x, writes_y)
    y, mean, rstd = layer_norm.normalize(x, weight, bias, eps, buffers)
    return *buffers.outputs(y), mean, rstd


backward = layer_norm.backward
