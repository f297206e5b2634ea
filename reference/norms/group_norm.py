"""GroupNorm over a sample's groups of channels, in the roundings of PyTorch's own."""

import math

import torch
from torch import Tensor

from liger_multi.reference.common.chunking import row_blocks, statistics_dtype


def forward(
    x: Tensor, num_groups: int, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """PyTorch's kernel, with parameters in fp32: that keeps the statistics in fp32."""
    acc_dtype, (samples, channels), positions = (
        statistics_dtype(x.dtype),
        x.shape[:2],
        math.prod(x.shape[2:]),
    )
    y = x.new_empty(x.shape)
    mean, rstd = (x.new_empty((samples, num_groups), dtype=acc_dtype) for _ in range(2))
    if x.numel() == 0:
        return y, mean.zero_(), rstd.zero_()
    # whose kernel on a CPU reads memory without strides
    w, b = (p if p is None else p.to(acc_dtype).contiguous() for p in (weight, bias))
    if w is None and acc_dtype != x.dtype:
        w = x.new_ones(channels, dtype=acc_dtype)
    # only on a CPU the kernel takes values of another dtype than its parameters
    widen = x.device.type != "cpu"
    for block in row_blocks(samples, 3 * channels * positions * acc_dtype.itemsize):
        f = (x[block].to(acc_dtype) if widen else x[block]).contiguous()
        sizes = (f.shape[0], channels, positions, num_groups)
        y[block], mean[block], rstd[block] = torch.native_group_norm(f, w, b, *sizes, eps)
    return y, mean, rstd


def backward(
    dy: Tensor,
    x: Tensor,
    num_groups: int,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    bias_dtype: torch.dtype | None,
    needs_x: bool,
    needs_weight: bool,
    needs_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """As of a layer norm whose rows are groups; ``dw`` and ``db`` sum a channel's values."""
    acc_dtype, (samples, channels) = rstd.dtype, x.shape[:2]
    dx = x.new_empty(x.shape if needs_x else (0,))
    dw = x.new_zeros(channels if needs_weight else 0, dtype=acc_dtype)
    db = x.new_zeros(channels if needs_bias else 0, dtype=acc_dtype)
    sample_bytes = 5 * math.prod(x.shape[1:]) * acc_dtype.itemsize
    for block in row_blocks(samples if x.numel() else 0, sample_bytes):
        shape = (block.stop - block.start, num_groups, channels // num_groups, -1)
        m, r = (t[block, :, None, None] for t in (mean, rstd))
        n = (x[block].to(acc_dtype).reshape(shape) - m) * r
        g = dy[block].to(acc_dtype).reshape(shape)
        if needs_weight:
            dw += (g * n).sum((0, 3)).flatten()
        if needs_bias:
            db += g.sum((0, 3)).flatten()
        if needs_x:
            g = g if weight is None else g * weight.to(acc_dtype).view(num_groups, -1, 1)
            g = g - g.mean((2, 3), keepdim=True)
            # n sums to zero, so that the mean of g does not change that of g * n
            dn = (g - n * (g * n).mean((2, 3), keepdim=True)) * r
            dx[block] = dn.view(-1, *x.shape[1:]).to(x.dtype)
    dweight = dw.to(x.dtype if weight is None else weight.dtype)
    return dx, dweight, db.to(bias_dtype or x.dtype)
