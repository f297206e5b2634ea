"""Squared ReLU, y = max(x, 0)^2 (arXiv:2109.08668), tiled as the gated activations are.

    dx = 2 max(x, 0) dy

A NaN stays NaN: only what is below zero becomes zero.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from liger_multi.backends.triton.activations.gated import flatten, tile_config
from liger_multi.backends.triton.common.launching import launch
from liger_multi.backends.triton.common.rows import assume_cols, cdiv, round_to
from liger_multi.dispatch.launch import launch_config


@triton.jit
def _relu_squared_forward_kernel(
    x_ptr, y_ptr, x_stride, y_stride, cols, tiles, BLOCK: tl.constexpr
):
    """Squared ReLU of one piece of a row.

    Program: BLOCK columns of one row; reads x, writes y.
    """
    row = (tl.program_id(0) // tiles).to(tl.int64)
    first = (tl.program_id(0) % tiles) * BLOCK
    assume_cols(first)
    col = first + tl.arange(0, BLOCK)
    mask = col < cols
    x = tl.load(x_ptr + row * x_stride + col, mask=mask, other=0.0).to(tl.float32)
    x = tl.where(x < 0.0, 0.0, x)
    tl.store(y_ptr + row * y_stride + col, round_to(x * x, y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _relu_squared_backward_kernel(
    dy_ptr, x_ptr, dx_ptr, dy_stride, x_stride, dx_stride, cols, tiles, BLOCK: tl.constexpr
):
    """Gradient of one piece of a row.

    Program: BLOCK columns of one row; reads dy and x, writes dx.
    """
    row = (tl.program_id(0) // tiles).to(tl.int64)
    first = (tl.program_id(0) % tiles) * BLOCK
    assume_cols(first)
    col = first + tl.arange(0, BLOCK)
    mask = col < cols
    dy = tl.load(dy_ptr + row * dy_stride + col, mask=mask, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + row * x_stride + col, mask=mask, other=0.0).to(tl.float32)
    dx = tl.where(x < 0.0, 0.0, x) * 2.0 * dy
    tl.store(dx_ptr + row * dx_stride + col, round_to(dx, dx_ptr.dtype.element_ty), mask=mask)


def forward(x: Tensor) -> Tensor:
    """max(x, 0)^2."""
    y = x.new_empty(x.shape)
    if x.numel():
        _launch("relu_squared.forward", _relu_squared_forward_kernel, x, y)
    return y


def backward(dy: Tensor, x: Tensor) -> Tensor:
    """The gradient of x."""
    dx = x.new_empty(x.shape)
    if x.numel():
        _launch("relu_squared.backward", _relu_squared_backward_kernel, dy, x, dx)
    return dx


def _launch(name: str, kernel: object, *tensors: Tensor) -> None:
    views = flatten(*tensors)
    rows, cols = views[0].shape
    k = launch_config(name, tile_config, views[0].device, rows=rows, cols=cols)
    tiles = cdiv(cols, k.block)
    strides = [t.stride(0) for t in views]
    launch(kernel, rows * tiles, (*views, *strides, cols, tiles), (k.block,), k.num_warps)
