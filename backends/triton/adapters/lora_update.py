"""Two thin products and an addition of PyTorch's, with parts of thin matrices by a kernel."""

from liger_multi.backends.triton.adapters.low_rank import split
from liger_multi.reference.adapters.lora_update import forward_and_backward
from liger_multi.reference.adapters.low_rank import LowRank

forward, backward = forward_and_backward(LowRank(split))
