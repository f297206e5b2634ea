"""Cross entropy of logits on vector cores: the reference's loop over the kernels in rows.py."""

from liger_multi.backends.npu.cross_entropy.rows import AscendRows
from liger_multi.reference.cross_entropy.cross_entropy import implement_cross_entropy

forward, backward = implement_cross_entropy(AscendRows())
