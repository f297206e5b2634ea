"""The total variation distance, by Ascend kernels."""

from liger_multi.backends.npu.divergences.pair_kernels import AscendPairs
from liger_multi.reference.divergences.given_rows import forward_and_backward

forward, backward = forward_and_backward("tvd", AscendPairs())
