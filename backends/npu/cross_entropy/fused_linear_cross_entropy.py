"""Cross entropy of a linear head: a GEMM per chunk, then the kernels in rows.py."""

from liger_multi.backends.npu.cross_entropy.rows import AscendRows
from liger_multi.reference.cross_entropy.fused_linear_cross_entropy import (
    implement_fused_linear_cross_entropy,
)

forward, backward = implement_fused_linear_cross_entropy(AscendRows())
