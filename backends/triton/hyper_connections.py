"""Coefficients of hyper-connections: sigmoids and Sinkhorn's iteration in one launch each way.

A program has some rows, each with its N by N matrix in registers. Backward computes the iterates
again, writes them to a buffer of its own and walks back through them. Sums of rows and columns
that are masked are 1. The product that reads the streams stands in :mod:`.hyper_mixes`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

import triton
import triton.language as tl
from torch import Tensor

from liger_multi.backends.triton import hyper_mixes
from liger_multi.backends.triton.common import (
    LOG2E,
    LONGEST_ROW,
    assume_cols,
    cdiv,
    checked_cols,
    power_of_2,
    sigmoid,
)
from liger_multi.backends.triton.launching import launch
from liger_multi.launch import DeviceInfo, knobs
from liger_multi.reference.hyper_connections import halves


@dataclass(frozen=True)
class SquashKnobs:
    """``rows`` rows a program."""

    rows: int
    num_warps: int


def squash_knobs(info: DeviceInfo, streams: int) -> SquashKnobs:
    """Matrices of about 256 elements together for one warp: their sums need no other."""
    return SquashKnobs(max(1, 256 // power_of_2(streams) ** 2), 1)


@triton.jit
def _softmax_rows(z, mask):
    """The softmax over the last axis of (rows, N, N); 0 where masked."""
    top = tl.max(tl.where(mask, z, -float("inf")), axis=2)
    p = tl.where(mask, tl.exp2((z - tl.where(top == top, top, 0.0)[:, :, None]) * LOG2E), 0.0)
    total = tl.sum(p, axis=2)
    return p / tl.where(total > 0, total, 1.0)[:, :, None]


@triton.jit
def _divide(m, COLUMNS: tl.constexpr, eps, mask):
    """One step of Sinkhorn's iteration, and the sums: of columns, or of rows."""
    if COLUMNS:
        total = (tl.sum(m, axis=1) + eps)[:, None, :] + tl.zeros_like(m)
    else:
        total = (tl.sum(m, axis=2) + eps)[:, :, None] + tl.zeros_like(m)
    total = tl.where(mask, total, 1.0)
    return m / total, total


