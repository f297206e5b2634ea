"""LoRA layers of one input; low_rank.py has their thin GEMMs."""

from liger_multi.backends.triton.adapters.low_rank import THIN
from liger_multi.reference.adapters.lora_qkv import implement_lora_qkv

forward, backward = implement_lora_qkv(THIN)
