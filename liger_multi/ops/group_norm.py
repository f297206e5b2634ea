"""Contract of ``group_norm``."""

import math

import torch
from torch import Tensor

from liger_multi import checks
from liger_multi.dispatch.bitwise import PER_ROW, bitwise
from liger_multi.dispatch.op import Op
from liger_multi.ops._formulas import rms_normalized, wide
from liger_multi.ops._samples import each_frozen
from liger_multi.ops._work import elementwise
from liger_multi.testing.samples import Sample, Tensor as T

op = Op("group_norm", family="norms", bitwise=bitwise(PER_ROW, "x y mean rstd"))


@op.forward(returns="y", residuals="mean rstd")
def forward(
    x: Tensor, num_groups: int, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    acc_dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    mean, rstd = (x.new_empty((x.shape[0], num_groups), dtype=acc_dtype) for _ in range(2))
    return x.new_empty(x.shape), mean, rstd


op.backward(
    reads="dy x num_groups weight mean rstd bias_dtype",
    returns="dx dweight dbias",
    shapes={"bias": lambda x: x.shape[1:2]},
    additive=("bias",),
)


def group_norm(
    x: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Normalization of groups of channels to mean 0 and variance 1.

    Math:
        For every sample, each of ``num_groups`` groups of C / num_groups neighboring channels has
        the mean and the variance of all its values, ``n = (x - mean) / sqrt(var + eps)``, and
        ``y = weight * n + bias`` with one number per channel. The variance is that of what is left
        of x without its mean, never a difference of squares.

    Shapes:
        x ``(N, C, *)`` of any rank from two, with any strides (a copy is made where it is not
        contiguous), weight and bias ``(C,)`` or None, each on its own; y the shape of x,
        contiguous.

    Dtypes:
        In: any floating dtypes. Inside: fp32 (fp64 for fp64), statistics too. Out: that of x.

    Memory:
        Kept for backward: x, weight and 8 bytes a group (``mean``, ``rstd``).

    Raises:
        TypeError: An argument is not a floating-point tensor, or num_groups no integer.
        ValueError: x has less than two axes, num_groups does not divide its channels, weight or
            bias have another size than they, mixed devices.

    Source:
        Wu and He 2018 (arXiv:1803.08494); ``torch.nn.functional.group_norm``.
    """
    checks.floating("group_norm", x=x, weight=weight, bias=bias, optional=("weight", "bias"))
    if x.ndim < 2:
        raise ValueError(f"group_norm: x must have shape (N, C, ...), got {checks.describe(x)}")
    groups, channels = checks.integer("group_norm", "num_groups", num_groups), x.shape[1]
    if groups < 1 or channels % groups:
        raise ValueError(
            f"group_norm: num_groups must divide {channels}, the channels of x, got {groups}"
        )
    for name, parameter in (("weight", weight), ("bias", bias)):
        checks.vector("group_norm", name, parameter, channels, "channels of x")
    result: Tensor = op(x, groups, weight, bias, checks.number("group_norm", "eps", eps, 0.0))
    return result


def formula(
    x: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Layer norm of groups of channels, with a weight and a bias per channel."""
    size = math.prod(x.shape[1:]) // num_groups
    groups = wide(x).reshape(x.shape[0], num_groups, size)
    n = rms_normalized(groups - groups.mean(-1, keepdim=True), eps).view(x.shape)
    channels = (-1, *[1] * (x.ndim - 2))
    n = n if weight is None else n * weight.view(channels)
    return (n if bias is None else n + bias.view(channels)).to(x.dtype)


work = elementwise(2, 5)


def _tensors(*shape: int, layout: str = "contiguous", **parameters: object) -> dict[str, T]:
    tensors = T(shape[1:2], **parameters)  # type: ignore[arg-type]
    return {"x": T(shape, layout=layout), "weight": tensors, "bias": tensors}


TWO, FOUR = {"num_groups": 2}, {"num_groups": 4}
SAMPLES = (
    Sample("image", _tensors(2, 8, 5, 6), FOUR),
    Sample("sequence", _tensors(3, 6, 7), TWO),
    Sample("two-axes", _tensors(4, 12), FOUR),
    Sample("five-axes", _tensors(2, 4, 2, 3, 3), TWO),
    Sample("one-group", _tensors(2, 6, 10), {"num_groups": 1}),
    Sample("every-channel", _tensors(2, 4, 33), FOUR),
    Sample("fp32-parameters", _tensors(2, 8, 12, dtype=torch.float32), FOUR | {"eps": 1e-3}),
    Sample("plain", {"x": T((2, 6, 20))}, TWO),
    Sample("without-bias", {"x": T((2, 6, 20)), "weight": T((6,))}, TWO),
    Sample("without-weight", {"x": T((2, 6, 20)), "bias": T((6,))}, TWO),
    Sample("odd-channels", _tensors(2, 15, 7), {"num_groups": 5}),
    Sample("wide-groups", _tensors(1, 3, 6000), {"num_groups": 1}, path="parts of a group"),
    Sample("many-channels", _tensors(1, 20000, 1), {"num_groups": 1}),
    Sample("one-sample", _tensors(1, 4, 30), TWO),
    Sample("one-value", _tensors(5, 2, 1), TWO | {"eps": 0.5}),
    Sample("no-samples", _tensors(0, 4, 6), TWO),
    Sample("no-positions", _tensors(2, 4, 0), TWO),
    Sample("sliced", _tensors(2, 4, 12, layout="sliced"), TWO),
    Sample("channels-inside", _tensors(2, 4, 10, layout="transposed"), TWO),
    Sample("row-gaps", _tensors(2, 4, 12, layout="rows"), TWO),
    Sample("expanded", _tensors(3, 4, 12, layout="expanded"), TWO),
    *each_frozen(_tensors(2, 4, 12), "weight bias x", TWO),
    Sample("frozen-parameters", _tensors(2, 4, 12, grad=False), TWO),
    Sample("past-65535-rows", _tensors(65537, 2, 1), {"num_groups": 1, "eps": 0.1}, size="thin"),
    Sample("past-65536-values", _tensors(2, 2, 33000), {"num_groups": 1}, size="thin"),
    Sample("8x320x64x64", _tensors(8, 320, 64, 64), {"num_groups": 32}, size="bench"),
    Sample("8x1280x16x16", _tensors(8, 1280, 16, 16), {"num_groups": 32}, size="bench"),
    Sample("2x128x512x512", _tensors(2, 128, 512, 512), {"num_groups": 32}, size="bench"),
    Sample("128x2048x512", _tensors(128, 2048, 512), {"num_groups": 128}, size="bench"),
)
