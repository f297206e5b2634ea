"""A linear layer of the vendor's FP8 GEMMs, whose factors our kernels round."""

from liger_multi.backends.triton.float8.rows import TritonQuantizer
from liger_multi.dispatch.bitwise import BY_GEMM, bitwise
from liger_multi.reference.float8.operators import implement_linear_float8

_forward, _backward = implement_linear_float8(TritonQuantizer())


class LinearFloat8:
    """Rows are rounded alone, but the vendor chooses a GEMM by their number."""

    BITWISE = bitwise(BY_GEMM, "x y x_codes x_scale codes codes_scale", 1)
    forward = staticmethod(_forward)
    backward = staticmethod(_backward)


OPERATORS = {"linear_float8": LinearFloat8}
