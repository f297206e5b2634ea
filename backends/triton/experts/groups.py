"""Rows sorted into groups, and the tiles of rows that programs own; no size is read back.

Groups are rows ``offsets[e]`` to ``offsets[e + 1]``. A table made on the device says for every tile
of rows its group and its first row. The grid is the largest that any partition needs, and programs
past the table's last tile return at once. ``order`` is the pair of every row, of which ``per``
share a row of the source.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Optional

import triton
import triton.language as tl
from torch import Tensor

from liger_multi.backends.triton.common.launching import launch
from liger_multi.backends.triton.common.rows import cdiv, power_of_2
from liger_multi.backends.triton.experts.pairs import inverse_of, rows_of_pairs


@triton.jit
def _group_tiles_kernel(
    offsets_ptr, tiles_ptr, groups, most, HEIGHT: tl.constexpr, GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
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
    mine = (which[:, None] == group[None, :]) & inside[None, :]
    first = tl.sum(tl.where(mine, (last - count)[None, :], 0), axis=1)
    begin = tl.sum(tl.where(mine, start[None, :], 0), axis=1)
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
    placed: Optional[Tensor] = None
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
        found = self.tables.get(block)
        if found is None:
            most = min(self.rows, cdiv(self.rows, block) + self.count)
            found = self.tables[block] = self.offsets.new_empty(most, 2)
            groups = power_of_2(self.count)
            step = max(16, min(128, 8192 // groups))
            launch(
                _group_tiles_kernel, cdiv(most, step),
                (self.offsets, found, self.count, most),
                (block, groups, step), 4,
            )  # fmt: skip
        return found


@dataclass
class RowOperand:
    """Rows of groups, or with ``gather`` what they are gathered from; columns are adjacent."""

    source: Tensor
    gather: bool = False
    made: Optional[Tensor] = None

    def written(self, groups: Groups) -> Tensor:
        """The rows themselves; written down once."""
        if not self.gather:
            return self.source
        if self.made is None:
            at = (groups.inverse, groups.offsets, groups.per)
            self.made = rows_of_pairs(self.source, *at)
        return self.made
