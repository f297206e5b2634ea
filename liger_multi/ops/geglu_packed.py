"""Contract of ``geglu_packed``."""

from torch import Tensor

from liger_multi import checks
from liger_multi.dispatch.op import Op
from liger_multi.ops.geglu import APPROXIMATIONS, EXACT
from liger_multi.ops.swiglu_packed import even
from liger_multi.testing.samples import Sample
from liger_multi.testing.samples import Tensor as T

op = Op("geglu_packed", compile="trace", rows=("gate_up", "dy"))


@op.forward(returns="y")
def forward(gate_up: Tensor, approximate: str) -> Tensor:
    """Shape rule."""
    return gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2))


@op.backward(returns="dgate_up")
def backward(dy: Tensor, gate_up: Tensor, approximate: str) -> Tensor:
    """Shape rule."""
    return gate_up.new_empty(gate_up.shape)


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
    even("geglu_packed", gate_up)
    checks.one_of("geglu_packed", "approximate", approximate, APPROXIMATIONS)
    result: Tensor = op(gate_up, approximate)
    return result


SAMPLES = (
    Sample("rows", {"gate_up": T((3, 5, 96))}),
    Sample("exact", {"gate_up": T((3, 5, 96))}, EXACT),
    Sample("odd-half", {"gate_up": T((4, 74))}),
    Sample("one-row", {"gate_up": T((1, 400))}),
    Sample("one-axis", {"gate_up": T((62,))}, EXACT),
    Sample("no-rows", {"gate_up": T((0, 16))}),
    Sample("sliced", {"gate_up": T((4, 48), layout="sliced")}),
    Sample("transposed", {"gate_up": T((2, 8, 12), layout="transposed")}, EXACT),
    Sample("row-gaps", {"gate_up": T((2, 3, 64), layout="rows")}),
    Sample("large-values", {"gate_up": T((4, 64), scale=30.0)}),
    Sample("past-65535-rows", {"gate_up": T((65537, 4))}, size="thin"),
    *[
        Sample(f"8192x{n}", {"gate_up": T((8192, 2 * n))}, size="bench")
        for n in (8192, 11008, 14336, 18944)
    ],
)
