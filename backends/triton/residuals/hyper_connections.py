"""Coefficients of hyper-connections: sigmoids and Sinkhorn's iteration in one launch each way.

A program owns some rows, each with its N by N matrix in registers. Backward computes the iterates
again, writes them to a buffer of its own and reads them back in reverse order. Sums of rows and
columns that are masked are 1. The GEMM that reads the streams is in :mod:`.hyper_mixes`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_multi.backends.triton.common.launching import launch
from liger_multi.backends.triton.common.rows import (
    LOG2E,
    LONGEST_ROW,
    assume_cols,
    cdiv,
    checked_cols,
    power_of_2,
    sigmoid,
    sum_partials,
)
from liger_multi.backends.triton.residuals import hyper_mixes
from liger_multi.dispatch.launch import DeviceInfo, launch_config
from liger_multi.reference.residuals.operators import How, implement_hyper_connections


@dataclass(frozen=True)
class SinkhornConfig:
    """``rows`` rows a program."""

    rows: int
    num_warps: int


def sinkhorn_config(info: DeviceInfo, streams: int) -> SinkhornConfig:
    """Matrices of about 256 elements together for one warp: their sums need no other."""
    return SinkhornConfig(max(1, 256 // power_of_2(streams) ** 2), 1)


@triton.jit
def _softmax_rows(z, mask):
    """Softmax over the last axis of (rows, N, N), with 0 where masked and for a row of -inf."""
    top = tl.max(tl.where(mask, z, -float("inf")), axis=2)
    p = tl.where(mask, tl.exp2((z - tl.where(top == top, top, 0.0)[:, :, None]) * LOG2E), 0.0)
    total = tl.sum(p, axis=2)
    return p / tl.where(total > 0, total, 1.0)[:, :, None]


@triton.jit
def _divide(m, COLUMNS: tl.constexpr, eps, mask):
    """One normalization of Sinkhorn's iteration, by the sums of columns or of rows, and those sums.

    The sums have the shape of m and are 1 where masked.
    """
    if COLUMNS:
        total = (tl.sum(m, axis=1) + eps)[:, None, :] + tl.zeros_like(m)
    else:
        total = (tl.sum(m, axis=2) + eps)[:, :, None] + tl.zeros_like(m)
    total = tl.where(mask, total, 1.0)
    return m / total, total


@triton.jit
def _logits(m, bias_ptr, scale_ptr, at, mask, PART: tl.constexpr):
    """Logits bias + m * scale of one of the three parts, and the part's scale."""
    scale = tl.load(scale_ptr + PART).to(tl.float32)
    return tl.load(bias_ptr + at, mask=mask, other=0.0).to(tl.float32) + m * scale, scale


