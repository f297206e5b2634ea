"""A linear layer's LoRA update, ``y = base + scale (x a') b'``; low_rank.py has its thin GEMMs."""

from liger_multi.backends.triton.adapters.low_rank import THIN
from liger_multi.reference.adapters.lora_update import implement_lora_update

forward, backward = implement_lora_update(THIN)
