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
    kind, parts = statistics_dtype(x.dtype), _parts_of_rows(x, out, post, mix)
    y = x.new_empty(parts[0].shape)
    for block in row_blocks(y.shape[0], 3 * y.shape[1:].numel() * kind.itemsize):
        r, o, p, m = (t[block].to(kind) for t in parts)
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
    given, needs = (x, out, post, mix), (needs_x, needs_out, needs_post, needs_mix)
    kind, parts, up = statistics_dtype(x.dtype), _parts_of_rows(*given), as_streams(dy)
    made = [g.new_empty(p.shape if n else 0) for g, p, n in zip(given, parts, needs, strict=True)]
    for block in row_blocks(up.shape[0], 4 * up.shape[1:].numel() * kind.itemsize):
        d = up[block].to(kind)
        r, o, p, m = (t[block].to(kind) for t in parts)
        if needs_x:
            made[0][block] = (m.mT @ d).to(x.dtype)
        if needs_out:
            made[1][block] = (p * d).sum(1, keepdim=True).to(out.dtype)
        if needs_post:
            made[2][block] = (d * o).sum(-1, keepdim=True).to(post.dtype)
        if needs_mix:
            made[3][block] = (d @ r.mT).to(mix.dtype)
    dx, dout, dpost, dmix = (
        t.view(g.shape) if n else t for t, g, n in zip(made, given, needs, strict=True)
    )
    return dx, dout, dpost, dmix
