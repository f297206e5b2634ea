"""Contract of ``swiglu_clamped``."""

import torch
from torch import Tensor

from liger_multi import checks
from liger_multi.dispatch.bitwise import PER_ROW, bitwise
from liger_multi.dispatch.op import Op
from liger_multi.ops._activations import FP32_UP, gate_and_up, pair
from liger_multi.ops._samples import PIECES, bench, each_frozen, usual
from liger_multi.ops._work import elementwise
from liger_multi.testing.samples import Sample, Tensor as T

# traced as swiglu, whose traced form was measured; this one's was not
op = Op(
    "swiglu_clamped",
    family="activations",
    compile="trace",
    rowwise=True,
    bitwise=bitwise(PER_ROW, "gate up y", 1),
)


@op.forward(returns="y")
def forward(gate: Tensor, up: Tensor, limit: float, alpha: float, up_offset: float) -> Tensor:
    return gate.new_empty(gate.shape, dtype=torch.promote_types(gate.dtype, up.dtype))


op.backward(reads="dy gate up limit alpha up_offset", returns="dgate dup")


def swiglu_clamped(
    gate: Tensor, up: Tensor, *, limit: float = 7.0, alpha: float = 1.702, up_offset: float = 1.0
) -> Tensor:
    """Gated activation of clamped inputs: ``(up + 1) * gate * sigmoid(1.702 * gate)``.

    Math:
        ``g = min(gate, limit)``, ``u = clamp(up, -limit, limit)``, ``y = (u + up_offset) * g *
        sigmoid(alpha * g)``. A clamp that holds a value passes no gradient. The defaults are those
        of GPT-OSS; ``alpha=1.0, up_offset=0.0`` is ``silu(g) * u``, as DeepSeek-V4 has it.

    Shapes:
        gate and up ``(..., F)`` with any strides; y ``(..., F)``, contiguous.

    Dtypes:
        In: any floating dtypes. Inside: fp32 (fp64 for fp64), the activation rounded to the dtype
        of gate; the reference rounds every step as the Hugging Face MLPs do. Out: the promotion of
        both.

    Memory:
        Kept for backward: gate and up; the activation is computed again.

    Raises:
        TypeError: An argument is not a floating-point tensor, or no number.
        ValueError: Shapes or devices differ, limit is not positive.

    Source:
        Shazeer 2020 (arXiv:2002.05202); transformers ``GptOssExperts``, ``DeepseekV4MLP``.
    """
    gate_and_up("swiglu_clamped", gate, up)
    result: Tensor = op(gate, up, *numbers("swiglu_clamped", limit, alpha, up_offset))
    return result


def formula(
    gate: Tensor, up: Tensor, *, limit: float = 7.0, alpha: float = 1.702, up_offset: float = 1.0
) -> Tensor:
    """``(up + up_offset) * gate * sigmoid(alpha * gate)`` of clamped inputs."""
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + up_offset) * (gate * torch.sigmoid(gate * alpha))


work = elementwise(3, 8)


def numbers(name: str, limit: float, alpha: float, offset: float) -> tuple[float, float, float]:
    """The options, checked."""
    return (
        checks.number(name, "limit", limit, 0.0, above=True, infinite=True),
        checks.number(name, "alpha", alpha),
        checks.number(name, "up_offset", offset),
    )


PLAIN = {"limit": 2.0, "alpha": 1.0, "up_offset": 0.0}
CLOSE = {"limit": 1.0}  # small, so that random inputs are clamped
SAMPLES = (
    Sample("rows", pair(3, 5, 48), CLOSE),
    *usual(
        pair,
        PIECES,
        CLOSE,
        but={"no-rows": {}, "row-gaps": PLAIN, "past-65535-rows": {}, "past-65536-columns": {}},
    ),
    Sample("far-limit", pair(3, 5, 48)),
    Sample("silu", pair(4, 64), PLAIN),
    Sample("large-values", {"gate": T((4, 64), scale=30.0), "up": T((4, 64), scale=30.0)}),
    Sample("fp32-up", FP32_UP, CLOSE),
    Sample(
        "at-the-bounds", {"gate": T((4, 64), integers=True), "up": T((4, 64), integers=True)}, CLOSE
    ),
    *each_frozen(pair(4, 64), "gate up", CLOSE),
    *bench(pair, "32768x2880"),
    Sample("8192x18432 silu", pair(8192, 18432), {**PLAIN, "limit": 10.0}, size="bench"),
)
