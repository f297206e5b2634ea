"""Gradients of grouped weights: one GEMM for every group, summed over its rows.

A program owns one tile of one group. A group without rows gets zeros, so that no fill comes first.
:mod:`.grouped` says what groups are and when PyTorch's grouped GEMM is taken.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_multi.backends.triton.common.launching import launch
from liger_multi.backends.triton.common.rows import assume_rows, cdiv, power_of_2, round_to
from liger_multi.backends.triton.experts.grouped import (
    ProductConfig,
    by_library,
    choice,
    dot,
    fitted,
    source_rows,
)
from liger_multi.backends.triton.experts.groups import Groups, RowOperand
from liger_multi.dispatch.launch import DeviceInfo


def weight_config(
    info: DeviceInfo, rows: int, groups: int, cols: int, inner: int, element_bytes: int
) -> ProductConfig:
    """The same for gradients of weights, whose tiles are columns of both and sums go over rows."""
    m, factors = max(16, min(128, power_of_2(cols))), 2 if element_bytes > 2 else 1
    return fitted(info, m, inner, cdiv(rows, groups), element_bytes, factors)


@triton.jit
def _grouped_weight_kernel(
    p_ptr, q_ptr, out_ptr, offsets_ptr, p_order_ptr, q_order_ptr, p_stride, q_stride, m_size,
    n_size, per, m_steps, n_steps, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Gradient of a weight: out[e, m, n] = sum over rows s of e of p[source(s), m] q[source(s), n].

    Program: a tile of BLOCK_M by BLOCK_N of one group; passes over the group's rows, BLOCK_K at a
    time. Rows past the end are masked to zeros. A group without rows runs no step and writes zeros.
    """
    group = tl.program_id(0) // (m_steps * n_steps)
    tile = tl.program_id(0) % (m_steps * n_steps)
    first_m, first_n = (tile // n_steps) * BLOCK_M, (tile % n_steps) * BLOCK_N
    m, n = first_m + tl.arange(0, BLOCK_M), first_n + tl.arange(0, BLOCK_N)
    start, stop = tl.load(offsets_ptr + group), tl.load(offsets_ptr + group + 1)
    k = tl.arange(0, BLOCK_K)
    p_ptrs, q_ptrs = p_ptr + m[None, :], q_ptr + n[None, :]
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for at in tl.range(start, stop, BLOCK_K, num_stages=STAGES):
        mask = (at + k < stop)[:, None]
        p_row = source_rows(p_order_ptr, at + k, stop, per)
        q_row = source_rows(q_order_ptr, at + k, stop, per)
        p_mask, q_mask = mask & (m < m_size)[None, :], mask & (n < n_size)[None, :]
        p = tl.load(p_ptrs + p_row[:, None] * p_stride, mask=p_mask, other=0.0)
        q = tl.load(q_ptrs + q_row[:, None] * q_stride, mask=q_mask, other=0.0)
        total = dot(tl.trans(p), q, total)
    assume_rows(out_ptr, n_size, 2 * BLOCK_M)
    m, n = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    out_ptr += (group.to(tl.int64) * m_size + first_m) * n_size + first_n
    mask = (m < m_size - first_m)[:, None] & (n < n_size - first_n)[None, :]
    out_ptrs = out_ptr + (m[:, None] * n_size + n[None, :])
    tl.store(out_ptrs, round_to(total, out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _zero_groups_kernel(out_ptr, offsets_ptr, size, steps, BLOCK: tl.constexpr):
    """Write zeros for groups without rows, which the library's grouped GEMM leaves as they are.

    Program: every ``steps``-th block of one group's result; returns where the group has rows.
    """
    group = tl.program_id(0) // steps
    if tl.load(offsets_ptr + group) == tl.load(offsets_ptr + group + 1):
        out_ptr += group.to(tl.int64) * size
        for start in tl.range((tl.program_id(0) % steps) * BLOCK, size, steps * BLOCK):
            place = start + tl.arange(0, BLOCK)
            zero = tl.zeros([BLOCK], out_ptr.dtype.element_ty)
            tl.store(out_ptr + place, zero, mask=place < size)


def weight_gradient(
    name: str, left: RowOperand, right: RowOperand, groups: Groups, turned: bool
) -> Tensor:
    """Left' right for every group, (E, M, N); or its transpose, (E, N, M), when ``turned``."""
    if turned:
        left, right = right, left
    p, q = left.source, right.source
    m, n = p.shape[1], q.shape[1]
    k = choice(name, weight_config, p, groups, m, n)
    if by_library(k, p, q):
        columns = left.written(groups).mT
        found = torch._grouped_mm(columns, right.written(groups), groups.offsets[1:])
        args = (found, groups.offsets, m * n, 16)
        launch(_zero_groups_kernel, groups.count * 16, args, (256,), 4)
        return found
    out = p.new_empty(groups.count, m, n)
    m_steps, n_steps = cdiv(m, k.block_m), cdiv(n, k.block_n)
    orders = [groups.order if side.gather else None for side in (left, right)]
    launch(
        _grouped_weight_kernel, groups.count * m_steps * n_steps,
        (p, q, out, groups.offsets, *orders, p.stride(0), q.stride(0), m, n, groups.per, m_steps,
         n_steps),
        (k.block_m, k.block_n, k.block_k, k.stages), k.num_warps,
    )  # fmt: skip
    return out
