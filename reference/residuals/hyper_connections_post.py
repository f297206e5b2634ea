"""Residual streams after a block, ``y[i] = post[i] out + sum of mix[i, j] x[j]``."""

from torch import Tensor

from liger_multi.reference.common.chunking import row_blocks, statistics_dtype
from liger_multi.reference.residuals.hyper_connections_pre import as_streams


def _parts_of_rows(x: Tensor, out: Tensor, post: Tensor, mix: Tensor) -> tuple[Tensor, ...]:
    rows = as_streams(x)
    count, streams, cols = rows.shape
    return (
        rows,
        out.reshape(count, 1, cols),
        post.reshape(count, streams, 1),
        mix.reshape(count, streams, streams),
    )


def forward(x: Tensor, out: Tensor, post: Tensor, mix: Tensor) -> Tensor:
    """Block by block of rows, in fp32."""
    acc_dtype, parts = statistics_dtype(x.dtype), _parts_of_rows(x, out, post, mix)
    y = x.new_empty(parts[0].shape)
    for block in row_blocks(y.shape[0], 3 * y.shape[1:].numel() * acc_dtype.itemsize):
        r, o, p, m = (t[block].to(acc_dtype) for t in parts)
        y[block] = (p * o + m @ r).to(x.dtype)
    return y.view(x.shape)


def backward(
    dy: Tensor,
    x: Tensor,
    out: Tensor,
    post: Tensor,
    mix: Tensor,
    needs_x: bool,
    needs_out: bool,
    needs_post: bool,
    needs_mix: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Products with the transposes."""
    inputs, needs = (x, out, post, mix), (needs_x, needs_out, needs_post, needs_mix)
    acc_dtype, parts, up = statistics_dtype(x.dtype), _parts_of_rows(*inputs), as_streams(dy)
    gradients = [
        g.new_empty(p.shape if n else 0) for g, p, n in zip(inputs, parts, needs, strict=True)
    ]
    for block in row_blocks(up.shape[0], 4 * up.shape[1:].numel() * acc_dtype.itemsize):
        d = up[block].to(acc_dtype)
        r, o, p, m = (t[block].to(acc_dtype) for t in parts)
        if needs_x:
            gradients[0][block] = (m.mT @ d).to(x.dtype)
        if needs_out:
            gradients[1][block] = (p * d).sum(1, keepdim=True).to(out.dtype)
        if needs_post:
            gradients[2][block] = (d * o).sum(-1, keepdim=True).to(post.dtype)
        if needs_mix:
            gradients[3][block] = (d @ r.mT).to(mix.dtype)
    dx, dout, dpost, dmix = (
        t.view(g.shape) if n else t for t, g, n in zip(gradients, inputs, needs, strict=True)
    )
    return dx, dout, dpost, dmix
