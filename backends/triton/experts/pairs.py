"""Token-expert pairs sorted by expert, and rows written once for every pair.

A counting sort in three launches: how many pairs of every expert each chunk has, sums of those over
the chunks before, and the place of every pair. Its place within a chunk is a count of equal experts
before it, so the order is stable and no order of additions is left to chance. ``order`` names the
pair of every sorted row and ``inverse`` the sorted row of every pair; pairs of no expert come last.

Groups are rows ``offsets[e]`` to ``offsets[e + 1]``. A table made on the device says for every tile
of rows its group and its first row. The grid is the largest that any partition needs, and programs
past the table's last tile return at once. No size is read back. ``order`` is the pair of every row,
of which ``per`` share a row of the source.
"""

from dataclasses import dataclass, field

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
from liger_multi.dispatch.launch import DeviceInfo, device_info, launch_config

# --- pairs ---

CHUNK = 128  # pairs per program, which compares each with all before it
TALL, NARROW = 256, 16  # chunks by experts of a step of the sums


@dataclass(frozen=True)
class PieceConfig:
    """``block`` columns of one row a program or a step."""

    block: int
    stages: int
    num_warps: int


def piece_config(info: DeviceInfo, cols: int) -> PieceConfig:
    """1024 columns, 8 of them a thread; steps under way where they have memory of their own.

    Elsewhere they take registers, and their stores the short addresses of buffer operations.
    """
    block = max(16, min(1024, power_of_2(cols)))
    stages = 2 if info.shared_bytes > 2**16 and info.warp_size < 64 else 1
    return PieceConfig(block, stages, warps(block // 8, info.warp_size))


def piece(name: str, tensor: Tensor, cols: int) -> PieceConfig:
    """Launch configuration of a pass over rows, which may hold gate and up."""
    checked_cols(2 * cols)
    config: PieceConfig = launch_config(f"fused_moe.{name}", piece_config, tensor.device, cols=cols)
    return config


@triton.jit
def _pairs_count_kernel(
    index_ptr, experts_ptr, counts_ptr, pairs, experts, BLOCK: tl.constexpr, WIDE: tl.constexpr
):
    """First launch: the expert of every pair, and how many pairs of each expert a chunk has.

    Program: one chunk of BLOCK pairs. Writes the experts, ``experts`` for a pair of none and
    ``experts`` + 1 past the last pair, and one row of counts (chunks, WIDE).
    """
    chunk = tl.program_id(0)
    pair = chunk * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(index_ptr + pair, mask=pair < pairs, other=0)
    expert = tl.where((expert < 0) | (expert >= experts), experts, expert).to(tl.int32)
    expert = tl.where(pair < pairs, expert, experts + 1)
    tl.store(experts_ptr + pair, expert)
    place = chunk.to(tl.int64) * WIDE + tl.arange(0, WIDE)
    tl.store(counts_ptr + place, tl.histogram(expert, WIDE))


@triton.jit
def _pairs_sum_kernel(
    counts_ptr, totals_ptr, chunks, WIDE: tl.constexpr, TALL: tl.constexpr, NARROW: tl.constexpr
):
    """Second launch: the pairs of each expert in the chunks before each chunk, and in total.

    Program: NARROW experts; passes over the chunks, TALL at a time, and overwrites the counts.
    """
    first_expert, n, c = tl.program_id(0) * NARROW, tl.arange(0, NARROW), tl.arange(0, TALL)
    counts_ptr += first_expert
    total = tl.zeros([NARROW], tl.int32)
    for first in tl.range(0, chunks, TALL):
        ptrs = counts_ptr + (c[:, None] * WIDE + n[None, :])
        mask = (first + c < chunks)[:, None]
        count = tl.load(ptrs, mask=mask, other=0)
        # - count: the sum of the chunks before, without the chunk itself
        tl.store(ptrs, total[None, :] + tl.cumsum(count, 0) - count, mask=mask)
        total += tl.sum(count, axis=0)
        counts_ptr += TALL * WIDE
    tl.store(totals_ptr + first_expert + n, total)


@triton.jit
def _pairs_place_kernel(
    experts_ptr,
    counts_ptr,
    totals_ptr,
    order_ptr,
    inverse_ptr,
    offsets_ptr,
    pairs,
    experts,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Third launch: the sorted row of every pair, and where each expert's rows begin.

    Program: one chunk of BLOCK pairs. It adds the start of each expert to the chunk's row of counts
    in memory, since a gather by expert needs an address; the barrier makes it visible to all
    threads. The number of equal experts before a pair is counted by comparing the chunk with
    itself.
    Writes ``inverse`` and ``order``; the first program writes the offsets.
    """
    chunk, i, e = tl.program_id(0), tl.arange(0, BLOCK), tl.arange(0, WIDE)
    counts_ptr += chunk.to(tl.int64) * WIDE
    count = tl.load(totals_ptr + e)
    start = tl.cumsum(count, 0) - count
    if chunk == 0:
        tl.store(offsets_ptr + e, start, mask=e <= experts)
    tl.store(counts_ptr + e, tl.load(counts_ptr + e) + start)
    pair = chunk * BLOCK + i
    expert = tl.load(experts_ptr + pair)
    same = (expert[:, None] == expert[None, :]) & (i[None, :] < i[:, None])
    before = tl.sum(same.to(tl.int32), axis=1)
    tl.debug_barrier()  # what follows reads what other threads have written
    row, mask = tl.load(counts_ptr + expert) + before, pair < pairs
    tl.store(inverse_ptr + pair, row, mask=mask)
    tl.store(order_ptr + row, pair, mask=mask)


@triton.jit
def _pairs_inverse_kernel(order_ptr, inverse_ptr, rows, BLOCK: tl.constexpr):
    """Inverse of an order: the sorted row of every pair.

    Program: BLOCK sorted rows.
    """
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    pair = tl.load(order_ptr + row, mask=row < rows, other=0)
    tl.store(inverse_ptr + pair, row, mask=row < rows)


@triton.jit
def _pairs_rows_kernel(
    x_ptr,
    inverse_ptr,
    offsets_ptr,
    out_ptr,
    x_stride,
    groups,
    cols,
    pieces,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy a token's row to the sorted row of each of its pairs.

    Program: BLOCK columns of one token, read once. A pair of no expert gets no row.
    """
    token = (tl.program_id(0) // pieces).to(tl.int64)
    first = (tl.program_id(0) % pieces) * BLOCK
    assume_cols(first)
    col = first + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + token * x_stride + col, mask=col < cols, other=0.0)
    stop = tl.load(offsets_ptr + groups)
    for k in tl.static_range(TOP_K):
        row = tl.load(inverse_ptr + token * TOP_K + k)
        width = tl.where(row < stop, cols, 0)
        tl.store(out_ptr + row.to(tl.int64) * cols + col, x, mask=col < width)


def sorted_pairs(index: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """The pair of every sorted row, the sorted row of every pair, and where experts begin."""
    pairs, wide = index.numel(), max(CHUNK, power_of_2(experts + 2))
    chunks = cdiv(pairs, CHUNK)
    order = index.new_empty(pairs, dtype=torch.int32)
    inverse, offsets = torch.empty_like(order), order.new_empty(experts + 1)
    if not pairs:
        return order, inverse, offsets.zero_()
    counts, ids = order.new_empty(chunks + 1, wide), order.new_empty(chunks * CHUNK)
    sums = counts[chunks:]
    threads, tile = warps(2 * CHUNK, device_info(index.device).warp_size), (CHUNK, wide)
    launch(_pairs_count_kernel, chunks, (index, ids, counts, pairs, experts), tile, threads)
    launch(
        _pairs_sum_kernel,
        cdiv(wide, NARROW),
        (counts, sums, chunks),
        (wide, TALL, NARROW),
        threads,
    )
    args = (ids, counts, sums, order, inverse, offsets, pairs, experts)
    launch(_pairs_place_kernel, chunks, args, tile, threads)
    return order, inverse, offsets


def inverse_of(order: Tensor) -> Tensor:
    """The sorted row of every pair."""
    inverse = torch.empty_like(order)
    args = (order, inverse, order.shape[0])
    launch(_pairs_inverse_kernel, cdiv(order.shape[0], 1024), args, (1024,), 4)
    return inverse


def rows_of_pairs(
    x: Tensor, inverse: Tensor, offsets: Tensor, pairs_per_row: int, out: Tensor
) -> Tensor:
    """Row ``pair // pairs_per_row`` of x for every sorted row, in ``out``.

    Rows of no expert are not written; the last group ends within ``out``.
    """
    cols = x.shape[1]
    k = piece("rows", x, cols)
    pieces = cdiv(cols, k.block)
    launch(
        _pairs_rows_kernel,
        x.shape[0] * pieces,
        (x, inverse, offsets, out, x.stride(0), offsets.shape[0] - 1, cols, pieces),
        (pairs_per_row, k.block),
        k.num_warps,
    )
    return out


# --- groups ---


@triton.jit
def _group_tiles_kernel(
    offsets_ptr,
    tiles_ptr,
    groups,
    most,
    HEIGHT: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The table of tiles: the group of every tile of HEIGHT rows, and its first row.

    Program: BLOCK tiles. It reads the offsets of all groups, since the number of a tile follows
    from the tiles of all groups before. Writes (group, first row), with group -1 past the last
    tile.
    """
    group = tl.arange(0, GROUPS)
    inside = group < groups
    start = tl.load(offsets_ptr + group, mask=inside, other=0)
    stop = tl.load(offsets_ptr + group + 1, mask=inside, other=0)
    count = tl.cdiv(stop - start, HEIGHT)
    last = tl.cumsum(count, 0)  # one past the group's last tile
    tile = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    # the group of a tile: how many groups end before it
    which = tl.sum((last[None, :] <= tile[:, None]).to(tl.int32), axis=1)
    in_group = (which[:, None] == group[None, :]) & inside[None, :]
    first = tl.sum(tl.where(in_group, (last - count)[None, :], 0), axis=1)
    begin = tl.sum(tl.where(in_group, start[None, :], 0), axis=1)
    none = which >= groups
    mask = tile < most
    tl.store(tiles_ptr + 2 * tile, tl.where(none, -1, which), mask=mask)
    tl.store(tiles_ptr + 2 * tile + 1, begin + (tile - first) * HEIGHT, mask=mask)


@dataclass
class Groups:
    """Sorted rows: where groups begin, the pair of every row, and the pairs that share a source."""

    offsets: Tensor
    order: Tensor
    per: int
    placed: Tensor | None = None
    tables: dict[int, Tensor] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """Number of groups."""
        return self.offsets.shape[0] - 1

    @property
    def rows(self) -> int:
        """Rows, those of no group included."""
        return self.order.shape[0]

    @property
    def inverse(self) -> Tensor:
        """The sorted row of every pair; found once."""
        if self.placed is None:
            self.placed = inverse_of(self.order)
        return self.placed

    def tiles(self, block: int) -> Tensor:
        """The table for tiles of ``block`` rows, (tiles, 2): group, or -1, and first row."""
        table = self.tables.get(block)
        if table is None:
            limit = min(self.rows, cdiv(self.rows, block) + self.count)
            table = self.tables[block] = self.offsets.new_empty(limit, 2)
            groups = power_of_2(self.count)
            step = max(16, min(128, 8192 // groups))
            launch(
                _group_tiles_kernel,
                cdiv(limit, step),
                (self.offsets, table, self.count, limit),
                (block, groups, step),
                4,
            )
        return table


@dataclass
class RowOperand:
    """Rows of groups, or with ``gather`` what they are gathered from; columns are adjacent."""

    source: Tensor
    gather: bool = False
    cached: Tensor | None = None

    def written(self, groups: Groups) -> Tensor:
        """The rows themselves; written down once."""
        if not self.gather:
            return self.source
        if self.cached is None:
            out = self.source.new_empty(groups.rows, self.source.shape[1])
            row_map = (groups.inverse, groups.offsets, groups.per)
            self.cached = rows_of_pairs(self.source, *row_map, out)
        return self.cached

    def first(self, groups: Groups, offsets: Tensor, rows: int, scratch: Tensor) -> Tensor:
        """The first ``rows`` of them, of groups that end within these by ``offsets``.

        Rows that are gathered take the memory of ``scratch``.
        """
        if not self.gather:
            return self.source[:rows]
        cols = self.source.shape[1]
        out = scratch.view(-1)[: rows * cols].view(rows, cols)
        return rows_of_pairs(self.source, groups.inverse, offsets, groups.per, out)
