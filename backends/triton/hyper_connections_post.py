"""Residual streams after a block: one pass each way."""

from __future__ import annotations

from torch import Tensor

from liger_multi.backends.triton.hyper_streams import (
    _streams_post_backward_kernel,
    _streams_post_kernel,
    as_outs,
    as_tiles,
    run,
)


def forward(x: Tensor, out: Tensor, post: Tensor, mix: Tensor) -> Tensor:
    """``y[i] = post[i] out + sum of mix[i, j] x[j]``."""
    y = x.new_empty(x.shape)
    if y.numel():
        rows, outs = as_tiles(x), as_outs(out)
        strides = (rows.stride(0), rows.stride(1), outs.stride(0))
        args = (rows, outs, post.contiguous(), mix.contiguous(), y, *strides)
        run("hyper_connections_post.forward", _streams_post_kernel, rows, args)
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
        run("hyper_connections_post.backward", _streams_post_backward_kernel, rows, args)
    elif x.shape[-1] == 0:
        dpost.zero_(), dmix.zero_()
    return dx, dout, dpost, dmix
