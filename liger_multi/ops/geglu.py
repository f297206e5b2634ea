"""Contract of ``geglu``."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_multi import checks
from liger_multi.dispatch.bitwise import PER_ROW, bitwise
from liger_multi.dispatch.op import Op
from liger_multi.ops._activations import FP32_UP, LARGE, MLPS, gate_and_up, pair
from liger_multi.ops._float8 import (
    OUTPUTS,
    SHAPES,
    QuantizedOutput,
    coded_samples,
    quantized_output,
    with_codes,
    with_optional_codes,
)
from liger_multi.ops._samples import PIECES, bench, each_frozen, usual
from liger_multi.ops._work import elementwise, with_code_bytes
from liger_multi.testing.samples import Sample, Tensor as T

APPROXIMATIONS = ("tanh", "none")
# traced as swiglu, whose traced form was measured; this one's was not
op = Op(
    "geglu",
    family="activations",
    compile="trace",
    rowwise=True,
    bitwise=bitwise(PER_ROW, "gate up y", 1),
)


@op.forward(returns="y")
def forward(gate: Tensor, up: Tensor, approximate: str) -> Tensor:
    return gate.new_empty(gate.shape, dtype=torch.promote_types(gate.dtype, up.dtype))


BACKWARD: dict[str, Any] = {"reads": "dy gate up approximate", "returns": "dgate dup"}
op.backward(**BACKWARD)
quantized_op = with_codes(op, **BACKWARD)


def geglu(gate: Tensor, up: Tensor, approximate: str = "tanh") -> Tensor:
    """Gated activation of an MLP: ``gelu(gate) * up``.

    Math:
        ``y = (gate * Phi(gate)).to(gate) * up``. ``none`` takes the normal distribution's ``Phi(x)
        = (1 + erf(x / sqrt(2))) / 2``; ``tanh`` its approximation ``(1 + tanh(sqrt(2 / pi) * (x +
        0.044715 * x^3))) / 2``.

    Shapes:
        gate and up ``(..., F)`` with any strides; y ``(..., F)``, contiguous.
        :func:`geglu_quantized` also returns the rows of y in FP8, as ``linear_float8``
        rounds them.

    Dtypes:
        In: any floating dtypes. Inside: fp32 (fp64 for fp64), the activation rounded to the dtype
        of gate as the Hugging Face MLP does. Out: the promotion of both.

    Memory:
        Kept for backward: gate and up; the activation is computed again.

    Raises:
        TypeError: An argument is not a floating-point tensor.
        ValueError: Shapes or devices differ, or approximate is neither ``tanh`` nor ``none``.

    Source:
        Shazeer 2020 (arXiv:2002.05202), Hendrycks and Gimpel 2016 (arXiv:1606.08415); transformers
        ``GemmaMLP``.
    """
    gate_and_up("geglu", gate, up)
    checks.one_of("geglu", "approximate", approximate, APPROXIMATIONS)
    return op(gate, up, approximate)  # type: ignore[no-any-return]


def geglu_quantized(
    gate: Tensor,
    up: Tensor,
    approximate: str = "tanh",
    *,
    quantize: str = "float8_e4m3",
    outputs: tuple[str, ...] = OUTPUTS,
) -> QuantizedOutput:
    """:func:`geglu`, and the rows of y in FP8 as ``linear_float8`` rounds them.

    ``outputs=("quantized",)`` leaves y out, which then has no gradient.
    """
    gate_and_up("geglu", gate, up)
    checks.one_of("geglu", "approximate", approximate, APPROXIMATIONS)
    return quantized_output(quantized_op, quantize, outputs, gate, up, approximate)


def formula(
    gate: Tensor,
    up: Tensor,
    approximate: str = "tanh",
    *,
    quantize: str | None = None,
    outputs: tuple[str, ...] = OUTPUTS,
) -> Tensor | QuantizedOutput:
    """``gelu(gate) * up``."""
    return with_optional_codes(F.gelu(gate, approximate=approximate) * up, quantize, outputs)


work = elementwise(3, 8)
quantized_work = with_code_bytes(work)


EXACT = {"approximate": "none"}
OVERFLOW = {
    "gate": T((4, 64), scale=1e22, dtype=torch.float32),
    "up": T((4, 64), dtype=torch.float32),
}
SAMPLES = (
    Sample("rows", pair(3, 5, 48)),
    *usual(pair, PIECES, but={"past-65536-columns": EXACT}),
    Sample("exact", pair(3, 5, 48), EXACT),
    Sample("exact-odd-width", pair(4, 37), EXACT),
    Sample("exact-sliced", pair(4, 24, layout="sliced"), EXACT),
    Sample("large-values", LARGE),
    Sample("exact-large-values", LARGE, EXACT),
    Sample("squares-overflow", OVERFLOW),
    Sample("exact-squares-overflow", OVERFLOW, EXACT),
    Sample("fp32-up", FP32_UP),
    *each_frozen(pair(4, 64), "gate"),
    *each_frozen(pair(4, 64), "up", EXACT),
    *bench(pair, MLPS),
)
QUANTIZED_SAMPLES = coded_samples(pair, SHAPES, "8192x14336", {"odd-width": EXACT})
