"""Contract of ``swiglu_packed``."""

from torch import Tensor

from liger_multi import checks
from liger_multi.dispatch.op import Op
from liger_multi.ops.swiglu import multipliers
from liger_multi.testing.samples import Sample
from liger_multi.testing.samples import Tensor as T

op = Op("swiglu_packed", compile="trace", rows=("gate_up", "dy"))


@op.forward(returns="y")
def forward(gate_up: Tensor, gate_multiplier: float, down_multiplier: float) -> Tensor:
    """Shape rule."""
    return gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2))


@op.backward(returns="dgate_up")
def backward(dy: Tensor, gate_up: Tensor, gate_multiplier: float, down_multiplier: float) -> Tensor:
    """Shape rule."""
    return gate_up.new_empty(gate_up.shape)


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
    even("swiglu_packed", gate_up)
    by = multipliers("swiglu_packed", gate_multiplier, down_multiplier)
    result: Tensor = op(gate_up, *by)
    return result


def even(name: str, gate_up: Tensor) -> None:
    """Check the input of a packed gated activation."""
    checks.floating(name, gate_up=gate_up)
    if gate_up.ndim == 0 or gate_up.shape[-1] % 2:
        raise ValueError(
            f"{name}: the last axis of gate_up must be even, got {checks.describe(gate_up)}"
        )


SAMPLES = (
    Sample("rows", {"gate_up": T((3, 5, 96))}),
    Sample("odd-half", {"gate_up": T((4, 74))}),
    Sample("one-row", {"gate_up": T((1, 400))}),
    Sample("one-axis", {"gate_up": T((62,))}),
    Sample("no-rows", {"gate_up": T((0, 16))}),
    Sample("sliced", {"gate_up": T((4, 48), layout="sliced")}),
    Sample("transposed", {"gate_up": T((2, 8, 12), layout="transposed")}),
    Sample("row-gaps", {"gate_up": T((2, 3, 64), layout="rows")}),
    Sample(
        "multipliers",
        {"gate_up": T((3, 5, 96))},
        {"gate_multiplier": 0.4, "down_multiplier": 2.5},
    ),
    Sample("past-65535-rows", {"gate_up": T((65537, 4))}, size="thin"),
    *[
        Sample(f"8192x{n}", {"gate_up": T((8192, 2 * n))}, size="bench")
        for n in (8192, 11008, 14336, 18944)
    ],
)
