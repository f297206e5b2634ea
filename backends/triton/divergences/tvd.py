"""Total variation distance: the row kernels of divergence.py."""

from liger_multi.backends.triton.divergences.divergence import TritonPairs
from liger_multi.reference.divergences.given_rows import forward_and_backward

forward, backward = forward_and_backward("tvd", TritonPairs("tvd"))
