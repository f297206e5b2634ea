"""Contract of ``layer_norm``."""

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
from liger_multi.ops._formulas import rms_normalized, wide
from liger_multi.ops._samples import ROWS, bench, each_frozen, usual
from liger_multi.ops._work import elementwise, with_code_bytes
from liger_multi.ops.rms_norm import EPS
from liger_multi.testing.samples import Sample, Tensor as T

op = Op(
    "layer_norm",
    family="norms",
    rowwise=True,
    bitwise=bitwise(PER_ROW, "x y mean rstd", 1),
)


@op.forward(returns="y", residuals="mean rstd")
def forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    acc_dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    mean, rstd = (x.new_empty(x.shape[:-1], dtype=acc_dtype) for _ in range(2))
    return x.new_empty(x.shape), mean, rstd


BACKWARD: dict[str, Any] = {
    "reads": "dy x weight mean rstd bias_dtype",
    "returns": "dx dweight dbias",
    "shapes": {"bias": lambda x: x.shape[-1:]},
    "additive": ("bias",),
    "values_for": {"weight": "x"},
}
op.backward(**BACKWARD)
quantized_op = with_codes(op, **BACKWARD)


def layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """Normalization to mean 0 and variance 1 over the last axis.

    Math:
        ``n = (x - mean(x)) / sqrt(var(x) + eps)`` with the variance of all H values (not H - 1),
        ``y = weight * n + bias``, rounded once.

    Shapes:
        x ``(..., H)`` with any strides, weight and bias ``(H,)`` or None, each on its own; y
        ``(..., H)``, contiguous.
        :func:`layer_norm_quantized` also returns the rows of y in FP8, as ``linear_float8``
        rounds them.

    Dtypes:
        In: any floating dtype, also different ones. Inside: fp32 (fp64 for fp64), statistics too.
        Out: that of x.

    Memory:
        Kept for backward: x, weight and 8 bytes a row (``mean``, ``rstd``).

    Raises:
        TypeError: An argument is not a floating-point tensor.
        ValueError: The width of weight or bias differs from that of x, mixed devices.

    Source:
        Ba, Kiros and Hinton 2016 (arXiv:1607.06450); ``torch.nn.functional.layer_norm``.
    """
    return op(*_checked(x, weight, bias, eps))  # type: ignore[no-any-return]


def layer_norm_quantized(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    quantize: str = "float8_e4m3",
    outputs: tuple[str, ...] = OUTPUTS,
) -> QuantizedOutput:
    """:func:`layer_norm`, and the rows of y in FP8 as ``linear_float8`` rounds them.

    ``outputs=("quantized",)`` leaves y out, which then has no gradient.
    """
    args = _checked(x, weight, bias, eps)
    return quantized_output(quantized_op, quantize, outputs, *args)


def _checked(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor | None, Tensor | None, float]:
    """The arguments of the operator."""
    checks.floating("layer_norm", x=x, weight=weight, bias=bias, optional=("weight", "bias"))
    if x.ndim == 0:
        raise ValueError(f"layer_norm: x must have at least one axis, got {checks.describe(x)}")
    for name, parameter in (("weight", weight), ("bias", bias)):
        checks.vector("layer_norm", name, parameter, x.shape[-1], "last axis of x")
    return x, weight, bias, checks.number("layer_norm", "eps", eps, 0.0)


def formula(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    quantize: str | None = None,
    outputs: tuple[str, ...] = OUTPUTS,
) -> Tensor | QuantizedOutput:
    """``(x - mean) / sqrt(variance + eps) * weight + bias``."""
    centered = wide(x) - wide(x).mean(-1, keepdim=True)
    y = rms_normalized(centered, eps)
    y = y if weight is None else y * weight
    return with_optional_codes((y if bias is None else y + bias).to(x.dtype), quantize, outputs)


work = elementwise(2, 5)
quantized_work = with_code_bytes(work)


def _tensors(*shape: int, layout: str = "contiguous", **options: Any) -> dict[str, T]:
    sliced = "sliced" if layout == "sliced" else "contiguous"
    tensors = T(shape[-1:], layout=sliced, **options)
    return {"x": T(shape, layout=layout), "weight": tensors, "bias": tensors}


SAMPLES = (
    Sample("affine", _tensors(2, 5, 64)),
    *usual(_tensors, ROWS, but=EPS | {"past-65535-rows": {"eps": 0.1}}),
    Sample("fp32-parameters", _tensors(7, 96, dtype=torch.float32), {"eps": 1e-6}),
    Sample("plain", {"x": T((4, 128))}),
    Sample("without-bias", {"x": T((6, 72)), "weight": T((72,))}),
    Sample("without-weight", {"x": T((6, 72)), "bias": T((72,))}),
    Sample("no-columns", _tensors(3, 0)),
    *each_frozen(_tensors(6, 64), "weight bias x"),
    Sample("frozen-parameters", _tensors(6, 64, grad=False)),
    *bench(_tensors, "8192x4096 32768x1024"),
)
QUANTIZED_SAMPLES = coded_samples(_tensors, SHAPES, "8192x4096")
COMPILE_SAMPLES = (*bench(_tensors, "2048x16384 1024x65536"),)
