"""A linear layer, ``y = x W' + b``; every GEMM is PyTorch's, or one of independent rows."""

from torch import Tensor

from liger_multi.reference.common.chunking import as_rows, statistics_dtype
from liger_multi.reference.common.stored import gradient_of, linear_of


def dense(x: Tensor) -> Tensor:
    """A contiguous tensor with the values of ``x``; ``x`` itself if it is one."""
    return x if x.is_contiguous() else x.contiguous()


def weight_gradient(left: Tensor, right: Tensor | None, is_needed: bool) -> Tensor:
    """The gradient of a weight: left' right, or nothing."""
    return left.t() @ as_rows(right) if is_needed and right is not None else left.new_empty(0)


def bias_gradient(rows: Tensor, is_needed: bool) -> Tensor:
    """The gradient of a bias, or nothing."""
    if not is_needed:
        return rows.new_empty(0)
    return rows.sum(0, dtype=statistics_dtype(rows.dtype)).to(rows.dtype)


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, needs_x: bool, needs_weight: bool
) -> Tensor:
    """X weight' + bias."""
    return dense(linear_of(x, weight, bias))


def backward(
    dy: Tensor,
    x: Tensor | None,
    weight: Tensor | None,
    needs_x: bool,
    needs_weight: bool,
    needs_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, weight and bias; empty tensors if not needed."""
    dy2d, dx = as_rows(dy), dy.new_empty(0)
    if needs_x and weight is not None:
        dx = gradient_of(dy2d, weight).view(*dy.shape[:-1], weight.shape[1])
    return dx, weight_gradient(dy2d, x, needs_weight), bias_gradient(dy2d, needs_bias)
