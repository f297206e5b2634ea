"""A gated MLP with LoRA: the activation of gated_mlp, and the thin GEMMs of low_rank.py."""

from liger_multi.backends.triton.activations.gated_mlp import TritonActivation
from liger_multi.backends.triton.adapters.low_rank import THIN
from liger_multi.reference.adapters.lora_mlp import implement_lora_mlp

forward, backward = implement_lora_mlp(TritonActivation(), THIN)
