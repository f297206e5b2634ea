"""Attention by Triton kernels: every mask that is made of ranges of keys, softcap and sinks.

Source: Dao 2023 (arXiv:2307.08691); the kernels are in attention_kernels.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_multi.backends.triton.attention.attention_kernels import (
    SHARED,
    _attention_backward_kernel,
    _attention_backward_keys_kernel,
    _attention_forward_kernel,
    _attention_parts_kernel,
)
from liger_multi.backends.triton.attention.blocks import merge
from liger_multi.backends.triton.common.launching import launch
from liger_multi.backends.triton.common.rows import cdiv, power_of_2, sum_rows, tile_rows
from liger_multi.dispatch.launch import DeviceInfo, device_info, launch_config, tabled
from liger_multi.reference.common.strict import by_rows

# --- tile bounds of any ranges of keys: which queries a tile of keys needs ---


PART_BLOCKS, PART_TILES, CHUNK = (
    16,
    8,
    256,
)  # of a program: blocks made, tiles, blocks read at a time


@triton.jit
def _attention_blocks_kernel(
    ranges_ptr,
    blocks_ptr,
    queries,
    keys,
    blocks,
    RANGES: tl.constexpr,
    BLOCK: tl.constexpr,
    COUNT: tl.constexpr,
):
    """Per block of queries, the keys that any of its queries sees and those that all of them see.

    Program: COUNT blocks of BLOCK queries, of one range of one element of the batch.
    Reads the ranges of those queries; rows past the last repeat it. Writes min(low), max(high),
    max(low) and min(high) of each block as (batch, ranges, 4, blocks). An empty range counts as
    [keys, 0).
    """
    programs = (blocks + COUNT - 1) // COUNT
    which, pid = tl.program_id(0) // programs, tl.program_id(0) % programs
    block = pid * COUNT + tl.arange(0, COUNT)
    row = tl.minimum(block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :], queries - 1)
    batch, second = (which // (RANGES // 2)).to(tl.int64), which % (RANGES // 2)
    at = ranges_ptr + batch * queries * RANGES + row.to(tl.int64) * RANGES + 2 * second
    low, high = tl.maximum(tl.load(at), 0), tl.minimum(tl.load(at + 1), keys)
    some = low < high
    low, high = tl.where(some, low, keys), tl.where(some, high, 0)
    blocks_ptr += which.to(tl.int64) * 4 * blocks + block
    mask = block < blocks
    tl.store(blocks_ptr, tl.min(low, 1), mask=mask)
    tl.store(blocks_ptr + blocks, tl.max(high, 1), mask=mask)
    tl.store(blocks_ptr + 2 * blocks, tl.max(low, 1), mask=mask)
    tl.store(blocks_ptr + 3 * blocks, tl.min(high, 1), mask=mask)


@triton.jit
def _attention_bounds_kernel(
    blocks_ptr,
    tile_bounds_ptr,
    keys,
    blocks,
    tiles,
    BLOCK_N: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Per tile of keys, the blocks of queries that see any of it and those that see all of it.

    Program: TILES tiles of BLOCK_N keys, of one range of one element of the batch. It passes over
    the bounds of all blocks of queries, BLOCK at a time.
    Writes (batch, ranges, 4, tiles): the first block and one past the last, of both kinds. Where
    the blocks that see the whole tile are not contiguous, their range is set past the end, so that
    every block gets a mask.
    """
    programs = (tiles + TILES - 1) // TILES
    which, pid = tl.program_id(0) // programs, tl.program_id(0) % programs
    tile, lane = pid * TILES + tl.arange(0, TILES), tl.arange(0, BLOCK)
    start = (tile * BLOCK_N)[:, None]
    stop = tl.minimum(start + BLOCK_N, keys)
    blocks_ptr += which.to(tl.int64) * 4 * blocks
    last = tl.zeros([TILES, BLOCK], tl.int32)
    first = last + blocks
    whole_first, whole_last, wholes = first, last, last
    for begin in range(0, blocks, BLOCK):
        block = (begin + lane)[None, :]
        mask = begin + lane < blocks
        at = blocks_ptr + begin  # a scalar base, so that AMD addresses by 32 bits
        low = tl.load(at + lane, mask=mask, other=keys)[None, :]
        high = tl.load(at + blocks + lane, mask=mask, other=0)[None, :]
        visible = (low < stop) & (high > start)
        first = tl.minimum(first, tl.where(visible, block, blocks))
        last = tl.maximum(last, tl.where(visible, block + 1, 0))
        low = tl.load(at + 2 * blocks + lane, mask=mask, other=keys)[None, :]
        high = tl.load(at + 3 * blocks + lane, mask=mask, other=0)[None, :]
        whole = (low <= start) & (high >= stop)
        whole_first = tl.minimum(whole_first, tl.where(whole, block, blocks))
        whole_last = tl.maximum(whole_last, tl.where(whole, block + 1, 0))
        wholes += whole.to(tl.int32)
    whole_begin, whole_end = tl.min(whole_first, 1), tl.max(whole_last, 1)
    apart = tl.sum(wholes, 1) != whole_end - whole_begin
    tile_bounds_ptr += which.to(tl.int64) * 4 * tiles + pid * TILES + tl.arange(0, TILES)
    mask = tile < tiles
    tl.store(tile_bounds_ptr, tl.min(first, 1), mask=mask)
    tl.store(tile_bounds_ptr + tiles, tl.max(last, 1), mask=mask)
    tl.store(tile_bounds_ptr + 2 * tiles, tl.where(apart, blocks, whole_begin), mask=mask)
    tl.store(tile_bounds_ptr + 3 * tiles, tl.where(apart, blocks, whole_end), mask=mask)


