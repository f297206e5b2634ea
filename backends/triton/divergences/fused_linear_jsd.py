"""The divergence of Jensen and Shannon of two linear heads: Triton row kernels."""

from liger_multi.backends.triton.divergences.divergence import TritonPairs
from liger_multi.reference.divergences.fused_linear_divergence import halves

forward, backward = halves("jsd", TritonPairs("jsd"))
