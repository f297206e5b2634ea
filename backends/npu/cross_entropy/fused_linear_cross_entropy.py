"""Cross entropy of a linear head: a GEMM per chunk, and Ascend row kernels on its logits."""

from liger_multi.backends.npu.cross_entropy.logits import AscendRows
from liger_multi.reference.cross_entropy.fused_linear_cross_entropy import (
    implement_fused_linear_cross_entropy,
)

forward, backward = implement_fused_linear_cross_entropy(AscendRows())
