"""Plain formulas and peers of the rotary kinds, for :mod:`.formulas`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Formula = Callable[..., Any]
Pair = tuple[Tensor, Tensor]


def _half(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Pair:
    def rotate_half(x: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=-1)
        return torch.cat((-b, a), dim=-1)

    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def _chosen(angle: Tensor, sections: Sequence[int], arrangement: str) -> Tensor:
    """The angles of each pair's grid, as the rotary modules join them."""
    if arrangement == "chunked":
        parts = angle.split([*sections, *sections], dim=-1)
        return torch.cat([part[i % len(sections)] for i, part in enumerate(parts)], dim=-1)
    first = angle[0].clone()
    half = first.shape[-1] // 2
    for grid in range(1, len(sections)):
        end = sections[grid] * len(sections)
        for start in (0, half):
            place = slice(start + grid, start + end, len(sections))
            first[..., place] = angle[grid, ..., place]
    return first


def _multimodal(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, sections: Sequence[int],
    arrangement: str = "chunked",
) -> Pair:  # fmt: skip
    return _half(q, k, *[_chosen(t, sections, arrangement) for t in (cos, sin)])


def _complex(q: Tensor, k: Tensor, freqs: Tensor) -> Pair:
    numbers = torch.view_as_complex(freqs.float()).unsqueeze(2)

    def turned(x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * numbers).flatten(-2).type_as(x)

    return turned(q), turned(k)


def _sorted(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, rotary_dim: int | None = None
) -> Pair:
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)

    def turned(x: Tensor) -> Tensor:
        a, b = x[..., ::2], x[..., 1::2]
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)

    return turned(q), turned(k)


def _positions(q: Tensor, k: Tensor, position_ids: Tensor, inv_freq: Tensor) -> Pair:
    turns = position_ids[..., None].float() * inv_freq
    both = torch.cat((turns, turns), dim=-1)
    return _half(q, k, both.cos().to(q.dtype), both.sin().to(q.dtype))


TABLE: dict[str, dict[str, Formula]] = {
    "rope_multimodal": {"torch": _multimodal},
    "rope_complex": {"torch": _complex},
    "rope_sorted": {"torch": _sorted},
    "rope_positions": {"torch": _positions},
}
MODULE = "liger_kernel.transformers"
LIGER: dict[str, tuple[str, Callable[[Formula], Formula]]] = {
    "rope_multimodal": (
        f"{MODULE}.qwen2vl_mrope:liger_multimodal_rotary_pos_emb",
        lambda f: lambda q, k, cos, sin, *, sections: f(q, k, cos, sin, list(sections)),
    ),
    "rope_complex": (
        f"{MODULE}.llama4_rope:liger_llama4_text_rotary_pos_emb",
        lambda f: lambda q, k, freqs: f(q, k, torch.view_as_complex(freqs)),
    ),
}
