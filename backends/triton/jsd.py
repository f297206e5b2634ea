"""The divergence of Jensen and Shannon: the row kernels of divergence.py."""

from liger_multi.backends.triton.divergence import TritonPairs
from liger_multi.reference.divergence_halves import halves

forward, backward = halves("jsd", TritonPairs("jsd"))
