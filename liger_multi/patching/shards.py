"""Operators that mix tokens, on rows that are sharded over ranks (sequence parallelism).

Between mixers, every rank has all heads or channels of its tokens, ``(tokens / P, heads)``.
:func:`spread` takes an operator and such tensors. One all-to-all gives ``(tokens, heads / P)``, the
operator runs as in one process, and another all-to-all brings its result back. :data:`AXES` has the
axes of every operator's tensors; operators themselves do not know of ranks.

Two variables are set while sharded models run. :func:`ranks` is set while a mixer runs, also when
backward computes it again. :func:`row` is set while the model runs, for masks and ids of samples,
which are created once per call.
"""

from __future__ import annotations

import contextlib
import functools
import math
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from liger_multi._torch_private import constant_in_graphs
from liger_multi.patching.packing.tree import Tree

# --- the ranks and the row in force ---


@dataclass(frozen=True)
class Ranks:
    """The ranks over which rows are sharded.

    Attributes:
        group: The process group. On the meta device, a function that is called with the bytes of
            every exchange, or None.
        size: The number of ranks.
        rank: The index of this rank.
    """

    group: Any
    size: int
    rank: int

    def share(self, x: Tensor, axis: int) -> Tensor:
        """This rank's part of an axis."""
        length = x.shape[axis] // self.size
        return x.narrow(axis, self.rank * length, length)


