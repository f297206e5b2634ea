"""Log-probabilities of tokens under given logits, by Ascend's row kernels."""

from liger_multi.backends.npu.cross_entropy.logits import AscendRows
from liger_multi.reference.cross_entropy.token_log_prob import forward_and_backward

forward, backward = forward_and_backward(AscendRows())
