"""The loop of fused linear losses: product, row kernel, two products, a chunk of rows at a time.

A backend brings its row kernels; the memory plan, the products and the dropping of ignored rows
stand here once. Gradients are kept unnormalised (as of the sum over rows, class weights scaled to
a mean of one), so that fp16 does not underflow before the loss scale arrives, and are divided in
backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from liger_multi.reference.chunking import (
    add_product_,
    capturing,
    chunk_rows,
    is_whole,
    row_blocks,
    statistics_dtype,
    weight_gradient_dtype,
)
from liger_multi.reference.rows import Objective


@dataclass(frozen=True)
class Plan:
    """The arguments of a fused linear loss that say how to go through the rows."""

    chunk: int
    budget: int
    compute_dtype: torch.dtype | None
    compact: bool


class Gradients(NamedTuple):
    """Unnormalised gradients; empty where nobody needs one."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor


class Chunks:
    """Iterate over chunks of rows with valid targets; their logits share one buffer."""

    def __init__(
        self, hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None,
        objective: Objective, plan: Plan,
    ) -> None:  # fmt: skip
        kind = plan.compute_dtype or hidden.dtype
        self.hidden, self.target = hidden, target
        self.weight, self.bias = weight.to(kind), None if bias is None else bias.to(kind)
        self.kind, self.index = kind, None
        if plan.compact and not capturing(hidden.device):
            # the one read-back: how many rows are valid
            index = (target != objective.ignore_index).nonzero().squeeze(1)
            self.index = index if index.numel() < target.numel() else None
        self.rows = target.numel() if self.index is None else self.index.numel()
        like = hidden.new_empty(0, hidden.shape[1], dtype=kind)
        self.step = chunk_rows(self.rows, like, weight.shape[0], plan.chunk, plan.budget)
        # of all rows, dropped or not: nothing that only the run knows decides a dtype
        every, size = target.numel(), like.element_size()
        limits = (plan.chunk, plan.budget)
        self.whole = is_whole(every, hidden.shape[1], weight.shape[0], size, *limits)
        self.buffer = hidden.new_empty(min(self.step, self.rows), weight.shape[0], dtype=kind)

    def __iter__(self) -> Iterator[tuple[slice, Tensor | slice, Tensor, Tensor, Tensor]]:
        """Place among the valid rows, place among all rows, hidden states, targets, raw logits."""
        for place in row_blocks(self.rows, 1, self.step):
            where = place if self.index is None else self.index[place]
            h = self.hidden[where].to(self.kind)
            raw = self.buffer[: place.stop - place.start]
            if self.bias is None:
                torch.mm(h, self.weight.t(), out=raw)
            else:
                torch.addmm(self.bias, h, self.weight.t(), out=raw)
            yield place, where, h, self.target[where], raw


class Accumulator:
    """Collect the gradients of hidden states, weight and bias over chunks."""

    def __init__(
        self, chunks: Chunks, hidden: Tensor, weight: Tensor, accumulate: torch.dtype,
        needs: tuple[bool, ...],
    ) -> None:  # fmt: skip
        self.chunks, self.needs = chunks, needs
        make = torch.empty if chunks.index is None else torch.zeros  # dropped rows stay zero
        total = weight_gradient_dtype(chunks.kind, weight.dtype, accumulate, chunks.whole)
        self.gradients = Gradients(
            make(hidden.shape if needs[0] else (0,), dtype=chunks.kind, device=hidden.device),
            torch.empty(weight.shape if needs[1] else (0,), dtype=total, device=weight.device),
            torch.zeros(
                weight.shape[0] if needs[2] else 0,
                dtype=statistics_dtype(chunks.kind),
                device=weight.device,
            ),
        )
        if not chunks.rows:
            self.gradients.weight.zero_()

    def add(self, place: slice, where: Tensor | slice, h: Tensor, graw: Tensor) -> None:
        """Add one chunk, whose logits were overwritten by their gradient."""
        if self.needs[0] and isinstance(where, slice):
            torch.mm(graw, self.chunks.weight, out=self.gradients.hidden[where])
        elif self.needs[0] and isinstance(where, Tensor):
            self.gradients.hidden.index_copy_(0, where, torch.mm(graw, self.chunks.weight))
        if self.needs[1]:
            add_product_(self.gradients.weight, graw.t(), h, first=place.start == 0)
        if self.needs[2]:
            self.gradients.bias.add_(graw.sum(0, dtype=self.gradients.bias.dtype))
