"""Linear layers with adapters: the vendor's GEMMs; a kernel splits thin matrices into parts."""

from liger_multi.backends.triton.adapters.low_rank import split
from liger_multi.reference.adapters.operators import LowRank, implement_lora_qkv

forward, backward = implement_lora_qkv(LowRank(split))
