"""Which sample every token of a call belongs to, from its arguments.

:func:`sample_ids` takes the arguments of a call and returns ids ``(B or 1, T)``, or None. A token
that a mask hides gets the id of the token before it, so that it neither starts nor ends a sample.
Positions are compared between neighboring visible tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_multi.patching.attention.interface import KeyMask


def rows_of(arguments: Mapping[str, Any]) -> Tensor | None:
    """The ids or embeddings of a call, ``(B, T, ...)``."""
    tokens = arguments.get("input_ids")
    return arguments.get("inputs_embeds") if tokens is None else tokens


# --- masks ---


def visible_tokens(mask: Any, tokens: int) -> Tensor | None:
    """Which of the last tokens a mask does not hide, ``(B or 1, T)`` bool; None if it hides none.

    A mask is per token, per query and key, or a dictionary of masks by types of layers. There may
    be more keys than tokens: those of a cache, before or around the tokens.
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


def continuing_tokens(mask: Any, tokens: int) -> Tensor | None:
    """Which tokens attend to an earlier one, ``(B or 1, T)`` bool: they start no sample.

    None if the mask has no row per token.
    """
    if isinstance(mask, Mapping):
        parts = [continuing_tokens(part, tokens) for part in mask.values()]
        answers = [part for part in parts if part is not None]
        return functools.reduce(torch.logical_or, answers) if answers else None
    mask = mask.dense if isinstance(mask, KeyMask) else mask
    keys = _keys(mask, tokens) if isinstance(mask, Tensor) and mask.ndim == 4 else None
    return None if keys is None else keys.visible.to(torch.uint8).argmax(2) < keys.own


FAR = -1e3
"""Largest value of a mask that hides a key; models use -1e4, -1e9, the least number or -inf. Biases
that grow with the distance stay above it for a token itself and its neighbors."""


class _Keys(NamedTuple):
    """The visible keys of every token, ``(B, T, S)`` bool, and the index of its own, ``(B, T)``."""

    visible: Tensor
    own: Tensor


def _keys(mask: Tensor, tokens: int) -> _Keys | None:
    """The keys by a mask ``(B, heads, T, S)``; None for another shape.

    The place of the tokens in a cache is not known. It is taken from the last visible key of each
    token, and is the same for all tokens of a row.
    """
    if mask.shape[2] != tokens or mask.shape[3] < tokens:
        return None
    visible = (mask > FAR if mask.is_floating_point() else mask != 0).any(1)
    key = torch.arange(mask.shape[3], device=mask.device)
    own_key = key[:tokens].expand(visible.shape[0], -1)
    if mask.shape[3] > tokens:
        offset = torch.where(visible, key, -1).amax(-1) - own_key
        own_key = (own_key + offset.amax(1, keepdim=True)).clamp(0, mask.shape[3] - 1)
    return _Keys(visible, own_key)


def _by_keys(mask: Tensor, tokens: int) -> Tensor | None:
    """The visible tokens by a mask ``(B, heads, T, S)``.

    A hidden token does not attend to itself. In masks where every token does, which avoids empty
    rows, a hidden token attends to no other one, and no other one attends to it.
    """
    keys = _keys(mask, tokens)
    if keys is None:
        return None
    itself = keys.visible.gather(2, keys.own[..., None])[..., 0]
    of_query, of_key = keys.visible.sum(2), keys.visible.sum(1).gather(1, keys.own)
    return itself & ((of_query > 1) | (of_key > 1))


def _by_last(last: Tensor) -> Tensor:
    """The visible tokens by the last key of each query, which is a visible token's own key.

    The place of the tokens in a cache is not known, but the same for all of them.
    """
    offset = last - torch.arange(last.shape[1], device=last.device)
    return offset == offset.amax(1, keepdim=True)


def _by_ranges(mask: KeyMask, tokens: int) -> Tensor | None:
    ranges = mask.ranges
    if ranges is None or ranges.shape[1] != tokens:
        return None
    first, end = ranges.unflatten(-1, (-1, 2)).unbind(-1)
    if mask.shape[3] == tokens:
        token = torch.arange(tokens, device=ranges.device)[:, None]
        return ((first <= token) & (token < end)).any(-1)  # type: ignore[no-any-return]
    return _by_last(torch.where(first < end, end - 1, -1).amax(-1))


def _by_function(mask: Any, tokens: int) -> Tensor | None:
    """The visible tokens by a block mask of flex attention, whose function takes token indices."""
    queries, keys = mask.seq_lengths
    if queries < tokens or keys < queries:
        return None
    device = mask.kv_num_blocks.device
    token = torch.arange(tokens, device=device)
    batch = torch.arange(mask.kv_num_blocks.shape[0], device=device)[:, None]
    visible: Tensor = mask.mask_mod(batch, torch.zeros_like(batch), token, token + (keys - queries))
    return visible.expand(batch.shape[0], tokens)


# --- samples ---


class _Neighbors(NamedTuple):
    """Indices of the visible tokens before and after each token; -1 and T if there is none."""

    before: Tensor
    after: Tensor

    @classmethod
    def of(cls, visible: Tensor) -> _Neighbors:
        tokens = visible.shape[1]
        token = torch.arange(tokens, device=visible.device)
        last = torch.where(visible, token, -1).cummax(1).values
        at_or_after = torch.where(visible, token, tokens).flip(1).cummin(1).values.flip(1)
        previous_visible = torch.cat([torch.full_like(last[:, :1], -1), last[:, :-1]], 1)
        next_visible = torch.cat([at_or_after[:, 1:], torch.full_like(last[:, :1], tokens)], 1)
        return cls(previous_visible, next_visible)


