"""The total variation distance, by Ascend kernels."""

from liger_multi.backends.npu.pair_kernels import AscendPairs
from liger_multi.reference.divergence_halves import halves

forward, backward = halves("tvd", AscendPairs())
