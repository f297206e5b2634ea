"""A linear layer of the vendor's FP8 GEMMs, whose factors our kernels round."""

from liger_multi.backends.triton.float8.rows import TritonQuantizer
from liger_multi.reference.common.implementation import Implementation
from liger_multi.reference.float8.operators import implement_linear_float8

OPERATORS = {"linear_float8": Implementation(*implement_linear_float8(TritonQuantizer()))}
