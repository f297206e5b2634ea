"""Jensen-Shannon divergence of rows of two distributions; kernels in pairs.py."""

from liger_multi.backends.npu.divergences.pairs import AscendPairs
from liger_multi.reference.divergences.divergence import forward_and_backward

forward, backward = forward_and_backward("jsd", AscendPairs())
