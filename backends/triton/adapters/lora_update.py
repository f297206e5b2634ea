"""Two thin GEMMs and an addition of PyTorch's; a kernel splits thin matrices into parts."""

from liger_multi.backends.triton.adapters.low_rank import split
from liger_multi.reference.adapters.lora_update import forward_and_backward
from liger_multi.reference.adapters.low_rank import LowRank

forward, backward = forward_and_backward(LowRank(split))
