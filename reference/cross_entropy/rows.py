"""Rows of logits: objective, statistics, and what the row kernels of a backend do with them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from liger_multi.reference.common.chunking import statistics_dtype
from liger_multi.reference.cross_entropy.float8 import Rounding


@dataclass(frozen=True)
class Objective:
    """How a row of raw logits becomes a loss."""

    ignore_index: int
    label_smoothing: float
    z_loss_weight: float
    softcap: float | None
    logit_scale: float = 1.0


def needs_argmax(outputs: str) -> bool:
    """Whether one of the comma-joined outputs is made from the place of a row's maximum."""
    return not {"argmax", "predicted_tokens", "token_accuracy"}.isdisjoint(outputs.split(","))


class RowStats(NamedTuple):
    """Statistics of every row; ignored rows are 0 (-1 in ``argmax``). Unwanted ones are empty."""

    ce: Tensor
    zl: Tensor
    lse: Tensor
    log_prob: Tensor
    entropy: Tensor
    argmax: Tensor

    @staticmethod
    def empty(
        rows: int, objective: Objective, outputs: str, like: Tensor, *, ignored: bool = False,
        loss: bool = True,
    ) -> RowStats:  # fmt: skip
        """Room beside ``like`` for what the loss (if any) and ``outputs`` ask of ``rows`` rows."""
        wanted, kind = outputs.split(","), statistics_dtype(like.dtype)
        zl = "z_loss" in wanted or objective.z_loss_weight != 0
        keep = (loss, zl, True, "log_prob" in wanted, "entropy" in wanted)
        parts = [like.new_empty(rows if kept else 0, dtype=kind) for kept in keep]
        parts.append(like.new_empty(rows if needs_argmax(outputs) else 0, dtype=torch.int64))
        made = RowStats._make(parts)
        if ignored:
            for part in made:
                part.fill_(-1 if part.dtype == torch.int64 else 0)
        return made

    def put(self, place: slice | Tensor, block: RowStats) -> None:
        """Write the statistics of a block of rows."""
        for room, part in zip(self, block, strict=True):
            if room.numel():
                room[place] = part


class RowKernels(Protocol):
    """What a backend's row kernels do with a chunk of raw logits, and how it rounds to 8 bits."""

    rounding: Rounding

    def statistics(
        self, raw: Tensor, target: Tensor, weight: Tensor | None, objective: Objective, outputs: str
    ) -> RowStats:
        """Statistics of every row; ``raw`` is left alone."""

    def statistics_and_gradient_(
        self,
        raw: Tensor,
        target: Tensor,
        weight: Tensor | None,
        objective: Objective,
        scales: Tensor,
        outputs: str,
    ) -> RowStats:
        """The same; ``raw`` becomes the gradient of ``ce * scales[0] + zl * scales[1]``."""

    def gradient_(
        self,
        raw: Tensor,
        target: Tensor,
        weight: Tensor | None,
        lse: Tensor,
        objective: Objective,
        dloss: Tensor,
    ) -> None:
        """Overwrite ``raw`` by its gradient; ``dloss`` has one value a row."""

    def scale(self, gradient: Tensor, factor: Tensor | None, dtype: torch.dtype) -> Tensor:
        """A gradient times a factor of one element (None: one), rounded once to ``dtype``."""
