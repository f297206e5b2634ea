"""Cross entropy of a linear head, chunk by chunk; the kernels are those of rows.py."""

from liger_multi.backends.triton.cross_entropy.rows import TritonRows
from liger_multi.reference.cross_entropy.fused_linear_cross_entropy import (
    implement_fused_linear_cross_entropy,
)

forward, backward = implement_fused_linear_cross_entropy(TritonRows())
