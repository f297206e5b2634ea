"""The gated delta rule (arXiv:2412.06464) on cube cores, as :mod:`.chunks` has it.

``npu_chunk_gated_delta_rule`` of torch_npu is for inference: it has no gradient.
"""

from liger_multi.backends.npu.linear_attention.chunks import Batched
from liger_multi.reference.linear_attention.chunks import implement
from liger_multi.reference.linear_attention.gated_delta_rule import HeadSpan


class BatchedHeadSpan(Batched, HeadSpan):
    """A span whose gates are numbers."""


forward, backward = implement(BatchedHeadSpan)
