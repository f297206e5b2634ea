"""Total variation distance: the row kernels of divergence.py."""

from liger_multi.backends.triton.divergences.divergence import TritonPairs
from liger_multi.reference.divergences.given_rows import halves

forward, backward = halves("tvd", TritonPairs("tvd"))
