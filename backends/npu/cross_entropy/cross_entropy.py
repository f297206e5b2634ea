"""Cross entropy of given logits by Ascend kernels.

npu_cross_entropy_loss keeps a second tensor of the logits' size, takes no negative ignore_index
and none of the options, so it is not used.
"""

from liger_multi.backends.npu.cross_entropy.logits import AscendRows
from liger_multi.reference.cross_entropy.cross_entropy import implement_cross_entropy

forward, backward = implement_cross_entropy(AscendRows())
