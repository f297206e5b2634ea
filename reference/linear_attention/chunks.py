"""Parts of tensors that operators of linear attention compute by chunks of tokens."""

from __future__ import annotations

import math
from typing import NamedTuple, Optional

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_multi.reference.common.chunking import row_blocks, statistics_dtype

CHUNK = 64
NORM_EPS = 1e-6  # of the l2 norm
GONE = {torch.float32: -110.0, torch.float64: -800.0}  # gates below have an exponential of 0
STEP = 2.0**-10


# --- parts of the tensors ---


class Heads(NamedTuple):
    """A block of sequences and of key heads with their value heads."""

    batch: slice
    key: slice
    value: slice


class Inputs(NamedTuple):
    """The tensors of a call, and its options."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    initial_state: Optional[Tensor]
    first: Optional[Tensor]
    scale: float
    qk_l2norm: bool

    @property
    def kind(self) -> torch.dtype:
        """The dtype of all that is computed."""
        return statistics_dtype(self.q.dtype)

    @property
    def chunk(self) -> int:
        """Tokens of a chunk."""
        return min(CHUNK, max(1, self.q.shape[1]))

    def states(self, heads: Heads) -> Tensor:
        """The states before the first token, ``(batch, key heads, group, K, V)``."""
        state, v = self.initial_state, self.v[heads.batch, :, heads.value]
        count = heads.key.stop - heads.key.start
        if state is None:
            shape = (v.shape[0], count, v.shape[2] // count, self.k.shape[3], v.shape[3])
            return v.new_zeros(shape, dtype=self.kind)
        made: Tensor = state[heads.batch, heads.value].to(self.kind).unflatten(1, (count, -1))
        return made


def _blocks(given: Inputs) -> tuple[list[Heads], list[slice]]:
    """Blocks of heads, and spans of about as many chunks as there are spans."""
    batch, length, heads, size = given.k.shape
    group, value, chunk = given.v.shape[2] // heads, given.v.shape[3], given.chunk
    steps = max(8, math.isqrt(-(-length // chunk)))
    unit = chunk * (6 * (size + value) + 10 * chunk) + 3 * size * value
    head_bytes = given.kind.itemsize * group * min(steps, -(-length // chunk)) * unit
    blocks = [
        Heads(b, h, slice(h.start * group, h.stop * group))
        for b in row_blocks(batch, heads * head_bytes)
        for h in row_blocks(heads, (b.stop - b.start) * head_bytes)
    ]
    spans = [slice(t, min(length, t + steps * chunk)) for t in range(0, length, steps * chunk)]
    return blocks, spans


def _chunked(x: Tensor, chunk: int, kind: torch.dtype) -> Tensor:
    """``(batch, tokens, heads, ...)`` as (batch, heads, chunks, chunk, ...), zeros at the end."""
    wide = x.to(kind)
    if more := -x.shape[1] % chunk:
        wide = F.pad(wide, (0, 0) * (x.ndim - 2) + (0, more))
    return wide.reshape(wide.shape[0], -1, chunk, *wide.shape[2:]).movedim(3, 1)


def _split(g: Tensor) -> tuple[Tensor, Tensor]:
    """Gates as multiples of ``STEP``, whose sums are exact, and small rests.

    So the difference of two sums is as accurate as the gates between them, however strong those
    before.
    """
    g = g.clamp(min=GONE[g.dtype])
    coarse = (g / STEP).floor() * STEP
    return coarse, g - coarse


def _tokens(x: Tensor, length: int) -> Tensor:
    """Back to (batch, tokens, heads, ...)."""
    return x.movedim(1, 3).flatten(1, 2)[:, :length]


def heads_of(first: Tensor, heads: Heads) -> slice:
    """The sequences of a block; segments may be those of all."""
    return slice(None) if first.shape[0] == 1 else heads.batch
