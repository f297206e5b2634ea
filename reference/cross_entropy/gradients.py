"""The gradients of a head: sums over chunks of rows, in fp32, rounded once."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from liger_multi.reference.common.chunking import (
    add_product_,
    statistics_dtype,
    weight_gradient_dtype,
)
from liger_multi.reference.cross_entropy.fused_linear import Chunks


class Gradients(NamedTuple):
    """Gradients before they are scaled; empty where nobody needs one."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor


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
            self._hidden(graw, self.gradients.hidden[where])
        elif self.needs[0] and isinstance(where, Tensor):
            self.gradients.hidden.index_copy_(0, where, self._hidden(graw, torch.empty_like(h)))
        if self.needs[1]:
            add_product_(self.gradients.weight, graw.t(), h, first=place.start == 0)
        if self.needs[2]:
            self.gradients.bias.add_(graw.sum(0, dtype=self.gradients.bias.dtype))

    def _hidden(self, graw: Tensor, out: Tensor) -> Tensor:
        if self.chunks.float8 is not None and self.chunks.float8.gradients:
            return self.chunks.float8.hidden_gradient(graw, out)
        return torch.mm(graw, self.chunks.weight, out=out)


def scale_to(gradient: Tensor, factor: Tensor | None, dtype: torch.dtype) -> Tensor:
    """``gradient * factor`` computed in fp32 and rounded once to ``dtype``, in one pass.

    The factor has one axis, because a tensor without axes would be rounded to the gradient's dtype
    first.
    """
    if factor is None:
        return gradient.to(dtype)
    return torch.mul(gradient, factor.reshape(1), out=torch.empty_like(gradient, dtype=dtype))
