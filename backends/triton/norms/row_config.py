"""Launch formulas that the kernels of all norms over the last axis share."""

from dataclasses import dataclass

from liger_multi.backends.triton.common.rows import cdiv, checked_cols, power_of_2, warps
from liger_multi.dispatch.launch import DeviceInfo

# columns; beyond, or soon after, a row's registers spill on some target of ci.static (triton 3.9)
WIDEST_FORWARD = 16384
WIDEST_BACKWARD = 8192


@dataclass(frozen=True)
class RowConfig:
    """``rows`` whole rows a tile, or one row in steps of ``block`` columns where it is wider."""

    rows: int
    block: int
    num_warps: int


@dataclass(frozen=True)
class BackwardConfig:
    """A RowConfig with ``programs`` persistent programs, which load ``stages`` - 1 tiles ahead."""

    rows: int
    block: int
    num_warps: int
    programs: int
    stages: int


def forward_config(info: DeviceInfo, rows: int, cols: int, sums: int = 1) -> RowConfig:
    """Tiles of about 4096 elements, 16 or more of them a thread.

    Args:
        info: Limits of the device.
        rows: Rows.
        cols: Columns.
        sums: Values a lane keeps along a row that is read in steps.
    """
    block = power_of_2(checked_cols(cols))
    if block > WIDEST_FORWARD:
        return RowConfig(1, 8192 // sums, warps(info.max_threads // sums, info.warp_size))
    per_tile = max(1, 4096 // block)  # whatever the rows: they decide nothing about a row's sum
    threads = min(per_tile * block // 16, info.max_threads)
    return RowConfig(per_tile, block, warps(threads, info.warp_size))


def backward_config(
    info: DeviceInfo,
    rows: int,
    cols: int,
    element_bytes: int,
    sums: int = 1,
    widest: int = WIDEST_BACKWARD,
) -> BackwardConfig:
    """Persistent tiles and the stages of their loads.

    Args:
        info: Limits of the device.
        rows: Rows.
        cols: Columns.
        element_bytes: Of all that is read, an element.
        sums: Sums over rows, of every column, that a program keeps in registers: with more of
            them tiles are smaller and programs more.
        widest: Columns beyond which a row is read in steps.
    """
    block = power_of_2(checked_cols(cols))
    if block > widest:
        programs = min(rows, 4 * info.cores)
        return BackwardConfig(1, 4096, warps(512, info.warp_size), programs, 1)
    elements = 4096 if block <= 512 else 8192 // sums
    per_tile = max(1, elements // block)
    threads = min(max(per_tile * block // 16, 32), 256 if block <= 4096 else 512)
    threads = threads if block <= elements else min(threads * sums, info.max_threads)
    stages = max(1, min(3, info.shared_bytes // (per_tile * block * element_bytes * sums)))
    per_core = (1 if block > 2048 else 2) * (sums if block <= elements else 1)
    programs = min(cdiv(rows, per_tile), info.cores * per_core)
    return BackwardConfig(per_tile, block, warps(threads, info.warp_size), programs, stages)