@dataclass(frozen=True)
class Row:
    """The arguments of a call for whole rows.

    Attributes:
        tokens: Tokens of a row, padded to a multiple of the ranks.
        share: Tokens per rank.
        padding: Padding tokens at the end of a row.
        mask: ``(B, tokens)``, or None.
        positions: ``(B or 1, tokens)``, or None.
        ids: The sample of every token ``(B or 1, tokens)``; None if positions do not tell.
        tree: The tree whose segments are the row, or None.
        ranks: The ranks that call the model with whole rows; None if they bring their shares.
    """

    tokens: int
    share: int
    padding: int
    mask: Tensor | None
    positions: Tensor | None
    ids: Tensor | None
    tree: Tree | None = None
    ranks: Ranks | None = None

    @property
    def length(self) -> int:
        """Tokens of a row without padding."""
        return self.tokens - self.padding

    def visible(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A mask function of transformers, limited to samples of the row."""
        ids, positions = self.ids, self.positions
        if ids is None or positions is None:
            return function

        def within_samples(batch: Any, head: Any, query: Any, key: Any) -> Any:
            row = batch if len(ids) > 1 else 0
            query_and_key = positions[row, query], positions[row, key]
            return function(batch, head, *query_and_key) & (ids[row, query] == ids[row, key])

        return within_samples


_ranks: ContextVar[Ranks | None] = ContextVar("ranks", default=None)
_row: ContextVar[Row | None] = ContextVar("row", default=None)
_suspended: ContextVar[bool] = ContextVar("suspended", default=False)


@constant_in_graphs
def ranks() -> Ranks | None:
    """The ranks over which the tokens of the running mixer are sharded."""
    return _ranks.get()


@constant_in_graphs
def row() -> Row | None:
    """The whole row of the running model, whose tensors are a share of it."""
    return _row.get()


@contextlib.contextmanager
def in_force(value: Ranks | Row) -> Iterator[None]:
    """Set the value of :func:`ranks` or :func:`row` within a block."""
    variable: ContextVar[Any] = _ranks if isinstance(value, Ranks) else _row
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


@contextlib.contextmanager
def suspended() -> Iterator[None]:
    """Within a block, rows are whole on every rank, as without sharding."""
    was_suspended, values = _suspended.get(), (_ranks.get(), _row.get())
    _suspended.set(True)
    _ranks.set(None)
    _row.set(None)
    try:
        yield
    finally:
        _suspended.set(was_suspended)
        _ranks.set(values[0])
        _row.set(values[1])


@constant_in_graphs
def is_suspended() -> bool:
    """Whether sharding is suspended."""
    return _suspended.get()


# --- rows that other libraries shard ---


def _cut_by_accelerate() -> str | None:
    state: Any = sys.modules.get("accelerate.state")
    config = state and state.AcceleratorState._shared_state.get("parallelism_config")
    if config is None or not (config.cp_enabled or config.sp_enabled):
        return None
    return (
        "accelerate's ParallelismConfig cuts rows over ranks: pass liger_multi.integrations."
        f"SequenceParallel(sp_size={config.cp_size * config.sp_size}) in its place, and shard the "
        "model with shard_sequence"
    )


cutters: list[Callable[[], str | None]] = [_cut_by_accelerate]
"""Functions that return why rows of a call may be shares of rows, or None."""


@constant_in_graphs
def cut_elsewhere() -> str | None:
    """Why the tokens of an unsharded mixer may be a share of a row, or None."""
    for cutter in cutters:
        reason = cutter()
        if reason is not None and not is_suspended():
            return reason
    return None


# --- all-to-all ---


def _received_parts(x: Tensor, ranks: Ranks, axis: int) -> Tensor:
    """The parts that all ranks sent to this one, on the first axis; ``x`` has an axis of parts.

    Memory:
        Two tensors of the size of ``x`` during the call, one after it.

    Raises:
        RuntimeError: A rank has ended, or is late beyond the time limit of the group.
    """
    parts = x.movedim(axis, 0).contiguous()
    received = torch.empty_like(parts)
    if parts.is_meta:  # of an estimate
        _count(ranks, parts.nbytes)
        return received
    try:
        dist.all_to_all_single(received, parts, group=ranks.group)
    except RuntimeError as error:
        raise RuntimeError(
            f"shard_sequence: rank {ranks.rank} of {ranks.size} got no tokens from another rank, "
            "which has ended or is late beyond the time limit of its process group; its own "
            f"output has the reason ({error})"
        ) from error
    return received


def _count(ranks: Ranks, nbytes: int) -> None:
    """Tell an estimate how many bytes all ranks together send to each other, or keep."""
    if ranks.group is not None:
        ranks.group(nbytes)


def _to_heads(x: Tensor, ranks: Ranks) -> Tensor:
    """``(B, T / P, H, ...)`` to ``(B, T, H / P, ...)``."""
    batch, share, heads = x.shape[:3]
    x = x.reshape(batch, share, ranks.size, heads // ranks.size, *x.shape[3:])
    received = _received_parts(x, ranks, 2)
    return received.movedim(0, 1).reshape(batch, ranks.size * share, *x.shape[3:])


def _to_tokens(x: Tensor, ranks: Ranks) -> Tensor:
    """``(B, T, H / P, ...)`` to ``(B, T / P, H, ...)``."""
    batch, tokens = x.shape[:2]
    x = x.reshape(batch, ranks.size, tokens // ranks.size, *x.shape[2:])
    received = _received_parts(x, ranks, 1).movedim(0, 2)
    # a reshape may leave strides with which modeling files cannot call view
    return received.reshape(*received.shape[:2], -1, *received.shape[4:]).contiguous()


class _Exchange(torch.autograd.Function):
    """One all-to-all, whose gradient is the other one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks, heads: bool) -> Tensor:
        ctx.ranks, ctx.heads = ranks, heads
        return _to_heads(x, ranks) if heads else _to_tokens(x, ranks)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        return (_to_tokens if ctx.heads else _to_heads)(dy, ctx.ranks), None, None


def _exchange(x: Tensor, ranks: Ranks, tokens: int, heads: int, to_heads: bool) -> Tensor:
    """The all-to-all of a tensor with these axes of tokens and heads, in the same layout."""
    exchanged = _Exchange.apply(x.movedim((tokens, heads), (1, 2)), ranks, to_heads)  # type: ignore[no-untyped-call]
    return exchanged.movedim((1, 2), (tokens, heads))  # type: ignore[no-any-return]


