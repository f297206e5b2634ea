"""The divergence of Kullback and Leibler: the row kernels of divergence.py."""

from liger_multi.backends.triton.divergences.divergence import TritonPairs
from liger_multi.reference.divergences.given_rows import halves

forward, backward = halves("kl_div", TritonPairs("kl_div"))
