"""Jensen-Shannon divergence of two linear heads, chunk by chunk; kernels in pairs.py."""

from liger_multi.backends.triton.cross_entropy.rows import scale
from liger_multi.backends.triton.divergences.pairs import TritonPairs
from liger_multi.reference.divergences.fused_linear_divergence import forward_and_backward

forward, backward = forward_and_backward("jsd", TritonPairs("jsd"), scale)