@triton.jit
def _sinkhorn_kernel(
    m_ptr, bias_ptr, scale_ptr, pre_ptr, post_ptr, mix_ptr, rows, steps, eps, post_scale,
    N: tl.constexpr, TALL: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Coefficients pre, post and mix of some rows.

    Program: ROWS rows of N (N + 2) numbers, the matrix padded from N to TALL.
    Reads them, a bias for each and a scale for each part. Writes pre = sigmoid + eps, post =
    sigmoid times ``post_scale``, and mix: the softmax plus eps, divided by its column sums, then
    ``steps`` - 1 times by its row sums and column sums (Sinkhorn).
    """
    first = tl.program_id(0).to(tl.int64) * ROWS
    row, i = tl.arange(0, ROWS), tl.arange(0, TALL)
    inside = (first + row < rows)[:, None] & (i < N)[None, :]
    mask = inside[:, :, None] & (i < N)[None, None, :]
    m_ptr += first * (N * (N + 2))
    pair, wide = row[:, None] * N + i[None, :], row[:, None] * (N * (N + 2)) + i[None, :]
    m = tl.load(m_ptr + wide, mask=inside, other=0.0)
    z, _ = _logits(m, bias_ptr, scale_ptr, i[None, :], (i < N)[None, :], 0)
    tl.store(pre_ptr + first * N + pair, sigmoid(z) + eps, mask=inside)
    m = tl.load(m_ptr + N + wide, mask=inside, other=0.0)
    z, _ = _logits(m, bias_ptr + N, scale_ptr, i[None, :], (i < N)[None, :], 1)
    tl.store(post_ptr + first * N + pair, sigmoid(z) * post_scale, mask=inside)
    at = (i[:, None] * N + i[None, :])[None, :, :]
    row = row[:, None, None]
    m = tl.load(m_ptr + 2 * N + (row * (N * (N + 2)) + at), mask=mask, other=0.0)
    both = ((i < N)[:, None] & (i < N)[None, :])[None, :, :]
    z, _ = _logits(m, bias_ptr + 2 * N, scale_ptr, at, both, 2)
    m = tl.where(mask, _softmax_rows(z, mask) + eps, 0.0)
    m, _ = _divide(m, True, eps, mask)
    for _step in tl.range(1, steps):
        m, _ = _divide(m, False, eps, mask)
        m, _ = _divide(m, True, eps, mask)
    tl.store(mix_ptr + first * (N * N) + (row * (N * N) + at), m, mask=mask)


@triton.jit
def _undivide(d, m, total, COLUMNS: tl.constexpr):
    """Gradient of the input of one normalization, from its result m and its sums."""
    if COLUMNS:
        share = tl.sum(d * m, axis=1)[:, None, :]
    else:
        share = tl.sum(d * m, axis=2)[:, :, None]
    return (d - share) / total


@triton.jit
def _sinkhorn_backward_kernel(
    m_ptr, bias_ptr, scale_ptr, rstd_ptr, dpre_ptr, dpost_ptr, dmix_ptr, d_ptr, own_ptr, sums_ptr,
    kept_ptr, rows, steps, eps, post_scale, length, wide_sums, N: tl.constexpr, TALL: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Gradients of m, times rstd; the norm's own term; and partial sums for bias and scale.

    Program: ROWS rows. First pre and post, whose sigmoids are elementwise. Then mix: Sinkhorn's
    iterates are computed again and stored in ``kept_ptr``, then read in reverse order, one
    normalization at a time, and last the softmax. The barrier makes the iterates visible to all
    threads.
    ``own_ptr`` gets sum(d m) rstd^2 / length: the factor of x in the gradient through the norm.
    ``sums_ptr`` gets one fp32 row a program: the gradients of the biases, then those of the scales.
    """
    assume_cols(steps, LONGEST_ROW // (2 * ROWS * N * N))
    base = tl.program_id(0).to(tl.int64) * ROWS
    row, i = tl.arange(0, ROWS), tl.arange(0, TALL)
    inside = (base + row < rows)[:, None] & (i < N)[None, :]
    mask = inside[:, :, None] & (i < N)[None, None, :]
    m_ptr += base * (N * (N + 2))
    d_ptr += base * (N * (N + 2))
    if sums_ptr is not None:
        sums_ptr += tl.program_id(0).to(tl.int64) * wide_sums
    rstd = tl.load(rstd_ptr + base + row, mask=base + row < rows, other=0.0)
    own = tl.zeros([ROWS], tl.float32)
    pair, wide = row[:, None] * N + i[None, :], row[:, None] * (N * (N + 2)) + i[None, :]
    for half in tl.static_range(2):  # pre, then post
        m = tl.load(m_ptr + half * N + wide, mask=inside, other=0.0)
        z, scale = _logits(m, bias_ptr + half * N, scale_ptr, i[None, :], (i < N)[None, :], half)
        p = sigmoid(z)
        d = tl.zeros([ROWS, TALL], tl.float32)
        if half == 0:
            if dpre_ptr is not None:
                d = tl.load(dpre_ptr + base * N + pair, mask=inside, other=0.0)
        else:
            if dpost_ptr is not None:
                d = tl.load(dpost_ptr + base * N + pair, mask=inside, other=0.0)
                d *= post_scale
        d *= p * (1.0 - p)
        if sums_ptr is not None:
            tl.store(sums_ptr + half * N + i, tl.sum(d, axis=0), mask=i < N)
            tl.store(sums_ptr + N * (N + 2) + half, tl.sum(tl.sum(d * m, axis=1), axis=0))
        d *= scale
        own += tl.sum(d * m, axis=1)
        tl.store(d_ptr + half * N + wide, d * rstd[:, None], mask=inside)
    at = (i[:, None] * N + i[None, :])[None, :, :]
    both = ((i < N)[:, None] & (i < N)[None, :])[None, :, :]
    square = row[:, None, None] * (N * (N + 2)) + at
    d = tl.zeros([ROWS, TALL, TALL], tl.float32)
    logits = tl.load(m_ptr + 2 * N + square, mask=mask, other=0.0)
    z, scale = _logits(logits, bias_ptr + 2 * N, scale_ptr, at, both, 2)
    if dmix_ptr is not None:
        first = _softmax_rows(z, mask)
        row = row[:, None, None]
        d = tl.load(dmix_ptr + base * (N * N) + (row * (N * N) + at), mask=mask, other=0.0)
        # iterate t of a row is at t N N of the row's part of the buffer
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
        d = first * (d - tl.sum(d * first, axis=2)[:, :, None])
    if sums_ptr is not None:
        place = sums_ptr + 2 * N + (i[:, None] * N + i[None, :])
        tl.store(place, tl.sum(d, axis=0), mask=(i < N)[:, None] & (i < N)[None, :])
        total = tl.sum(tl.sum(tl.sum(d * logits, axis=2), axis=1), axis=0)
        tl.store(sums_ptr + N * (N + 2) + 2, total)
    d *= scale
    own += tl.sum(tl.sum(d * logits, axis=2), axis=1)
    tl.store(d_ptr + 2 * N + square, d * rstd[:, None, None], mask=mask)
    row = tl.arange(0, ROWS)
    tl.store(own_ptr + base + row, own * rstd * rstd / length, mask=base + row < rows)


class TritonParts:
    """Launches of the kernels for coefficients."""

    mixes = staticmethod(hyper_mixes.mixes)
    mixes_gradients = staticmethod(hyper_mixes.gradients)

    @staticmethod
    def values(m: Tensor, bias: Tensor, scale: Tensor, how: How) -> tuple[Tensor, Tensor, Tensor]:
        """Sigmoids, and the last iterate."""
        rows, count = m.shape[0], how[0]
        pre, post = m.new_empty(rows, count), m.new_empty(rows, count)
        mix = m.new_empty(rows, count, count)
        if rows:
            k = launch_config("hyper_connections.forward", sinkhorn_config, m.device, streams=count)
            args = (m.contiguous(), bias.contiguous(), scale.contiguous(), pre, post, mix, rows)
            constants = (count, power_of_2(count), k.rows)
            launch(_sinkhorn_kernel, cdiv(rows, k.rows), (*args, *how[1:]), constants, k.num_warps)
        return pre, post, mix

    @staticmethod
    def gradient(
        m: Tensor, bias: Tensor, scale: Tensor, rstd: Tensor, length: int,
        grads: tuple[Optional[Tensor], ...], how: How, needs: tuple[bool, bool],
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        """One launch, and one that adds what programs leave of the parameters' gradients."""
        (rows, outputs), (count, steps, *_) = m.shape, how
        d, own = m.new_empty(m.shape), m.new_empty(rows, 1)
        if not rows:
            dbias, dscale = (
                t.new_zeros(t.shape if n else 0) for t, n in zip((bias, scale), needs, strict=True)
            )
            return d, own, dbias, dscale
        k = launch_config("hyper_connections.backward", sinkhorn_config, m.device, streams=count)
        checked_cols(2 * steps * k.rows * count * count)  # a tile's part of the iterates
        programs = cdiv(rows, k.rows)
        wide = cdiv(outputs + 3, 16) * 16  # what is past them is not used
        sums = m.new_empty(programs, wide) if any(needs) else None
        kept = m.new_empty(rows * (2 * steps - 1) * count * count if grads[2] is not None else 0)
        dense = [None if g is None else g.contiguous() for g in grads]
        given = (m.contiguous(), bias.contiguous(), scale.contiguous(), rstd.contiguous())
        args = (*given, *dense, d, own, sums, kept, rows, *how[1:], length, wide)
        constants = (count, power_of_2(count), k.rows)
        launch(_sinkhorn_backward_kernel, programs, args, constants, k.num_warps)
        total = own.new_empty(0) if sums is None else sum_partials(sums, torch.float32)
        dbias = total[:outputs].to(bias.dtype) if needs[0] else bias.new_empty(0)
        dscale = (
            total[outputs : outputs + 3].to(scale.dtype, copy=True)
            if needs[1]
            else scale.new_empty(0)
        )
        return d, own, dbias, dscale


forward, backward = implement_hyper_connections(TritonParts())


def supports(x: Tensor) -> str | None:
    """No fp64: iterates are fp32."""
    return "its iterates are float32, got float64" if x.element_size() == 8 else None
