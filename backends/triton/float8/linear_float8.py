"""A linear layer whose GEMMs of rows are the vendor's in FP8; our kernels round their factors.

Rows are rounded alone, but the vendor chooses a GEMM by their number.
"""

from liger_multi.backends.triton.float8.rows import TritonQuantizer
from liger_multi.dispatch.bitwise import BY_GEMM, bitwise
from liger_multi.reference.float8.linear_float8 import implement_linear_float8

BITWISE = bitwise(BY_GEMM, "x y x_codes x_scale codes codes_scale", 1)
forward, backward = implement_linear_float8(TritonQuantizer())
