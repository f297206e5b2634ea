"""Group norm (arXiv:1803.08494) with fp32 statistics.

:mod:`.group_norm_kernels` has the maths; the launchers are here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Optional

import torch
from torch import Tensor

from liger_multi.backends.triton.common.launching import launch
from liger_multi.backends.triton.common.rows import (
    cdiv,
    checked_cols,
    power_of_2,
    sum_all_partials,
    tile_rows,
    warps,
)
from liger_multi.backends.triton.norms.group_norm_kernels import (
    _group_norm_apply_kernel,
    _group_norm_backward_apply_kernel,
    _group_norm_backward_kernel,
    _group_norm_forward_kernel,
    _group_norm_means_kernel,
    _group_norm_moments_kernel,
    _group_norm_statistics_kernel,
    _group_norm_sums_kernel,
)
from liger_multi.dispatch.launch import DeviceInfo, launch_config

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


def _config(info: DeviceInfo, each: int, cols: int, largest: int) -> GroupConfig:
    rows, block = power_of_2(checked_cols(each)), power_of_2(checked_cols(cols))
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
    x: Tensor, num_groups: int, weight: Optional[Tensor], bias: Optional[Tensor], eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """y, and mean and rstd (fp32) of every group."""
    y = x.new_empty(x.shape)
    mean, rstd = (x.new_empty((x.shape[0], num_groups), dtype=torch.float32) for _ in range(2))
    if x.numel() == 0:
        return y, mean, rstd
    weight, bias = (None if t is None else t.contiguous() for t in (weight, bias))
    x = x.contiguous()
    rows, channels, each, cols = _sizes(x, num_groups)
    k = launch_config("group_norm.forward", forward_config, x.device, each=each, cols=cols)
    scale = 1.0 / (each * cols)
    if k.whole:
        launch(
            _group_norm_forward_kernel, rows // each,
            (x, weight, bias, y, mean, rstd, num_groups, each, cols, scale, eps),
            (k.rows, k.block), k.num_warps,
        )  # fmt: skip
        return y, mean, rstd
    moments = x.new_empty((2, rows), dtype=torch.float32)
    launch(
        _group_norm_moments_kernel, cdiv(rows, k.rows), (x, moments, rows, cols, 1.0 / cols),
        (k.rows, k.block), k.num_warps,
    )  # fmt: skip
    launch(
        _group_norm_statistics_kernel, rows // each,
        (moments, mean, rstd, rows, each, cols, scale, eps), (JOIN_BLOCK,), 4,
    )  # fmt: skip
    tiles = cdiv(cols, k.block)
    launch(
        _group_norm_apply_kernel, cdiv(rows, k.rows) * tiles,
        (x, weight, bias, mean, rstd, y, rows, cols, channels, each, tiles), (k.rows, k.block),
        k.num_warps,
    )  # fmt: skip
    return y, mean, rstd


def backward(
    dy: Tensor, x: Tensor, num_groups: int, weight: Optional[Tensor], mean: Tensor, rstd: Tensor,
    bias_dtype: Optional[torch.dtype], needs_x: bool, needs_weight: bool, needs_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of x, weight and bias; one that nobody needs is an empty tensor."""
    kinds = (x.dtype if weight is None else weight.dtype, bias_dtype or x.dtype)
    dx = x.new_empty(x.shape if needs_x else 0)
    if x.numel() == 0:
        made: tuple[Tensor, ...] = tuple(x.new_zeros(x.shape[1], dtype=d) for d in kinds)
    else:
        dy, x, mean, rstd = (t.contiguous() for t in (dy, x, mean, rstd))
        weight = None if weight is None else weight.contiguous()
        moves = x.numel() > mean.numel()  # the norm of a single value does not
        target = dx if needs_x and moves else None
        sums = _launch(dy, x, num_groups, weight, mean, rstd, target)
        if not moves:
            dx.zero_()
        made = sum_all_partials(sums, *kinds) if needs_weight or needs_bias else (dx, dx)
    dweight = made[0] if needs_weight else x.new_empty(0, dtype=kinds[0])
    return dx, dweight, made[1] if needs_bias else x.new_empty(0, dtype=kinds[1])


def _launch(
    dy: Tensor, x: Tensor, num_groups: int, weight: Optional[Tensor], mean: Tensor, rstd: Tensor,
    dx: Optional[Tensor],
) -> Tensor:  # fmt: skip
    """Fill dx; the sums of dy * n and of dy of every sample and channel."""
    rows, channels, each, cols = _sizes(x, num_groups)
    sums = x.new_empty((2, x.shape[0], channels), dtype=torch.float32)
    k = launch_config("group_norm.backward", backward_config, x.device, each=each, cols=cols)
    scale, tile = 1.0 / (each * cols), (k.rows, k.block)
    if k.whole:
        launch(
            _group_norm_backward_kernel, rows // each,
            (dy, x, weight, mean, rstd, dx, sums, rows, num_groups, each, cols, scale), tile,
            k.num_warps,
        )  # fmt: skip
        return sums
    launch(
        _group_norm_sums_kernel, cdiv(rows, k.rows), (dy, x, mean, rstd, sums, rows, cols, each),
        tile, k.num_warps,
    )  # fmt: skip
    if dx is not None:
        means, tiles = x.new_empty(2 * rows // each, dtype=torch.float32), cdiv(cols, k.block)
        launch(
            _group_norm_means_kernel, rows // each,
            (sums, weight, means, rows, num_groups, each, scale), (JOIN_BLOCK,), 4,
        )  # fmt: skip
        launch(
            _group_norm_backward_apply_kernel, cdiv(rows, k.rows) * tiles,
            (dy, x, weight, mean, rstd, means, dx, rows, cols, channels, each, tiles), tile,
            k.num_warps,
        )  # fmt: skip
    return sums
