"""Gradients of listed keys: parts by (query, slot) are added up by key, in one order.

The pairs of some queries are sorted by key, stably, which is the inverse of their lists: where the
run of every key begins, and which pairs are in it. One program per key adds its parts in the order
of the queries. So there are no atomic additions, and the same call gives the same bits.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_multi.backends.triton.common.launching import launch
from liger_multi.backends.triton.common.rows import (
    assume_cols,
    cdiv,
    checked_cols,
    power_of_2,
    warps,
)
from liger_multi.dispatch.launch import DeviceInfo, launch_config

RUN: tl.constexpr = tl.constexpr(256)  # parts of one sum
PARTS_BYTES = 2**30
"""Parts of pairs that exist at a time, and what they are made of; at least those of one query."""


@dataclass(frozen=True)
class PairsConfig:
    """``block`` columns a program; ``stages`` of loads in flight."""

    block: int
    stages: int
    num_warps: int


def pairs_config(info: DeviceInfo, keys: int, width: int) -> PairsConfig:
    """Whole rows of up to 1024 columns, four a thread."""
    block = min(1024, power_of_2(checked_cols(width)))
    return PairsConfig(block, 3, warps(max(32, block // 4), info.warp_size))


@triton.jit
def _pairs_of_lists_kernel(
    parts_ptr,
    order_ptr,
    bounds_ptr,
    total_ptr,
    width,
    steps,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Add the parts of one key to its sum.

    Program: one key by BLOCK columns; ``bounds_ptr`` says where its run of sorted pairs begins and
    ends. Without pairs there is nothing to do.
    Reads the parts of its pairs, (pairs, width) fp32, in order; adds their sum to ``total_ptr``,
    (keys, width) fp32. Runs of RUN parts have sums of their own: one sum of 40,000 parts in turn
    would be off by several tolerances of fp32.
    """
    key = tl.program_id(0) // steps
    begin, end = tl.load(bounds_ptr + key), tl.load(bounds_ptr + key + 1)
    if begin == end:
        return
    start = (tl.program_id(0) % steps) * BLOCK
    assume_cols(start)
    col = start + tl.arange(0, BLOCK)
    mask = col < width
    total = tl.zeros([BLOCK], tl.float32)
    run = total
    for at in tl.range(begin, end, num_stages=STAGES):
        row_ptr = parts_ptr + tl.load(order_ptr + at).to(tl.int64) * width  # a scalar base
        run += tl.load(row_ptr + col, mask=mask, other=0.0)
        is_last = (at - begin) % RUN == RUN - 1  # selects, so that loads stay in flight
        total = tl.where(is_last, total + run, total)
        run = tl.where(is_last, 0.0, run)
    total += run
    total_ptr += key.to(tl.int64) * width
    total += tl.load(total_ptr + col, mask=mask, other=0.0)
    tl.store(total_ptr + col, total, mask=mask)


def inverse(lists: Tensor, keys: int) -> tuple[Tensor, Tensor]:
    """Order of the pairs by key, and where the run of every key begins and ends.

    Args:
        lists: Keys by pair, ``(queries, groups, slots)`` int32; those of group g are g ``keys``
            further on. Below 0 for absent ones.
        keys: Number of keys of a group.
    """
    groups = lists.shape[1]
    offset = torch.arange(groups, device=lists.device, dtype=torch.int32)[:, None] * keys
    is_key = (lists >= 0) & (lists < keys)
    flat = torch.where(is_key, lists + offset, groups * keys).flatten()
    sorted_keys, order = torch.sort(flat, stable=True)
    key_ids = torch.arange(groups * keys + 1, device=lists.device, dtype=torch.int32)
    return order, torch.searchsorted(sorted_keys, key_ids)


def add_up(total: Tensor, parts: Tensor, lists: Tensor, keys: int) -> None:
    """Add the parts of some queries' pairs to the sums of their keys.

    Args:
        total: ``(groups keys, width)`` fp32.
        parts: ``(queries, groups, slots, width)`` fp32.
        lists: ``(queries, groups, slots)`` int32.
        keys: Number of keys of a group.
    """
    order, bounds = inverse(lists, keys)
    rows, width = total.shape
    k = launch_config("pairs_of_lists", pairs_config, total.device, keys=rows, width=width)
    steps = cdiv(width, k.block)
    launch(
        _pairs_of_lists_kernel,
        rows * steps,
        (parts, order, bounds, total, width, steps),
        (k.block, k.stages),
        k.num_warps,
    )


def summed(
    lists: Tensor,
    groups: int,
    keys: int,
    width: int,
    write: Callable[[Tensor, int, slice], None],
    extra_bytes: int = 0,
) -> Tensor:
    """Sums of what pairs give to keys, ``(B, groups, keys, width)`` fp32.

    Args:
        lists: ``(B, 1 or groups, queries, slots)`` int32.
        groups: Heads of keys.
        keys: Number of keys.
        width: Numbers that a pair gives.
        write: Fills the parts of some queries of one element of the batch.
        extra_bytes: Bytes of a slot that ``write`` takes meanwhile.
    """
    batch, _, queries, slots = lists.shape
    total = torch.zeros((batch, groups, keys, width), dtype=torch.float32, device=lists.device)
    step = max(1, PARTS_BYTES // max(1, slots * (4 * groups * width + extra_bytes)))
    size = (min(step, queries), groups, slots, width)
    parts = torch.empty(size, dtype=torch.float32, device=lists.device)
    for b, rows in _blocks(batch, queries, step):
        write(parts, b, rows)
        lists_of_groups = lists[b, :, rows].transpose(0, 1).expand(-1, groups, -1)
        add_up(total[b].flatten(0, 1), parts, lists_of_groups, keys)
    return total


def _blocks(batch: int, queries: int, step: int) -> Iterator[tuple[int, slice]]:
    for b in range(batch):
        for start in range(0, queries, step):
            yield b, slice(start, min(queries, start + step))
