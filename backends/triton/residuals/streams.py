"""Tiles of residual streams, before and after a block of hyper-connections.

A tile has all streams of some columns, which are read once in forward and once in backward. A
thread has the same columns of every stream, so that sums over streams stay within it. Forward gives
a program one tile, backward one row. The sums over columns that gradients of coefficients need stay
in registers until the row ends: no atomic additions. The number of rows is a run-time number, that
of streams a kernel's constant.
"""

from dataclasses import dataclass

from torch import Tensor

from liger_multi.backends.triton.common.rows import cdiv, checked_cols, power_of_2, tile_rows, warps
from liger_multi.dispatch.launch import DeviceInfo, launch_config

LARGEST = 4096  # elements of a tile


@dataclass(frozen=True)
class StreamConfig:
    """All streams of ``block`` columns a step."""

    block: int
    num_warps: int


def stream_config(info: DeviceInfo, streams: int, cols: int, size: int) -> StreamConfig:
    """Columns that 128 threads load by 16 bytes each; fewer of both where streams are many."""
    vector = 16 // size
    limit = min(128 * vector, LARGEST // power_of_2(streams))
    block = max(16, min(power_of_2(checked_cols(cols)), limit))
    return StreamConfig(block, warps(max(32, block // vector), info.warp_size))


def as_tiles(x: Tensor) -> Tensor:
    """View (or copy) ``(..., N, C)`` as ``(rows, N, C)`` with adjacent columns, streams near."""
    rows = x.reshape(x.shape[:-2].numel(), *x.shape[-2:])
    tall = power_of_2(checked_cols(rows.shape[1] * rows.shape[2]) and rows.shape[1])
    is_near = tile_rows(tall, rows.stride(1)) == tall
    return rows if is_near and (rows.stride(2) == 1 or rows.shape[2] == 1) else rows.contiguous()


def as_outs(x: Tensor) -> Tensor:
    """View (or copy) ``(..., C)`` as ``(rows, C)`` with adjacent columns."""
    rows = x.reshape(x.shape[:-1].numel(), x.shape[-1])
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()


def tile(name: str, rows: Tensor) -> tuple[tuple[int, int, int], int, int]:
    """Constants of a launch over rows of streams (rows, N, C), its warps, and pieces of a row."""
    _, streams, cols = rows.shape
    sizes = {"streams": streams, "cols": cols, "size": rows.element_size()}
    k = launch_config(name, stream_config, rows.device, **sizes)
    return (streams, power_of_2(streams), k.block), k.num_warps, cdiv(cols, k.block)
