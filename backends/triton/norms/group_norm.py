"""Group norm (arXiv:1803.08494) with fp32 statistics.

With n = (x - mean) * rstd of each group, y = w n + b of each channel:

    dw = sum of dy * n, db = sum of dy, over all of a channel
    dx = rstd * (dy w - c1 - n c2),  c1 = mean(dy w), c2 = mean(dy w n) over the group

A group that fits into registers is one tile, channels by positions, of one program, read once. In a
larger one, channels are rows: one kernel computes the moments (backward: the sums) of each, another
combines those of a group, a third applies them. The sums of dw and db over samples are made from
one fp32 number per channel and sample, in a fixed order.
"""

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_multi.backends.triton.common.launching import launch
from liger_multi.backends.triton.common.rows import (
    assume_cols,
    assume_rows,
    cdiv,
    checked_cols,
    load_or,
    power_of_2,
    round_to,
    sum_all_partials,
    tile_rows,
    warps,
)
from liger_multi.dispatch.launch import DeviceInfo, launch_config

# --- kernels ---


@triton.jit
def _group_norm_forward_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    mean_ptr,
    rstd_ptr,
    groups,
    each,
    cols,
    per_value,
    eps,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Group norm of a group that fits into registers.

    Program: one group of one sample, as a tile of channels by positions; reads x, and weight and
    bias of its channels; writes mean, rstd and y.
    """
    group = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, CHANNELS)
    col = tl.arange(0, BLOCK)
    mask = (channel < each)[:, None] & (col < cols)[None, :]
    assume_cols(cols, BLOCK)
    base = group * each * cols
    at = channel[:, None] * cols + col[None, :]
    x = tl.load(x_ptr + base + at, mask=mask, other=0.0).to(tl.float32)
    place = (group % groups) * each + channel
    weight = load_or(weight_ptr, place, channel < each, 1.0)[:, None]
    bias = load_or(bias_ptr, place, channel < each, 0.0)[:, None]
    mean = tl.sum(tl.sum(x, axis=1), axis=0) * per_value
    centered = tl.where(mask, x - mean, 0.0)
    squares = tl.sum(tl.sum(centered * centered, axis=1), axis=0)
    rstd = tl.rsqrt(squares * per_value + eps)
    tl.store(mean_ptr + group, mean)
    tl.store(rstd_ptr + group, rstd)
    y = centered * rstd * weight + bias
    tl.store(y_ptr + base + at, round_to(y, y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _group_norm_moments_kernel(
    x_ptr, moments_ptr, rows, cols, per_col, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """Mean of every channel, and the sum of squares around it, for larger groups.

    Program: ROWS channels, in steps of BLOCK positions. Each lane has a running mean and sum of
    squares of its own positions (Welford); the lanes are merged at the end.
    Writes the means to ``moments_ptr`` and, ``rows`` numbers later, the sums of squares.
    """
    first = tl.program_id(0).to(tl.int64) * ROWS
    lane = tl.arange(0, ROWS)
    row = first + lane
    assume_rows(x_ptr, cols, ROWS)
    at = lane[:, None] * cols + tl.arange(0, BLOCK)[None, :]
    means = tl.zeros([ROWS, BLOCK], tl.float32)
    squares = tl.zeros([ROWS, BLOCK], tl.float32)
    count = 0.0
    for start in tl.range(0, cols, BLOCK):
        col = start + tl.arange(0, BLOCK)
        mask = (row < rows)[:, None] & (col < cols)[None, :]
        x = tl.load(x_ptr + (first * cols + start) + at, mask=mask, other=0.0)
        count += 1.0
        before = x.to(tl.float32) - means
        means += tl.where(mask, before / count, 0.0)
        squares += tl.where(mask, before * (x.to(tl.float32) - means), 0.0)
    # a lane of the last step may have one value less
    lane = tl.arange(0, BLOCK) + (count - 1.0) * BLOCK
    counts = (count - tl.where(lane < cols, 0.0, 1.0))[None, :]
    mean = tl.sum(means * counts, axis=1) * per_col
    apart = means - mean[:, None]
    tl.store(moments_ptr + row, mean, mask=row < rows)
    total = tl.sum(squares + counts * apart * apart, axis=1)
    tl.store(moments_ptr + rows + row, total, mask=row < rows)


@triton.jit(do_not_specialize=["rows"])
def _group_norm_statistics_kernel(
    moments_ptr, mean_ptr, rstd_ptr, rows, group_stride, cols, per_value, eps, BLOCK: tl.constexpr
):
    """Mean and rstd of a group from the moments of its channels, which all have the same length.

    Program: one group, with two passes over its channels: their mean, then the sum of squares
    around it.
    """
    group = tl.program_id(0).to(tl.int64)
    assume_cols(group_stride)
    moments_ptr += group * group_stride
    squares_ptr = moments_ptr + rows
    means = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, group_stride, BLOCK):
        channel = start + tl.arange(0, BLOCK)
        means += tl.load(moments_ptr + channel, mask=channel < group_stride, other=0.0)
    mean = tl.sum(means, axis=0) / group_stride
    squares = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, group_stride, BLOCK):
        channel = start + tl.arange(0, BLOCK)
        mask = channel < group_stride
        apart = tl.load(moments_ptr + channel, mask=mask, other=0.0) - mean
        inside = tl.load(squares_ptr + channel, mask=mask, other=0.0)
        squares += tl.where(mask, inside + cols * apart * apart, 0.0)
    tl.store(mean_ptr + group, mean)
    tl.store(rstd_ptr + group, tl.rsqrt(tl.sum(squares, axis=0) * per_value + eps))


@triton.jit(do_not_specialize=["rows"])
def _group_norm_apply_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    mean_ptr,
    rstd_ptr,
    y_ptr,
    rows,
    cols,
    channels,
    each,
    tiles,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Normalize a tile of a larger group.

    Program: ROWS channels by BLOCK positions; reads x, mean and rstd of each channel's group, and
    the channel's weight and bias; writes y.
    """
    first = (tl.program_id(0) // tiles).to(tl.int64) * ROWS
    start = (tl.program_id(0) % tiles) * BLOCK
    row = first + tl.arange(0, ROWS)
    col = start + tl.arange(0, BLOCK)
    assume_rows(x_ptr, cols, ROWS)
    base = first * cols + start
    inside = row < rows
    mask = inside[:, None] & (col < cols)[None, :]
    at = tl.arange(0, ROWS)[:, None] * cols + tl.arange(0, BLOCK)[None, :]
    x = tl.load(x_ptr + base + at, mask=mask, other=0.0).to(tl.float32)
    mean = tl.load(mean_ptr + row // each, mask=inside, other=0.0)[:, None]
    rstd = tl.load(rstd_ptr + row // each, mask=inside, other=0.0)[:, None]
    y = (x - mean) * rstd * load_or(weight_ptr, row % channels, inside, 1.0)[:, None]
    y += load_or(bias_ptr, row % channels, inside, 0.0)[:, None]
    tl.store(y_ptr + base + at, round_to(y, y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def _group_norm_backward_kernel(
    dy_ptr,
    x_ptr,
    weight_ptr,
    mean_ptr,
    rstd_ptr,
    dx_ptr,
    sums_ptr,
    rows,
    groups,
    each,
    cols,
    per_value,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Gradients of a group that fits into registers.

    Program: one group of one sample, as in forward; reads dy and x once.
    Writes the sums of dy * n and of dy per channel and sample, the second ``rows`` numbers after
    the first, and dx where it is needed.
    """
    group = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, CHANNELS)
    col = tl.arange(0, BLOCK)
    mask = (channel < each)[:, None] & (col < cols)[None, :]
    assume_cols(cols, BLOCK)
    base = group * each * cols
    at = channel[:, None] * cols + col[None, :]
    dy = tl.load(dy_ptr + base + at, mask=mask, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + base + at, mask=mask, other=0.0).to(tl.float32)
    rstd = tl.load(rstd_ptr + group)
    n = tl.where(mask, (x - tl.load(mean_ptr + group)) * rstd, 0.0)
    dw = tl.sum(dy * n, axis=1)
    db = tl.sum(dy, axis=1)
    row = group * each + channel
    tl.store(sums_ptr + row, dw, mask=channel < each)
    tl.store(sums_ptr + rows + row, db, mask=channel < each)
    if dx_ptr is not None:
        place = (group % groups) * each + channel
        weight = load_or(weight_ptr, place, channel < each, 1.0)
        c1 = tl.sum(weight * db, axis=0) * per_value
        c2 = tl.sum(weight * dw, axis=0) * per_value
        dx = round_to((dy * weight[:, None] - c1 - n * c2) * rstd, dx_ptr.dtype.element_ty)
        tl.store(dx_ptr + base + at, dx, mask=mask)


@triton.jit(do_not_specialize=["rows"])
def _group_norm_sums_kernel(
    dy_ptr,
    x_ptr,
    mean_ptr,
    rstd_ptr,
    sums_ptr,
    rows,
    cols,
    each,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sums of dy * n and of dy of every channel, for larger groups.

    Program: ROWS channels, in steps of BLOCK positions; each lane adds its own positions. Writes as
    the kernel above does.
    """
    first = tl.program_id(0).to(tl.int64) * ROWS
    lane = tl.arange(0, ROWS)
    row = first + lane
    assume_rows(x_ptr, cols, ROWS)
    at = lane[:, None] * cols + tl.arange(0, BLOCK)[None, :]
    inside = row < rows
    mean = tl.load(mean_ptr + row // each, mask=inside, other=0.0)[:, None]
    rstd = tl.load(rstd_ptr + row // each, mask=inside, other=0.0)[:, None]
    dw = tl.zeros([ROWS, BLOCK], tl.float32)
    db = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in tl.range(0, cols, BLOCK):
        col = start + tl.arange(0, BLOCK)
        mask = inside[:, None] & (col < cols)[None, :]
        dy = tl.load(dy_ptr + (first * cols + start) + at, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + (first * cols + start) + at, mask=mask, other=0.0).to(tl.float32)
        dw += dy * ((x - mean) * rstd)
        db += dy
    tl.store(sums_ptr + row, tl.sum(dw, axis=1), mask=inside)
    tl.store(sums_ptr + rows + row, tl.sum(db, axis=1), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _group_norm_means_kernel(
    sums_ptr, weight_ptr, means_ptr, rows, groups, group_stride, per_value, BLOCK: tl.constexpr
):
    """The means c1 and c2 of a group, from the sums of its channels.

    Program: one group, in steps of BLOCK channels; writes c1 and c2 side by side.
    """
    group = tl.program_id(0).to(tl.int64)
    assume_cols(group_stride)
    sums_ptr += group * group_stride
    other_ptr = sums_ptr + rows
    c1 = tl.zeros([BLOCK], tl.float32)
    c2 = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, group_stride, BLOCK):
        channel = start + tl.arange(0, BLOCK)
        mask = channel < group_stride
        weight = load_or(weight_ptr, (group % groups) * group_stride + channel, mask, 1.0)
        c1 += tl.load(other_ptr + channel, mask=mask, other=0.0) * weight
        c2 += tl.load(sums_ptr + channel, mask=mask, other=0.0) * weight
    tl.store(means_ptr + 2 * group, tl.sum(c1, axis=0) * per_value)
    tl.store(means_ptr + 2 * group + 1, tl.sum(c2, axis=0) * per_value)


@triton.jit
def _group_norm_backward_apply_kernel(
    dy_ptr,
    x_ptr,
    weight_ptr,
    mean_ptr,
    rstd_ptr,
    means_ptr,
    dx_ptr,
    rows,
    cols,
    channels,
    each,
    tiles,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Gradient of x of a tile of a larger group.

    Program: ROWS channels by BLOCK positions; reads dy, x, and mean, rstd, c1 and c2 of each
    channel's group; writes dx.
    """
    first = (tl.program_id(0) // tiles).to(tl.int64) * ROWS
    start = (tl.program_id(0) % tiles) * BLOCK
    row = first + tl.arange(0, ROWS)
    col = start + tl.arange(0, BLOCK)
    assume_rows(x_ptr, cols, ROWS)
    base = first * cols + start
    inside = row < rows
    mask = inside[:, None] & (col < cols)[None, :]
    at = tl.arange(0, ROWS)[:, None] * cols + tl.arange(0, BLOCK)[None, :]
    group = row // each
    dy = tl.load(dy_ptr + base + at, mask=mask, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + base + at, mask=mask, other=0.0).to(tl.float32)
    mean = tl.load(mean_ptr + group, mask=inside, other=0.0)[:, None]
    rstd = tl.load(rstd_ptr + group, mask=inside, other=0.0)[:, None]
    c1 = tl.load(means_ptr + 2 * group, mask=inside, other=0.0)[:, None]
    c2 = tl.load(means_ptr + 2 * group + 1, mask=inside, other=0.0)[:, None]
    weight = load_or(weight_ptr, row % channels, inside, 1.0)[:, None]
    dx = (dy * weight - c1 - (x - mean) * rstd * c2) * rstd
    tl.store(dx_ptr + base + at, round_to(dx, dx_ptr.dtype.element_ty), mask=mask)


# --- launchers ---

JOIN_BLOCK = 1024  # channels of a group that are joined at a time


@dataclass(frozen=True)
class GroupConfig:
    """``rows`` channels x ``block`` positions a tile, a whole group where ``whole`` is 1."""

    rows: int
    block: int
    num_warps: int
    whole: int


def forward_config(info: DeviceInfo, each: int, cols: int) -> GroupConfig:
    """Groups up to 16384 values are one tile, 16 values a thread; of others, tiles of 4096."""
    return _config(info, each, cols, 16384)


def backward_config(info: DeviceInfo, each: int, cols: int) -> GroupConfig:
    """The same with groups up to 8192 values, since two tensors are read."""
    return _config(info, each, cols, 8192)


def _config(info: DeviceInfo, group_rows: int, cols: int, largest: int) -> GroupConfig:
    rows, block = power_of_2(checked_cols(group_rows)), power_of_2(checked_cols(cols))
    if rows * block <= largest:
        threads = min(max(32, rows * block // 16), info.max_threads)
        return GroupConfig(rows, block, warps(threads, info.warp_size), 1)
    block = min(block, 2048)
    rows = tile_rows(4096 // block, cols)
    return GroupConfig(rows, block, warps(256, info.warp_size), 0)


def _sizes(x: Tensor, num_groups: int) -> tuple[int, int, int, int]:
    """Channels of all samples, channels, channels of a group, positions."""
    samples, channels = x.shape[:2]
    return samples * channels, channels, channels // num_groups, math.prod(x.shape[2:])


def forward(
    x: Tensor, num_groups: int, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """y, and mean and rstd (fp32) of every group."""
    y = x.new_empty(x.shape)
    mean, rstd = (x.new_empty((x.shape[0], num_groups), dtype=torch.float32) for _ in range(2))
    if x.numel() == 0:
        return y, mean, rstd
    weight, bias = (None if t is None else t.contiguous() for t in (weight, bias))
    x = x.contiguous()
    rows, channels, group_rows, cols = _sizes(x, num_groups)
    k = launch_config("group_norm.forward", forward_config, x.device, each=group_rows, cols=cols)
    scale = 1.0 / (group_rows * cols)
    if k.whole:
        launch(
            _group_norm_forward_kernel,
            rows // group_rows,
            (x, weight, bias, y, mean, rstd, num_groups, group_rows, cols, scale, eps),
            (k.rows, k.block),
            k.num_warps,
        )
        return y, mean, rstd
    moments = x.new_empty((2, rows), dtype=torch.float32)
    launch(
        _group_norm_moments_kernel,
        cdiv(rows, k.rows),
        (x, moments, rows, cols, 1.0 / cols),
        (k.rows, k.block),
        k.num_warps,
    )
    launch(
        _group_norm_statistics_kernel,
        rows // group_rows,
        (moments, mean, rstd, rows, group_rows, cols, scale, eps),
        (JOIN_BLOCK,),
        4,
    )
    tiles = cdiv(cols, k.block)
    launch(
        _group_norm_apply_kernel,
        cdiv(rows, k.rows) * tiles,
        (x, weight, bias, mean, rstd, y, rows, cols, channels, group_rows, tiles),
        (k.rows, k.block),
        k.num_warps,
    )
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
    """Gradients of x, weight and bias; empty tensors if not needed."""
    dtypes = (x.dtype if weight is None else weight.dtype, bias_dtype or x.dtype)
    dx = x.new_empty(x.shape if needs_x else 0)
    if x.numel() == 0:
        sums_of_parameters: tuple[Tensor, ...] = tuple(
            x.new_zeros(x.shape[1], dtype=d) for d in dtypes
        )
    else:
        dy, x, mean, rstd = (t.contiguous() for t in (dy, x, mean, rstd))
        weight = None if weight is None else weight.contiguous()
        moves = x.numel() > mean.numel()  # the norm of a single value does not depend on it
        target = dx if needs_x and moves else None
        sums = _launch(dy, x, num_groups, weight, mean, rstd, target)
        if not moves:
            dx.zero_()
        sums_of_parameters = (
            sum_all_partials(sums, *dtypes) if needs_weight or needs_bias else (dx, dx)
        )
    dweight = sums_of_parameters[0] if needs_weight else x.new_empty(0, dtype=dtypes[0])
    return dx, dweight, sums_of_parameters[1] if needs_bias else x.new_empty(0, dtype=dtypes[1])


def _launch(
    dy: Tensor,
    x: Tensor,
    num_groups: int,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    dx: Tensor | None,
) -> Tensor:
    """Fill dx; the sums of dy * n and of dy of every sample and channel."""
    rows, channels, group_rows, cols = _sizes(x, num_groups)
    sums = x.new_empty((2, x.shape[0], channels), dtype=torch.float32)
    k = launch_config("group_norm.backward", backward_config, x.device, each=group_rows, cols=cols)
    scale, tile = 1.0 / (group_rows * cols), (k.rows, k.block)
    if k.whole:
        launch(
            _group_norm_backward_kernel,
            rows // group_rows,
            (dy, x, weight, mean, rstd, dx, sums, rows, num_groups, group_rows, cols, scale),
            tile,
            k.num_warps,
        )
        return sums
    launch(
        _group_norm_sums_kernel,
        cdiv(rows, k.rows),
        (dy, x, mean, rstd, sums, rows, cols, group_rows),
        tile,
        k.num_warps,
    )
    if dx is not None:
        means, tiles = x.new_empty(2 * rows // group_rows, dtype=torch.float32), cdiv(cols, k.block)
        launch(
            _group_norm_means_kernel,
            rows // group_rows,
            (sums, weight, means, rows, num_groups, group_rows, scale),
            (JOIN_BLOCK,),
            4,
        )
        launch(
            _group_norm_backward_apply_kernel,
            cdiv(rows, k.rows) * tiles,
            (dy, x, weight, mean, rstd, means, dx, rows, cols, channels, group_rows, tiles),
            tile,
            k.num_warps,
        )
    return sums
