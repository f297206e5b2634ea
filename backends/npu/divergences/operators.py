"""The divergences by Ascend row kernels; the loops over chunks are those of the reference."""

from liger_multi.backends.npu.divergences.pair_kernels import AscendPairs
from liger_multi.reference.divergences.operators import implement

OPERATORS = implement(lambda kind: AscendPairs())
