"""A gated MLP whose GEMMs of rows are the vendor's in FP8.

Our kernels round their factors; those of the activation are in activations/gated_rows.py.
"""

from liger_multi.backends.triton.activations.gated_mlp import TritonActivation
from liger_multi.backends.triton.float8.rows import TritonQuantizer
from liger_multi.dispatch.bitwise import BY_GEMM, bitwise
from liger_multi.reference.float8.gated_mlp_float8 import implement_gated_mlp_float8

BITWISE = bitwise(BY_GEMM, "x y gate up codes codes_scale", 1)
forward, backward = implement_gated_mlp_float8(TritonActivation(), TritonQuantizer())
