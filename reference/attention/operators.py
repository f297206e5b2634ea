"""Attention beside the plain one: convolved causal probabilities, and neighbors on a line.

Attention to neighbors is attention to ranges of keys, one line for each dilated set. With dilation
d, tokens see only tokens of their own remainder by d: as many independent lines, padded to one
length, whose neighbors are adjacent.
"""

from collections.abc import Callable
from typing import Any, Optional

import torch
from torch import Tensor
from torch.nn.functional import conv2d

from liger_multi.reference.attention import attention
from liger_multi.reference.common.chunking import row_blocks, statistics_dtype
from liger_multi.reference.common.implementation import Implementation
from liger_multi.reference.common.strict import ordered_convolutions
from liger_multi.reference.cross_entropy.operators import Sparsemax

LOWEST = -1e30  # finite: sparsemax takes differences


def _probabilities(scores: Tensor, sparse: bool) -> Tensor:
    kind, (_, _, rows, cols) = statistics_dtype(scores.dtype), scores.shape
    p = scores.new_empty(scores.shape)
    flat, made = scores.flatten(0, 1), p.flatten(0, 1)
    place = torch.arange(cols, device=scores.device)
    for part in row_blocks(rows, 4 * flat.shape[0] * cols * kind.itemsize):
        row = torch.arange(part.start, part.stop, device=scores.device)[:, None]
        s = flat[:, part].to(kind).masked_fill(place > row, LOWEST)
        found = Sparsemax.forward(s) if sparse else torch.softmax(s, -1)
        made[:, part] = found.masked_fill_(place > row, 0).to(p.dtype)
    return p


class MultiTokenAttention:
    """Causal probabilities of given scores, and PyTorch's convolution of them."""

    @staticmethod
    def forward(
        scores: Tensor, weight: Tensor, bias: Optional[Tensor], stride: int, padding: int,
        dilation: int, groups: int, sparse: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Probabilities block by block of queries, then the convolution as a whole."""
        p = _probabilities(scores, sparse)
        with ordered_convolutions(p.device):
            y = conv2d(p, weight, bias, stride, padding, dilation, groups)
        return y.contiguous().tril_(), p

    @staticmethod
    def backward(
        dy: Tensor, weight: Tensor, bias: Optional[Tensor], p: Tensor, stride: int, padding: int,
        dilation: int, groups: int, sparse: bool, needs_scores: bool, needs_weight: bool,
        needs_bias: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """The convolution's gradients, then those of the rows' probabilities."""
        has_bias = bias is not None and needs_bias
        with ordered_convolutions(p.device):
            found = torch.ops.aten.convolution_backward(
                dy.tril(), p, weight, None if bias is None else list(bias.shape), [stride] * 2,
                [padding] * 2, [dilation] * 2, False, [0, 0], groups,
                [needs_scores, needs_weight, has_bias],
            )  # fmt: skip
        dp, dweight, dbias = (weight.new_empty(0) if x is None else x.contiguous() for x in found)
        if needs_scores:
            kind, cols = statistics_dtype(p.dtype), p.shape[-1]
            flat, shares = dp.view(-1, cols), p.view(-1, cols)
            for part in row_blocks(flat.shape[0], 4 * cols * kind.itemsize):
                share, g = shares[part].to(kind), flat[part].to(kind)
                if sparse:
                    flat[part] = Sparsemax.backward(g, share).to(p.dtype)
                else:
                    inner = (share * g).sum(-1, keepdim=True)
                    flat[part] = (share * (g - inner)).to(p.dtype)
        return dp, dweight, dbias


# --- neighbors on a line ---


def _lines(x: Tensor, dilation: int) -> Tensor:
    """``(B, H, L, D)`` as (B * dilation, H, tokens, D), padded with zeros."""
    if dilation == 1:
        return x
    batch, heads, length, size = x.shape
    tokens = -(-length // dilation)
    padded = x.new_zeros(batch, tokens * dilation, heads, size)
    padded[:, :length] = x.transpose(1, 2)
    apart = padded.view(batch, tokens, dilation, heads, size).permute(0, 2, 3, 1, 4)
    return apart.reshape(batch * dilation, heads, tokens, size)


def _joined(x: Tensor, dilation: int, length: int) -> Tensor:
    """The reverse, in memory (B, L, H, D)."""
    if dilation == 1:
        return x
    lines, heads, tokens, size = x.shape
    apart = x.view(lines // dilation, dilation, heads, tokens, size).permute(0, 3, 1, 2, 4)
    whole = apart.reshape(lines // dilation, tokens * dilation, heads, size)[:, :length]
    return whole.contiguous().transpose(1, 2)


def _neighbors(q: Tensor, length: int, reach: int, dilation: int) -> Tensor:
    """Ranges of keys, of one line for all where they are alike; no line sees its padding."""
    lines, tokens = q.shape[0], q.shape[2]
    place = torch.arange(tokens, device=q.device, dtype=torch.int32)
    if dilation == 1:
        low, high = (place - reach).clamp_(min=0), (place + (reach + 1)).clamp_(max=length)
        return torch.stack([low, high], -1)[None]
    own = torch.arange(lines, device=q.device) % dilation  # remainder of this line
    last = (length - own + dilation - 1).div(dilation, rounding_mode="floor").clamp(min=0)[:, None]
    low = torch.minimum((place - reach).clamp(min=0), last)
    high = torch.maximum(torch.minimum(place + reach + 1, last), low)
    return torch.stack([low.expand(lines, -1), high], -1).to(torch.int32)


def implement_neighborhood_attention(kernels: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Forward and backward of the contract over a backend's attention."""

    def forward(
        q: Tensor, k: Tensor, v: Tensor, reach: int, dilation: int, scale: float
    ) -> tuple[Tensor, Tensor]:
        a, b, c = (_lines(x, dilation) for x in (q, k, v))
        ranges = _neighbors(a, q.shape[2], reach, dilation)
        y, lse = kernels.forward(a, b, c, None, ranges, False, scale, 0.0)
        flat = _joined(lse.unsqueeze(-1), dilation, q.shape[2]).squeeze(-1)
        return _joined(y, dilation, q.shape[2]), flat.contiguous()

    def backward(
        dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor, reach: int,
        dilation: int, scale: float, needs_q: bool, needs_k: bool, needs_v: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        a, b, c, up, out = (_lines(x, dilation) for x in (q, k, v, dy, y))
        ends = _lines(lse.unsqueeze(-1), dilation).squeeze(-1)
        ranges = _neighbors(a, q.shape[2], reach, dilation)
        needs = (needs_q, needs_k, needs_v)
        found = kernels.backward(
            up, a, b, c, None, ranges, out, ends, False, scale, 0.0, *needs, False
        )
        grads = [
            _joined(x, dilation, q.shape[2]) if needed else x
            for x, needed in zip(found, needs, strict=False)
        ]
        return grads[0], grads[1], grads[2]

    return forward, backward


neighborhood_attention = Implementation(*implement_neighborhood_attention(attention))


OPERATORS = {
    "multi_token_attention": MultiTokenAttention,
    "neighborhood_attention": neighborhood_attention,
}
