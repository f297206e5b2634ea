"""Mixers of tokens on rows that are spread over ranks: whole rows of some heads, by all-to-all.

Between mixers every rank has all heads or channels of its share of tokens, ``(tokens / P, heads)``.
One all-to-all turns that into ``(tokens, heads / P)``, the operator runs as in one process, and
another one turns its result back. :data:`AXES` says for every operator which axes these are; no
operator knows of ranks.

Two variables say what is in force, and are None elsewhere. :func:`ranks` is set while a module
runs that mixes tokens, so that backward may compute it again. :func:`row` is set while the model of
these modules runs, for what is made once a call: masks and ids of samples.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from liger_multi._torch_private import constant_in_graphs

# --- what is in force ---


@dataclass(frozen=True)
class Ranks:
    """The ranks over which rows are spread.

    Attributes:
        group: Of processes.
        size: How many ranks there are.
        rank: Which of them this one is.
    """

    group: Any
    size: int
    rank: int

    def share(self, x: Tensor, axis: int) -> Tensor:
        """This rank's part of an axis that ranks divide."""
        length = x.shape[axis] // self.size
        return x.narrow(axis, self.rank * length, length)


@dataclass(frozen=True)
class Row:
    """What the arguments of a call say of whole rows.

    Attributes:
        tokens: Of a row, with padding to a multiple of the ranks.
        share: Of these, on one rank.
        padding: At the end of a row.
        mask: ``(B, tokens)``, as the call has it; None without one.
        positions: ``(B or 1, tokens)``, as the call has them; None without.
        ids: The sample of every token ``(B or 1, tokens)``, where positions tell.
    """

    tokens: int
    share: int
    padding: int
    mask: Tensor | None
    positions: Tensor | None
    ids: Tensor | None

    def visible(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A mask function of transformers on rows with several samples."""
        ids, positions = self.ids, self.positions
        if ids is None or positions is None:
            return function

        def within_samples(batch: Any, head: Any, query: Any, key: Any) -> Any:
            row = batch if len(ids) > 1 else 0
            places = positions[row, query], positions[row, key]
            return function(batch, head, *places) & (ids[row, query] == ids[row, key])

        return within_samples


_ranks: ContextVar[Ranks | None] = ContextVar("ranks", default=None)
_row: ContextVar[Row | None] = ContextVar("row", default=None)
_suspended: ContextVar[bool] = ContextVar("suspended", default=False)


@constant_in_graphs
def ranks() -> Ranks | None:
    """The ranks over which the tokens of the running mixer are spread."""
    return _ranks.get()


@constant_in_graphs
def row() -> Row | None:
    """The whole row of the running model, of which its tensors are a share."""
    return _row.get()


def enter(value: Ranks | Row) -> Callable[[], None]:
    """Set what :func:`ranks` or :func:`row` returns, and return what ends it."""
    place: ContextVar[Any] = _ranks if isinstance(value, Ranks) else _row
    before = place.get()
    place.set(value)

    def end() -> None:
        place.set(before)

    return end


@contextlib.contextmanager
def suspended() -> Iterator[None]:
    """Rows within are whole on every rank, as if no model was sharded."""
    before, values = _suspended.get(), (_ranks.get(), _row.get())
    _suspended.set(True)
    _ranks.set(None)
    _row.set(None)
    try:
        yield
    finally:
        _suspended.set(before)
        _ranks.set(values[0])
        _row.set(values[1])


@constant_in_graphs
def is_suspended() -> bool:
    """Whether rows are whole."""
    return _suspended.get()


# --- all-to-all ---


def _sent(parts: Tensor, ranks: Ranks) -> Tensor:
    """What the ranks sent to this one, of parts by rank.

    Raises:
        RuntimeError: A rank has ended, or is late beyond the time limit of the group.
    """
    received = torch.empty_like(parts)
    try:
        dist.all_to_all_single(received, parts, group=ranks.group)
    except RuntimeError as error:
        raise RuntimeError(
            f"shard_sequence: rank {ranks.rank} of {ranks.size} got no tokens from another rank, "
            "which has ended or is late beyond the time limit of its process group; its own "
            f"output has the reason ({error})"
        ) from error
    return received


def _to_heads(x: Tensor, ranks: Ranks) -> Tensor:
    """``(B, T / P, H, ...)`` to ``(B, T, H / P, ...)``."""
    batch, share, heads = x.shape[:3]
    parts = x.reshape(batch, share, ranks.size, heads // ranks.size, *x.shape[3:])
    parts = parts.movedim(2, 0).contiguous()
    received = _sent(parts, ranks)
    return received.movedim(0, 1).reshape(batch, ranks.size * share, *parts.shape[3:])


def _to_tokens(x: Tensor, ranks: Ranks) -> Tensor:
    """``(B, T, H / P, ...)`` to ``(B, T / P, H, ...)``."""
    batch, tokens = x.shape[:2]
    parts = x.reshape(batch, ranks.size, tokens // ranks.size, *x.shape[2:])
    parts = parts.movedim(1, 0).contiguous()
    received = _sent(parts, ranks)
    received = received.movedim(0, 2)
    # a reshape may leave strides with which modeling files cannot call view
    return received.reshape(*received.shape[:2], -1, *received.shape[4:]).contiguous()


class _Exchange(torch.autograd.Function):
    """One all-to-all; its gradient is the other one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks, heads: bool) -> Tensor:
        ctx.ranks, ctx.heads = ranks, heads
        return _to_heads(x, ranks) if heads else _to_tokens(x, ranks)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        return (_to_tokens if ctx.heads else _to_heads)(dy, ctx.ranks), None, None


