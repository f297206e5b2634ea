"""Contract of ``hyper_connections``."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_multi import checks
from liger_multi.dispatch.bitwise import BY_PIECES, bitwise, promise
from liger_multi.dispatch.op import Op
from liger_multi.ops._formulas import rms_normalized, wide
from liger_multi.ops._work import streamwise
from liger_multi.ops.hyper_connections_pre import coefficient, streams
from liger_multi.testing.samples import Sample, Tensor as T

_LIBRARY = "where registers are few, the vendor's library multiplies"
op = Op(
    "hyper_connections",
    family="residuals",
    rowwise=True,
    bitwise=bitwise(
        BY_PIECES,
        "x pre post mix mixes rstd",
        2,
        backward=promise("repeat recompute", rows="rows", because={"cards": _LIBRARY}),
    ),
)


@op.forward(returns="pre post mix", residuals="mixes rstd")
def forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    scale: Tensor,
    iterations: int,
    rms_eps: float,
    eps: float,
    post_scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    row_shape, count = x.shape[:-2], x.shape[-2]
    acc_dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    return (
        x.new_empty((*row_shape, count), dtype=acc_dtype),
        x.new_empty((*row_shape, count), dtype=acc_dtype),
        x.new_empty((*row_shape, count, count), dtype=acc_dtype),
        x.new_empty((*row_shape, count * (count + 2)), dtype=acc_dtype),
        x.new_empty(row_shape, dtype=acc_dtype),
    )


op.backward(
    reads="dpre dpost dmix x weight bias scale mixes rstd iterations eps post_scale",
    returns="dx dweight dbias dscale",
)


class HyperCoefficients(NamedTuple):
    """Coefficients of every row: into the block, out of it, and between the streams."""

    pre: Tensor
    post: Tensor
    mix: Tensor


def hyper_connections(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    scale: Tensor,
    *,
    iterations: int = 20,
    rms_eps: float = 1e-6,
    eps: float = 1e-6,
    post_scale: float = 2.0,
) -> HyperCoefficients:
    """Coefficients of manifold-constrained hyper-connections, from the streams themselves.

    Math:
        ``m = weight @ (v / sqrt(mean(v^2) + rms_eps))`` with v the streams of a row side by side;
        ``a, b, c`` are its first N, next N and last N * N numbers, each times its number of scale
        and plus its part of bias. ``pre = sigmoid(a) + eps``, ``post = post_scale sigmoid(b)``.
        mix is the softmax of the rows of c, plus eps, then brought to rows and columns that sum
        to 1 by Sinkhorn's iteration: columns are divided by their sum + eps, and ``iterations - 1``
        times rows and columns in turn.

    Shapes:
        x ``(..., N, C)`` with any strides and any N, weight ``(N (N + 2), N C)``, bias
        ``(N (N + 2),)``, scale ``(3,)``; pre and post ``(..., N)``, mix ``(..., N, N)``.

    Dtypes:
        In: any floating dtypes. Inside and out: fp32 (fp64 for an x of fp64).

    Memory:
        Kept for backward: x, the parameters, and N (N + 2) + 1 numbers a row. Sinkhorn's iterates
        are computed again.

    Raises:
        TypeError: Wrong kinds of arguments.
        ValueError: Shapes or devices do not fit together, fewer than one iteration, negative eps.

    Source:
        Xie et al. 2025 (arXiv:2512.24880); transformers ``DeepseekV4HyperConnection``.
    """
    name = op.name
    checks.floating(name, x=x, weight=weight, bias=bias, scale=scale)
    streams(name, x)
    count, cols = x.shape[-2:]
    coefficient(name, "weight", weight, (count * (count + 2), count * cols))
    coefficient(name, "bias", bias, (count * (count + 2),))
    coefficient(name, "scale", scale, (3,))
    steps = checks.integer(name, "iterations", iterations)
    if steps < 1:
        raise ValueError(f"{name}: iterations must be at least 1, got {steps}")
    numbers = (
        checks.number(name, "rms_eps", rms_eps, 0.0),
        checks.number(name, "eps", eps, 0.0),
        checks.number(name, "post_scale", post_scale),
    )
    return HyperCoefficients(*op(x, weight, bias, scale, steps, *numbers))


def formula(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    scale: Tensor,
    *,
    iterations: int = 20,
    rms_eps: float = 1e-6,
    eps: float = 1e-6,
    post_scale: float = 2.0,
) -> HyperCoefficients:
    """Coefficients of n streams; those that mix are made doubly stochastic by Sinkhorn steps."""
    n = x.shape[-2]
    m = F.linear(rms_normalized(wide(x.flatten(-2)), rms_eps), wide(weight))
    (a, b, c), (p, q, r) = (t.split([n, n, n * n], -1) for t in (m, wide(bias)))
    mix = torch.softmax((c * scale[2] + r).unflatten(-1, (n, n)), -1) + eps
    mix = mix / (mix.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        mix = mix / (mix.sum(-1, keepdim=True) + eps)
        mix = mix / (mix.sum(-2, keepdim=True) + eps)
    pre, post = torch.sigmoid(a * scale[0] + p) + eps, torch.sigmoid(b * scale[1] + q)
    return HyperCoefficients(pre, post_scale * post, mix)


# streams read; read again, their gradient written
work = streamwise(1, 3, (0, 0))


def _case(
    *shape: int, layout: str = "contiguous", frozen: str = "", dtype: torch.dtype | None = None
) -> dict[str, T]:
    count, cols = shape[-2:]
    outs = count * (count + 2)
    shapes = {"weight": (outs, count * cols), "bias": (outs,), "scale": (3,)}
    tensors = {"x": T(shape, layout=layout, grad="x" not in frozen.split())}
    for name, size in shapes.items():
        spread = (count * cols) ** -0.5 if name == "weight" else 0.5
        tensors[name] = T(size, dtype, spread, name not in frozen.split())
    return tensors


SAMPLES = (
    Sample("rows", _case(4, 4, 8)),
    Sample("two-axes", _case(2, 3, 2, 8), {"iterations": 3}),
    Sample("three-streams", _case(3, 3, 13), {"iterations": 5}),
    Sample("one-iteration", _case(3, 4, 4), {"iterations": 1}),
    Sample("options", _case(3, 2, 8), {"rms_eps": 1e-2, "eps": 1e-3, "post_scale": 1.5}),
    Sample("fp32-parameters", _case(3, 4, 8, dtype=torch.float32), {"iterations": 3}),
    Sample("no-rows", _case(0, 4, 8)),
    Sample("no-axes", _case(4, 8), {"iterations": 2}),
    Sample("sliced", _case(3, 2, 8, layout="sliced"), {"iterations": 2}),
    Sample("transposed", _case(3, 3, 8, layout="transposed"), {"iterations": 2}),
    Sample("frozen-x", _case(3, 4, 8, frozen="x"), {"iterations": 2}),
    Sample("frozen-parameters", _case(3, 4, 8, frozen="weight bias scale"), {"iterations": 2}),
    Sample("past-65535-rows", _case(65537, 2, 2), {"iterations": 2}, size="thin"),
    Sample("8192x4x4096", _case(8192, 4, 4096, dtype=torch.float32), size="bench"),
)
COMPILE_SAMPLES = (
    Sample("8192x2x2048", _case(8192, 2, 2048, dtype=torch.float32)),
    Sample("2048x8x7168", _case(2048, 8, 7168, dtype=torch.float32)),
)
