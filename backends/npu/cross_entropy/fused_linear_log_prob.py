"""Log-probabilities of a linear head: a GEMM per chunk, then the kernels in rows.py."""

from liger_multi.backends.npu.cross_entropy.rows import AscendRows
from liger_multi.reference.cross_entropy.fused_linear_log_prob import (
    implement_fused_linear_log_prob,
)

forward, backward = implement_fused_linear_log_prob(AscendRows())