def tile_bounds(ranges: Tensor, keys: int, block_m: int, block_n: int) -> Tensor:
    """For every tile of keys, blocks of queries: int32 (B, ranges, 4, tiles).

    The first block and one past the last, of those that see any of its keys, and of those that see
    the whole tile. Where the latter are not contiguous, none counts.
    """
    batch, queries, width = ranges.shape
    blocks, tiles, sets = cdiv(queries, block_m), cdiv(keys, block_n), batch * width // 2
    bounds = ranges.new_empty(sets, 4, blocks)
    launch(
        _attention_blocks_kernel,
        sets * cdiv(blocks, PART_BLOCKS),
        (ranges, bounds, queries, keys, blocks),
        (width, block_m, PART_BLOCKS),
        4,
    )
    tile_ranges = torch.empty(
        (batch, width // 2, 4, tiles), dtype=torch.int32, device=ranges.device
    )
    launch(
        _attention_bounds_kernel,
        sets * cdiv(tiles, PART_TILES),
        (bounds, tile_ranges, keys, blocks, tiles),
        (block_n, PART_TILES, CHUNK),
        4,
    )
    return tile_ranges


# --- launches ---


@dataclass(frozen=True)
class AttentionConfig:
    """Tile of queries by keys; ``stages`` of loads in flight; ``parts`` that share a long loop."""

    block_m: int = 64
    block_n: int = 64
    stages: int = 2
    num_warps: int = 4
    parts: int = 1


# The widest tiles (queries, keys, stages, warps) that ci.static finds to spill no register at any
# launch: (forward, backward, backward of the keys) by kind of core and widest head. What operands,
# sums and the compiler's copies of them take follows no rule across kinds. Launch
# tables have what single architectures hold beyond their kind.
LARGEST_TILE, MANY = 128, 2**20  # rows of a tile, rows of a long sequence
SMALL, SMALLEST = (32, 32, 1, 4), (16, 16, 1, 4)
TILES = {
    ("waves of 64", 64): ((128, 32, 1, 8), (128, 32, 1, 8), (32, 64, 1, 4)),
    ("waves of 64", 128): ((64, 32, 1, 4), (64, 32, 1, 4), (16, 64, 1, 4)),
    ("little memory", 64): ((64, 32, 1, 4), SMALLEST, (16, 32, 1, 4)),
    ("some memory", 64): ((128, 64, 3, 8), (128, 32, 3, 8), (16, 128, 3, 8)),
    ("some memory", 128): ((128, 32, 3, 8), (128, 32, 3, 8), (16, 128, 1, 8)),
    ("much memory", 64): ((128, 64, 3, 8), (64, 32, 2, 4), (32, 128, 3, 8)),
    ("much memory", 128): ((128, 64, 3, 8), (128, 32, 3, 8), SMALL),
    ("much memory", 256): ((64, 32, 1, 8), (32, 32, 1, 8), (16, 32, 1, 8)),
}


def core_type(info: DeviceInfo) -> str:
    """Kind of core, by its limits: cores of a kind hold operands and sums of GEMMs alike."""
    if info.warp_size == 64:
        return "waves of 64"
    if info.shared_bytes <= 65536:
        return "little memory"
    return "some memory" if info.shared_bytes < 200_000 else "much memory"


def _class(dim: int, value_dim: int) -> int:
    return max(64, power_of_2(max(dim, value_dim)))


def supports(q: Tensor, v: Tensor) -> str | None:
    """Why a call is refused, or None."""
    info, widest = device_info(q.device), max(q.shape[3], v.shape[3])
    if tile_rows(LARGEST_TILE, q.shape[1] * widest) == 1:  # the stride of tokens in the results
        return f"takes tokens of less than 16 MiB, got {q.shape[1]} heads of {widest} elements"
    if (core_type(info), _class(q.shape[3], v.shape[3])) in TILES:
        return None
    directions = ("forward", "backward", "backward_keys")
    shape = {"queries": MANY, "keys": MANY, "dim": q.shape[3], "value_dim": v.shape[3]}
    shape |= {"item": q.element_size(), "extra": 2, "ranges": 4}
    if all(tabled(f"attention.{direction}", info, **shape) for direction in directions):
        return None  # this architecture has more registers than others of its core type
    limit = max(size for core, size in TILES if core == core_type(info))
    return f"takes heads of up to {limit} elements on {info.arch} (registers), got {widest}"


def _sizes(dim: int, value_dim: int) -> tuple[int, int]:
    return max(16, power_of_2(dim)), max(16, power_of_2(value_dim))


def _tile(
    info: DeviceInfo,
    kernel_index: int,
    dim: int,
    value_dim: int,
    rows: tuple[int, int],
    on_chip: Callable[[int, int, int], int],
) -> AttentionConfig:
    """The kind's tile, or a smaller one where on-chip memory or the sequences want it."""
    core = core_type(info)
    small = () if core == "little memory" else (SMALL,)
    tiles = TILES.get((core, _class(dim, value_dim)), (SMALLEST,) * 3)
    for m, n, stages, warps in (tiles[kernel_index], *small):
        covers_rows = (m, n)[rows[0]] <= max(16, power_of_2(rows[1]))
        if covers_rows and on_chip(m, n, stages) <= info.shared_bytes:
            return AttentionConfig(m, n, stages, warps)
    return AttentionConfig(*SMALLEST)


def forward_config(
    info: DeviceInfo,
    queries: int,
    keys: int,
    dim: int,
    value_dim: int,
    item: int,
    extra: int,
    ranges: int,
) -> AttentionConfig:
    """Queries, and the blocks of keys and values in flight, fit on chip."""
    both = sum(_sizes(dim, value_dim))

    def on_chip(m: int, n: int, stages: int) -> int:
        return item * (m * _sizes(dim, value_dim)[0] + stages * n * both)

    return _tile(info, 0, dim, value_dim, (0, queries), on_chip)


def backward_config(
    info: DeviceInfo,
    queries: int,
    keys: int,
    dim: int,
    value_dim: int,
    item: int,
    extra: int,
    ranges: int,
) -> AttentionConfig:
    """Tiles as in forward; on-chip memory also holds the upstream gradient."""
    both = sum(_sizes(dim, value_dim))

    def on_chip(m: int, n: int, stages: int) -> int:
        return item * ((m + stages * n) * both + m * n)

    return _tile(info, 1, dim, value_dim, (0, queries), on_chip)


def backward_keys_config(
    info: DeviceInfo,
    queries: int,
    keys: int,
    dim: int,
    value_dim: int,
    item: int,
    extra: int,
    ranges: int,
) -> AttentionConfig:
    """Keys and values stay; two gradients of their size are summed in registers."""
    both = sum(_sizes(dim, value_dim))

    def on_chip(m: int, n: int, stages: int) -> int:
        return item * ((n + stages * m) * both + 2 * m * n)

    config = _tile(info, 2, dim, value_dim, (1, keys), on_chip)
    return replace(config, parts=8 if extra == 2 and queries >= 2048 else 1)


def _rows(x: Tensor) -> Tensor:
    """``x`` with adjacent channels and tiles below 2 GiB (see assume_rows)."""
    is_near = tile_rows(LARGEST_TILE, x.stride(2)) > 1
    return x if is_near and (x.stride(3) == 1 or x.shape[3] == 1) else x.contiguous()


def _steps(x: Tensor) -> tuple[int, int, int]:
    return x.stride(0), x.stride(1), x.stride(2)


def _shape(
    q: Tensor, k: Tensor, v: Tensor, ranges: Tensor | None, softcap: float
) -> dict[str, int]:
    """Sizes that launch tables may bound; ``extra``: 1 with a softcap, 2 with a second range."""
    width = 0 if ranges is None else ranges.shape[2]
    extra = 2 if width > 2 else int(softcap != 0.0)
    queries, keys = (MANY, MANY) if by_rows() else (q.shape[2], k.shape[2])  # padding changes them
    return {
        "queries": queries,
        "keys": keys,
        "dim": q.shape[3],
        "value_dim": v.shape[3],
        "item": q.element_size(),
        "extra": extra,
        "ranges": width,
    }


def _constants(
    q: Tensor, v: Tensor, ranges: Tensor | None, causal: bool, softcap: float, k: AttentionConfig
) -> tuple[Any, ...]:
    size, value = _sizes(q.shape[3], v.shape[3])
    return (
        0 if ranges is None else ranges.shape[2],
        causal,
        softcap != 0.0,
        (q.shape[3], size, v.shape[3], value),
        k.block_m,
        k.block_n,
        k.stages,
    )


def _batch_step(ranges: Tensor | None) -> int:
    return 0 if ranges is None or ranges.shape[0] == 1 else ranges.stride(0)


def _ordered(tensor: Tensor, dtype: torch.dtype, size: int) -> Tensor:
    batch, heads, length, _ = tensor.shape
    return tensor.new_empty(batch, length, heads, size, dtype=dtype).transpose(1, 2)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    ranges: Tensor | None,
    causal: bool,
    scale: float,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    """One program per tile of queries; more than two ranges in several passes."""
    if ranges is not None and ranges.shape[2] > 4:
        return _forward_by_pairs(q, k, v, sinks, ranges, scale, softcap)
    y, lse = _ordered(q, q.dtype, v.shape[3]), q.new_empty(q.shape[:3], dtype=torch.float32)
    if not y.numel():
        return y, lse.fill_(-torch.inf)
    q, k, v = _rows(q), _rows(k), _rows(v)
    ranges = None if ranges is None else ranges.contiguous()
    numbers = launch_config(
        "attention.forward", forward_config, q.device, **_shape(q, k, v, ranges, softcap)
    )
    blocks = cdiv(q.shape[2], numbers.block_m)
    args = (
        q,
        k,
        v,
        sinks if sinks is None else sinks.contiguous(),
        ranges,
        y,
        lse,
        (*_steps(q), *_steps(k), *_steps(v)),
        (_batch_step(ranges), blocks, q.shape[1], k.shape[1], q.shape[2], k.shape[2]),
        scale,
        softcap,
    )
    constants = _constants(q, v, ranges, causal, softcap, numbers)
    count = blocks * q.shape[0] * q.shape[1]
    launch(_attention_forward_kernel, count, args, constants, numbers.num_warps)
    return y, lse


def backward(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    ranges: Tensor | None,
    y: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
    softcap: float,
    needs_q: bool,
    needs_k: bool,
    needs_v: bool,
    needs_sinks: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries first: that kernel writes the sums of ``dy y`` that keys and sinks need."""
    needs = (needs_q, needs_k, needs_v, needs_sinks)
    if ranges is not None and ranges.shape[2] > 4:
        return _backward_by_pairs(
            dy, q, k, v, sinks, ranges, y, lse, scale=scale, softcap=softcap, needs=needs
        )
    gradients = [
        _ordered(x, x.dtype, x.shape[3]) if is_needed else x.new_empty(0)
        for x, is_needed in ((q, needs_q), (k, needs_k), (v, needs_v))
    ]
    inner = torch.empty_like(lse, memory_format=torch.contiguous_format)
    masked = (None if ranges is None else ranges.contiguous(), causal, scale, softcap)
    if lse.numel():
        dy, q, k, v, y = (_rows(x) for x in (dy, q, k, v, y))
        lse = lse.contiguous()
        _backward_queries(dy, q, k, v, y, lse, inner, gradients[0] if needs_q else None, *masked)
        if needs_k or needs_v:
            dk, dv = (
                gradients[i] if is_needed else None for i, is_needed in ((1, needs_k), (2, needs_v))
            )
            _backward_keys(dy, q, k, v, lse, inner, dk, dv, *masked)
    else:
        _ = [x.zero_() for x in gradients]
    if sinks is None or not needs_sinks:
        return gradients[0], gradients[1], gradients[2], q.new_empty(0)
    share = inner.mul_(-torch.exp(sinks.float()[None, :, None] - lse)).mT
    return gradients[0], gradients[1], gradients[2], sum_rows(share.flatten(0, 1), sinks.dtype)


def _forward_by_pairs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    ranges: Tensor,
    scale: float,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    """Two ranges at a time; their results are added by their shares of the sum of exponentials."""
    first, *other_ranges = ranges.split(4, -1)
    y, lse = forward(q, k, v, sinks, first, False, scale, softcap)
    total = y.float()
    for pair in other_ranges:
        merge(total, lse, *forward(q, k, v, None, pair, False, scale, softcap))
    return y.copy_(total), lse


def _backward_by_pairs(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    ranges: Tensor,
    y: Tensor,
    lse: Tensor,
    scale: float,
    softcap: float,
    needs: tuple[bool, bool, bool, bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Every pair of ranges has its part of each gradient, with y and lse of all; sums in fp32."""
    first, *other_ranges = ranges.split(4, -1)
    gradients = backward(dy, q, k, v, sinks, first, y, lse, False, scale, softcap, *needs)
    totals = [x.float() for x in gradients[:3]]
    for pair in other_ranges:
        options = (False, scale, softcap, *needs[:3], False)
        parts = backward(dy, q, k, v, None, pair, y, lse, *options)
        totals = [total.add_(part) for total, part in zip(totals, parts, strict=False)]
    dq, dk, dv = (x.copy_(total) for x, total in zip(gradients, totals, strict=False))
    return dq, dk, dv, gradients[3]


def _backward_queries(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y: Tensor,
    lse: Tensor,
    inner: Tensor,
    dq: Tensor | None,
    ranges: Tensor | None,
    causal: bool,
    scale: float,
    softcap: float,
) -> None:
    numbers = launch_config(
        "attention.backward", backward_config, q.device, **_shape(q, k, v, ranges, softcap)
    )
    blocks = cdiv(q.shape[2], numbers.block_m)
    args = (
        q,
        k,
        v,
        dy,
        y,
        lse,
        ranges,
        dq,
        inner,
        (*_steps(q), *_steps(k), *_steps(v), *_steps(dy), *_steps(y)),
        (_batch_step(ranges), blocks, q.shape[1], k.shape[1], q.shape[2], k.shape[2]),
        scale,
        softcap,
    )
    constants = _constants(q, v, ranges, causal, softcap, numbers)
    count = blocks * q.shape[0] * q.shape[1]
    launch(_attention_backward_kernel, count, args, constants, numbers.num_warps)


def _backward_keys(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    inner: Tensor,
    dk: Tensor | None,
    dv: Tensor | None,
    ranges: Tensor | None,
    causal: bool,
    scale: float,
    softcap: float,
) -> None:
    if not k.numel():
        return
    numbers = launch_config(
        "attention.backward_keys",
        backward_keys_config,
        q.device,
        **_shape(q, k, v, ranges, softcap),
    )
    (batch, groups, keys, _), queries = k.shape, q.shape[2]
    tiles, width = cdiv(keys, numbers.block_n), 0 if ranges is None else ranges.shape[2]
    parts = numbers.parts if width == 4 else 1
    limits, partial, extra = None, None, SHARED * parts if parts > 1 else 0
    if ranges is not None:
        limits = tile_bounds(ranges, keys, numbers.block_m, numbers.block_n)
    if extra:
        size = numbers.block_n * sum(_sizes(q.shape[3], v.shape[3]))
        partial = torch.empty(extra * batch * groups, size, dtype=torch.float32, device=q.device)
    args = (
        q,
        k,
        v,
        dy,
        lse,
        inner,
        ranges,
        limits,
        partial,
        dk,
        dv,
        (*_steps(q), *_steps(k), *_steps(v), *_steps(dy)),
        (_batch_step(ranges), tiles, q.shape[1], groups, queries, keys),
        scale,
        softcap,
    )
    constants = (*_constants(q, v, ranges, causal, softcap, numbers), SHARED, parts)
    count = (tiles + extra) * batch * groups
    launch(_attention_backward_keys_kernel, count, args, constants, numbers.num_warps)
    if extra:
        sizes = (dk, dv, _batch_step(ranges), tiles, groups, queries, keys, scale)
        launch(
            _attention_parts_kernel,
            SHARED * batch * groups,
            (partial, limits, *sizes),
            (*constants[3], *constants[4:6], SHARED, parts),
            numbers.num_warps,
        )