class _Gather(torch.autograd.Function):
    """The tokens of all ranks, for computations that every rank repeats.

    The gradient of this rank's tokens is its share of the upstream gradient, times a factor.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks, factor: int) -> Tensor:
        ctx.ranks, ctx.factor = ranks, factor
        parts = [torch.empty_like(x) for _ in range(ranks.size)]
        if not x.is_meta:
            dist.all_gather(parts, x.contiguous(), group=ranks.group)
        return torch.cat(parts, 1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        return ctx.ranks.share(dy, 1) * ctx.factor, None, None


def gather(x: Tensor, ranks: Ranks, factor: int = 1) -> Tensor:
    """``(B, T / P, ...)`` of every rank as ``(B, T, ...)`` on all of them.

    A factor of P is for inputs of a loss outside of the model: gradients of weights that are
    averaged over the ranks then equal those of one process.
    """
    row: Tensor = _Gather.apply(x, ranks, factor)  # type: ignore[no-untyped-call]
    return row


class _Keys(torch.autograd.Function):
    """The tokens of all ranks along an axis; the gradient of each is the sum of every rank's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks, axis: int) -> Tensor:
        ctx.ranks, ctx.axis = ranks, axis
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format)] * ranks.size
        if x.is_meta:
            _count(ranks, ranks.size * x.nbytes)
        else:
            parts = [torch.empty_like(part) for part in parts]
            dist.all_gather(parts, x.contiguous(), group=ranks.group)
        return torch.cat(parts, axis)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        parts = _received_parts(dy.unflatten(ctx.axis, (ctx.ranks.size, -1)), ctx.ranks, ctx.axis)
        return (
            parts.sum(0, dtype=torch.promote_types(dy.dtype, torch.float32)).to(dy.dtype),
            None,
            None,
        )


def keys_of_row(x: Tensor, axis: int) -> Tensor:
    """Keys of the whole row for the queries of this rank; ``x`` itself without ranks.

    For mixers whose heads share keys (latents, keys of an indexer): every rank gets all keys, and
    queries stay.
    """
    ranks_in_force = ranks()
    if ranks_in_force is None:
        return x
    keys: Tensor = _Keys.apply(x, ranks_in_force, axis)  # type: ignore[no-untyped-call]
    return keys


class _Sum(torch.autograd.Function):
    """The sum over ranks; the gradient of a part is P times that of the sum.

    Gradients of weights that are averaged over the ranks then are their sum.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks) -> Tensor:
        ctx.size = ranks.size
        total = x.detach().clone()
        if not x.is_meta:
            dist.all_reduce(total, group=ranks.group)
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        return dy * ctx.size, None


def total(x: Tensor, ranks: Ranks) -> Tensor:
    """The sum of every rank's part of a loss, on all ranks."""
    loss: Tensor = _Sum.apply(x, ranks)  # type: ignore[no-untyped-call]
    return loss


def shared_input(x: Tensor, ranks: Ranks) -> Tensor:
    """A number that all ranks have, each with the gradient of its share of tokens.

    For losses outside of the model, as :func:`gather` with a factor of P.
    """
    return ranks.size * x - (ranks.size - 1) * x.detach()


def merge(x: Tensor, indices: Tensor, count: int, ranks: Ranks) -> Tensor:
    """Numbers of every rank's tokens at their places among ``count``, on all ranks.

    For inputs of a loss outside of the model, as :func:`gather` with a factor of P.
    """
    return total(x.new_zeros(count).index_copy(0, indices, x), ranks)


# --- operators ---


@dataclass(frozen=True)
class Axes:
    """The axes of an operator's tensors, one letter each.

    ``b`` is the batch, ``t`` tokens, ``h`` heads or channels, and ``g`` grouped heads. ``s`` is for
    tensors that all heads share. ``p`` is an axis of :data:`PARTS` parts with all channels each.

    Attributes:
        rows: Axes of the positional arguments.
        named: Axes of keyword arguments.
        result: Axes of the result.
    """

    rows: tuple[str, ...]
    named: dict[str, str]
    result: str


