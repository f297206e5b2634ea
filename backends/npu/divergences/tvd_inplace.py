"""Total variation distance of rows whose gradient overwrites the student; kernels in pairs.py."""

from liger_multi.backends.npu.divergences.pairs import AscendPairs
from liger_multi.reference.divergences.divergence import overwriting, scale_

forward, backward = overwriting("tvd", AscendPairs()), scale_
