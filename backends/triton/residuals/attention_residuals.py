"""Attention over depth (arXiv:2603.15031): launches of :mod:`.attention_residuals_kernels`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Optional

import torch
from torch import Tensor

from liger_multi.backends.triton.common.launching import launch
from liger_multi.backends.triton.common.rows import (
    cdiv,
    checked_cols,
    power_of_2,
    sum_partials,
    tile_rows,
    warps,
    with_stride,
)
from liger_multi.backends.triton.residuals.attention_residuals_gradients import (
    _attention_residuals_backward_kernel,
    _attention_residuals_backward_wide_kernel,
)
from liger_multi.backends.triton.residuals.attention_residuals_kernels import (
    _attention_residuals_forward_kernel,
    _attention_residuals_forward_wide_kernel,
)
from liger_multi.dispatch.launch import DeviceInfo, launch_config
from liger_multi.reference.residuals import attention_residuals as reference

WIDEST = 8192  # columns; beyond, a row is read in steps
TILE_BYTES = 16384  # of a few blocks of a token, at a time


@dataclass(frozen=True)
class ResidualConfig:
    """``group`` blocks of ``rows`` tokens a tile, whole or in steps of ``block`` columns.

    Loads go ``stages`` - 1 tiles ahead; backward has ``programs`` persistent programs.
    """

    rows: int
    group: int
    block: int
    stages: int
    num_warps: int
    programs: int


def backward_config(info: DeviceInfo, rows: int, cols: int, size: int) -> ResidualConfig:
    """Tiles of 16 KiB; a thread has all blocks of 8 columns, of 16 where a tile has one or two.

    Narrow tokens are several, a block of each at a time. About two programs a core: what they have
    read once is still in the cache when they come back.
    """
    block = power_of_2(checked_cols(cols))
    if block > WIDEST:
        checked_cols(2 * cols)  # of two rows, a block apart
        programs = min(rows, 4 * info.cores)
        return ResidualConfig(1, 2, 2048, 1, warps(256, info.warp_size), programs)
    tile = max(1, min(4096 // block, power_of_2(rows))) if block < 512 else 1
    group = 1 if block < 512 else max(1, min(8, TILE_BYTES // size // block))
    threads = max(32, min(tile * block // 8, 256 if block <= 4096 else 512))
    programs = min(cdiv(rows, tile), info.cores * max(1, 512 // threads))
    return ResidualConfig(tile, group, block, 1, warps(threads, info.warp_size), programs)


def forward_config(info: DeviceInfo, rows: int, cols: int, size: int) -> ResidualConfig:
    """The same tiles, one per program; loads in three stages where on-chip memory holds 12 tiles.

    A thread has 32 columns, of two blocks: programs of few warps wait less for each other's sums.
    """
    k = backward_config(info, rows, cols, size)
    stages = max(1, min(3, info.shared_bytes // (4 * TILE_BYTES)))
    if size == 2 and k.rows == 1 and k.block <= WIDEST:
        threads = max(32, k.block // 32)
        k = replace(k, group=min(2, k.group), num_warps=warps(threads, info.warp_size))
    return replace(k, stages=stages, programs=0)


def _config(direction: str, formula: Callable[..., ResidualConfig], v: Tensor) -> ResidualConfig:
    return launch_config(
        f"attention_residuals.{direction}", formula, v.device, rows=v.shape[1], cols=v.shape[2],
        size=v.element_size(),
    )  # fmt: skip


def _view(blocks: Tensor) -> Tensor:
    """``(N, ..., D)`` as (N, rows, D) with adjacent columns."""
    v = blocks.reshape(blocks.shape[0], blocks.shape[1:-1].numel(), blocks.shape[-1])
    return v if v.stride(2) == 1 or v.shape[2] == 1 else v.contiguous()


def _near(group: int, v: Tensor) -> int:
    """As many blocks as span less than 2 GiB, here and in a contiguous tensor."""
    apart = max(v.stride(0), v.shape[1] * v.shape[2]) * v.element_size()
    while group > 1 and group * apart >= 2**31:
        group //= 2
    return group


def forward(
    blocks: Tensor, query: Tensor, weight: Optional[Tensor], eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """y, and p and rstd (fp32) of every block and token."""
    if blocks.numel() == 0:
        return reference.forward(blocks, query, weight, eps)
    v = _view(blocks)
    count, rows, cols = v.shape
    y = v.new_empty(blocks.shape[1:])
    p, rstd = (v.new_empty(blocks.shape[:-1], dtype=torch.float32) for _ in range(2))
    k = _config("forward", forward_config, v)
    weight = None if weight is None else weight.contiguous()
    tensors = (v, query.contiguous(), weight, y, p, rstd)
    numbers = (v.stride(0), v.stride(1), count, rows, cols, eps)
    tile, group = tile_rows(k.rows, v.stride(1)), _near(k.group, v)
    lanes = tile_rows(max(1, min(64, 512 // tile)), rows)
    if k.block >= cols:
        launch(
            _attention_residuals_forward_kernel, cdiv(rows, tile), (*tensors, *numbers),
            (tile, group, k.block, lanes, k.stages), k.num_warps,
        )  # fmt: skip
    else:
        launch(
            _attention_residuals_forward_wide_kernel, rows, (*tensors, *numbers),
            (group, k.block, lanes, k.stages), k.num_warps,
        )  # fmt: skip
    return y, p, rstd


def backward(
    dy: Tensor, blocks: Tensor, query: Tensor, weight: Optional[Tensor], p: Tensor, rstd: Tensor,
    needs_blocks: bool, needs_query: bool, needs_weight: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of blocks, query and weight; one that nobody needs is an empty tensor."""
    needs_weight = needs_weight and weight is not None
    needs_direction = needs_query or needs_weight
    if blocks.numel() == 0 or not (needs_blocks or needs_direction):
        needs = (needs_blocks, needs_query, needs_weight)
        return reference.backward(dy, blocks, query, weight, p, rstd, *needs)
    v, (dy, dy_stride) = _view(blocks), with_stride(dy)
    count, rows, cols = v.shape
    k = _config("backward", backward_config, v)
    tile, group = tile_rows(k.rows, v.stride(1), dy_stride), _near(k.group, v)
    dv = v.new_empty(blocks.shape) if needs_blocks else None
    weight = None if weight is None else weight.contiguous()
    query = query.contiguous()
    wide = k.block < cols
    partial = None
    if needs_direction:  # a wide row's sums are in memory, and grow there
        empty = v.new_zeros if wide else v.new_empty
        partial = empty(k.programs, cols, dtype=torch.float32)
    inner = p.new_empty(k.programs, 2, tile, count)
    tensors = (dy, v, query, weight, p.contiguous(), rstd.contiguous(), dv, partial, inner)
    numbers = (dy_stride, v.stride(0), v.stride(1), count, rows, cols)
    kernel, constants = _attention_residuals_backward_kernel, (group, k.block, k.stages)
    if wide:
        kernel = _attention_residuals_backward_wide_kernel
    launch(
        kernel, k.programs, (*tensors, *numbers), constants if wide else (tile, *constants),
        k.num_warps,
    )  # fmt: skip
    dquery = dweight = query.new_empty(0)
    if partial is not None:
        dw = sum_partials(partial, torch.float32)
        if needs_query:
            dquery = (dw if weight is None else dw * weight).to(query.dtype)
        if weight is not None and needs_weight:
            dweight = (dw * query).to(weight.dtype)
    return v.new_empty(0) if dv is None else dv, dquery, dweight


def supports(blocks: Tensor) -> str | None:
    """No fp64: sums are fp32."""
    return "its sums are float32, got float64" if blocks.element_size() == 8 else None
