"""Tile bounds of attention, for any ranges of keys: which queries a tile of keys needs."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_multi.backends.triton.common.launching import launch
from liger_multi.backends.triton.common.rows import cdiv

BLOCKS, TILES, CHUNK = 16, 8, 256  # of a program: blocks made, tiles, blocks read at a time


@triton.jit
def _attention_blocks_kernel(
    ranges_ptr, blocks_ptr, queries, keys, blocks,
    RANGES: tl.constexpr, BLOCK: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
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
    blocks_ptr, tile_bounds_ptr, keys, blocks, tiles,
    BLOCK_N: tl.constexpr, TILES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
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
        seen = (low < stop) & (high > start)
        first = tl.minimum(first, tl.where(seen, block, blocks))
        last = tl.maximum(last, tl.where(seen, block + 1, 0))
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
        _attention_blocks_kernel, sets * cdiv(blocks, BLOCKS),
        (ranges, bounds, queries, keys, blocks), (width, block_m, BLOCKS), 4,
    )  # fmt: skip
    found = torch.empty((batch, width // 2, 4, tiles), dtype=torch.int32, device=ranges.device)
    launch(
        _attention_bounds_kernel, sets * cdiv(tiles, TILES), (bounds, found, keys, blocks, tiles),
        (block_n, TILES, CHUNK), 4,
    )  # fmt: skip
    return found
