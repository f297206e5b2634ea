"""Total variation distance of two linear heads: Triton row kernels in the reference's loop."""

from liger_multi.backends.triton.divergences.divergence import TritonPairs
from liger_multi.reference.divergences.fused_linear_divergence import halves

forward, backward = halves("tvd", TritonPairs("tvd"))
