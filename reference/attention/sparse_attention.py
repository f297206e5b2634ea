"""Softmax attention over lists of keys, by blocks of queries whose keys are gathered."""

from collections.abc import Iterator

import torch
from torch import Tensor

from liger_multi.reference.attention.attention import ordered
from liger_multi.reference.common.chunking import row_blocks, statistics_dtype

FEW_QUERIES = 1024
"""Queries whose rows are added up one after another."""


def gather_positions(indices: Tensor, keys: int) -> tuple[Tensor, Tensor]:
    """Places to gather from, int64, and which are keys; of lists on a CPU all must be below S.

    Raises:
        ValueError: An index is S or more.
    """
    if indices.device.type == "cpu" and indices.numel() and int(indices.max()) >= keys:
        raise ValueError(
            f"an index must be below the number of keys, {keys}, or -1, got {int(indices.max())}"
        )
    is_key = (indices >= 0) & (indices < keys)
    return torch.where(is_key, indices, 0).long(), is_key


def gathered(x: Tensor, positions: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows of ``(N, S, D)`` by places (N, rows, K), as (N, rows, K, D)."""
    flat = positions.flatten(1)[..., None].expand(-1, -1, x.shape[-1])
    rows: Tensor = x.gather(1, flat).to(dtype).unflatten(1, positions.shape[1:])
    return rows


def add_rows_(total: Tensor, positions: Tensor, is_key: Tensor, rows: Tensor) -> None:
    """Add rows (N, rows, K, D) to those of ``(N, S, D)`` that places name, in one order."""
    offset = torch.arange(total.shape[0], device=total.device) * total.shape[1]
    index = (positions + offset.view(-1, 1, 1)).flatten()
    values = (rows * is_key[..., None]).flatten(0, -2)
    flat = total.view(-1, total.shape[-1])
    if total.device.type == "cpu":
        flat.index_add_(0, index, values)
    else:  # sorts the indices; index_add_ would use atomic additions
        flat.index_put_((index,), values, accumulate=True)


class SumsByKey:
    """Sums of rows by key, (N, S, D) in all: those of some queries first, then these sums.

    A key that every query lists would be a sum of one term after another, whose rounding errors
    are 2.3 times the tolerance of fp32 after 65,537 terms.
    """

    def __init__(
        self, shape: tuple[int, ...], tensor: Tensor, list_length: int, queries: int
    ) -> None:
        self.total = tensor.new_zeros(shape)
        # with fewer queries, summing over all keys costs more than the lists themselves
        self.most = max(FEW_QUERIES, shape[1] // max(list_length, 1))
        self.part = tensor.new_zeros(shape) if queries > 2 * self.most else self.total
        self.queries = 0

    def add(
        self, positions: Tensor, is_key: Tensor, rows: Tensor, width: int | None = None
    ) -> None:
        """Add rows (N, queries, K, D), in one order, to the first ``width`` columns."""
        steps = self.most if self.part is not self.total else positions.shape[1]
        for block in row_blocks(positions.shape[1], 1, max(1, steps)):
            part = self.part[..., :width]
            add_rows_(part, positions[:, block], is_key[:, block], rows[:, block])
            self.queries += block.stop - block.start
            if self.queries >= self.most:
                self._flush()

    def _flush(self) -> None:
        self.queries = 0
        if self.part is not self.total:
            self.total += self.part
            self.part.zero_()

    def result(self) -> Tensor:
        """The sums."""
        self._flush()
        return self.total


class _Lists:
    """The tensors of a call, grouped by key heads: the leading axis is (B, G)."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor | None, indices: Tensor, value_dim: int, scale: float
    ) -> None:
        self.acc_dtype = statistics_dtype(q.dtype)
        self.batch, self.groups, self.keys, _ = k.shape
        self.heads, self.queries, self.value_dim = q.shape[1], q.shape[2], value_dim
        self.k = k.flatten(0, 1)
        self.v = self.k[..., :value_dim] if v is None else v.flatten(0, 1)
        self.indices = indices.expand(-1, self.groups, -1, -1).flatten(0, 1)
        self.scale = scale

    def blocks(self, limit_of: int) -> Iterator[slice]:
        """Blocks of queries."""
        pair_elements = self.k.shape[-1] + self.v.shape[-1] + 3 * self.heads // self.groups
        row = (
            self.batch
            * self.groups
            * self.indices.shape[-1]
            * pair_elements
            * self.acc_dtype.itemsize
        )
        yield from row_blocks(self.queries if self.batch else 0, limit_of * row)

    def of_heads(self, x: Tensor, rows: slice) -> Tensor:
        """Rows of ``(B, H, L, ...)`` as (B G, rows, H / G, ...)."""
        part: Tensor = x[:, :, rows].unflatten(1, (self.groups, -1)).flatten(0, 1)
        return part.transpose(1, 2).to(self.acc_dtype)

    def to_heads(self, x: Tensor) -> Tensor:
        """The inverse of :meth:`of_heads`, as (B, H, rows, ...)."""
        parts: Tensor = x.transpose(1, 2).unflatten(0, (self.batch, -1))
        return parts.flatten(1, 2)

    def scores(self, q: Tensor, rows: slice) -> tuple[Tensor, ...]:
        """Queries, keys and scores of a block, places, and which of them are keys."""
        positions, is_key = gather_positions(self.indices[:, rows], self.keys)
        queries, k = self.of_heads(q, rows), gathered(self.k, positions, self.acc_dtype)
        s = (queries @ k.mT).mul_(self.scale).masked_fill_(~is_key[:, :, None], -torch.inf)
        out_of_range = self.indices[:, rows] >= self.keys
        return queries, k, s.masked_fill_(out_of_range[:, :, None], torch.nan), positions, is_key


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    indices: Tensor,
    value_dim: int,
    scale: float,
    output_weights: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """A block of queries at a time; without keys there is nothing to gather."""
    lists = _Lists(q, k, v, indices, value_dim, scale)
    y = ordered(q, q.dtype, q.shape[1], q.shape[2], value_dim)
    lse = q.new_full(q.shape[:3], -torch.inf, dtype=lists.acc_dtype)
    weights = q.new_zeros(indices.shape if output_weights else (0,), dtype=lists.acc_dtype)
    if not lists.keys or not indices.shape[-1]:
        gather_positions(indices, lists.keys)
        return y, weights, lse
    for rows in lists.blocks(1):
        _, _, s, positions, _ = lists.scores(q, rows)
        top = s.amax(-1, keepdim=True)
        p = torch.exp(s - top.masked_fill(top == -torch.inf, 0))
        total = p.sum(-1, keepdim=True)
        lse[:, :, rows] = lists.to_heads((top + total.log()).squeeze(-1))
        p /= total.masked_fill(total == 0, 1)
        y[:, :, rows] = lists.to_heads(p @ gathered(lists.v, positions, lists.acc_dtype)).to(
            q.dtype
        )
        if output_weights:
            mean = p.mean(2).unflatten(0, (lists.batch, -1))
            weights[:, :, rows] = mean if indices.shape[1] > 1 else mean.mean(1, keepdim=True)
    return y, weights, lse


