"""Contract of ``fused_add_rms_norm``."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_multi import checks
from liger_multi.dispatch.bitwise import PER_ROW, bitwise
from liger_multi.dispatch.op import Op
from liger_multi.ops._float8 import (
    OUTPUTS,
    SHAPES,
    coded,
    coded_samples,
    quantized,
    with_codes,
)
from liger_multi.ops._formulas import weighted_rms_norm
from liger_multi.ops._samples import ROWS, bench, each_frozen, usual
from liger_multi.ops._work import elementwise, with_code_bytes
from liger_multi.ops.linear_float8 import Float8Rows
from liger_multi.ops.rms_norm import CASTINGS, EPS, GEMMA, forward as norm_shapes, numbers
from liger_multi.testing.samples import Sample, Tensor as T

op = Op(
    "fused_add_rms_norm",
    family="norms",
    rowwise=True,
    bitwise=bitwise(PER_ROW, "x residual y new_residual rstd", 1),
)


class FusedAddRMSNormOutput(NamedTuple):
    """What :func:`fused_add_rms_norm` returns; both have gradients.

    Attributes:
        y: The normalized sum.
        new_residual: The sum, which the next layer adds to.
    """

    y: Tensor
    new_residual: Tensor


class QuantizedAddRMSNormOutput(NamedTuple):
    """What :func:`fused_add_rms_norm_quantized` returns; y and new_residual have gradients.

    Attributes:
        y: The normalized sum; None where ``outputs`` does not name it.
        new_residual: The sum, which the next layer adds to.
        quantized: Rows of y in FP8, for ``linear_float8(..., quantized=)``.
    """

    y: Tensor | None
    new_residual: Tensor
    quantized: Float8Rows


@op.forward(returns="y new_residual", residuals="rstd")
def forward(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float, casting: str
) -> tuple[Tensor, Tensor, Tensor]:
    s = x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, residual.dtype))
    y, rstd = norm_shapes(s, weight, eps, offset, casting)
    return y, s, rstd


BACKWARD: dict[str, Any] = {
    "reads": "new_residual dy dnew_residual weight rstd offset casting",
    "returns": "dx dweight",
    "shapes": {"x": "new_residual"},
    "same_grad_as": {"residual": "x"},
}
op.backward(**BACKWARD)
quantized_op = with_codes(op, **BACKWARD)


def fused_add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    casting: str = "llama",
) -> FusedAddRMSNormOutput:
    """Add the residual stream and normalize the sum over the last axis, in one pass.

    Math:
        ``new_residual = x + residual``, rounded to its dtype, and ``y = rms_norm(new_residual)``
        with the options of ``rms_norm``. Backward: both terms have the gradient
        ``d(norm) + dnew_residual``, added in fp32 and rounded once.

    Shapes:
        x and residual ``(..., H)`` with any strides, weight ``(H,)`` or None; y and new_residual
        ``(..., H)``, contiguous.
        :func:`fused_add_rms_norm_quantized` also returns the rows of y in FP8, as ``linear_float8``
        rounds them.

    Dtypes:
        In: any floating dtype. Inside: fp32 (fp64 for fp64). Out: new_residual has the promotion
        of x and residual, y what ``rms_norm`` of it has.

    Memory:
        Kept for backward: new_residual, weight and 4 bytes a row (``rstd``); neither x nor
        residual.

    Raises:
        TypeError: An argument is not a floating-point tensor.
        ValueError: x and residual differ in shape, the width of weight differs from theirs, mixed
            devices, unknown casting.

    Source:
        Zhang and Sennrich 2019 (arXiv:1910.07467); the two lines between the blocks of
        transformers ``LlamaDecoderLayer``.
    """
    return FusedAddRMSNormOutput(*op(*_checked(x, residual, weight, eps, offset, casting)))


def fused_add_rms_norm_quantized(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    casting: str = "llama",
    quantize: str = "float8_e4m3",
    outputs: tuple[str, ...] = OUTPUTS,
) -> QuantizedAddRMSNormOutput:
    """:func:`fused_add_rms_norm`, and the rows of y in FP8 as ``linear_float8`` rounds them.

    ``outputs=("quantized",)`` leaves y out, which then has no gradient.
    """
    args = _checked(x, residual, weight, eps, offset, casting)
    y, (total,), rows = quantized(quantized_op, quantize, outputs, *args)
    return QuantizedAddRMSNormOutput(y, total, rows)


def _checked(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float, casting: str
) -> tuple[Tensor, Tensor, Tensor | None, float, float, str]:
    """The arguments of the operator."""
    name = "fused_add_rms_norm"
    checks.floating(name, x=x, residual=residual, weight=weight, optional=("weight",))
    checks.same_shape(name, x=x, residual=residual)
    if x.ndim == 0:
        raise ValueError(f"{name}: x must have at least one axis, got {checks.describe(x)}")
    checks.vector(name, "weight", weight, x.shape[-1], "last axis of x")
    checks.one_of(name, "casting", casting, CASTINGS)
    return (x, residual, weight, *numbers(name, eps, offset), casting)


def formula(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    casting: str = "llama",
    quantize: str | None = None,
    outputs: tuple[str, ...] = OUTPUTS,
) -> FusedAddRMSNormOutput | QuantizedAddRMSNormOutput:
    """The norm of ``x + residual``, and that sum."""
    total = x + residual
    y = weighted_rms_norm(total, weight, eps, offset)
    if quantize is None:
        return FusedAddRMSNormOutput(y, total)
    first, rows = coded(y, outputs)
    return QuantizedAddRMSNormOutput(first, total, rows)


# both terms read, sum and norm written; two gradients and the sum read, one written
work = elementwise(4, 8)
quantized_work = with_code_bytes(work)


def terms(
    *shape: int, weight: bool = True, layout: str = "contiguous", **options: Any
) -> dict[str, T]:
    """Tensors of a sample; of some strides, only one term has them."""
    sliced = "sliced" if layout == "sliced" else "contiguous"
    x, residual = (
        sliced if layout == sliced_term else layout for sliced_term in ("rows", "transposed")
    )
    residual = sliced if layout == "expanded" else residual
    tensors = {"x": T(shape, layout=x, **options), "residual": T(shape, layout=residual, **options)}
    return tensors | ({"weight": T(shape[-1:], layout=sliced)} if weight else {})


def fp32_residual() -> dict[str, T]:
    """A residual stream of another dtype."""
    return terms(7, 96) | {"residual": T((7, 96), dtype=torch.float32)}


SAMPLES = (
    Sample("llama", terms(2, 5, 64)),
    *usual(terms, ROWS, but=EPS),
    Sample("fp32-residual", fp32_residual(), {"eps": 1e-5}),
    Sample("fp32-weight", terms(3, 24) | {"weight": T((24,), dtype=torch.float32)}),
    Sample("olmo", terms(3, 3, 40), {"casting": "olmo"}),
    Sample("gemma", terms(6, 72) | {"weight": T((72,), scale=0.2)}, GEMMA),
    Sample("llama-offset", terms(6, 33), {"offset": 1.0}),
    Sample("weightless", terms(4, 128, weight=False)),
    Sample("no-columns", terms(3, 0)),
    *each_frozen(terms(6, 64), "weight x"),
    *each_frozen(terms(6, 64, weight=False), "residual"),
    Sample("frozen-terms", terms(6, 64, grad=False)),
    *bench(terms, "8192x4096"),
)
QUANTIZED_SAMPLES = coded_samples(terms, SHAPES, "8192x4096", {"odd-width": GEMMA})
COMPILE_SAMPLES = (*bench(terms, "2048x16384 1024x65536"),)
