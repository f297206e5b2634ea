"""Contract of ``swiglu``."""

from typing import Any

import torch
from torch import Tensor

from liger_multi.dispatch.bitwise import PER_ROW, bitwise
from liger_multi.dispatch.op import Op
from liger_multi.ops._activations import BOTH, FP32_UP, LARGE, MLPS, gate_and_up, multipliers, pair
from liger_multi.ops._float8 import (
    OUTPUTS,
    SHAPES,
    QuantizedOutput,
    coded_samples,
    quantized_output,
    with_codes,
    with_optional_codes,
)
from liger_multi.ops._formulas import scaled_swiglu
from liger_multi.ops._samples import PIECES, bench, each_frozen, usual
from liger_multi.ops._work import elementwise, with_code_bytes
from liger_multi.testing.samples import Sample

# H200, 8192x14336 bf16, 2026-11: forward + backward 0.439 ms under
# torch.compile, 0.438 ms as a kernel; traced, it also fuses with its neighbors
op = Op(
    "swiglu",
    family="activations",
    compile="trace",
    rowwise=True,
    bitwise=bitwise(PER_ROW, "gate up y", 1),
)


@op.forward(returns="y")
def forward(gate: Tensor, up: Tensor, gate_multiplier: float, down_multiplier: float) -> Tensor:
    return gate.new_empty(gate.shape, dtype=torch.promote_types(gate.dtype, up.dtype))


BACKWARD: dict[str, Any] = {
    "reads": "dy gate up gate_multiplier down_multiplier",
    "returns": "dgate dup",
}
op.backward(**BACKWARD)
quantized_op = with_codes(op, **BACKWARD)


def swiglu(
    gate: Tensor,
    up: Tensor,
    *,
    gate_multiplier: float = 1.0,
    down_multiplier: float = 1.0,
) -> Tensor:
    """Gated activation of an MLP: ``silu(gate) * up``.

    Math:
        ``y = (g * sigmoid(g)).to(gate) * up * down_multiplier`` with ``g = gate *
        gate_multiplier``. Both multipliers are run-time numbers; 1 costs nothing.

    Shapes:
        gate and up ``(..., F)`` with any strides; y ``(..., F)``, contiguous.
        :func:`swiglu_quantized` also returns the rows of y in FP8, as ``linear_float8``
        rounds them.

    Dtypes:
        In: any floating dtypes. Inside: fp32 (fp64 for fp64), the activation rounded to the dtype
        of gate as the Hugging Face MLP does. Out: the promotion of both.

    Memory:
        Kept for backward: gate and up; the activation is computed again.

    Raises:
        TypeError: An argument is not a floating-point tensor, or a multiplier no number.
        ValueError: Shapes or devices differ.

    Source:
        Shazeer 2020 (arXiv:2002.05202); transformers ``LlamaMLP``, ``FalconH1MLP``.
    """
    gate_and_up("swiglu", gate, up)
    factors = multipliers("swiglu", gate_multiplier, down_multiplier)
    return op(gate, up, *factors)  # type: ignore[no-any-return]


def swiglu_quantized(
    gate: Tensor,
    up: Tensor,
    *,
    gate_multiplier: float = 1.0,
    down_multiplier: float = 1.0,
    quantize: str = "float8_e4m3",
    outputs: tuple[str, ...] = OUTPUTS,
) -> QuantizedOutput:
    """:func:`swiglu`, and the rows of y in FP8 as ``linear_float8`` rounds them.

    ``outputs=("quantized",)`` leaves y out, which then has no gradient.
    """
    gate_and_up("swiglu", gate, up)
    factors = multipliers("swiglu", gate_multiplier, down_multiplier)
    return quantized_output(quantized_op, quantize, outputs, gate, up, *factors)


def formula(
    gate: Tensor,
    up: Tensor,
    *,
    gate_multiplier: float = 1.0,
    down_multiplier: float = 1.0,
    quantize: str | None = None,
    outputs: tuple[str, ...] = OUTPUTS,
) -> Tensor | QuantizedOutput:
    """``silu(gate_multiplier * gate) * up * down_multiplier``."""
    return with_optional_codes(
        scaled_swiglu(gate, up, gate_multiplier, down_multiplier), quantize, outputs
    )


# gate and up read, y written; dy, gate and up read, two gradients written
work = elementwise(3, 8)
quantized_work = with_code_bytes(work)


FALCON = {"gate_multiplier": 0.8838834764831844, "down_multiplier": 0.5}
SAMPLES = (
    Sample("rows", pair(3, 5, 48)),
    *usual(pair, PIECES),
    Sample("large-values", LARGE),
    Sample("fp32-up", FP32_UP),
    Sample("multipliers", pair(3, 5, 48), BOTH),
    Sample("gate-multiplier", pair(4, 37), {"gate_multiplier": 1.7}),
    Sample("down-multiplier", pair(4, 24, layout="sliced"), {"down_multiplier": 0.3}),
    *each_frozen(pair(4, 64), "gate up"),
    *bench(pair, MLPS),
    Sample("8192x12288 multipliers", pair(8192, 12288), FALCON, size="bench"),
)
QUANTIZED_SAMPLES = coded_samples(pair, SHAPES, "8192x14336", {"odd-width": BOTH})
