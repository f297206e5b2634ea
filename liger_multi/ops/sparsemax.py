"""Contract of ``sparsemax``."""

import torch
from torch import Tensor

from liger_multi.dispatch.bitwise import PER_ROW, bitwise
from liger_multi.dispatch.op import Op
from liger_multi.ops._work import elementwise
from liger_multi.ops.softmax import over_axis, samples_of

op = Op("sparsemax", family="cross_entropy", rowwise=True, bitwise=bitwise(PER_ROW, "x y", 1))


@op.forward(returns="y")
def forward(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


op.backward(reads="dy y", returns="dx", shapes={"x": "y"})


def sparsemax(x: Tensor, dim: int = -1) -> Tensor:
    """Projection on the probability simplex along an axis: a softmax with exact zeros.

    Math:
        ``y[j] = max(x[j] - tau, 0)`` with the ``tau`` for which y sums to 1. On the support,
        where ``y[j] > 0``, ``dx[j] = dy[j] - mean of dy over the support``; elsewhere 0.

    Shapes:
        x of any shape and strides; y the same, contiguous if ``dim`` is the last axis. Another
        axis is moved to the end, which copies.

    Dtypes:
        In and out: any floating dtype. Inside: fp32 (fp64 for fp64).

    Memory:
        Kept for backward: y. The kernels find tau by Newton's method, without sorting and without
        a buffer for it.

    Raises:
        TypeError: x is no floating-point tensor, or dim no integer.
        ValueError: dim names no axis, or one without elements.

    Source:
        Martins and Astudillo 2016 (arXiv:1602.02068).
    """
    return over_axis(op, x, dim)


def formula(x: Tensor, dim: int = -1) -> Tensor:
    """The nearest point of the probability simplex."""
    x = x.movedim(dim, -1)
    descending = x.sort(-1, descending=True).values
    count = torch.arange(1, x.shape[-1] + 1, device=x.device)
    total = descending.cumsum(-1) - 1
    k = (descending * count > total).sum(-1, keepdim=True)
    total = total.gather(-1, k - 1)
    # an entry at the threshold is outside: a clamp would pass its gradient on
    return torch.where(x * k > total, x - total / k, 0).movedim(-1, dim)


work = elementwise(2, 5)


SAMPLES = samples_of()
