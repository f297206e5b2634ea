"""A gated MLP with adapters: the launches of gated_mlp, between GEMMs of the vendor's library.

The thin GEMMs are the library's too: reading x once more for one of 16 columns costs what a copy of
x does, which is little beside the layer's own GEMM.
"""

from __future__ import annotations

from liger_multi.backends.triton.activations.gated_mlp import TritonActivation
from liger_multi.backends.triton.adapters.low_rank import split
from liger_multi.reference.adapters.operators import LowRank, implement_lora_mlp

forward, backward = implement_lora_mlp(TritonActivation(), LowRank(split))
