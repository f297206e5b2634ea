"""Contract of ``dyt``."""

from typing import Any

import torch
from torch import Tensor

from liger_multi import checks
from liger_multi.dispatch.bitwise import PER_ROW, bitwise
from liger_multi.dispatch.op import Op
from liger_multi.ops._samples import ROWS, bench, each_frozen, usual
from liger_multi.ops._work import elementwise
from liger_multi.testing.samples import Sample, Tensor as T

op = Op(
    "dyt",
    family="norms",
    rowwise=True,
    bitwise=bitwise(PER_ROW, "x y", 1),
)


@op.forward(returns="y")
def forward(x: Tensor, alpha: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    dtype = torch.promote_types(x.dtype, alpha.dtype)
    for parameter in (weight, bias):
        dtype = dtype if parameter is None else torch.promote_types(dtype, parameter.dtype)
    return x.new_empty(x.shape, dtype=dtype)


op.backward(
    reads="dy x alpha weight bias_dtype",
    returns="dx dalpha dweight dbias",
    shapes={"bias": lambda x: x.shape[-1:]},
    values_for={"weight": "x alpha"},
)


def dyt(
    x: Tensor, alpha: Tensor, weight: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """Dynamic tanh, an elementwise replacement for a norm: ``weight * tanh(alpha * x) + bias``.

    Math:
        ``t = tanh(alpha * x)``, ``y = weight * t + bias``, rounded once. Backward:
        ``dx = dy * weight * alpha * (1 - t^2)``; the gradients of the parameters are sums over
        rows (alpha: over all elements), in fp32 and in a fixed order.

    Shapes:
        x ``(..., H)`` with any strides, alpha ``(1,)`` or without axes, weight and bias ``(H,)`` or
        None, each on its own; y ``(..., H)``, contiguous.

    Dtypes:
        In: any floating dtypes. Inside: fp32 (fp64 for fp64). Out: the promotion of all, as the
        plain formula has.

    Memory:
        Kept for backward: x and the parameters; tanh is computed again.

    Raises:
        TypeError: An argument is not a floating-point tensor.
        ValueError: alpha has more than one element, the width of weight or bias differs from that
            of x, mixed devices.

    Source:
        Zhu et al. 2025 (arXiv:2503.10622).
    """
    checks.floating("dyt", x=x, alpha=alpha, weight=weight, bias=bias, optional=("weight", "bias"))
    if x.ndim == 0:
        raise ValueError(f"dyt: x must have at least one axis, got {checks.describe(x)}")
    if alpha.numel() != 1 or alpha.ndim > 1:
        raise ValueError(f"dyt: alpha must have shape (1,) or (), got {checks.describe(alpha)}")
    for name, parameter in (("weight", weight), ("bias", bias)):
        checks.vector("dyt", name, parameter, x.shape[-1], "last axis of x")
    result: Tensor = op(x, alpha, weight, bias)
    return result


def formula(
    x: Tensor, alpha: Tensor, weight: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """``weight * tanh(alpha * x) + bias``."""
    y = torch.tanh(alpha * x)
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


work = elementwise(2, 5)


def _tensors(*shape: int, layout: str = "contiguous", **parameters: Any) -> dict[str, T]:
    tensors, width = {"x": T(shape, layout=layout)}, T(shape[-1:], **parameters)
    return tensors | {"alpha": T((1,), scale=0.7, **parameters), "weight": width, "bias": width}


SAMPLES = (
    Sample("affine", _tensors(2, 5, 64)),
    *usual(_tensors, ROWS),
    Sample("fp32-parameters", _tensors(7, 96, dtype=torch.float32)),
    Sample("plain", {"x": T((4, 128)), "alpha": T((1,))}),
    Sample("scalar-alpha", {"x": T((4, 24)), "alpha": T(()), "weight": T((24,))}),
    Sample("without-weight", {"x": T((6, 72)), "alpha": T((1,)), "bias": T((72,))}),
    Sample("no-columns", _tensors(3, 0)),
    Sample("large-values", {**_tensors(4, 64), "x": T((4, 64), scale=40.0)}),
    Sample("small-values", {**_tensors(4, 64), "x": T((4, 64), scale=1e-3)}),
    Sample("frozen-alpha", {**_tensors(6, 64), "alpha": T((1,), grad=False)}),
    *each_frozen(_tensors(6, 64), "weight x"),
    Sample("frozen-parameters", _tensors(6, 64, grad=False)),
    *bench(_tensors, "8192x4096 50432x768"),
)
COMPILE_SAMPLES = (*bench(_tensors, "65536x256 1024x65536"),)
