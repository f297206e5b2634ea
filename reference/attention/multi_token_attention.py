"""Causal probabilities of given scores, and PyTorch's convolution of them."""

import torch
from torch import Tensor
from torch.nn.functional import conv2d

from liger_multi.reference.common.chunking import row_blocks, statistics_dtype
from liger_multi.reference.common.strict import ordered_convolutions
from liger_multi.reference.cross_entropy import sparsemax

LOWEST = -1e30  # finite: sparsemax takes differences


def _probabilities(scores: Tensor, sparse: bool) -> Tensor:
    acc_dtype, (_, _, rows, cols) = statistics_dtype(scores.dtype), scores.shape
    p = scores.new_empty(scores.shape)
    flat, out = scores.flatten(0, 1), p.flatten(0, 1)
    column = torch.arange(cols, device=scores.device)
    for part in row_blocks(rows, 4 * flat.shape[0] * cols * acc_dtype.itemsize):
        row = torch.arange(part.start, part.stop, device=scores.device)[:, None]
        s = flat[:, part].to(acc_dtype).masked_fill(column > row, LOWEST)
        probs = sparsemax.forward(s) if sparse else torch.softmax(s, -1)
        out[:, part] = probs.masked_fill_(column > row, 0).to(p.dtype)
    return p


def forward(
    scores: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: int,
    padding: int,
    dilation: int,
    groups: int,
    sparse: bool,
) -> tuple[Tensor, Tensor]:
    """Probabilities block by block of queries, then the convolution as a whole."""
    p = _probabilities(scores, sparse)
    with ordered_convolutions(p.device):
        y = conv2d(p, weight, bias, stride, padding, dilation, groups)
    return y.contiguous().tril_(), p


def backward(
    dy: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    p: Tensor,
    stride: int,
    padding: int,
    dilation: int,
    groups: int,
    sparse: bool,
    needs_scores: bool,
    needs_weight: bool,
    needs_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The convolution's gradients, then those of the rows' probabilities."""
    has_bias = bias is not None and needs_bias
    with ordered_convolutions(p.device):
        gradients = torch.ops.aten.convolution_backward(
            dy.tril(),
            p,
            weight,
            bias_sizes=None if bias is None else list(bias.shape),
            stride=[stride] * 2,
            padding=[padding] * 2,
            dilation=[dilation] * 2,
            transposed=False,
            output_padding=[0, 0],
            groups=groups,
            output_mask=[needs_scores, needs_weight, has_bias],
        )
    dp, dweight, dbias = (weight.new_empty(0) if x is None else x.contiguous() for x in gradients)
    if needs_scores:
        acc_dtype, cols = statistics_dtype(p.dtype), p.shape[-1]
        flat, shares = dp.view(-1, cols), p.view(-1, cols)
        for part in row_blocks(flat.shape[0], 4 * cols * acc_dtype.itemsize):
            share, g = shares[part].to(acc_dtype), flat[part].to(acc_dtype)
            if sparse:
                flat[part] = sparsemax.backward(g, share).to(p.dtype)
            else:
                inner = (share * g).sum(-1, keepdim=True)
                flat[part] = (share * (g - inner)).to(p.dtype)
    return dp, dweight, dbias
