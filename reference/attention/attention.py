"""Attention by blocks of queries and keys, with a running softmax; nothing is of size L x S.

Ranges of keys that amount to a plain causal mask are detected once and marked. A compiled graph has
ranges even where an eager model has none, because the compiler does not know their values; without
the mark it could not use kernels for plain causal masks. The mark is an attribute of a tensor that
nobody writes to. If it is lost, a backend uses the ranges as they are.
"""

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from liger_multi.reference.common.chunking import BLOCK_BYTES, statistics_dtype
from liger_multi.reference.common.strict import by_rows

# --- blocks, and what a block of queries sees ---

VisibleKeys = tuple[slice, Tensor | None]


def blocks(length: int, step: int) -> Iterator[slice]:
    """Slices of ``step`` positions over a length."""
    for start in range(0, length, step):
        yield slice(start, min(length, start + step))


def block_size(heads: int, itemsize: int) -> int:
    """Rows and columns of a block, of which four arrays keep to the limit."""
    area = BLOCK_BYTES // max(1, 4 * heads * itemsize)
    return max(16, min(1024, 1 << (int(area**0.5).bit_length() - 1)))


def visible_keys(
    q: Tensor, k: Tensor, ranges: Tensor | None, causal: bool, rows: slice, step: int
) -> Iterator[VisibleKeys]:
    """Blocks of keys, and which of them the rows see, (B or 1, 1, 1, rows, cols); None for all.

    On a CPU blocks that no row sees are left out; elsewhere that would wait for the device.
    """
    keys, offset = k.shape[2], k.shape[2] - q.shape[2]
    last = max(0, min(keys, rows.stop + offset)) if causal else keys
    query = torch.arange(rows.start, rows.stop, device=q.device)[:, None] + offset
    bounds = [] if ranges is None else [b[:, None, None] for b in ranges[:, rows].split(2, -1)]
    extents = []
    if q.device.type == "cpu":
        extents = [(int(b[..., 0].min()), int(b[..., 1].max())) for b in bounds]
    for cols in blocks(last, step):
        if extents and not any(a < cols.stop and cols.start < b for a, b in extents):
            continue
        column = torch.arange(cols.start, cols.stop, device=q.device)
        if ranges is None:
            all_visible = not causal or cols.stop <= rows.start + offset + 1
            yield cols, None if all_visible else (column <= query)[None, None, None]
            continue
        in_ranges = [(column >= b[..., :1]) & (column < b[..., 1:]) for b in bounds]
        yield cols, torch.stack(in_ranges).any(0)


def grouped(x: Tensor, groups: int, rows: slice, dtype: torch.dtype) -> Tensor:
    """Some rows of ``(B, H, L, D)`` as (B, groups, H / groups * rows, D)."""
    part = x[:, :, rows].to(dtype)
    return part.reshape(part.shape[0], groups, -1, part.shape[3])


def scores(q: Tensor, k: Tensor, scale: float, softcap: float, heads: int) -> Tensor:
    """Scores of grouped rows, (B, G, H / G, rows, cols)."""
    s = (q @ k.mT).mul_(scale).unflatten(2, (heads, -1))
    return s if softcap == 0.0 else torch.tanh(s / softcap) * softcap


def ordered(tensor: Tensor, dtype: torch.dtype, heads: int, length: int, size: int) -> Tensor:
    """Zeros ``(B, heads, length, size)`` whose memory has the order (B, length, heads, size)."""
    return tensor.new_zeros(tensor.shape[0], length, heads, size, dtype=dtype).transpose(1, 2)


# --- queries apart from each other ---


def queries_apart(
    q: Tensor, k: Tensor, ranges: Tensor | None, causal: bool
) -> Iterator[tuple[slice, slice, Tensor]]:
    """Every query by itself, as (batch index, query), with the keys that it sees.

    Other documents of its row, and padding, have no influence on its result.
    """
    offset = k.shape[2] - q.shape[2]
    for b, i in itertools.product(range(q.shape[0]), range(q.shape[2])):
        bounds = [0, i + offset + 1 if causal else k.shape[2]]
        if ranges is not None:
            bounds = ranges[b if ranges.shape[0] > 1 else 0, i].tolist()
        visible = torch.zeros(k.shape[2], dtype=torch.bool)
        for begin, end in zip(bounds[::2], bounds[1::2], strict=True):
            visible[max(0, begin) : max(0, end)] = True
        yield slice(b, b + 1), slice(i, i + 1), visible.nonzero().squeeze(1).to(k.device)


