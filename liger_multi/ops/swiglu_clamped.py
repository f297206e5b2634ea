"""Contract of ``swiglu_clamped``."""

import torch
from torch import Tensor

from liger_multi import checks
from liger_multi.dispatch.op import Op
from liger_multi.ops.swiglu import gate_and_up, pair
from liger_multi.testing.samples import Sample
from liger_multi.testing.samples import Tensor as T

# traced as swiglu, whose traced form was measured; this one's was not
op = Op("swiglu_clamped", compile="trace", rows=("gate", "up", "dy"))


@op.forward(returns="y")
def forward(gate: Tensor, up: Tensor, limit: float, alpha: float, up_offset: float) -> Tensor:
    """Shape rule."""
    return gate.new_empty(gate.shape, dtype=torch.promote_types(gate.dtype, up.dtype))


@op.backward(returns="dgate dup")
def backward(
    dy: Tensor,
    gate: Tensor,
    up: Tensor,
    limit: float,
    alpha: float,
    up_offset: float,
    needs_gate: bool,
    needs_up: bool,
) -> tuple[Tensor, Tensor]:
    """Shape rule."""
    return gate.new_empty(gate.shape if needs_gate else (0,)), up.new_empty(
        up.shape if needs_up else (0,)
    )


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


def numbers(name: str, limit: float, alpha: float, offset: float) -> tuple[float, float, float]:
    """The options, checked."""
    return (
        checks.number(name, "limit", limit, 0.0, above=True, infinite=True),
        checks.number(name, "alpha", alpha),
        checks.number(name, "up_offset", offset),
    )


PLAIN = {"limit": 2.0, "alpha": 1.0, "up_offset": 0.0}
CLOSE = {"limit": 1.0}  # so that random inputs meet it
SAMPLES = (
    Sample("rows", pair((3, 5, 48)), CLOSE),
    Sample("far-limit", pair((3, 5, 48))),
    Sample("silu", pair((4, 64)), PLAIN),
    Sample("odd-width", pair((4, 37)), CLOSE),
    Sample("one-row", pair((1, 200)), CLOSE),
    Sample("one-axis", pair((31,)), CLOSE),
    Sample("no-rows", pair((0, 16))),
    Sample("sliced", pair((4, 24), "sliced"), CLOSE),
    Sample("transposed", pair((2, 8, 12), "transposed"), CLOSE),
    Sample("row-gaps", pair((2, 3, 64), "rows"), PLAIN),
    Sample("expanded", pair((5, 24), "expanded"), CLOSE),
    Sample("large-values", {"gate": T((4, 64), scale=30.0), "up": T((4, 64), scale=30.0)}),
    Sample("fp32-up", {"gate": T((4, 64)), "up": T((4, 64), dtype=torch.float32)}, CLOSE),
    Sample("frozen-gate", {"gate": T((4, 64), grad=False), "up": T((4, 64))}, CLOSE),
    Sample("frozen-up", {"gate": T((4, 64)), "up": T((4, 64), grad=False)}, CLOSE),
    Sample("past-65535-rows", pair((65537, 2)), size="thin"),
    Sample("past-65536-columns", pair((2, 65600)), size="thin"),
    Sample("32768x2880", pair((32768, 2880)), size="bench"),
    Sample("8192x18432 silu", pair((8192, 18432)), {**PLAIN, "limit": 10.0}, size="bench"),
)
