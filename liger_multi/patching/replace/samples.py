"""Which sample every token of a call belongs to, as far as its arguments tell."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def rows_of(given: Mapping[str, Any]) -> Tensor | None:
    """The ids or embeddings of a call, ``(B, T, ...)``."""
    tokens = given.get("input_ids")
    rows: Tensor | None = given.get("inputs_embeds") if tokens is None else tokens
    return rows


def sample_ids(given: Mapping[str, Any]) -> Tensor | None:
    """Ids of the sample that every token belongs to, ``(B, T)`` or ``(1, T)``; None if not told.

    As given, or from ``cu_seq_lens_q``, or from where ``position_ids`` do not go on. Of positions
    in three axes (images), those that are the lowest of their row in each begin a sample.
    """
    ids: Tensor | None = given.get("seq_idx")
    if ids is not None:
        return ids
    tokens = rows_of(given)
    ends, positions = given.get("cu_seq_lens_q"), given.get("position_ids")
    if ends is not None and tokens is not None:
        place = torch.arange(tokens.shape[1], device=tokens.device, dtype=ends.dtype)
        return torch.searchsorted(ends.contiguous(), place, right=True).to(torch.int32)[None]
    if positions is None:
        return None
    if positions.ndim == 3 and positions.shape[0] == 3:
        begins = (positions == positions.amin((0, 2), keepdim=True)).all(0)
    else:
        positions = positions[0] if positions.ndim == 3 else positions
        begins = positions[:, 1:] != positions[:, :-1] + 1
        begins = torch.cat([torch.zeros_like(positions[:, :1], dtype=torch.bool), begins], 1)
    made: Tensor = begins.cumsum(1).to(torch.int32)
    return made


def unmasked(begins: Tensor, given: Mapping[str, Any]) -> Tensor:
    """Of the places where samples begin, those between two tokens that a mask leaves.

    Args:
        begins: ``(B, T - 1)``, whether the token after the first one begins a sample, and so on.
        given: Arguments of the call.
    """
    mask = given.get("attention_mask")
    if isinstance(mask, Tensor) and mask.ndim == 2 and mask.shape[1] == begins.shape[1] + 1:
        return begins & (mask[:, 1:] != 0) & (mask[:, :-1] != 0)
    return begins


def is_numbered(mask: Any) -> bool:
    """Whether a mask ``(B, T)`` numbers the samples of rows, as some collators' (1, 1, 2, 2, 0) do.

    This waits for the device. transformers takes all numbers but 0 alike.
    """
    if type(mask) is not Tensor or mask.ndim != 2 or mask.dtype == torch.bool or not mask.numel():
        return False
    if mask.is_floating_point() or mask.device.type == "meta":
        return False
    on = ((mask[:, 1:] >= mask[:, :-1]) | (mask[:, 1:] == 0)).all()
    return bool(on & (mask.amax() > 1))


def several(given: Mapping[str, Any]) -> bool:
    """Whether a row of a call has several samples; this waits for the device.

    Where positions tell, they begin again and go on from there: they may leave some out within a
    sample, and padding has equal ones.
    """
    ids = sample_ids(given)
    if ids is None or ids.shape[1] < 3:
        return False
    begins = ids[:, 1:] != ids[:, :-1]
    if given.get("seq_idx") is None and given.get("cu_seq_lens_q") is None:
        positions = given["position_ids"]
        if positions.ndim < 3 or positions.shape[0] != 3:
            positions = positions[0] if positions.ndim == 3 else positions
            again = positions[:, 1:] <= positions[:, :-1]
            begins = begins & again
            begins = begins[:, :-1] & (positions[:, 2:] == positions[:, 1:-1] + 1)
            begins = torch.cat([begins, torch.zeros_like(begins[:, :1])], 1)
    return bool(unmasked(begins, given).any())
