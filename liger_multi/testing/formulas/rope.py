"""Rotary position embeddings; ``casting`` says where 16-bit dtypes round and changes no formula."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from liger_multi.testing.formulas._common import wide

Pair = tuple[Tensor, Tensor]


def _rotated(x: Tensor, style: str) -> Tensor:
    """Each pair (a, b) becomes (-b, a)."""
    if style == "half":
        a, b = x.chunk(2, dim=-1)
        return torch.cat((-b, a), dim=-1)
    return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)


def _per_channel(angle: Tensor, style: str) -> Tensor:
    """A value for both channels of every pair."""
    if style == "half":
        return torch.cat((angle, angle), dim=-1)
    return angle.repeat_interleave(2, -1)


def rope(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    style: str = "half",
    unsqueeze_dim: int = 1,
    rotary_dim: int | None = None,
    casting: str = "llama",
) -> Pair:
    """``x * cos + rotate(x) * sin`` of the first ``rotary_dim`` channels."""
    width = rotary_dim or cos.shape[-1]
    if cos.shape[-1] != width:  # one value per pair
        cos, sin = _per_channel(cos, style), _per_channel(sin, style)
    cos, sin = cos.unsqueeze(unsqueeze_dim - q.ndim), sin.unsqueeze(unsqueeze_dim - q.ndim)

    def turned(x: Tensor) -> Tensor:
        if width < x.shape[-1]:
            return torch.cat((turned(x[..., :width]), x[..., width:]), dim=-1)
        return x * cos + _rotated(x, style) * sin

    return turned(q), turned(k)


def _of_sections(angle: Tensor, sections: Sequence[int], arrangement: str, style: str) -> Tensor:
    """From the angles of every grid, those of the grid that each pair belongs to."""
    count, pairs = len(sections), sum(sections)
    both = angle.shape[-1] == 2 * pairs  # a value for each channel
    if both and style == "interleaved":
        even = _of_sections(angle[..., ::2], sections, arrangement, style)
        odd = _of_sections(angle[..., 1::2], sections, arrangement, style)
        return torch.stack((even, odd), dim=-1).flatten(-2)
    if arrangement == "chunked":
        parts = angle.split([*sections] * (1 + both), dim=-1)
        return torch.cat([part[i % count] for i, part in enumerate(parts)], dim=-1)
    chosen = angle[0].clone()
    for grid in range(1, count):
        for start in (0, pairs)[: 1 + both]:
            end = start + min(sections[grid] * count, pairs)
            place = slice(start + grid, end, count)
            chosen[..., place] = angle[grid, ..., place]
    return chosen


def rope_multimodal(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    sections: Sequence[int],
    *,
    arrangement: str = "chunked",
    style: str = "half",
    unsqueeze_dim: int = 1,
    rotary_dim: int | None = None,
    casting: str = "llama",
) -> Pair:
    """RoPE whose pairs take their angles from different grids (time, height, width)."""
    cos, sin = (_of_sections(t, sections, arrangement, style) for t in (cos, sin))
    return rope(q, k, cos, sin, style=style, unsqueeze_dim=unsqueeze_dim, rotary_dim=rotary_dim)


def rope_complex(q: Tensor, k: Tensor, freqs: Tensor, *, unsqueeze_dim: int = 2) -> Pair:
    """Neighboring channels as complex numbers, times ``freqs``; other channels stay."""
    numbers = torch.view_as_complex(wide(freqs).contiguous()).unsqueeze(unsqueeze_dim - q.ndim)
    width = 2 * numbers.shape[-1]

    def turned(x: Tensor) -> Tensor:
        if width < x.shape[-1]:
            return torch.cat((turned(x[..., :width]), x[..., width:]), dim=-1)
        pairs = torch.view_as_complex(wide(x).unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * numbers).flatten(-2).type_as(x)

    return turned(q), turned(k)


def rope_sorted(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    unsqueeze_dim: int = 1,
    rotary_dim: int | None = None,
    casting: str = "llama",
) -> Pair:
    """RoPE with interleaved input and half-split output (DeepSeek layout)."""
    width = rotary_dim or cos.shape[-1]
    both = cos.shape[-1] == width  # a value for each channel of the output
    cos, sin = cos.unsqueeze(unsqueeze_dim - q.ndim), sin.unsqueeze(unsqueeze_dim - q.ndim)
    cosines, sines = (t.chunk(2, dim=-1) if both else (t, t) for t in (cos, sin))

    def turned(x: Tensor) -> Tensor:
        if width < x.shape[-1]:
            return torch.cat((turned(x[..., :width]), x[..., width:]), dim=-1)
        a, b = x[..., ::2], x[..., 1::2]
        first, second = a * cosines[0] - b * sines[0], b * cosines[1] + a * sines[1]
        return torch.cat((first, second), dim=-1)

    return turned(q), turned(k)


def rope_positions(
    q: Tensor,
    k: Tensor,
    position_ids: Tensor,
    inv_freq: Tensor,
    *,
    scaling: float = 1.0,
    sections: Sequence[int] | None = None,
    arrangement: str = "chunked",
    style: str = "half",
    unsqueeze_dim: int = 1,
    casting: str = "llama",
) -> Pair:
    """RoPE whose angles are ``position_ids * inv_freq``."""
    frequencies = wide(inv_freq)
    turns = position_ids[..., None].to(frequencies.dtype) * frequencies
    if sections is not None:
        turns = _of_sections(turns, sections, arrangement, "half")
    turns = _per_channel(turns, style)

    def cast(wave: Tensor) -> Tensor:
        return (wave if scaling == 1.0 else wave * scaling).to(q.dtype)

    cos, sin = cast(turns.cos()), cast(turns.sin())
    return rope(q, k, cos, sin, style=style, unsqueeze_dim=unsqueeze_dim)
