"""Log-probabilities of tokens under given logits: the row kernels of fused_linear_log_prob."""

from __future__ import annotations

from liger_multi.backends.triton.cross_entropy.fused_linear_log_prob import TritonLogProbRows
from liger_multi.reference.cross_entropy.operators import implement_token_log_prob

forward, backward = implement_token_log_prob(TritonLogProbRows())