def backward(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    indices: Tensor,
    y: Tensor,
    lse: Tensor,
    value_dim: int,
    scale: float,
    needs_q: bool,
    needs_k: bool,
    needs_v: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """``ds = p (dy v' - sum(dy y))``; what lists give to keys is added up in fp32."""
    lists = _Lists(q, k, v, indices, value_dim, scale)
    dq = ordered(q, q.dtype, *q.shape[1:]) if needs_q else q.new_empty(0)
    dk, dv = (
        SumsByKey(x.shape, x.new_empty(0, dtype=lists.acc_dtype), indices.shape[-1], lists.queries)
        if is_needed
        else None
        for x, is_needed in ((lists.k, needs_k), (lists.v, needs_v and v is not None))
    )
    for rows in lists.blocks(2) if lists.keys and indices.shape[-1] else ():
        queries, keys, s, positions, is_key = lists.scores(q, rows)
        up, ends = lists.of_heads(dy, rows), lists.of_heads(lse, rows)[..., None]
        inner = (up * lists.of_heads(y, rows)).sum(-1, keepdim=True)
        p = torch.exp(s - ends.masked_fill(ends == -torch.inf, 0))
        ds = (p * (up @ gathered(lists.v, positions, lists.acc_dtype).mT - inner)).mul_(scale)
        if needs_q:
            dq[:, :, rows] = lists.to_heads(ds @ keys).to(q.dtype)
        if dk is not None:
            dk.add(positions, is_key, ds.mT @ queries)
        if v is None and dk is not None:
            dk.add(positions, is_key, p.mT @ up, value_dim)
        elif dv is not None:
            dv.add(positions, is_key, p.mT @ up)
    return dq, _as_heads(dk, k), _as_heads(dv, k if v is None else v)


def _as_heads(sums: SumsByKey | None, x: Tensor) -> Tensor:
    """Sums (B G, S, D) as a gradient of ``(B, G, S, D)``, in memory (B, S, G, D)."""
    if sums is None:
        return x.new_empty(0)
    total = sums.result()
    out = x.new_empty(x.shape[0], x.shape[2], x.shape[1], x.shape[3]).transpose(1, 2)
    return out.copy_(total.view(x.shape))
