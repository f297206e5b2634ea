"""Which sample every token of a call belongs to, as far as its arguments tell.

A token that a mask hides belongs to no sample: it has the id of the token before it, so that it
neither begins a sample nor ends one. Positions are compared from one visible token to the next.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_multi.patching.attention.interface import KeyMask


def rows_of(arguments: Mapping[str, Any]) -> Tensor | None:
    """The ids or embeddings of a call, ``(B, T, ...)``."""
    tokens = arguments.get("input_ids")
    return arguments.get("inputs_embeds") if tokens is None else tokens  # type: ignore[no-any-return]


# --- masks ---


def visible_tokens(mask: Any, tokens: int) -> Tensor | None:
    """Which of the last tokens a mask leaves, ``(B or 1, T)`` bool; None where it hides none.

    A mask is of all tokens so far, of queries and keys, or a dictionary of masks by kinds of
    layers. Keys may be more than tokens: those of a cache, before the tokens or around them.
    """
    if isinstance(mask, Mapping):
        parts = sorted(mask.values(), key=lambda part: getattr(part, "ndim", 0) != 2)
        answers = [visible_tokens(part, tokens) for part in parts]
        return next((answer for answer in answers if answer is not None), None)
    if isinstance(mask, KeyMask):
        return _by_ranges(mask, tokens) if mask.dense is None else _by_keys(mask.dense, tokens)
    if isinstance(mask, Tensor):
        if mask.ndim == 2 and mask.shape[1] >= tokens:
            return mask[:, mask.shape[1] - tokens :] != 0
        return _by_keys(mask, tokens) if mask.ndim == 4 else None
    return _by_function(mask, tokens) if hasattr(mask, "mask_mod") else None


def _by_keys(mask: Tensor, tokens: int) -> Tensor | None:
    """By a mask ``(B, heads, T, S)``: a token that is hidden does not see itself."""
    if mask.shape[2] != tokens or mask.shape[3] < tokens:
        return None
    floating = mask.is_floating_point()
    visible = (mask > torch.finfo(mask.dtype).min / 2 if floating else mask != 0).any(1)
    if mask.shape[3] == tokens:
        return visible.diagonal(dim1=1, dim2=2)
    place = torch.arange(mask.shape[3], device=mask.device)
    return _by_last(torch.where(visible, place, -1).amax(-1))


def _by_last(last: Tensor) -> Tensor:
    """By the last key that each query sees: that of a visible token is its own.

    Where in a cache the tokens stand is not known; it is the same place for all of them.
    """
    offset = last - torch.arange(last.shape[1], device=last.device)
    return offset == offset.amax(1, keepdim=True)


def _by_ranges(mask: KeyMask, tokens: int) -> Tensor | None:
    ranges = mask.ranges
    if ranges is None or ranges.shape[1] != tokens:
        return None
    first, end = ranges.unflatten(-1, (-1, 2)).unbind(-1)
    if mask.shape[3] == tokens:
        place = torch.arange(tokens, device=ranges.device)[:, None]
        return ((first <= place) & (place < end)).any(-1)  # type: ignore[no-any-return]
    return _by_last(torch.where(first < end, end - 1, -1).amax(-1))


def _by_function(mask: Any, tokens: int) -> Tensor | None:
    """By a block mask of flex attention, whose function takes numbers of tokens."""
    queries, keys = mask.seq_lengths
    if queries < tokens or keys < queries:
        return None
    device = mask.kv_num_blocks.device
    place = torch.arange(tokens, device=device)
    batch = torch.arange(mask.kv_num_blocks.shape[0], device=device)[:, None]
    visible: Tensor = mask.mask_mod(batch, torch.zeros_like(batch), place, place + (keys - queries))
    return visible.expand(batch.shape[0], tokens)


# --- samples ---


class _Neighbors(NamedTuple):
    """Numbers of the visible tokens before and after each token; -1 and T where there is none."""

    before: Tensor
    after: Tensor

    @classmethod
    def of(cls, visible: Tensor) -> _Neighbors:
        tokens = visible.shape[1]
        place = torch.arange(tokens, device=visible.device)
        last = torch.where(visible, place, -1).cummax(1).values
        following = torch.where(visible, place, tokens).flip(1).cummin(1).values.flip(1)
        before = torch.cat([torch.full_like(last[:, :1], -1), last[:, :-1]], 1)
        after = torch.cat([following[:, 1:], torch.full_like(last[:, :1], tokens)], 1)
        return cls(before, after)


def sample_ids(arguments: Mapping[str, Any]) -> Tensor | None:
    """Ids of the sample that every token belongs to, ``(B, T)`` or ``(1, T)``; None if not told.

    As given, or from ``cu_seq_lens_q``, or from where ``position_ids`` do not go on. Of positions
    in three axes (images), those that are the lowest of their row in each begin a sample.
    """
    numbers = _sample_numbers(arguments)
    if numbers is None:
        return None
    visible = visible_tokens(arguments.get("attention_mask"), numbers.shape[-1])
    by_position = _by_position(arguments)
    if visible is None:
        return _ids(_jumps(numbers)) if by_position else numbers
    begins = _begins(numbers, visible, by_position)
    return _ids(begins) if numbers.shape[-1] else numbers


def _by_position(arguments: Mapping[str, Any]) -> bool:
    return arguments.get("seq_idx") is None and arguments.get("cu_seq_lens_q") is None


def _sample_numbers(arguments: Mapping[str, Any]) -> Tensor | None:
    """Ids as they are given, ``(B or 1, T)``, or positions, ``(B or 1, T)`` or ``(3, B, T)``."""
    ids: Tensor | None = arguments.get("seq_idx")
    if ids is not None:
        return ids
    tokens = rows_of(arguments)
    ends, positions = arguments.get("cu_seq_lens_q"), arguments.get("position_ids")
    if ends is not None and tokens is not None:
        place = torch.arange(tokens.shape[1], device=tokens.device, dtype=ends.dtype)
        return torch.searchsorted(ends.contiguous(), place, right=True).to(torch.int32)[None]
    if not isinstance(positions, Tensor):
        return None
    return positions[0] if positions.ndim == 3 and positions.shape[0] != 3 else positions


def _ids(begins: Tensor) -> Tensor:
    return begins.cumsum(1).to(torch.int32)


def _jumps(positions: Tensor) -> Tensor:
    """Where samples begin of which all tokens are visible."""
    if positions.ndim == 3:
        return (positions == positions.amin((0, 2), keepdim=True)).all(0)
    begins = positions[:, 1:] != positions[:, :-1] + 1
    return torch.cat([torch.zeros_like(positions[:, :1], dtype=torch.bool), begins], 1)


def _begins(numbers: Tensor, visible: Tensor, by_position: bool) -> Tensor:
    """Where samples begin, among visible tokens: never at the first one of a row."""
    before = _Neighbors.of(visible).before
    later = visible & (before >= 0)
    if numbers.ndim == 3:
        most = torch.iinfo(numbers.dtype).max
        lowest = torch.where(visible, numbers, most).amin((0, 2), keepdim=True)
        return later & (numbers == lowest).all(0)
    numbers = numbers.expand(visible.shape[0], -1) if numbers.shape[0] == 1 else numbers
    before = before.expand(numbers.shape[0], -1)
    step = numbers - numbers.gather(1, before.clamp(min=0))
    if not by_position:
        return later & (step != 0)
    # hidden tokens between two others may have positions of their own, all or some of them
    distance = torch.arange(numbers.shape[1], device=numbers.device) - before
    return later & ((step < 1) | (step > distance))


def is_numbered(mask: Any) -> bool:
    """Whether a mask ``(B, T)`` numbers the samples of rows, as some collators' (1, 1, 2, 2, 0) do.

    This waits for the device. transformers takes all numbers but 0 alike.
    """
    if type(mask) is not Tensor or mask.ndim != 2 or mask.dtype == torch.bool or not mask.numel():
        return False
    if mask.is_floating_point() or mask.device.type == "meta":
        return False
    return bool(((mask[:, 1:] >= mask[:, :-1]) | (mask[:, 1:] == 0)).all() & (mask.amax() > 1))


def several(arguments: Mapping[str, Any]) -> bool:
    """Whether a row of a call has several samples; this waits for the device.

    Where positions tell, they begin again and go on from there: they may leave some out within a
    sample, and padding has equal ones.
    """
    numbers = _sample_numbers(arguments)
    if numbers is None or numbers.shape[-1] < 3:
        return False
    visible = visible_tokens(arguments.get("attention_mask"), numbers.shape[-1])
    if visible is None:
        visible = torch.ones(numbers.shape[-2:], dtype=torch.bool, device=numbers.device)
    by_position = _by_position(arguments)
    begins = _begins(numbers, visible, by_position)
    if by_position and numbers.ndim == 2:
        begins = begins & _again(numbers.expand(len(begins), -1), _Neighbors.of(visible))
    return bool(begins.any())


def _again(positions: Tensor, neighbors: _Neighbors) -> Tensor:
    """Where positions are no higher than before, and go on from there."""
    before, after = (part.expand(len(positions), -1) for part in neighbors)
    tokens = positions.shape[1]
    earlier = positions.gather(1, before.clamp(min=0))
    later = positions.gather(1, after.clamp(max=tokens - 1))
    return (positions <= earlier) & (after < tokens) & (later == positions + 1)
