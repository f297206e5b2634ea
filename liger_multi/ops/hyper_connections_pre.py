"""Contract of ``hyper_connections_pre``."""

import torch
from torch import Tensor

from liger_multi import checks
from liger_multi.dispatch.bitwise import PER_ROW, bitwise
from liger_multi.dispatch.op import Op
from liger_multi.ops._samples import each_frozen
from liger_multi.ops._work import streamwise
from liger_multi.testing.samples import Sample, Tensor as T

op = Op(
    "hyper_connections_pre",
    family="residuals",
    rowwise=True,
    bitwise=bitwise(PER_ROW, "x pre y", 2),
)


@op.forward(returns="y")
def forward(x: Tensor, pre: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-2], x.shape[-1]))


op.backward(reads="dy x pre", returns="dx dpre")


def streams(op: str, x: Tensor) -> None:
    """Streams before the last axis."""
    if x.ndim < 2 or x.shape[-2] < 1:
        checks.refuse(op, "x must have shape (..., N, C), at least one stream", x)


def coefficient(op: str, name: str, value: Tensor, shape: tuple[int, ...]) -> None:
    """A coefficient for every stream, or pair of them, of every row."""
    if tuple(value.shape) != shape:
        raise ValueError(f"{op}: {name} must have shape {shape}, got {checks.describe(value)}")


def hyper_connections_pre(x: Tensor, pre: Tensor) -> Tensor:
    """The input of a block: the weighted sum of the residual streams.

    Math:
        ``y = sum over i of pre[i] x[i]``.

    Shapes:
        x ``(..., N, C)``, pre ``(..., N)``, any strides, any N; y ``(..., C)``, contiguous.

    Dtypes:
        In: any floating dtypes. Inside: fp32 (fp64 for fp64), rounded once. Out: that of x.

    Memory:
        Kept for backward: x and pre.

    Raises:
        TypeError: An argument is not a floating-point tensor.
        ValueError: Shapes or devices do not fit together.

    Source:
        Xie et al. 2025 (arXiv:2512.24880); transformers ``DeepseekV4HyperConnection``.
    """
    checks.floating(op.name, x=x, pre=pre)
    checks.floating(op.name, pre=pre)
    streams(op.name, x)
    coefficient(op.name, "pre", pre, tuple(x.shape[:-1]))
    result: Tensor = op(x, pre)
    return result


def formula(x: Tensor, pre: Tensor) -> Tensor:
    """The input of a layer: a weighted sum of the streams."""
    return (pre.unsqueeze(-1) * x).sum(-2).to(x.dtype)


# streams read, one written; dy and streams read, a gradient written
work = streamwise(1, 3, (1, 2))


def _case(
    *shape: int, dtype: torch.dtype | None = None, layout: str = "contiguous"
) -> dict[str, T]:
    return {"x": T(shape, layout=layout), "pre": T(shape[:-1], dtype)}


SAMPLES = (
    Sample("rows", _case(5, 4, 8)),
    Sample("two-axes", _case(2, 3, 4, 8)),
    Sample("one-stream", _case(3, 1, 8)),
    Sample("three-streams", _case(3, 3, 13)),
    Sample("fp32-pre", _case(4, 4, 8, dtype=torch.float32)),
    Sample("no-rows", _case(0, 4, 8)),
    Sample("no-axes", _case(4, 8)),
    Sample("sliced", _case(3, 4, 8, layout="sliced")),
    Sample("transposed", _case(3, 4, 8, layout="transposed")),
    *each_frozen(_case(3, 4, 8), "x pre"),
    Sample("wide", _case(2, 5, 3001), size="thin"),
    Sample("past-65535-rows", _case(65537, 2, 4), size="thin"),
    Sample("8192x4x4096", _case(8192, 4, 4096, dtype=torch.float32), size="bench"),
)
COMPILE_SAMPLES = (Sample("2048x8x7168", _case(2048, 8, 7168, dtype=torch.float32)),)
