"""Elementwise operators of one tensor, y = f(x) and dx = f'(x) dy, from f and its derivative.

Both are jitted functions from fp32 to fp32, which the compiler inlines; the result is rounded once.
Tiled as the gated activations are: a program takes one piece of one row, and contiguous tensors
are one long row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from liger_multi.backends.triton.activations.gated import flatten, tile_config
from liger_multi.backends.triton.common.launching import launch
from liger_multi.backends.triton.common.rows import assume_cols, cdiv, round_to
from liger_multi.dispatch.launch import launch_config


@triton.jit
def _pointwise_forward_kernel(
    x_ptr, y_ptr, x_stride, y_stride, cols, tiles, VALUE: tl.constexpr, BLOCK: tl.constexpr
):
    """Read BLOCK columns of one row of x, and write VALUE of them to y."""
    row = (tl.program_id(0) // tiles).to(tl.int64)
    first = (tl.program_id(0) % tiles) * BLOCK
    assume_cols(first)
    col = first + tl.arange(0, BLOCK)
    mask = col < cols
    x = tl.load(x_ptr + row * x_stride + col, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * y_stride + col, round_to(VALUE(x), y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _pointwise_backward_kernel(
    dy_ptr,
    x_ptr,
    dx_ptr,
    dy_stride,
    x_stride,
    dx_stride,
    cols,
    tiles,
    SLOPE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Read BLOCK columns of one row of dy and x, and write SLOPE(x) * dy to dx."""
    row = (tl.program_id(0) // tiles).to(tl.int64)
    first = (tl.program_id(0) % tiles) * BLOCK
    assume_cols(first)
    col = first + tl.arange(0, BLOCK)
    mask = col < cols
    dy = tl.load(dy_ptr + row * dy_stride + col, mask=mask, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + row * x_stride + col, mask=mask, other=0.0).to(tl.float32)
    dx = SLOPE(x) * dy
    tl.store(dx_ptr + row * dx_stride + col, round_to(dx, dx_ptr.dtype.element_ty), mask=mask)


def pointwise(op: str, value: Any, slope: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Forward and backward of an operator.

    Args:
        op: Its name, under which launch tables know it.
        value: A jitted function, ``y`` of ``x``.
        slope: A jitted function, the derivative at ``x``.
    """

    def forward(x: Tensor) -> Tensor:
        y = x.new_empty(x.shape)
        if x.numel():
            _launch(f"{op}.forward", _pointwise_forward_kernel, value, x, y)
        return y

    def backward(dy: Tensor, x: Tensor) -> Tensor:
        dx = x.new_empty(x.shape)
        if x.numel():
            _launch(f"{op}.backward", _pointwise_backward_kernel, slope, dy, x, dx)
        return dx

    return forward, backward


def _launch(name: str, kernel: object, formula: object, *tensors: Tensor) -> None:
    views = flatten(*tensors)
    rows, cols = views[0].shape
    k = launch_config(name, tile_config, views[0].device, rows=rows, cols=cols)
    tiles = cdiv(cols, k.block)
    strides = [t.stride(0) for t in views]
    launch(kernel, rows * tiles, (*views, *strides, cols, tiles), (formula, k.block), k.num_warps)