def forward_apart(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    ranges: Tensor | None,
    causal: bool,
    scale: float,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    """Forward of one query after the other."""
    y = ordered(q, q.dtype, q.shape[1], q.shape[2], v.shape[3])
    lse = q.new_empty(q.shape[:3], dtype=statistics_dtype(q.dtype))
    for b, i, keys in queries_apart(q, k, ranges, causal):
        # a library may choose a GEMM by strides and addresses: a cache has others than a sequence
        query = q[b, :, i].clone(memory_format=torch.contiguous_format)
        key_rows, values = (x[b][:, :, keys].contiguous() for x in (k, v))
        y[b, :, i], lse[b, :, i] = forward_by_blocks(
            query, key_rows, values, sinks, None, False, scale, softcap
        )
    return y, lse


def backward_apart(
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
    *needs: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Backward of one query after the other; keys and values add what their queries give them."""
    acc_dtype = lse.dtype
    totals = [
        ordered(x, acc_dtype, *x.shape[1:]) if n else x.new_empty(0)
        for x, n in zip((q, k, v), needs[:3], strict=True)
    ]
    dsinks = q.new_zeros(q.shape[1] if sinks is not None and needs[3] else 0, dtype=acc_dtype)
    wide = None if sinks is None else sinks.to(acc_dtype)
    for b, i, keys in queries_apart(q, k, ranges, causal):
        gradients = backward_by_blocks(
            dy[b, :, i].to(acc_dtype),
            q[b, :, i].to(acc_dtype),
            k[b][:, :, keys].to(acc_dtype),
            v[b][:, :, keys].to(acc_dtype),
            wide,
            None,
            y[b, :, i].to(acc_dtype),
            lse[b, :, i],
            False,
            scale,
            softcap,
            *needs,
        )
        if needs[0]:
            totals[0][b, :, i] = gradients[0]
        for total, part, is_needed in zip(totals[1:], gradients[1:3], needs[1:3], strict=True):
            if is_needed:
                total[b][:, :, keys] = total[b][:, :, keys] + part  # each key listed once
        dsinks += gradients[3] if dsinks.numel() else 0
    rounded = [_rounded(t, x.dtype) for t, x in zip(totals, (q, k, v), strict=True)]
    return *rounded, dsinks if sinks is None else dsinks.to(sinks.dtype)  # type: ignore[return-value]


# --- forward and backward ---


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
    """Attention in blocks; query by query if queries must not influence each other's bits."""
    chosen = forward_apart if by_rows() else forward_by_blocks
    return chosen(q, k, v, sinks, ranges, causal, scale, softcap)


def forward_by_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    ranges: Tensor | None,
    causal: bool,
    scale: float,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    """What is summed so far is rescaled where a block has a larger score; a sink comes first."""
    acc_dtype, (batch, heads, length, _), groups = statistics_dtype(q.dtype), q.shape, k.shape[1]
    y = ordered(q, q.dtype, heads, length, v.shape[3])
    lse, step = (
        q.new_empty(q.shape[:3], dtype=acc_dtype),
        block_size(batch * heads, acc_dtype.itemsize),
    )
    for rows in blocks(length if batch else 0, step):
        query_rows = grouped(q, groups, rows, acc_dtype)
        score_shape = (batch, groups, heads // groups, rows.stop - rows.start)
        top = query_rows.new_full((*score_shape, 1), -torch.inf)
        if sinks is not None:
            top = sinks.to(acc_dtype).view(1, groups, -1, 1, 1).expand_as(top)
        total, acc = (
            torch.full_like(top, sinks is not None),
            query_rows.new_zeros(*score_shape, v.shape[3]),
        )
        for cols, visible in visible_keys(q, k, ranges, causal, rows, step):
            s = scores(query_rows, k[:, :, cols].to(acc_dtype), scale, softcap, score_shape[2])
            s = s if visible is None else s.masked_fill(~visible, -torch.inf)
            new_top = torch.maximum(top, s.amax(-1, keepdim=True))
            base = new_top.masked_fill(new_top == -torch.inf, 0)
            p, decay = torch.exp(s - base), torch.exp(top - base)
            total, top = total * decay + p.sum(-1, keepdim=True), new_top
            acc = acc * decay + (p.flatten(2, 3) @ v[:, :, cols].to(acc_dtype)).view(acc.shape)
        lse[:, :, rows] = (top + total.log()).view(batch, heads, -1)
        y[:, :, rows] = (acc / total.masked_fill(total == 0, 1)).flatten(1, 2).to(q.dtype)
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
    """Attention in blocks; query by query if queries must not influence each other's bits."""
    chosen = backward_apart if by_rows() else backward_by_blocks
    needs = (needs_q, needs_k, needs_v, needs_sinks)
    return chosen(dy, q, k, v, sinks, ranges, y, lse, causal, scale, softcap, *needs)


def backward_by_blocks(
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
    """``ds = p (dy v' - sum(dy y))``; lse counts the sink, whose probability has no value."""
    acc_dtype, (batch, heads, length, _), groups = lse.dtype, q.shape, k.shape[1]
    dq, dk, dv = (
        ordered(x, d, *x.shape[1:]) if is_needed else x.new_empty(0)
        for x, d, is_needed in (
            (q, q.dtype, needs_q),
            (k, acc_dtype, needs_k),
            (v, acc_dtype, needs_v),
        )
    )
    dsinks, step = lse.new_zeros(heads), block_size(batch * heads, acc_dtype.itemsize)
    for rows in blocks(length if batch else 0, step):
        query_rows, up = grouped(q, groups, rows, acc_dtype), grouped(dy, groups, rows, acc_dtype)
        inner, ends = (
            (up * grouped(y, groups, rows, acc_dtype)).sum(-1, keepdim=True),
            lse[:, :, rows],
        )
        total, normal = (
            torch.zeros_like(query_rows),
            ends.reshape(batch, groups, heads // groups, -1, 1),
        )
        if sinks is not None:
            share = torch.exp(sinks.to(acc_dtype)[:, None] - ends)
            dsinks -= (share * inner.view(ends.shape)).sum((0, 2))
        for cols, visible in visible_keys(q, k, ranges, causal, rows, step):
            key_rows, values = k[:, :, cols].to(acc_dtype), v[:, :, cols].to(acc_dtype)
            s = scores(query_rows, key_rows, scale, softcap, heads // groups)
            p = torch.exp(s - normal)
            p = (p if visible is None else p.masked_fill(~visible, 0)).flatten(2, 3)
            if needs_v:
                dv[:, :, cols] += p.mT @ up
            ds = p.mul_(up @ values.mT - inner)
            ds = ds if softcap == 0.0 else ds * (1 - (s.flatten(2, 3) / softcap).square())
            total += ds @ key_rows
            if needs_k:
                dk[:, :, cols] += (ds.mT @ query_rows).mul_(scale)
        if needs_q:
            dq[:, :, rows] = (total * scale).view(batch, heads, -1, q.shape[3]).to(q.dtype)
    dsinks = q.new_empty(0) if sinks is None or not needs_sinks else dsinks.to(sinks.dtype)
    return dq, _rounded(dk, k.dtype), _rounded(dv, v.dtype), dsinks


def _rounded(total: Tensor, dtype: torch.dtype) -> Tensor:
    return total.to(dtype, memory_format=torch.preserve_format)


# --- ranges that are a causal mask ---

MARK = "_liger_multi_causal"


def _on_main_stream(device: torch.device) -> bool:
    """Whether no CUDA graph is being captured or warmed up here; both use a side stream.

    A capture must not wait for the device, and would fix its answer for all later masks.
    """
    if device.type == "cpu":
        return True
    module = torch.get_device_module(device)
    if not hasattr(module, "default_stream"):
        return False
    return bool(module.current_stream(device) == module.default_stream(device))


def looked_at(ranges: Tensor, keys: int) -> Tensor:
    """A copy, marked if it is a causal mask with as many queries as keys. Waits for the device."""
    copy, queries = ranges.clone(), ranges.shape[1]
    if hasattr(ranges, BLOCKS):
        setattr(copy, BLOCKS, getattr(ranges, BLOCKS))
    elif queries == keys and ranges.shape[2] == 2 and _on_main_stream(ranges.device):
        ends = torch.arange(1, keys + 1, device=ranges.device, dtype=ranges.dtype)
        plain = (ranges[..., 0] == 0).all() & (ranges[..., 1] == ends).all()
        setattr(copy, MARK, bool(plain))
    return copy


def unless_causal(ranges: Tensor | None, causal: bool) -> tuple[Tensor | None, bool]:
    """The ranges and ``causal`` to compute with; a marked mask becomes ``causal``."""
    if ranges is not None and getattr(ranges, MARK, False) and _on_main_stream(ranges.device):
        return None, True
    return ranges, causal


# --- ranges that are blocks ---

BLOCKS = "_liger_multi_blocks"
"""Attribute of ranges that say the same as some calls without ranges; lost, as a mark is."""


class Block(NamedTuple):
    """Queries of one row that see all of the same keys, or each other causally.

    Attributes:
        query: The first one.
        key: The first key.
        batch: Blocks of this size behind each other, which do not see each other.
        queries: Of a block.
        keys: Of a block; where causal, they are the queries.
        causal: Whether a query sees no later keys.
    """

    query: int
    key: int
    batch: int
    queries: int
    keys: int
    causal: bool


class Blocks(NamedTuple):
    """What ranges say, in parts that have no pair of a query and a key in common.

    Attributes:
        calls: Causal blocks, which have no query in common, and then others.
        rest: Ranges of what the calls leave; None where the causal blocks have every query that
            sees a key.
    """

    calls: tuple[Block, ...]
    rest: Tensor | None

    @property
    def depth(self) -> int:
        """The most parts that a query is in."""
        spans = [(block.query, block.query + block.batch * block.queries) for block in self.calls]
        deepest = max(sum(start <= edge < end for start, end in spans) for edge, _ in spans)
        return deepest + (self.rest is not None)


def blocks_of(ranges: Tensor | None) -> Blocks | None:
    """The blocks of ranges, unless results of a query may not depend on its neighbors."""
    return None if by_rows() else getattr(ranges, BLOCKS, None)
