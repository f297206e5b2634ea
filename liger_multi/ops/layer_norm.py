"""Contract of ``layer_norm``."""

from typing import Optional

import torch
from torch import Tensor

from liger_multi import checks
from liger_multi.dispatch.op import Op
from liger_multi.testing.samples import Sample
from liger_multi.testing.samples import Tensor as T

op = Op("layer_norm", rows=("x", "dy", "mean", "rstd"), replicated=("weight", "bias"))


@op.forward(returns="y mean rstd", residuals="mean rstd")
def forward(
    x: Tensor, weight: Optional[Tensor], bias: Optional[Tensor], eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Shape rule."""
    kind = torch.float64 if x.dtype == torch.float64 else torch.float32
    mean, rstd = (x.new_empty(x.shape[:-1], dtype=kind) for _ in range(2))
    return x.new_empty(x.shape), mean, rstd


@op.backward(returns="dx dweight dbias", added=("bias",))
def backward(
    dy: Tensor,
    x: Tensor,
    weight: Optional[Tensor],
    mean: Tensor,
    rstd: Tensor,
    bias_dtype: Optional[torch.dtype],
    needs_x: bool,
    needs_weight: bool,
    needs_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Shape rule."""
    cols, none = x.shape[-1:], (0,)
    dweight = x.new_empty(0) if weight is None else weight.new_empty(cols if needs_weight else none)
    dbias = x.new_empty(cols if needs_bias else none, dtype=bias_dtype)
    return x.new_empty(x.shape if needs_x else none), dweight, dbias


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
    checks.floating("layer_norm", x=x, weight=weight, bias=bias, optional=("weight", "bias"))
    if x.ndim == 0:
        raise ValueError(f"layer_norm: x must have at least one axis, got {checks.describe(x)}")
    for name, parameter in (("weight", weight), ("bias", bias)):
        checks.vector("layer_norm", name, parameter, x.shape[-1], "last axis of x")
    result: Tensor = op(x, weight, bias, checks.number("layer_norm", "eps", eps, 0.0))
    return result


def _affine(cols: int, **both: object) -> dict[str, T]:
    made = T((cols,), **both)  # type: ignore[arg-type]
    return {"weight": made, "bias": made}


SAMPLES = (
    Sample("affine", {"x": T((2, 5, 64)), **_affine(64)}),
    Sample("fp32-parameters", {"x": T((7, 96)), **_affine(96, dtype=torch.float32)}, {"eps": 1e-6}),
    Sample("plain", {"x": T((4, 128))}),
    Sample("without-bias", {"x": T((6, 72)), "weight": T((72,))}),
    Sample("without-weight", {"x": T((6, 72)), "bias": T((72,))}),
    Sample("one-row", {"x": T((1, 257)), **_affine(257)}),
    Sample("one-axis", {"x": T((48,)), **_affine(48)}),
    Sample("one-column", {"x": T((9, 1)), **_affine(1)}, {"eps": 0.5}),
    Sample("no-rows", {"x": T((0, 64)), **_affine(64)}),
    Sample("no-columns", {"x": T((3, 0)), **_affine(0)}),
    Sample("sliced", {"x": T((6, 32), layout="sliced"), **_affine(32, layout="sliced")}),
    Sample("transposed", {"x": T((2, 16, 24), layout="transposed"), **_affine(24)}),
    Sample("row-gaps", {"x": T((3, 4, 64), layout="rows"), **_affine(64)}),
    Sample("expanded", {"x": T((5, 64), layout="expanded"), **_affine(64)}),
    Sample("frozen-weight", {"x": T((6, 64)), "weight": T((64,), grad=False), "bias": T((64,))}),
    Sample("frozen-bias", {"x": T((6, 64)), "weight": T((64,)), "bias": T((64,), grad=False)}),
    Sample("frozen-parameters", {"x": T((6, 64)), **_affine(64, grad=False)}),
    Sample("frozen-x", {"x": T((6, 64), grad=False), **_affine(64)}),
    Sample("many-tiny-rows", {"x": T((1100, 8)), **_affine(8)}),
    Sample("past-65535-rows", {"x": T((65537, 2)), **_affine(2)}, {"eps": 0.1}, size="thin"),
    Sample("past-65536-columns", {"x": T((2, 65600)), **_affine(65600)}, size="thin"),
    Sample("8192x4096", {"x": T((8192, 4096)), **_affine(4096)}, size="bench"),
    Sample("32768x1024", {"x": T((32768, 1024)), **_affine(1024)}, size="bench"),
)
