"""The divergence of Kullback and Leibler: the row kernels of divergence.py."""

from liger_multi.backends.triton.divergence import TritonPairs
from liger_multi.reference.divergence_halves import halves

forward, backward = halves("kl_div", TritonPairs("kl_div"))
