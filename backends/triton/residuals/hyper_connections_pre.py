"""The weighted sum of residual streams: one pass each way."""

from __future__ import annotations

from torch import Tensor

from liger_multi.backends.triton.common.launching import launch
from liger_multi.backends.triton.residuals.hyper_streams import (
    _streams_pre_backward_kernel,
    _streams_pre_kernel,
    as_outs,
    as_tiles,
    tile,
)


def forward(x: Tensor, pre: Tensor) -> Tensor:
    """``y = sum of pre[i] x[i]``."""
    y = x.new_empty((*x.shape[:-2], x.shape[-1]))
    if y.numel():
        rows = as_tiles(x)
        constants, threads, pieces = tile("hyper_connections_pre.forward", rows)
        args = (rows, pre.contiguous(), y, rows.stride(0), rows.stride(1), rows.shape[2], pieces)
        launch(_streams_pre_kernel, rows.shape[0] * pieces, args, constants, threads)
    return y


def backward(
    dy: Tensor, x: Tensor, pre: Tensor, needs_x: bool, needs_pre: bool
) -> tuple[Tensor, Tensor]:
    """Both gradients."""
    dx = x.new_empty(x.shape if needs_x else 0)
    dpre = pre.new_zeros(pre.shape if needs_pre else 0)
    if dy.numel() and (needs_x or needs_pre):
        rows, up = as_tiles(x), as_outs(dy)
        args = (
            up, rows, pre.contiguous(), dx if needs_x else None, dpre if needs_pre else None,
            up.stride(0), rows.stride(0), rows.stride(1), rows.shape[2],
        )  # fmt: skip
        constants, threads, _ = tile("hyper_connections_pre.backward", rows)
        launch(_streams_pre_backward_kernel, rows.shape[0], args, constants, threads)
    return dx, dpre
