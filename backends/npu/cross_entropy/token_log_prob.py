"""Log-probabilities of tokens from their logits; the kernels are in rows.py."""

from liger_multi.backends.npu.cross_entropy.rows import AscendRows
from liger_multi.reference.cross_entropy.token_log_prob import implement_token_log_prob

forward, backward = implement_token_log_prob(AscendRows())
