"""The divergence of Kullback and Leibler of two heads: a product a chunk, and kernels."""

from liger_multi.backends.npu.divergences.pair_kernels import AscendPairs
from liger_multi.reference.divergences.fused_linear_divergence import halves

forward, backward = halves("kl_div", AscendPairs())
