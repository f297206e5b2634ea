"""Layers of the vendor's FP8 GEMMs, whose factors our kernels round."""

from liger_multi.backends.triton.activations.operators import TritonActivation
from liger_multi.backends.triton.float8.rows import TritonQuantizer
from liger_multi.dispatch.bitwise import BY_GEMM, bitwise
from liger_multi.reference.float8.operators import (
    implement_gated_mlp_float8,
    implement_linear_float8,
)


class LinearFloat8:
    """Rows are rounded alone, but the vendor chooses a GEMM by their number."""

    BITWISE = bitwise(BY_GEMM, "x y x_codes x_scale codes codes_scale", 1)
    forward, backward = map(staticmethod, implement_linear_float8(TritonQuantizer()))


class GatedMLPFloat8:
    """The same of a gated MLP; the kernels of its activation stand in gated_rows.py."""

    BITWISE = bitwise(BY_GEMM, "x y gate up codes codes_scale", 1)
    forward, backward = map(
        staticmethod, implement_gated_mlp_float8(TritonActivation(), TritonQuantizer())
    )


OPERATORS = {"linear_float8": LinearFloat8, "gated_mlp_float8": GatedMLPFloat8}
