"""The divergence of Jensen and Shannon, by Ascend kernels."""

from liger_multi.backends.npu.divergences.pair_kernels import AscendPairs
from liger_multi.reference.divergences.given_rows import halves

forward, backward = halves("jsd", AscendPairs())
