"""Contract of ``rms_norm``."""

from typing import Any

import torch
from torch import Tensor

from liger_multi import checks
from liger_multi.dispatch.bitwise import PER_ROW, bitwise
from liger_multi.dispatch.op import Op
from liger_multi.ops._float8 import (
    OUTPUTS,
    SHAPES,
    QuantizedOutput,
    coded_samples,
    quantized_output,
    with_codes,
    with_optional_codes,
)
from liger_multi.ops._formulas import weighted_rms_norm
from liger_multi.ops._samples import ROWS, bench, each_frozen, usual
from liger_multi.ops._work import elementwise, with_code_bytes
from liger_multi.testing.samples import Sample, Tensor as T

CASTINGS = ("llama", "olmo", "gemma")
FACTOR = "factor"
op = Op(
    "rms_norm",
    family="norms",
    rowwise=True,
    bitwise=bitwise(PER_ROW, "x y rstd", 1),
)


@op.forward(returns="y", residuals="rstd")
def forward(
    x: Tensor, weight: Tensor | None, eps: float, offset: float, casting: str
) -> tuple[Tensor, Tensor]:
    wide = weight is not None and casting == "llama"
    dtype = torch.promote_types(x.dtype, weight.dtype) if weight is not None and wide else x.dtype
    acc_dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    return x.new_empty(x.shape, dtype=dtype), x.new_empty(x.shape[:-1], dtype=acc_dtype)


BACKWARD: dict[str, Any] = {
    "reads": "dy x weight rstd offset casting",
    "returns": "dx dweight",
    "values_for": {"weight": "x"},
}
op.backward(**BACKWARD)
quantized_op = with_codes(op, **BACKWARD)


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    casting: str = "llama",
) -> Tensor:
    """Root-mean-square normalization over the last axis.

    Math:
        ``n = x / sqrt(mean(x^2) + eps)``, ``y = (offset + weight) * n``. ``casting`` says where
        ``n`` is rounded: ``llama`` ``w * n.to(x)``, ``olmo`` ``(w * n).to(x)``, ``gemma``
        everything in fp32 (with ``offset=1.0``). ``factor``, for no weight, rounds the factor of a
        row before it is multiplied: ``x * (1 / sqrt(mean(x^2) + eps)).to(x)``.

    Shapes:
        x ``(..., H)`` with any strides, weight ``(H,)`` or None; y ``(..., H)``, contiguous.
        :func:`rms_norm_quantized` also returns the rows of y in FP8, as ``linear_float8``
        rounds them.

    Dtypes:
        In: any floating dtype. Inside: fp32 (fp64 for fp64). Out: that of x; with ``llama`` the
        promotion of x and weight, as the Hugging Face class returns.

    Memory:
        Kept for backward: x, weight and 4 bytes a row (``rstd``).

    Raises:
        TypeError: An argument is not a floating-point tensor.
        ValueError: The width of weight differs from that of x, mixed devices, unknown casting, a
            weight under ``factor``.

    Source:
        Zhang and Sennrich 2019 (arXiv:1910.07467); transformers ``LlamaRMSNorm``, ``Olmo2RMSNorm``,
        ``GemmaRMSNorm``, ``DeepseekV4UnweightedRMSNorm``.
    """
    return op(*_checked(x, weight, eps, offset, casting))  # type: ignore[no-any-return]


def rms_norm_quantized(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    casting: str = "llama",
    quantize: str = "float8_e4m3",
    outputs: tuple[str, ...] = OUTPUTS,
) -> QuantizedOutput:
    """:func:`rms_norm`, and the rows of y in FP8 as ``linear_float8`` rounds them.

    ``outputs=("quantized",)`` leaves y out, which then has no gradient.
    """
    args = _checked(x, weight, eps, offset, casting)
    return quantized_output(quantized_op, quantize, outputs, *args)


def _checked(
    x: Tensor, weight: Tensor | None, eps: float, offset: float, casting: str
) -> tuple[Tensor, Tensor | None, float, float, str]:
    """The arguments of the operator."""
    checks.floating("rms_norm", x=x, weight=weight, optional=("weight",))
    shape = x.shape
    if not shape:
        raise ValueError(f"rms_norm: x must have at least one axis, got {checks.describe(x)}")
    checks.vector("rms_norm", "weight", weight, shape[-1], "last axis of x")
    checks.one_of("rms_norm", "casting", casting, (*CASTINGS, FACTOR))
    if casting == FACTOR and weight is not None:
        checks.refuse("rms_norm", "casting 'factor' is that of norms without weight", weight)
    return (x, weight, *numbers("rms_norm", eps, offset), casting)


def formula(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    casting: str = "llama",
    quantize: str | None = None,
    outputs: tuple[str, ...] = OUTPUTS,
) -> Tensor | QuantizedOutput:
    """``x / sqrt(mean(x^2) + eps) * (weight + offset)``."""
    return with_optional_codes(weighted_rms_norm(x, weight, eps, offset), quantize, outputs)


# x read, y written; dy and x read, dx written (statistics and weights are one row)
work = elementwise(2, 5)
quantized_work = with_code_bytes(work)


def numbers(name: str, eps: float, offset: float) -> tuple[float, float]:
    """Both numbers of a norm, checked."""
    return (
        checks.number(name, "eps", eps, 0.0),
        checks.number(name, "offset", offset),
    )


def _tensors(*shape: int, layout: str = "contiguous", **weight: Any) -> dict[str, T]:
    sliced = "sliced" if layout == "sliced" else "contiguous"
    return {"x": T(shape, layout=layout), "weight": T(shape[-1:], layout=sliced, **weight)}


EPS, GEMMA = {"one-column": {"eps": 0.5}}, {"casting": "gemma", "offset": 1.0}
SAMPLES = (
    Sample("llama", _tensors(2, 5, 64)),
    *usual(_tensors, ROWS, but=EPS),
    Sample("llama-fp32-weight", _tensors(7, 96, dtype=torch.float32), {"eps": 1e-5}),
    Sample("olmo", _tensors(3, 3, 40), {"casting": "olmo"}),
    Sample("gemma", _tensors(6, 72, scale=0.2), GEMMA),
    Sample("llama-offset", _tensors(6, 33), {"offset": 1.0}),
    Sample("weightless", {"x": T((4, 128))}),
    Sample("factor", {"x": T((5, 72))}, {"casting": FACTOR}),
    *each_frozen(_tensors(6, 64), "weight x"),
    *bench(_tensors, "8192x4096 16384x2048 4096x8192 32768x1536 262144x128"),
)
QUANTIZED_SAMPLES = coded_samples(
    _tensors,
    SHAPES,
    "8192x4096 16384x2048",
    {"odd-width": GEMMA, "one-row": {"casting": "olmo"}},
)
COMPILE_SAMPLES = (
    *bench(_tensors, "2048x16384 1024x65536"),
    Sample("16384x2048 gemma", _tensors(16384, 2048), GEMMA),
)
