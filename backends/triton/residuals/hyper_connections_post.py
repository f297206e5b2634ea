"""Residual streams after a block: one pass each way."""

from __future__ import annotations

from torch import Tensor

from liger_multi.backends.triton.common.launching import launch
from liger_multi.backends.triton.residuals.hyper_streams import (
    _streams_post_backward_kernel,
    _streams_post_kernel,
    as_outs,
    as_tiles,
    tile,
    width_of,
)


def forward(x: Tensor, out: Tensor, post: Tensor, mix: Tensor) -> Tensor:
    """``y[i] = post[i] out + sum of mix[i, j] x[j]``."""
    y = x.new_empty(x.shape)
    if y.numel():
        rows, outs = as_tiles(x), as_outs(out)
        constants, threads, pieces = tile("hyper_connections_post.forward", rows)
        sizes = (rows.stride(0), rows.stride(1), outs.stride(0), rows.shape[2], pieces)
        args = (rows, outs, post.contiguous(), mix.contiguous(), y, *sizes)
        launch(_streams_post_kernel, rows.shape[0] * pieces, args, constants, threads)
    return y


def backward(
    dy: Tensor, x: Tensor, out: Tensor, post: Tensor, mix: Tensor, needs_x: bool, needs_out: bool,
    needs_post: bool, needs_mix: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """All four gradients."""
    pairs = ((x, needs_x), (out, needs_out), (post, needs_post), (mix, needs_mix))
    dx, dout, dpost, dmix = (t.new_empty(t.shape if needed else 0) for t, needed in pairs)
    made = [m if n else None for m, (_, n) in zip((dx, dout, dpost, dmix), pairs, strict=True)]
    if dy.numel():
        up, rows, outs = as_tiles(dy), as_tiles(x), as_outs(out)
        strides = (up.stride(0), up.stride(1), rows.stride(0), rows.stride(1), outs.stride(0))
        args = (up, rows, outs, post.contiguous(), mix.contiguous(), *made, *strides)
        constants, threads, _ = tile("hyper_connections_post.backward", rows)
        wide = width_of(rows.shape[1], constants[2], rows.element_size())
        args = (*args, rows.shape[2])
        launch(_streams_post_backward_kernel, rows.shape[0], args, (*constants, wide), threads)
    elif x.shape[-1] == 0:
        dpost.zero_(), dmix.zero_()
    return dx, dout, dpost, dmix
