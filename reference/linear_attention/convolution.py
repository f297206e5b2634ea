"""Depthwise causal convolutions, some tokens of all rows at a time.

A block of tokens is computed from a window: the block and the W - 1 tokens before it. In backward a
token's gradient has terms from W - 1 later tokens, so that the last W - 1 sums of a block wait for
the next one.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from liger_multi.reference.common.chunking import row_blocks, statistics_dtype


class Filter(NamedTuple):
    """Weight (C, W) and bias in the dtype of the sums, and which tokens share a sequence."""

    weight: Tensor
    bias: Tensor | None
    near: list[Tensor] | None

    @property
    def before(self) -> int:
        """Tokens before a block that it reads."""
        return self.weight.shape[1] - 1

    def taps(self, window: Tensor, block: slice) -> list[Tensor]:
        """What each of the W weights meets: zeros where it is not of the token's sequence."""
        count = block.stop - block.start
        views = [window[:, k : k + count] for k in range(self.before + 1)]
        if self.near is None:
            return views
        pairs = zip(views, reversed(self.near), strict=True)
        return [x.masked_fill(~is_near[:, block], 0) for x, is_near in pairs]

    def sums(self, taps: list[Tensor]) -> Tensor:
        """``bias + sum of weight * x``."""
        u = taps[0] * self.weight[:, 0]
        for k in range(1, len(taps)):
            u = torch.addcmul(u, taps[k], self.weight[:, k])
        return u if self.bias is None else u + self.bias

    def transposed(self, du: Tensor, block: slice, pending: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of the tokens that are complete with this block, and sums that are not."""
        count = du.shape[1]
        total = torch.cat([pending, torch.zeros_like(du)], 1)
        for k in range(self.before + 1):
            term = du * self.weight[:, k]
            if self.near is not None:
                term = term.masked_fill(~self.near[self.before - k][:, block], 0)
            total[:, k : k + count] += term
        return total[:, :count], total[:, count:]


def filter_of(
    weight: Tensor, bias: Tensor | None, ids: Tensor | None, acc_dtype: torch.dtype
) -> Filter:
    """The filter of one call.

    Its ``near[j]`` (B, T, 1) says whether token t - j is of the sequence of t: no id changes in
    between. What stands before a row belongs to the row's first sequence.
    """
    masks = None
    if ids is not None:
        width = weight.shape[1]
        change = ids[:, 1:] != ids[:, :-1]
        same_sequence = torch.cat([ids.new_ones(ids.shape[0], width, dtype=torch.bool), ~change], 1)
        masks, length = [torch.ones_like(ids, dtype=torch.bool)], ids.shape[1]
        for j in range(1, width):
            masks.append(masks[-1] & same_sequence[:, width - j : width - j + length])
        masks = [n.unsqueeze(-1) for n in masks]
    return Filter(weight.to(acc_dtype), None if bias is None else bias.to(acc_dtype), masks)


def window_of(x: Tensor, initial_state: Tensor | None, block: slice, reach: int) -> Tensor:
    """A block's tokens and those before it, the row's initial state or zeros where it has none."""
    acc_dtype, start = statistics_dtype(x.dtype), block.start
    if start >= reach:
        return x[:, start - reach : block.stop].to(acc_dtype)
    if initial_state is None:
        initial_state = x.new_zeros(x.shape[0], reach, x.shape[2])
    return torch.cat([initial_state[:, start:].to(acc_dtype), x[:, : block.stop].to(acc_dtype)], 1)


def blocks_of(x: Tensor) -> list[slice]:
    """Slices over tokens."""
    token_bytes = 6 * x.shape[0] * x.shape[2] * statistics_dtype(x.dtype).itemsize
    return list(row_blocks(x.shape[1], token_bytes))


class Sums:
    """Gradients of weight and bias over all blocks."""

    def __init__(self, filter_of_call: Filter, needs_weight: bool, needs_bias: bool) -> None:
        self.weight = torch.zeros_like(filter_of_call.weight) if needs_weight else None
        has_bias = needs_bias and filter_of_call.bias is not None
        self.bias = (
            filter_of_call.weight.new_zeros(filter_of_call.weight.shape[0]) if has_bias else None
        )

    def add(self, du: Tensor, taps: list[Tensor]) -> None:
        """One block."""
        if self.weight is not None:
            for k, x in enumerate(taps):
                self.weight[:, k] += (du * x).sum((0, 1))
        if self.bias is not None:
            self.bias += du.sum((0, 1))

    def gradients(self, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        """In the dtypes of weight and bias, or of what stands in place of an absent bias."""
        return (
            weight.new_empty(0) if self.weight is None else self.weight.to(weight.dtype),
            bias.new_empty(0) if self.bias is None else self.bias.to(bias.dtype),
        )
