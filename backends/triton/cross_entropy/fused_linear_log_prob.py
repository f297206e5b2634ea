"""Log-probabilities of a linear head, chunk by chunk; the kernels are those of rows.py."""

from liger_multi.backends.triton.cross_entropy.rows import TritonLogProbRows
from liger_multi.reference.cross_entropy.fused_linear_log_prob import (
    implement_fused_linear_log_prob,
)

forward, backward = implement_fused_linear_log_prob(TritonLogProbRows())