@triton.jit
def _squash_kernel(
    z_ptr, pre_ptr, post_ptr, mix_ptr, rows, steps, eps, post_scale, N: tl.constexpr,
    TALL: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * ROWS
    row, i = tl.arange(0, ROWS), tl.arange(0, TALL)
    inside = (first + row < rows)[:, None] & (i < N)[None, :]
    mask = inside[:, :, None] & (i < N)[None, None, :]
    z_ptr += first * (N * (N + 2))
    pair, wide = row[:, None] * N + i[None, :], row[:, None] * (N * (N + 2)) + i[None, :]
    pre = sigmoid(tl.load(z_ptr + wide, mask=inside, other=0.0)) + eps
    tl.store(pre_ptr + first * N + pair, pre, mask=inside)
    post = sigmoid(tl.load(z_ptr + N + wide, mask=inside, other=0.0)) * post_scale
    tl.store(post_ptr + first * N + pair, post, mask=inside)
    at = (i[:, None] * N + i[None, :])[None, :, :]
    row = row[:, None, None]
    z = tl.load(z_ptr + 2 * N + (row * (N * (N + 2)) + at), mask=mask, other=0.0)
    m = tl.where(mask, _softmax_rows(z, mask) + eps, 0.0)
    m, _ = _divide(m, True, eps, mask)
    for _step in tl.range(1, steps):
        m, _ = _divide(m, False, eps, mask)
        m, _ = _divide(m, True, eps, mask)
    tl.store(mix_ptr + first * (N * N) + (row * (N * N) + at), m, mask=mask)


@triton.jit
def _undivide(d, m, total, COLUMNS: tl.constexpr):
    """The gradient of what one step was given, from the step's result and sums."""
    if COLUMNS:
        share = tl.sum(d * m, axis=1)[:, None, :]
    else:
        share = tl.sum(d * m, axis=2)[:, :, None]
    return (d - share) / total


@triton.jit
def _squash_backward_kernel(
    z_ptr, dpre_ptr, dpost_ptr, dmix_ptr, dz_ptr, kept_ptr, rows, steps, eps, post_scale,
    N: tl.constexpr, TALL: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    assume_cols(steps, LONGEST_ROW // (2 * ROWS * N * N))
    base = tl.program_id(0).to(tl.int64) * ROWS
    row, i = tl.arange(0, ROWS), tl.arange(0, TALL)
    inside = (base + row < rows)[:, None] & (i < N)[None, :]
    mask = inside[:, :, None] & (i < N)[None, None, :]
    z_ptr += base * (N * (N + 2))
    dz_ptr += base * (N * (N + 2))
    pair, wide = row[:, None] * N + i[None, :], row[:, None] * (N * (N + 2)) + i[None, :]
    for half in tl.static_range(2):
        p = sigmoid(tl.load(z_ptr + half * N + wide, mask=inside, other=0.0))
        d = tl.zeros([ROWS, TALL], tl.float32)
        if half == 0:
            if dpre_ptr is not None:
                d = tl.load(dpre_ptr + base * N + pair, mask=inside, other=0.0)
        else:
            if dpost_ptr is not None:
                d = tl.load(dpost_ptr + base * N + pair, mask=inside, other=0.0)
                d *= post_scale
        tl.store(dz_ptr + half * N + wide, d * p * (1.0 - p), mask=inside)
    at = (i[:, None] * N + i[None, :])[None, :, :]
    square = row[:, None, None] * (N * (N + 2)) + at
    if dmix_ptr is None:
        tl.store(dz_ptr + 2 * N + square, tl.zeros([ROWS, TALL, TALL], tl.float32), mask)
    else:
        z = tl.load(z_ptr + 2 * N + square, mask=mask, other=0.0)
        first = _softmax_rows(z, mask)
        row = row[:, None, None]
        d = tl.load(dmix_ptr + base * (N * N) + (row * (N * N) + at), mask=mask, other=0.0)
        # iterate t of a row stands at t N N of the row's part of the buffer
        kept_ptr += base * ((2 * steps - 1) * N * N)
        kept = kept_ptr + (row * ((2 * steps - 1) * N * N) + at)
        m = tl.where(mask, first + eps, 0.0)
        tl.store(kept, m, mask=mask)
        for step in tl.range(1, steps):
            m, _ = _divide(m, True, eps, mask)
            tl.store(kept + (2 * step - 1) * N * N, m, mask=mask)
            m, _ = _divide(m, False, eps, mask)
            tl.store(kept + 2 * step * N * N, m, mask=mask)
        tl.debug_barrier()
        for back in tl.range(1, steps):
            step = steps - back
            before = tl.load(kept + 2 * step * N * N, mask=mask, other=0.0)
            m, total = _divide(before, True, eps, mask)
            d = _undivide(d, m, total, True)
            before = tl.load(kept + (2 * step - 1) * N * N, mask=mask, other=0.0)
            m, total = _divide(before, False, eps, mask)
            d = _undivide(d, m, total, False)
        m, total = _divide(tl.where(mask, first + eps, 0.0), True, eps, mask)
        d = tl.where(mask, _undivide(d, m, total, True), 0.0)
        dz = first * (d - tl.sum(d * first, axis=2)[:, :, None])
        tl.store(dz_ptr + 2 * N + square, dz, mask=mask)


class TritonParts:
    """All launches."""

    mixes = staticmethod(hyper_mixes.mixes)
    mixes_gradients = staticmethod(hyper_mixes.gradients)

    @staticmethod
    def values(
        z: Tensor, count: int, steps: int, eps: float, post_scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Sigmoids, and the last iterate."""
        rows = z.shape[0]
        pre, post = z.new_empty(rows, count), z.new_empty(rows, count)
        mix = z.new_empty(rows, count, count)
        if rows:
            k = knobs("hyper_connections.forward", squash_knobs, z.device, streams=count)
            args = (z.contiguous(), pre, post, mix, rows, steps, eps, post_scale)
            constants = (count, power_of_2(count), k.rows)
            launch(_squash_kernel, cdiv(rows, k.rows), args, constants, k.num_warps)
        return pre, post, mix

    @staticmethod
    def gradient(
        z: Tensor, grads: tuple[Optional[Tensor], ...], count: int, steps: int, eps: float,
        post_scale: float,
    ) -> Tensor:  # fmt: skip
        """The gradient of the logits."""
        rows = z.shape[0]
        z, dz = z.contiguous(), z.new_empty(z.shape)
        if rows:
            k = knobs("hyper_connections.backward", squash_knobs, z.device, streams=count)
            checked_cols(2 * steps * k.rows * count * count)  # a tile's part of the iterates
            dense = [None if g is None else g.contiguous() for g in grads]
            kept = z.new_empty(
                rows * (2 * steps - 1) * count * count if grads[2] is not None else 0
            )
            args = (z, *dense, dz, kept, rows, steps, eps, post_scale)
            constants = (count, power_of_2(count), k.rows)
            launch(_squash_backward_kernel, cdiv(rows, k.rows), args, constants, k.num_warps)
        return dz


forward, backward = halves(TritonParts())


def supports(x: Tensor) -> str | None:
    """Iterates are fp32."""
    return "its iterates are float32, got float64" if x.element_size() == 8 else None
