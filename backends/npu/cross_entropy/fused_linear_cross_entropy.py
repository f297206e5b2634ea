"""Cross entropy of a linear head: a GEMM per chunk, and Ascend row kernels on its logits."""

from liger_multi.backends.npu.cross_entropy.logits import AscendRows
from liger_multi.reference.cross_entropy.fused_linear_cross_entropy import forward_and_backward

forward, backward = forward_and_backward(AscendRows())
