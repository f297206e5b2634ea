"""The divergence of Jensen and Shannon of two linear heads: Triton row kernels."""

from liger_multi.backends.triton.divergence import TritonPairs
from liger_multi.reference.fused_linear_divergence import halves

forward, backward = halves("jsd", TritonPairs("jsd"))
