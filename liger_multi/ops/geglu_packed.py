"""Contract of ``geglu_packed``."""

import torch.nn.functional as F
from torch import Tensor

from liger_multi import checks
from liger_multi.dispatch.bitwise import PER_ROW, bitwise
from liger_multi.dispatch.op import Op
from liger_multi.ops._activations import PACKED_MLPS, check_even_width, packed, packed_work
from liger_multi.ops._samples import HALVES, usual
from liger_multi.ops.geglu import APPROXIMATIONS, EXACT
from liger_multi.testing.samples import Sample, Tensor as T

op = Op(
    "geglu_packed",
    family="activations",
    compile="trace",
    rowwise=True,
    bitwise=bitwise(PER_ROW, "gate_up y", 1),
)


@op.forward(returns="y")
def forward(gate_up: Tensor, approximate: str) -> Tensor:
    return gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2))


op.backward(reads="dy gate_up approximate", returns="dgate_up")


def geglu_packed(gate_up: Tensor, approximate: str = "tanh") -> Tensor:
    """Gated activation of a packed projection, without copying its halves.

    Math:
        ``gate, up = gate_up[..., :F], gate_up[..., F:]``; ``y = gelu(gate) * up``, gelu as in
        :func:`geglu`.

    Shapes:
        gate_up ``(..., 2 F)`` with any strides; y ``(..., F)``, contiguous.

    Dtypes:
        In and out: any floating dtype. Inside: fp32 (fp64 for fp64), the activation rounded to the
        dtype of gate_up.

    Memory:
        Kept for backward: gate_up; the activation is computed again.

    Raises:
        TypeError: gate_up is not a floating-point tensor.
        ValueError: Its last axis is odd, or approximate is neither ``tanh`` nor ``none``.

    Source:
        Shazeer 2020 (arXiv:2002.05202); transformers ``ModernBertMLP``.
    """
    check_even_width("geglu_packed", gate_up)
    checks.one_of("geglu_packed", "approximate", approximate, APPROXIMATIONS)
    result: Tensor = op(gate_up, approximate)
    return result


def formula(gate_up: Tensor, approximate: str = "tanh") -> Tensor:
    """GeGLU of the first and the second half of the last axis."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate=approximate) * up


work = packed_work


SAMPLES = (
    Sample("rows", packed(3, 5, 96)),
    *usual(packed, HALVES, but={"one-axis": EXACT, "transposed": EXACT}),
    Sample("exact", packed(3, 5, 96), EXACT),
    Sample("large-values", {"gate_up": T((4, 64), scale=30.0)}),
    *PACKED_MLPS,
)
