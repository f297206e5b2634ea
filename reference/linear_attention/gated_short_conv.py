"""``y = c (causal convolution of b v)`` of x, which is b, c and v side by side."""

from torch import Tensor

from liger_multi.reference.common.chunking import statistics_dtype
from liger_multi.reference.linear_attention.convolution import Sums, blocks_of, filter_of, window_of


def forward(x: Tensor, weight: Tensor, bias: Tensor | None, segments: Tensor | None) -> Tensor:
    """Block by block of tokens."""
    taps_of = filter_of(weight, bias, segments, statistics_dtype(x.dtype))
    b, c, v = x.chunk(3, -1)
    y = x.new_empty(c.shape)
    for block in blocks_of(x):
        product = window_of(b, None, block, taps_of.before) * window_of(
            v, None, block, taps_of.before
        )
        y[:, block] = taps_of.sums(taps_of.taps(product, block)) * c[:, block]
    return y


def backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    segments: Tensor | None,
    needs_x: bool,
    needs_weight: bool,
    needs_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """With ``dz`` the gradient of ``z = b v``: ``db = dz v`` and ``dv = dz b``."""
    acc_dtype = statistics_dtype(x.dtype)
    taps_of = filter_of(weight, bias, segments, acc_dtype)
    b, c, v = x.chunk(3, -1)
    dx, total = x.new_empty(x.shape if needs_x else 0), Sums(taps_of, needs_weight, needs_bias)
    gradients = dx.chunk(3, -1) if needs_x else ()
    reach = taps_of.before
    pending = x.new_zeros(x.shape[0], reach, c.shape[2], dtype=acc_dtype)

    def write(dz: Tensor, first: int) -> None:
        last, early = first + dz.shape[1], max(0, -first)
        tokens = slice(first + early, max(last, 0))
        gradients[0][:, tokens] = dz[:, early:] * v[:, tokens]
        gradients[2][:, tokens] = dz[:, early:] * b[:, tokens]

    for block in blocks_of(x):
        product = window_of(b, None, block, reach) * window_of(v, None, block, reach)
        taps, upstream = taps_of.taps(product, block), dy[:, block].to(acc_dtype)
        du = upstream * c[:, block]
        total.add(du, taps)
        if needs_x:
            gradients[1][:, block] = taps_of.sums(taps) * upstream
            dz_block, pending = taps_of.transposed(du, block, pending)
            write(dz_block, block.start - reach)
    if needs_x:
        write(pending, x.shape[1] - reach)
    return dx, *total.gradients(weight, x if bias is None else bias)
