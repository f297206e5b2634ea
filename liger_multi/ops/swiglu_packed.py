"""Contract of ``swiglu_packed``."""

from torch import Tensor

from liger_multi.dispatch.bitwise import PER_ROW, bitwise
from liger_multi.dispatch.op import Op
from liger_multi.ops._activations import (
    BOTH,
    PACKED_MLPS,
    check_even_width,
    multipliers,
    packed,
    packed_work,
)
from liger_multi.ops._formulas import scaled_swiglu
from liger_multi.ops._samples import HALVES, usual
from liger_multi.testing.samples import Sample

op = Op(
    "swiglu_packed",
    family="activations",
    compile="trace",
    rowwise=True,
    bitwise=bitwise(PER_ROW, "gate_up y", 1),
)


@op.forward(returns="y")
def forward(gate_up: Tensor, gate_multiplier: float, down_multiplier: float) -> Tensor:
    return gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2))


op.backward(reads="dy gate_up gate_multiplier down_multiplier", returns="dgate_up")


def swiglu_packed(
    gate_up: Tensor, *, gate_multiplier: float = 1.0, down_multiplier: float = 1.0
) -> Tensor:
    """Gated activation of a packed projection, without copying its halves.

    Math:
        ``gate, up = gate_up[..., :F], gate_up[..., F:]``; ``y = silu(gate *
        gate_multiplier) * up * down_multiplier``.

    Shapes:
        gate_up ``(..., 2 F)`` with any strides; y ``(..., F)``, contiguous.

    Dtypes:
        In and out: any floating dtype. Inside: fp32 (fp64 for fp64).

    Memory:
        Kept for backward: gate_up; the activation is computed again.

    Raises:
        TypeError: gate_up is not a floating-point tensor, or a multiplier no number.
        ValueError: Its last axis is odd.

    Source:
        Shazeer 2020 (arXiv:2002.05202); transformers ``Phi3MLP``.
    """
    check_even_width("swiglu_packed", gate_up)
    factors = multipliers("swiglu_packed", gate_multiplier, down_multiplier)
    result: Tensor = op(gate_up, *factors)
    return result


def formula(
    gate_up: Tensor, *, gate_multiplier: float = 1.0, down_multiplier: float = 1.0
) -> Tensor:
    """SwiGLU of the first and the second half of the last axis."""
    gate, up = gate_up.chunk(2, dim=-1)
    return scaled_swiglu(gate, up, gate_multiplier, down_multiplier)


work = packed_work


SAMPLES = (
    Sample("rows", packed(3, 5, 96)),
    *usual(packed, HALVES),
    Sample("multipliers", packed(3, 5, 96), BOTH),
    *PACKED_MLPS,
)