def sample_ids(arguments: Mapping[str, Any]) -> Tensor | None:
    """Ids of the samples of all tokens, ``(B, T)`` or ``(1, T)``; None if no argument tells them.

    They come from ``seq_idx``, from ``cu_seq_lens_q``, or from ``position_ids`` that do not
    continue. With positions in three axes (images), a token that has the row's lowest position in
    each axis starts a sample.
    """
    numbers = _sample_numbers(arguments)
    if numbers is None:
        return None
    visible = visible_tokens(arguments.get("attention_mask"), numbers.shape[-1])
    by_position = _by_position(arguments)
    if visible is None:
        return _ids(_jumps(numbers)) if by_position else numbers
    begins = _begins(numbers, visible, by_position)
    if by_position:
        begins = _starts_by_mask(begins, arguments)
    return _ids(begins) if numbers.shape[-1] else numbers


def _starts_by_mask(begins: Tensor, arguments: Mapping[str, Any]) -> Tensor:
    """Starts of samples without the tokens that attend to an earlier one, if the mask tells."""
    continuing = continuing_tokens(arguments.get("attention_mask"), begins.shape[1])
    return begins if continuing is None else begins & ~continuing


def _by_position(arguments: Mapping[str, Any]) -> bool:
    return arguments.get("seq_idx") is None and arguments.get("cu_seq_lens_q") is None


def _sample_numbers(arguments: Mapping[str, Any]) -> Tensor | None:
    """Ids ``(B or 1, T)`` from an argument, or positions, ``(B or 1, T)`` or ``(3, B, T)``."""
    ids: Tensor | None = arguments.get("seq_idx")
    if ids is not None:
        return ids
    tokens = rows_of(arguments)
    ends, positions = arguments.get("cu_seq_lens_q"), arguments.get("position_ids")
    if ends is not None and tokens is not None:
        token = torch.arange(tokens.shape[1], device=tokens.device, dtype=ends.dtype)
        return torch.searchsorted(ends.contiguous(), token, right=True).to(torch.int32)[None]
    if not isinstance(positions, Tensor):
        return None
    return positions[0] if positions.ndim == 3 and positions.shape[0] != 3 else positions


def _ids(begins: Tensor) -> Tensor:
    return begins.cumsum(1).to(torch.int32)


def _jumps(positions: Tensor) -> Tensor:
    """Starts of samples by positions if all tokens are visible."""
    if positions.ndim == 3:
        return (positions == positions.amin((0, 2), keepdim=True)).all(0)
    begins = positions[:, 1:] != positions[:, :-1] + 1
    return torch.cat([torch.zeros_like(positions[:, :1], dtype=torch.bool), begins], 1)


def _begins(numbers: Tensor, visible: Tensor, by_position: bool) -> Tensor:
    """Starts of samples among visible tokens; the first token of a row does not count."""
    previous = _Neighbors.of(visible).before
    not_first = visible & (previous >= 0)
    if numbers.ndim == 3:
        maximum = torch.iinfo(numbers.dtype).max
        lowest = torch.where(visible, numbers, maximum).amin((0, 2), keepdim=True)
        return not_first & (numbers == lowest).all(0)
    numbers = numbers.expand(visible.shape[0], -1) if numbers.shape[0] == 1 else numbers
    previous = previous.expand(numbers.shape[0], -1)
    step = numbers - numbers.gather(1, previous.clamp(min=0))
    if not by_position:
        return not_first & (step != 0)
    # hidden tokens between two visible ones may or may not have positions of their own
    distance = torch.arange(numbers.shape[1], device=numbers.device) - previous
    return not_first & ((step < 1) | (step > distance))


def is_numbered(mask: Any) -> bool:
    """Whether a mask ``(B, T)`` numbers samples, such as (1, 1, 2, 2, 0) of some collators.

    Waits for the device. transformers treats all numbers but 0 alike.
    """
    if type(mask) is not Tensor or mask.ndim != 2 or mask.dtype == torch.bool or not mask.numel():
        return False
    if mask.is_floating_point() or mask.device.type == "meta":
        return False
    return bool(((mask[:, 1:] >= mask[:, :-1]) | (mask[:, 1:] == 0)).all() & (mask.amax() > 1))


def has_samples(arguments: Mapping[str, Any]) -> bool:
    """Whether a row of a call has several samples. Waits for the device.

    Positions tell this only if they restart and continue: samples may skip positions, and padding
    may repeat one.
    """
    numbers = _sample_numbers(arguments)
    if numbers is None or numbers.shape[-1] < 3:
        return False
    visible = visible_tokens(arguments.get("attention_mask"), numbers.shape[-1])
    if visible is None:
        visible = torch.ones(numbers.shape[-2:], dtype=torch.bool, device=numbers.device)
    by_position = _by_position(arguments)
    begins = _begins(numbers, visible, by_position)
    if by_position:
        begins = _starts_by_mask(begins, arguments)
    if by_position and numbers.ndim == 2:
        begins = begins & _restarts(numbers.expand(len(begins), -1), _Neighbors.of(visible))
    return bool(begins.any())


def _restarts(positions: Tensor, neighbors: _Neighbors) -> Tensor:
    """Where positions do not increase, and the next one continues."""
    previous, following = (part.expand(len(positions), -1) for part in neighbors)
    tokens = positions.shape[1]
    earlier = positions.gather(1, previous.clamp(min=0))
    next_positions = positions.gather(1, following.clamp(max=tokens - 1))
    return (positions <= earlier) & (following < tokens) & (next_positions == positions + 1)
