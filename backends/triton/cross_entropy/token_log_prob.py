"""Log-probabilities of tokens from their logits; the kernels are those of rows.py."""

from liger_multi.backends.triton.cross_entropy.rows import TritonLogProbRows
from liger_multi.reference.cross_entropy.token_log_prob import implement_token_log_prob

forward, backward = implement_token_log_prob(TritonLogProbRows())
