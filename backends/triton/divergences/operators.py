"""The divergences by Triton row kernels; the loops over chunks are those of the reference."""

from liger_multi.backends.triton.divergences.divergence import TritonPairs, scale_
from liger_multi.reference.divergences.operators import implement

OPERATORS = implement(TritonPairs, scale_)
