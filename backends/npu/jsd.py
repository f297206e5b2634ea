"""The divergence of Jensen and Shannon, by Ascend kernels."""

from liger_multi.backends.npu.pair_kernels import AscendPairs
from liger_multi.reference.divergence_halves import halves

forward, backward = halves("jsd", AscendPairs())
