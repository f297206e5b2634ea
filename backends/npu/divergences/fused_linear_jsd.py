"""The Jensen-Shannon divergence of two heads: a product a chunk, and kernels."""

from liger_multi.backends.npu.divergences.pair_kernels import AscendPairs
from liger_multi.reference.divergences.fused_linear_divergence import forward_and_backward

forward, backward = forward_and_backward("jsd", AscendPairs())
