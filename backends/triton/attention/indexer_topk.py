"""The keys that an indexer selects, by Triton kernels; indexer_kernels.py has them.

Scores of all keys exist for some queries at a time. The selection reads them from there.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from liger_multi.backends.triton.attention.attention import core_type
from liger_multi.backends.triton.attention.indexer_kernels import (
    _indexer_all_scores_kernel,
    _indexer_select_kernel,
)
from liger_multi.backends.triton.attention.indexer_scores import (
    _near_rows,
    _padded,
    _steps,
    backward,
    supports as takes_heads,
)
from liger_multi.backends.triton.common.launching import launch
from liger_multi.backends.triton.common.rows import cdiv, tile_rows
from liger_multi.dispatch.launch import DeviceInfo, launch_config

__all__ = ["backward", "forward", "supports"]

LARGEST_TILE, LARGEST_BLOCK = 128, 1024  # rows of a tile, scores of a step of the selection
SCORES_BYTES = 2**28
"""Scores of all keys that exist at a time; at least those of a tile of queries."""


@dataclass(frozen=True)
class TileConfig:
    """Tile of queries by keys."""

    block_m: int
    block_n: int
    num_warps: int


@dataclass(frozen=True)
class SelectConfig:
    """Scores that a program of the selection reads at a time."""

    block: int
    num_warps: int


def tile_config(info: DeviceInfo, dim: int, item: int) -> TileConfig:
    """Keys, and queries of one head after the other; the sum of heads is in registers."""
    if core_type(info) == "little memory":
        return TileConfig(16, 32, 4)
    for m, n, num_warps in ((64, 128, 8), (64, 64, 4), (32, 32, 4)):
        if item * (2 * m + n) * _padded(dim) <= info.shared_bytes and item < 4:
            return TileConfig(m, n, num_warps)
    return TileConfig(16, 16, 8)


def select_config(info: DeviceInfo, keys: int) -> SelectConfig:
    """Eight scores a thread."""
    return SelectConfig(LARGEST_BLOCK, LARGEST_BLOCK // (8 * info.warp_size))


def supports(q: Tensor, k: Tensor) -> str | None:
    """Why a call is refused, or None."""
    if tile_rows(LARGEST_TILE, k.shape[1] + LARGEST_BLOCK) == 1:  # what scores are stored by
        return f"takes up to {2**28 // LARGEST_TILE - LARGEST_BLOCK} keys, got {k.shape[1]}"
    return takes_heads(q)


def _queries(q: Tensor) -> Tensor:
    """Queries of adjacent channels, a tile of which is no 2 GiB long."""
    q = _near_rows(q)
    return q if tile_rows(LARGEST_TILE, q.stride(1)) > 1 else q.contiguous()


def forward(
    q: Tensor,
    k: Tensor,
    w: Tensor,
    ranges: Tensor | None,
    topk: int,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Some queries of one element of the batch at a time: all scores, then the selection."""
    (batch, queries, heads, dim), keys = q.shape, k.shape[1]
    count = min(topk, keys)
    indices = q.new_empty((batch, queries, count), dtype=torch.int32)
    out = q.new_empty(indices.shape, dtype=torch.float32)
    if not indices.numel():
        return indices, out
    q, k = _queries(q), _near_rows(k)
    ranges = None if ranges is None else ranges.contiguous().expand(batch, -1, -1)
    tile = launch_config("indexer_topk.tile", tile_config, q.device, dim=dim, item=q.element_size())
    select = launch_config("indexer_topk.select", select_config, q.device, keys=keys)
    width = cdiv(keys, select.block) * select.block
    rows = max(1, SCORES_BYTES // (4 * width * tile.block_m)) * tile.block_m
    scores = q.new_empty((min(rows, queries), width), dtype=torch.float32)
    for b in range(batch):
        bounds = None if ranges is None else ranges[b]
        for begin in range(0, queries, rows):
            query_count = min(rows, queries - begin)
            args = (
                q[b],
                k[b],
                w[b],
                bounds,
                scores,
                _steps(q),
                _steps(k),
                _steps(w),
                width,
                begin,
                queries,
                keys,
                heads,
                scale,
            )
            constants = (causal, dim, _padded(dim), tile.block_m, tile.block_n)
            programs = cdiv(query_count, tile.block_m) * cdiv(keys, tile.block_n)
            launch(_indexer_all_scores_kernel, programs, args, constants, tile.num_warps)
            chosen = (scores, bounds, indices[b], out[b], width, begin, queries, keys, count)
            launch(
                _indexer_select_kernel,
                query_count,
                chosen,
                (causal, select.block),
                select.num_warps,
            )
    return indices, out
