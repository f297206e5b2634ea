"""Attention whose ranges of keys are a few blocks: a call without ranges for each, and their sum.

Every call has an output and a log-sum-exp of its keys. Outputs are added by their shares of the
sum of exponentials. Backward of a call takes the output and the log-sum-exp of all, so that its
gradients are exact parts of the whole ones. Sums of more than two parts are kept in fp32, so that
results are rounded twice however deep a tree is.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_multi.backends.triton.common.launching import launch
from liger_multi.backends.triton.common.rows import cdiv, power_of_2, round_to, sum_rows
from liger_multi.reference.attention.attention import Block, Blocks

TILE = 4096  # elements of a program

# --- two parts of a softmax ---


@triton.jit
def _attention_merge_kernel(
    y_ptr,
    lse_ptr,
    part_ptr,
    part_lse_ptr,
    lse_block,
    lse_head,
    pairs,
    length,
    heads,
    DIM: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Add a part of the keys to an output and its log-sum-exp, in place.

    Program: ROWS pairs of a query and a head, in the order of y, (block, query, head, DIM), which
    is that of the part too. The part's log-sum-exp is (block, head, query), of blocks of ``length``
    queries; that of y has the strides ``lse_block`` and ``lse_head``. A query that sees no key in
    either has -inf, and y = 0.
    """
    start = tl.program_id(0) * ROWS  # less than 2^31: y has DIM times as many elements
    row, col = tl.arange(0, ROWS), tl.arange(0, SIZE)
    pair = start + row
    mask = pair < pairs
    query, head = pair // heads, (pair % heads).to(tl.int64)
    block, query = (query // length).to(tl.int64), query % length
    lse_ptr += block * lse_block + head * lse_head + query
    part_lse_ptr += (block * heads + head) * length + query
    lse = tl.load(lse_ptr, mask=mask, other=float("-inf"))
    part_lse = tl.load(part_lse_ptr, mask=mask, other=float("-inf"))
    tl.debug_barrier()  # several threads have read each number, and one of them writes over it
    top = tl.maximum(lse, part_lse)
    base = tl.where(top == float("-inf"), 0.0, top)  # -inf - -inf would be NaN
    share, part_share = tl.exp(lse - base), tl.exp(part_lse - base)
    some = top > float("-inf")
    total = tl.where(some, share + part_share, 1.0)
    tl.store(lse_ptr, tl.where(some, base + tl.log(total), top), mask=mask)
    y_ptr += start.to(tl.int64) * DIM
    part_ptr += start.to(tl.int64) * DIM
    at = row[:, None] * DIM + col[None, :]
    inside = mask[:, None] & (col < DIM)[None, :]
    y = tl.load(y_ptr + at, mask=inside, other=0.0).to(tl.float32)
    part = tl.load(part_ptr + at, mask=inside, other=0.0).to(tl.float32)
    y = y * (share / total)[:, None] + part * (part_share / total)[:, None]
    tl.store(y_ptr + at, round_to(y, y_ptr.dtype.element_ty), mask=inside)


def merge(y: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Add a part of the keys to ``y (B, H, L, E)`` and ``lse (B, H, L)`` in place.

    Args:
        y: In the contract's order in memory, (B, L, H, E) without gaps; fp32, or as the part.
        lse: Its log-sum-exp; queries are adjacent.
        part: Of the same shape and order.
        part_lse: Contiguous.
    """
    batch, heads, length, width = part.shape
    size = power_of_2(width)
    rows = max(1, TILE // size)
    pairs = batch * heads * length
    launch(
        _attention_merge_kernel,
        cdiv(pairs, rows),
        (y, lse, part, part_lse, lse.stride(0), lse.stride(1), pairs, length, heads),
        (width, size, rows),
        4,
    )


# --- the calls ---


def _view(x: Tensor, start: int, block: Block, length: int) -> Tensor:
    """The tokens of a block, ``(batch, H, length, ...)`` from ``(1, H, L, ...)``."""
    part = x[0].narrow(1, start, block.batch * length)
    return part.unflatten(1, (block.batch, length)).transpose(0, 1)


def _queries(x: Tensor, block: Block) -> Tensor:
    return _view(x, block.query, block, block.queries)


def _keys(x: Tensor, block: Block) -> Tensor:
    return _view(x, block.key, block, block.keys)


def _sum_dtype(tensor: Tensor, blocks: Blocks) -> torch.dtype:
    """The dtype that parts are added in."""
    return tensor.dtype if blocks.depth <= 2 else torch.float32


def _empty_output(tensor: Tensor, size: int, blocks: Blocks) -> Tensor:
    """An uninitialized output for causal blocks, with zeros in the padding behind them."""
    _, heads, length, _ = tensor.shape
    empty = tensor.new_empty(1, length, heads, size, dtype=_sum_dtype(tensor, blocks))
    end = max(b.query + b.batch * b.queries for b in blocks.calls if b.causal)
    if end < length:
        empty[:, end:] = 0
    return empty.transpose(1, 2)


def forward(
    call: Callable[..., tuple[Tensor, Tensor]],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    blocks: Blocks,
    *options: float,
) -> tuple[Tensor, Tensor]:
    """Forward of every block by ``call``, a forward of the contract, for one row."""
    remaining = blocks.rest
    if remaining is not None:
        y, lse = call(q, k, v, sinks, remaining, False, *options)
        y = y.to(_sum_dtype(y, blocks))
    else:  # causal blocks have all queries but those of padding
        y = _empty_output(q, v.shape[3], blocks)
        lse = torch.full(q.shape[:3], -torch.inf, dtype=torch.float32, device=q.device)
        if sinks is not None:
            lse.copy_(sinks[None, :, None])
    for block in blocks.calls:
        first = remaining is None and block.causal
        heads = (_queries(q, block), _keys(k, block), _keys(v, block), sinks if first else None)
        part, part_lse = call(*heads, None, block.causal, *options)
        if first:
            _queries(y, block).copy_(part)
            _queries(lse, block).copy_(part_lse)
        else:
            merge(_queries(y, block), _queries(lse, block), part, part_lse)
    return y.to(q.dtype), lse


def backward(
    call: Callable[..., Any],
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    blocks: Blocks,
    y: Tensor,
    lse: Tensor,
    options: tuple[float, float],
    needs: tuple[bool, bool, bool, bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Backward of every block by ``call``, a backward of the contract; gradients are added."""
    remaining = blocks.rest
    dsinks = []
    if remaining is not None:
        *grads, dsink = call(dy, q, k, v, sinks, remaining, y, lse, False, *options, *needs)
        grads = [x.to(_sum_dtype(x, blocks)) for x in grads]
        dsinks.append(dsink)
    else:
        grads = [
            _empty_output(x, x.shape[3], blocks) if is_needed else x.new_empty(0)
            for x, is_needed in zip((q, k, v), needs[:3], strict=True)
        ]
    views = (_queries, _keys, _keys)
    for block in blocks.calls:
        first = remaining is None and block.causal
        heads = [view(x, block) for view, x in zip(views, (q, k, v), strict=True)]
        up, out, ends = (_queries(x, block) for x in (dy, y, lse))
        mask = (sinks if first else None, None, out, ends.contiguous(), block.causal)
        *parts, dsink = call(up, *heads, *mask, *options, *needs[:3], first and needs[3])
        for view, total, part in zip(views, grads, parts, strict=True):
            if total.numel():
                write = Tensor.copy_ if first else Tensor.add_
                write(view(total, block), part)
        if first:
            dsinks.append(dsink)
    dq, dk, dv = (total.to(q.dtype) for total in grads)
    if not needs[3]:
        return dq, dk, dv, q.new_empty(0)
    return dq, dk, dv, sum_rows(torch.stack(dsinks), dsinks[0].dtype)
