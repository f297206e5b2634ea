"""Elementwise operators of one tensor, ``y = f(x)`` and ``dx = f'(x) dy``, from both functions."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from liger_multi.reference.common.chunking import (
    as_rows,
    in_one_piece,
    row_blocks,
    statistics_dtype,
)

Function = Callable[[Tensor], Tensor]


def pointwise(
    value: Function, slope: Function
) -> tuple[Function, Callable[[Tensor, Tensor], Tensor]]:
    """Forward and backward of an operator.

    Args:
        value: ``y`` of ``x``, in the dtype of ``x`` and with one rounding.
        slope: The derivative at ``x``, which comes in fp32 or fp64.
    """

    def forward(x: Tensor) -> Tensor:
        return value(x).contiguous()

    def backward(dy: Tensor, x: Tensor) -> Tensor:
        """Block by block of rows; in one piece where a compiler fuses it."""
        acc_dtype = statistics_dtype(x.dtype)
        if in_one_piece():
            return (slope(x.to(acc_dtype)) * dy.to(acc_dtype)).to(x.dtype).contiguous()
        dx, x2d, dy2d = x.new_empty(x.shape), as_rows(x), as_rows(dy)
        dx2d = as_rows(dx)
        for block in row_blocks(x2d.shape[0], 2 * x2d.shape[1] * acc_dtype.itemsize):
            dx2d[block] = slope(x2d[block].to(acc_dtype)) * dy2d[block].to(acc_dtype)
        return dx

    return forward, backward
