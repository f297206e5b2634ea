"""Sum of two tensors and its RMSNorm, which also rounds its rows to FP8, from registers."""

from torch import Tensor

from liger_multi.backends.triton.float8.rows import code_buffers
from liger_multi.backends.triton.norms import fused_add_rms_norm
from liger_multi.backends.triton.norms.rms_norm import normalize


def forward(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float,
    offset: float,
    casting: str,
    writes_y: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Y where it is needed, the sum, codes and scales of y, and rstd (fp32)."""
    buffers = code_buffers(x, writes_y)
    name = "fused_add_rms_norm"
    y, s, rstd = normalize(name, x, residual, weight, eps, offset, casting, buffers)
    first, codes, scale = buffers.outputs(y)
    return first, s, codes, scale, rstd


backward = fused_add_rms_norm.backward
