"""Log-probabilities under a linear head: a GEMM per chunk, and Ascend row kernels."""

from liger_multi.backends.npu.cross_entropy.logits import AscendRows
from liger_multi.reference.cross_entropy.fused_linear_log_prob import (
    implement_fused_linear_log_prob,
)

forward, backward = implement_fused_linear_log_prob(AscendRows())
