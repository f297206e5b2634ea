"""Scores of listed keys by Triton kernels; indexer_kernels.py has them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from liger_multi.backends.triton.attention.attention import core_type
from liger_multi.backends.triton.attention.indexer_kernels import (
    _indexer_backward_kernel,
    _indexer_scores_kernel,
)
from liger_multi.backends.triton.attention.pairs_of_lists import summed
from liger_multi.backends.triton.common.launching import launch
from liger_multi.backends.triton.common.rows import INTERPRETED, power_of_2
from liger_multi.dispatch.launch import DeviceInfo, device_info, launch_config


@dataclass(frozen=True)
class IndexerConfig:
    """Listed keys of a tile, and ``stages`` of loads in flight."""

    block_n: int
    stages: int
    num_warps: int


def _padded(size: int) -> int:
    return max(16, power_of_2(size))


def scores_config(info: DeviceInfo, heads: int, dim: int, item: int) -> IndexerConfig:
    """Queries of all heads stay."""
    return _config(info, heads, dim, item, 128)


def backward_config(info: DeviceInfo, heads: int, dim: int, item: int) -> IndexerConfig:
    """Queries of all heads and their gradient stay; what keys get is in registers as well."""
    if info.warp_size == 64:  # three sums of GEMMs, whose operands are in registers as well
        return IndexerConfig(16, 1, 4)
    return _config(info, heads, dim, item, 64)


def _config(info: DeviceInfo, heads: int, dim: int, item: int, largest: int) -> IndexerConfig:
    padded_heads, size = _padded(heads), _padded(dim)
    if core_type(info) == "little memory":
        return IndexerConfig(16, 1, 4)
    for block, stages in ((largest, 2), (64, 2), (32, 2), (32, 1)):
        loaded = item * (padded_heads * size + stages * block * size + block * padded_heads)
        if block <= largest and loaded <= info.shared_bytes and item < 4:
            return IndexerConfig(block, stages, 8 if padded_heads * size > 2048 else 4)
    return IndexerConfig(16, 1, 8)


def supports(q: Tensor) -> str | None:
    """Why a call is refused, or None."""
    info = device_info(q.device)
    size = q.element_size() * _padded(q.shape[2]) * _padded(q.shape[3])
    # cores with little memory have few registers, and no matrix units for fp32
    little = core_type(info) == "little memory"
    limit = (1024 if q.element_size() == 2 else 0) if little else info.shared_bytes // 2
    if size > limit and not INTERPRETED:
        largest = limit // q.element_size()
        return (
            f"takes up to {largest} elements of all heads on {info.arch} (registers), got "
            f"{q.shape[2]} heads of {q.shape[3]}"
        )
    return None


def _near_rows(x: Tensor) -> Tensor:
    """``x`` with adjacent channels; copied only where needed."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _steps(x: Tensor) -> tuple[int, ...]:
    return x.stride()[:3]


def forward(q: Tensor, k: Tensor, w: Tensor, indices: Tensor, scale: float) -> Tensor:
    """One program per query."""
    scores = q.new_empty(indices.shape, dtype=torch.float32)
    if not scores.numel():
        return scores
    q, k, indices = _near_rows(q), _near_rows(k), indices.contiguous()
    (batch, queries, heads, dim), keys = q.shape, k.shape[1]
    n = launch_config(
        "indexer_scores.forward",
        scores_config,
        q.device,
        heads=heads,
        dim=dim,
        item=q.element_size(),
    )
    args = (
        q,
        k,
        w,
        indices,
        scores,
        _steps(q),
        _steps(k),
        _steps(w),
        queries,
        keys,
        heads,
        indices.shape[2],
        scale,
    )
    constants = (dim, _padded(dim), _padded(heads), n.block_n, n.stages)
    launch(_indexer_scores_kernel, batch * queries, args, constants, n.num_warps)
    return scores


def backward(
    dscores: Tensor,
    q: Tensor,
    k: Tensor,
    w: Tensor,
    indices: Tensor,
    scale: float,
    needs_q: bool,
    needs_k: bool,
    needs_w: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """One program per query writes all of its gradients; then those of keys are added up."""
    (batch, queries, heads, dim), keys, slots = q.shape, k.shape[1], indices.shape[2]
    dq, dw = q.new_empty(q.shape), w.new_empty(w.shape)
    dscores, indices = dscores.contiguous(), indices.contiguous()
    near_q, near_k = _near_rows(q), _near_rows(k)
    n = launch_config(
        "indexer_scores.backward",
        backward_config,
        q.device,
        heads=heads,
        dim=dim,
        item=q.element_size(),
    )
    constants = (dim, _padded(dim), _padded(heads), n.block_n, n.stages)

    def write(parts: Tensor | None, b: int, rows: slice) -> None:
        args = (
            near_q[b],
            near_k[b],
            w[b],
            indices[b],
            dscores[b],
            dq[b],
            dw[b],
            parts,
            _steps(near_q),
            _steps(near_k),
            _steps(w),
            rows.start,
            queries,
            keys,
            heads,
            slots,
            scale,
        )
        launch(_indexer_backward_kernel, rows.stop - rows.start, args, constants, n.num_warps)

    if needs_k:
        dk = summed(indices[:, None], 1, keys, dim, write)[:, 0].to(k.dtype)
    else:
        dk = k.new_empty(0)
        for b in range(batch if queries else 0):
            write(None, b, slice(0, queries))
    return dq if needs_q else q.new_empty(0), dk, dw if needs_w else w.new_empty(0)
