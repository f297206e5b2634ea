"""Log-probabilities of tokens under given logits, by Ascend's row kernels."""

from liger_multi.backends.npu.cross_entropy.logits import AscendRows
from liger_multi.reference.cross_entropy.operators import implement_token_log_prob

forward, backward = implement_token_log_prob(AscendRows())
