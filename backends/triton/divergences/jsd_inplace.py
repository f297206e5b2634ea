"""Jensen-Shannon divergence of rows whose gradient overwrites the student; kernels in pairs.py."""

from liger_multi.backends.triton.divergences.pairs import TritonPairs, scale_
from liger_multi.reference.divergences.divergence import overwriting

forward, backward = overwriting("jsd", TritonPairs("jsd")), scale_
