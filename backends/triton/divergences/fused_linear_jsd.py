"""The Jensen-Shannon divergence of two linear heads: Triton row kernels."""

from liger_multi.backends.triton.divergences.divergence import TritonPairs
from liger_multi.reference.divergences.fused_linear_divergence import forward_and_backward

forward, backward = forward_and_backward("jsd", TritonPairs("jsd"))
