"""Log-probabilities of tokens under given logits: the row kernels of fused_linear_log_prob."""

from __future__ import annotations

from liger_multi.backends.triton.fused_linear_log_prob import TritonLogProbRows
from liger_multi.reference.token_log_prob import halves

forward, backward = halves(TritonLogProbRows())
