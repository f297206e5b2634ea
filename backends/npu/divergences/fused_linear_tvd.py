"""Total variation distance of two linear heads, chunk by chunk; kernels in pairs.py."""

from liger_multi.backends.npu.divergences.pairs import AscendPairs
from liger_multi.reference.divergences.fused_linear_divergence import forward_and_backward

forward, backward = forward_and_backward("tvd", AscendPairs())
