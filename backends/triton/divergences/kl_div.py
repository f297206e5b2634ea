"""KL divergence of rows of two distributions; kernels in pairs.py."""

from liger_multi.backends.triton.divergences.pairs import TritonPairs
from liger_multi.reference.divergences.divergence import forward_and_backward

forward, backward = forward_and_backward("kl_div", TritonPairs("kl_div"))
