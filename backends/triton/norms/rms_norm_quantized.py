"""RMSNorm that also rounds its rows to FP8, from registers."""

from torch import Tensor

from liger_multi.backends.triton.float8.rows import code_buffers
from liger_multi.backends.triton.norms import rms_norm
from liger_multi.backends.triton.norms.rms_norm import normalize


def forward(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    offset: float,
    casting: str,
    writes_y: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Y where it is needed, its codes and scales, and rstd (fp32)."""
    buffers = code_buffers(x, writes_y)
    y, _, rstd = normalize("rms_norm", x, None, weight, eps, offset, casting, buffers)
    return *buffers.outputs(y), rstd


backward = rms_norm.backward