_RULE = Axes(("btg", "btg", "bth", "bth", "bth"), {}, "bth")
AXES = {
    "attention": Axes(("bht", "bgt", "bgt"), {"sinks": "h"}, "bht"),
    "causal_conv1d": Axes(("bth", "h", "h"), {}, "bth"),
    "gated_short_conv": Axes(("btph", "h", "h"), {}, "bth"),
    "gated_delta_rule": _RULE,
    "kimi_delta_attention": _RULE,
    "ssd_scan": Axes(
        ("bth", "bth", "h", "btg", "btg"), {"D": "h", "dt_bias": "h", "z": "bth"}, "bth"
    ),
    "selective_scan": Axes(
        ("bth", "bth", "h", "bts", "bts"), {"D": "h", "delta_bias": "h", "z": "bth"}, "bth"
    ),
}
"""Axes by operator; an operator that mixes tokens needs a line to run on sharded rows."""
PARTS = 3  # of an axis ``p``


def spread(
    op: str, function: Callable[..., Any], rows: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """``function(*rows, **kwargs)``, an operator, on whole rows of this rank's heads.

    Without ranks in force, it is just called.

    Raises:
        ValueError: The number of heads is no multiple of the ranks.
        RuntimeError: Another library shards rows.
    """
    ranks_in_force = ranks()
    if ranks_in_force is None:
        reason = cut_elsewhere()
        if reason:
            raise RuntimeError(f"{op} was called on a share of a row, not on all of it: {reason}")
        return function(*rows, **kwargs)
    axes = AXES[op]
    heads = _heads(op, axes, rows)
    if heads % ranks_in_force.size:
        raise ValueError(
            f"{op} has {heads} heads or channels, which {ranks_in_force.size} ranks do not divide: "
            "a row of this model is spread over as many ranks as divide the heads of all mixers"
        )
    part = functools.partial(_part, ranks=ranks_in_force, heads=heads)
    rows = tuple(part(x, letters) for x, letters in zip(rows, axes.rows, strict=True))
    kwargs = {name: part(x, axes.named.get(name, "")) for name, x in kwargs.items()}
    result = function(*rows, **kwargs)
    y, *states = result if isinstance(result, tuple) else (result,)
    y = _exchange(y, ranks_in_force, axes.result.index("t"), axes.result.index("h"), False)
    # states are of this rank's heads only: None, so that they are not taken for all
    return (y, *(None for _ in states)) if states else y


def _heads(op: str, axes: Axes, rows: tuple[Any, ...]) -> int:
    x, letters = next((x, s) for x, s in zip(rows, axes.rows, strict=True) if "h" in s)
    return x.shape[-1] // PARTS if "p" in letters else x.shape[letters.index("h")]  # type: ignore[no-any-return]


def _part(x: Any, letters: str, ranks: Ranks, heads: int) -> Any:
    """This rank's part of an argument."""
    if not isinstance(x, Tensor) or not letters:
        return x
    if "t" not in letters:
        return ranks.share(x, letters.index("h"))
    tokens = letters.index("t")
    if "s" in letters:
        shared = x.unsqueeze(2).expand(*x.shape[:2], ranks.size, *x.shape[2:])
        return _exchange(shared, ranks, tokens, 2, True).squeeze(2)
    if "p" in letters:
        return _exchange(x.unflatten(-1, (PARTS, heads)), ranks, tokens, 3, True).flatten(-2)
    axis = letters.index("h" if "h" in letters else "g")
    if "g" in letters:
        x = x.repeat_interleave(_copies(x.shape[axis], heads, ranks.size), axis)
    return _exchange(x, ranks, tokens, axis, True)


def _copies(groups: int, heads: int, size: int) -> int:
    """How often grouped heads are repeated: the least that gives every rank its own heads."""
    fewest = size // math.gcd(groups, size)
    return fewest if (heads // groups) % fewest == 0 else heads // groups
