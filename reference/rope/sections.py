"""Angles of rotary embeddings with several grids of positions: each pair belongs to one grid."""

import torch
from torch import Tensor


def grids(sections: str, chunked: bool, device: torch.device) -> Tensor:
    """Which grid every pair belongs to.

    Chunked, each section is a run of pairs. Interleaved, pair p belongs to grid ``p % G`` while
    that section lasts, and to the first one then.
    """
    sizes = [int(size) for size in sections.split(",")]
    pair = torch.arange(sum(sizes), device=device)
    if chunked:
        return torch.arange(len(sizes), device=device).repeat_interleave(
            torch.tensor(sizes, device=device), output_size=sum(sizes)
        )
    grid = pair % len(sizes)
    ends = torch.tensor(sizes, device=device)[grid] * len(sizes)
    return torch.where(pair < ends, grid, 0)


def merged(angle: Tensor, sections: str, chunked: bool, style: str) -> Tensor:
    """``(grids, batch, tokens, width)`` to ``(batch, tokens, width)``, a value per pair or two."""
    grid = grids(sections, chunked, angle.device)
    if angle.shape[-1] == 2 * grid.numel():
        grid = torch.cat((grid, grid)) if style == "half" else grid.repeat_interleave(2)
    index = grid.expand(1, *angle.shape[1:])
    return angle.gather(0, index).squeeze(0)