def _exchange(x: Tensor, ranks: Ranks, tokens: int, heads: int, to_heads: bool) -> Tensor:
    """The all-to-all of a tensor with these axes, which keep their places."""
    moved = _Exchange.apply(x.movedim((tokens, heads), (1, 2)), ranks, to_heads)  # type: ignore[no-untyped-call]
    return moved.movedim((1, 2), (tokens, heads))  # type: ignore[no-any-return]


class _Gather(torch.autograd.Function):
    """The tokens of all ranks, for what every rank then computes alike.

    So every rank has the gradient of all tokens, and its own are a part of that, times a factor.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks, factor: int) -> Tensor:
        ctx.ranks, ctx.factor = ranks, factor
        parts = [torch.empty_like(x) for _ in range(ranks.size)]
        dist.all_gather(parts, x.contiguous(), group=ranks.group)
        return torch.cat(parts, 1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        return ctx.ranks.share(dy, 1) * ctx.factor, None, None


def gather(x: Tensor, ranks: Ranks, factor: int = 1) -> Tensor:
    """``(B, T / P, ...)`` of every rank as ``(B, T, ...)`` on all of them.

    A factor of P is for what a loss outside of the model is computed of: averaged over the ranks,
    gradients of weights are then those of one process.
    """
    whole: Tensor = _Gather.apply(x, ranks, factor)  # type: ignore[no-untyped-call]
    return whole


class _Sum(torch.autograd.Function):
    """The sum over ranks; the gradient of a part is P times that of the sum.

    Whoever averages gradients of weights over the ranks then has their sum.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks) -> Tensor:
        ctx.size = ranks.size
        total = x.detach().clone()
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


# --- operators ---


@dataclass(frozen=True)
class Axes:
    """The axes of an operator's tensors, a letter each.

    ``b`` is the batch, ``t`` tokens, ``h`` heads or channels, ``g`` heads that several of ``h``
    share, ``s`` stands for no axis of a tensor with tokens that all heads share, ``p`` for parts of
    an axis that each have all channels, and ``.`` for the rest.

    Attributes:
        rows: Of the positional arguments.
        named: Of keyword arguments.
        result: Of what the operator returns.
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
"""Operators that mix tokens. A new one needs a line here to run on rows that are spread."""
PARTS = 3  # of an axis ``p``, in one axis with the channels


def spread(
    op: str, function: Callable[..., Any], rows: tuple[Any, ...], named: dict[str, Any]
) -> Any:
    """``function(*rows, **named)``, an operator, on whole rows of this rank's heads.

    Where no ranks are in force, that is all it does.

    Raises:
        ValueError: The ranks do not divide the heads, or somebody asks for states.
    """
    over = ranks()
    if over is None:
        return function(*rows, **named)
    axes = AXES[op]
    heads = _heads(op, axes, rows)
    if heads % over.size:
        raise ValueError(
            f"{op} has {heads} heads or channels, which {over.size} ranks do not divide: a row of "
            "this model is spread over as many ranks as divide the heads of all of its mixers"
        )
    part = functools.partial(_part, over=over, heads=heads)
    rows = tuple(part(x, letters) for x, letters in zip(rows, axes.rows, strict=True))
    named = {name: part(x, axes.named.get(name, "")) for name, x in named.items()}
    result = function(*rows, **named)
    y, *states = result if isinstance(result, tuple) else (result,)
    y = _exchange(y, over, axes.result.index("t"), axes.result.index("h"), False)
    # states are of this rank's heads alone: None, so that nobody takes them for all
    return (y, *(None for _ in states)) if states else y


def _heads(op: str, axes: Axes, rows: tuple[Any, ...]) -> int:
    x, letters = next((x, s) for x, s in zip(rows, axes.rows, strict=True) if "h" in s)
    return x.shape[-1] // PARTS if "p" in letters else x.shape[letters.index("h")]  # type: ignore[no-any-return]


def _part(x: Any, letters: str, over: Ranks, heads: int) -> Any:
    """This rank's part of an argument."""
    if not isinstance(x, Tensor) or not letters:
        return x
    if "t" not in letters:
        return over.share(x, letters.index("h"))
    tokens = letters.index("t")
    if "s" in letters:
        shared = x.unsqueeze(2).expand(*x.shape[:2], over.size, *x.shape[2:])
        return _exchange(shared, over, tokens, 2, True).squeeze(2)
    if "p" in letters:
        return _exchange(x.unflatten(-1, (PARTS, heads)), over, tokens, 3, True).flatten(-2)
    axis = letters.index("h" if "h" in letters else "g")
    if "g" in letters:
        x = x.repeat_interleave(_copies(x.shape[axis], heads, over.size), axis)
    return _exchange(x, over, tokens, axis, True)


def _copies(groups: int, heads: int, size: int) -> int:
    """How often heads that others share are repeated: as little as gives every rank its own."""
    fewest = size // math.gcd(groups, size)
    return fewest if (heads // groups) % fewest == 0 else heads // groups
