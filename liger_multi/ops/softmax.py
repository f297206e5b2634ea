"""Contract of ``softmax``, and what it shares with ``sparsemax``."""

import torch
from torch import Tensor

from liger_multi import checks
from liger_multi.dispatch.bitwise import PER_ROW, bitwise
from liger_multi.dispatch.op import Op
from liger_multi.ops._work import elementwise
from liger_multi.testing.samples import Sample, Tensor as T

op = Op("softmax", family="cross_entropy", rowwise=True, bitwise=bitwise(PER_ROW, "x y", 1))


@op.forward(returns="y")
def forward(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


op.backward(reads="dy y", returns="dx", shapes={"x": "y"})


def over_axis(op: Op, x: Tensor, dim: int) -> Tensor:
    """Run an operator of the last axis along any axis."""
    name = op.name
    checks.floating(name, x=x)
    dim = checks.integer(name, "dim", dim)
    if x.ndim == 0 or not -x.ndim <= dim < x.ndim:
        raise ValueError(f"{name}: dim must name an axis of x, got {dim} and {checks.describe(x)}")
    if x.shape[dim] == 0:
        raise ValueError(f"{name}: axis {dim} of x has no elements, got {checks.describe(x)}")
    last = dim in (-1, x.ndim - 1)
    output: Tensor = op(x if last else x.movedim(dim, -1))
    return output if last else output.movedim(-1, dim)


def softmax(x: Tensor, dim: int = -1) -> Tensor:
    """Softmax along an axis.

    Math:
        ``y[j] = exp(x[j]) / sum_k exp(x[k])``; ``dx = y (dy - sum_k y[k] dy[k])``.

    Shapes:
        x of any shape and strides; y the same, contiguous if ``dim`` is the last axis. Another
        axis is moved to the end, which copies.

    Dtypes:
        In and out: any floating dtype. Inside: fp32 (fp64 for fp64).

    Memory:
        Kept for backward: y.

    Raises:
        TypeError: x is no floating-point tensor, or dim no integer.
        ValueError: dim names no axis, or one without elements.

    Source:
        ``torch.nn.functional.softmax``.
    """
    return over_axis(op, x, dim)


def formula(x: Tensor, dim: int = -1) -> Tensor:
    """``exp(x) / sum(exp(x))``."""
    return torch.softmax(x, dim)


# x read, y written; dy and y read, dx written
work = elementwise(2, 5)


def samples_of() -> tuple[Sample, ...]:
    """Samples of softmax and sparsemax."""

    def x(*shape: int, layout: str = "contiguous", scale: float = 1.0) -> dict[str, T]:
        return {"x": T(shape, layout=layout, scale=scale)}

    return (
        *[Sample(f"rows-{n}", x(n, 37)) for n in (0, 1, 2, 7)],
        *[Sample(f"cols-{n}", x(5, n)) for n in (1, 8, 129)],
        Sample("one-axis", x(24)),
        Sample("four-axes", x(2, 3, 2, 13)),
        Sample("first-axis", x(9, 5), {"dim": 0}),
        Sample("middle-axis", x(3, 6, 4), {"dim": -2}),
        Sample("sliced", x(4, 24, layout="sliced")),
        Sample("transposed", x(6, 16, layout="transposed")),
        Sample("row-gaps", x(4, 64, layout="rows")),
        Sample("large", x(5, 40, scale=4.0)),
        Sample("wide", x(2, 20000), size="thin"),
        Sample("past-65536-columns", x(2, 70001), size="thin", path="wide rows"),
        Sample("past-65535-rows", x(65537, 2), size="thin"),
        Sample("32768x256", x(32768, 256), size="bench"),
        Sample("8192x4096", x(8192, 4096), size="bench"),
        Sample("4096x32768", x(4096, 32768), size="bench"),
        Sample("2048x131072", x(2048, 131072), size="bench"),
    )


SAMPLES = samples_of()
