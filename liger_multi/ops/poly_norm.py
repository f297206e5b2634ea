"""Contract of ``poly_norm``."""

from typing import Optional

import torch
from torch import Tensor

from liger_multi import checks
from liger_multi.dispatch.op import Op
from liger_multi.testing.samples import Sample
from liger_multi.testing.samples import Tensor as T

op = Op("poly_norm", rows=("x", "dy", "rstd"), replicated=("weight", "bias"))


@op.forward(returns="y rstd", residuals="rstd")
def forward(x: Tensor, weight: Tensor, bias: Optional[Tensor], eps: float) -> tuple[Tensor, Tensor]:
    """Shape rule."""
    kind = torch.float64 if x.dtype == torch.float64 else torch.float32
    dtype = x.dtype if bias is None else torch.promote_types(x.dtype, bias.dtype)
    return x.new_empty(x.shape, dtype=dtype), x.new_empty((*x.shape[:-1], 3), dtype=kind)


@op.backward(returns="dx dweight dbias", added=("bias",))
def backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    rstd: Tensor,
    bias_dtype: Optional[torch.dtype],
    needs_x: bool,
    needs_weight: bool,
    needs_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Shape rule."""
    return (
        x.new_empty(x.shape if needs_x else (0,)),
        weight.new_empty(3 if needs_weight else 0),
        x.new_empty(1 if needs_bias else 0, dtype=bias_dtype),
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
        Kept for backward: x, weight and 12 bytes a row (``rstd`` of three powers).

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


def _given(*shape: int, layout: str = "contiguous", **parameters: object) -> dict[str, T]:
    return {
        "x": T(shape, layout=layout),
        "weight": T((3,), **parameters),  # type: ignore[arg-type]
        "bias": T((1,), **parameters),  # type: ignore[arg-type]
    }


SAMPLES = (
    Sample("rows", _given(2, 5, 64)),
    Sample("fp32-parameters", _given(7, 96, dtype=torch.float32), {"eps": 1e-5}),
    Sample("without-bias", {"x": T((6, 72)), "weight": T((3,))}),
    Sample("large-values", {**_given(4, 64), "x": T((4, 64), scale=60.0)}),
    Sample("one-row", _given(1, 257)),
    Sample("one-axis", _given(48)),
    Sample("one-column", _given(9, 1), {"eps": 0.5}),
    Sample("no-rows", _given(0, 64)),
    Sample("sliced", _given(6, 32, layout="sliced")),
    Sample("transposed", _given(2, 16, 24, layout="transposed")),
    Sample("row-gaps", _given(3, 4, 64, layout="rows")),
    Sample("expanded", _given(5, 64, layout="expanded")),
    Sample("frozen-weight", {**_given(6, 64), "weight": T((3,), grad=False)}),
    Sample("frozen-bias", {**_given(6, 64), "bias": T((1,), grad=False)}),
    Sample("frozen-parameters", _given(6, 64, grad=False)),
    Sample("frozen-x", {**_given(6, 64), "x": T((6, 64), grad=False)}),
    Sample("many-tiny-rows", _given(1100, 8)),
    Sample("past-65535-rows", _given(65537, 2), {"eps": 0.1}, size="thin"),
    Sample("past-65536-columns", _given(2, 65600), size="thin"),
    Sample("8192x4096", _given(8192, 4096), size="bench"),
    Sample("8192x11264", _given(8192, 11264), size="bench"),
)
