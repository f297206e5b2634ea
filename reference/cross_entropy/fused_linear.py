"""The loop of fused linear operators: the logits of a chunk of rows at a time.

A backend brings its row kernels; the memory plan, the product and the dropping of ignored rows
stand here once, and the products of the gradients in gradients.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor

from liger_multi.reference.common.chunking import capturing, chunk_rows, is_whole, row_blocks
from liger_multi.reference.common.retry import divided
from liger_multi.reference.cross_entropy.float8 import GRADIENT, PLAIN, Rounding
from liger_multi.reference.cross_entropy.float8_head import Head, logits_dtype
from liger_multi.reference.cross_entropy.rows import Objective

# which chunks are gone through: a simulation leaves out those that repeat the one before them
visited: ContextVar[Callable[[Iterable[slice]], Iterable[slice]]] = ContextVar(
    "liger_multi_visited", default=iter
)


@dataclass(frozen=True)
class ChunkSpec:
    """The arguments of a fused linear loss that say how to go through the rows."""

    chunk: int
    budget: int
    compute_dtype: torch.dtype | None
    compact: bool


class Chunks:
    """Iterate over chunks of rows with valid targets; their logits share one buffer.

    ``rounding`` is how a head in 8 bits rounds, ``wanted`` whether it makes gradients of hidden.
    """

    def __init__(
        self, hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None,
        objective: Objective, plan: ChunkSpec, rounding: Rounding = PLAIN, wanted: bool = False,
    ) -> None:  # fmt: skip
        kind = logits_dtype(plan.compute_dtype, hidden.dtype)
        self.hidden, self.target = hidden, target
        self.weight, self.bias = weight.to(kind), None if bias is None else bias.to(kind)
        self.kind, self.index = kind, None
        self.float8: Head | None = None
        if plan.compute_dtype is not None and plan.compute_dtype.itemsize == 1:
            self.float8 = Head(self.weight, plan.compute_dtype == GRADIENT, wanted, rounding)
        if plan.compact and not capturing(hidden.device):
            # the one read-back: how many rows are valid
            index = (target != objective.ignore_index).nonzero().squeeze(1)
            self.index = index if index.numel() < target.numel() else None
        self.rows = target.numel() if self.index is None else self.index.numel()
        like = hidden.new_empty(0, hidden.shape[1], dtype=kind)
        # of all rows, dropped or not: nothing that only the run knows decides a dtype
        every, size = target.numel(), like.element_size()
        limits = (plan.chunk, plan.budget)
        self.whole = is_whole(every, hidden.shape[1], weight.shape[0], size, *limits)
        step = chunk_rows(self.rows, like, weight.shape[0], plan.chunk, plan.budget)
        self.step = divided(min(step, max(1, self.rows)), self.whole)
        self.buffer = hidden.new_empty(min(self.step, self.rows), weight.shape[0], dtype=kind)

    def __iter__(self) -> Iterator[tuple[slice, Tensor | slice, Tensor, Tensor, Tensor]]:
        """Place among the valid rows, place among all rows, hidden states, targets, raw logits."""
        for place in visited.get()(row_blocks(self.rows, 1, self.step)):
            yield self.at(place, self.buffer[: place.stop - place.start])

    def at(
        self, place: slice, raw: Tensor, ready: bool = False
    ) -> tuple[slice, Tensor | slice, Tensor, Tensor, Tensor]:
        """One chunk, whose logits are written into ``raw`` unless they are there already."""
        where = place if self.index is None else self.index[place]
        h = self.hidden[where].to(self.kind)
        if ready:
            pass
        elif self.float8 is not None:
            self.float8.logits(h, self.bias, raw)
        elif self.bias is None:
            torch.mm(h, self.weight.t(), out=raw)
        else:
            torch.addmm(self.bias, h, self.weight.t(), out=raw)
        return place, where, h, self.target[where], raw
