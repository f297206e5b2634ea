"""Contract of ``poly_norm``."""

from typing import Any

import torch
from torch import Tensor

from liger_multi import checks
from liger_multi.dispatch.bitwise import PER_ROW, bitwise
from liger_multi.dispatch.op import Op
from liger_multi.ops._formulas import rms_normalized, wide
from liger_multi.ops._samples import ROWS, bench, each_frozen, usual
from liger_multi.ops._work import elementwise
from liger_multi.ops.rms_norm import EPS
from liger_multi.testing.samples import Sample, Tensor as T

op = Op(
    "poly_norm",
    family="norms",
    rowwise=True,
    bitwise=bitwise(PER_ROW, "x y rstd", 1),
)


@op.forward(returns="y", residuals="rstd")
def forward(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    acc_dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    dtype = x.dtype if bias is None else torch.promote_types(x.dtype, bias.dtype)
    return x.new_empty(x.shape, dtype=dtype), x.new_empty((*x.shape[:-1], 3), dtype=acc_dtype)


op.backward(
    reads="dy x weight rstd bias_dtype",
    returns="dx dweight dbias",
    shapes={"bias": lambda x: (1,)},
    additive=("bias",),
    values_for={"weight": "x"},
)


def poly_norm(x: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """Sum of the root-mean-square norms of the first three powers, an activation.

    Math:
        ``n(u) = u / sqrt(mean(u^2) + eps)`` over the last axis, ``y = weight[0] * n(x^3) +
        weight[1] * n(x^2) + weight[2] * n(x) + bias``. Powers are taken in fp32.

    Shapes:
        x ``(..., H)`` with any strides, weight ``(3,)``, bias ``(1,)`` or None; y ``(..., H)``,
        contiguous.

    Dtypes:
        In: any floating dtypes. Inside: fp32 (fp64 for fp64); there ``x^6`` is infinite from 2.6e6
        on. Out: the promotion of x and bias, as the plain formula has.

    Memory:
        Kept for backward: x, weight and 12 bytes per row (``rstd`` of three powers).

    Raises:
        TypeError: An argument is not a floating-point tensor.
        ValueError: weight has not three elements or bias not one, mixed devices.

    Source:
        Zhuo et al. 2024 (arXiv:2411.03884).
    """
    checks.floating("poly_norm", x=x, weight=weight, bias=bias, optional=("bias",))
    if x.ndim == 0:
        raise ValueError(f"poly_norm: x must have at least one axis, got {checks.describe(x)}")
    checks.vector("poly_norm", "weight", weight, 3, "three powers")
    checks.vector("poly_norm", "bias", bias, 1, "one constant")
    result: Tensor = op(x, weight, bias, checks.number("poly_norm", "eps", eps, 0.0))
    return result


def formula(x: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """``w0 * norm(x^3) + w1 * norm(x^2) + w2 * norm(x) + bias``."""
    u = wide(x)
    y = weight[0] * rms_normalized(u**3, eps) + weight[1] * rms_normalized(u**2, eps)
    y = y + weight[2] * rms_normalized(u, eps)
    return (y if bias is None else y + bias).to(x.dtype)


work = elementwise(2, 5)


def _tensors(*shape: int, layout: str = "contiguous", **parameters: Any) -> dict[str, T]:
    tensors = {"x": T(shape, layout=layout)}
    return tensors | {"weight": T((3,), **parameters), "bias": T((1,), **parameters)}


SAMPLES = (
    Sample("rows", _tensors(2, 5, 64)),
    *usual(_tensors, ROWS, but=EPS | {"past-65535-rows": {"eps": 0.1}}),
    Sample("fp32-parameters", _tensors(7, 96, dtype=torch.float32), {"eps": 1e-5}),
    Sample("without-bias", {"x": T((6, 72)), "weight": T((3,))}),
    Sample("large-values", {**_tensors(4, 64), "x": T((4, 64), scale=60.0)}),
    *each_frozen(_tensors(6, 64), "weight bias x"),
    Sample("frozen-parameters", _tensors(6, 64, grad=False)),
    *bench(_tensors, "8192x4096 8192x11264"),
)
COMPILE_SAMPLES = (*bench(_tensors, "65536x256 1024x65536"),)
