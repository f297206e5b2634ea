"""GEMMs of a wide matrix with a thin one, whose cost is to read or write the wide one.

With wide (rows, cols), of 16 bits, low (rows, r) and factor (r, cols) or (cols, r):

    widen              out = base + scale low factor     reads base if there is one, writes out
    narrow_and_sums    wide factor, scale wide' low      reads wide once for both

A vendor's library needs twice the time of a copy for the first, and reads wide twice for the
others. Programs share the rows of sums and leave partials in fp32, which are added in a fixed
order. The scale meets sums in fp32, which are rounded once. Thin matrices have any strides; they
are of the wide one's dtype, or fp32 beside bf16: then they are three bf16 parts made in registers,
whose products are exact.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_multi.backends.triton.common.launching import launch
from liger_multi.backends.triton.common.rows import (
    LONGEST_ROW,
    assume_cols,
    assume_rows,
    bf16_parts,
    cdiv,
    power_of_2,
    round_to,
    sum_partials,
    warps,
)
from liger_multi.backends.triton.experts.grouped import dot
from liger_multi.dispatch.launch import DeviceInfo, launch_config

MOST_RANK = {2: 128, 4: 16}
"""Of widen with a base, by the size of a thin element: more is faster in the vendor's library."""
MOST_SUMS = 16  # columns of a thin matrix of narrow_and_sums
MOST_PARTS = 32  # programs that share the rows of a sum
MOST_STRIDE = 2**21  # elements, so that a tile along any axis ends within 2 GiB (see assume_rows)

PAIRS = (
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
    (torch.bfloat16, torch.float32),
)
"""Dtypes of wide and thin matrices."""

# --- helpers ---


@triton.jit
def _add_dots(a, b, t0, t1, t2):
    """Add ``a @ b`` to sums: to one, or those of the parts of an fp32 b to one each.

    Compilers get several dots of one turn through one accumulator wrong (ci.static.patterns).
    """
    if a.dtype == b.dtype:
        t0 = dot(a, b, t0)
    else:
        b0, b1, b2 = bf16_parts(b)
        t0, t1, t2 = dot(a, b0, t0), dot(a, b1, t1), dot(a, b2, t2)
    return t0, t1, t2


@triton.jit
def _term(a, b, total, TERM: tl.constexpr, TERMS: tl.constexpr):
    """Add one of the products of bf16 parts that make ``a @ b``, the smallest first.

    Six products of two in fp32; the three that are left out are below fp32's last bit.
    """
    if TERMS == 1:
        return dot(a, b, total)
    else:
        a_parts, b_parts = bf16_parts(a), bf16_parts(b)
        if TERM == 0:
            return dot(a_parts[2], b_parts[0], total)
        elif TERM == 1:
            return dot(a_parts[0], b_parts[2], total)
        elif TERM == 2:
            return dot(a_parts[1], b_parts[1], total)
        elif TERM == 3:
            return dot(a_parts[1], b_parts[0], total)
        elif TERM == 4:
            return dot(a_parts[0], b_parts[1], total)
        else:
            return dot(a_parts[0], b_parts[0], total)


# --- kernels ---


@triton.jit(do_not_specialize=["rows", "col_steps"])
def _widen_kernel(
    out_ptr,
    base_ptr,
    low_ptr,
    factor_ptr,
    base_stride,
    low_stride,
    low_r_stride,
    r_stride,
    n_stride,
    out_stride,
    rows,
    cols,
    rank,
    col_steps,
    scale,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    STEPS: tl.constexpr,
    TERMS: tl.constexpr,
):
    """Product of few terms: out[m, n] = base[m, n] + scale sum over r of low[m, r] factor[r, n].

    Program: a tile of BLOCK_M by BLOCK_N; tiles of the same rows follow each other. Reads low and
    the factor, BLOCK_R of the rank at a time, and its tile of base, where there is one; ``out`` may
    be base. Products of parts have loops in turn: compilers get several dots of one turn wrong
    (ci.static.patterns). One step is no loop, and reads its factors once.
    """
    first = (tl.program_id(0) // col_steps).to(tl.int64) * BLOCK_M
    first_col = (tl.program_id(0) % col_steps) * BLOCK_N
    assume_rows(base_ptr, base_stride, BLOCK_M)
    assume_rows(out_ptr, out_stride, BLOCK_M)
    assume_rows(low_ptr, low_stride, BLOCK_M)
    assume_rows(low_ptr, low_r_stride, BLOCK_R * STEPS)
    assume_rows(factor_ptr, r_stride, BLOCK_R * STEPS)
    assume_rows(factor_ptr, n_stride, BLOCK_N)
    assume_cols(first_col)
    m, n, r = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_R)
    here, inside = (first + m < rows)[:, None], (first_col + n < cols)[None, :]
    low_ptr += first * low_stride
    factor_ptr += first_col.to(tl.int64) * n_stride
    if base_ptr is not None:
        base_ptr += first * base_stride + first_col
        base = tl.load(
            base_ptr + (m[:, None] * base_stride + n[None, :]), mask=here & inside, other=0.0
        )
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for term in tl.static_range(TERMS):
        for step in tl.range(0, STEPS):
            k = step * BLOCK_R + r
            low_ptrs = low_ptr + (m[:, None] * low_stride + k[None, :] * low_r_stride)
            low = tl.load(low_ptrs, mask=here & (k < rank)[None, :], other=0.0)
            factor_ptrs = factor_ptr + (k[:, None] * r_stride + n[None, :] * n_stride)
            factor = tl.load(factor_ptrs, mask=(k < rank)[:, None] & inside, other=0.0)
            total = _term(low, factor, total, term, TERMS)
    y = scale * total
    if base_ptr is not None:
        y += base.to(tl.float32)
    out_ptr += first * out_stride + first_col
    out_ptrs = out_ptr + (m[:, None] * out_stride + n[None, :])
    tl.store(out_ptrs, round_to(y, out_ptr.dtype.element_ty), mask=here & inside)


@triton.jit(do_not_specialize=["rows", "steps"])
def _narrow_sums_kernel(
    wide_ptr,
    factor_ptr,
    low_ptr,
    narrow_ptr,
    sums_ptr,
    wide_stride,
    factor_stride,
    factor_r_stride,
    low_stride,
    low_r_stride,
    rows,
    cols,
    rank,
    steps,
    scale,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Both products of backward that read dy, in one pass over it; partials of both, in fp32.

    narrow[t, k, r] = sum over columns n of tile t of wide[k, n] factor[n, r]
    sums[s, n, r] = scale sum over rows k of part s of wide[k, n] low[k, r]

    Program: BLOCK_N columns of wide, tile t, and ``steps`` steps of BLOCK_K rows, part s, which is
    axis 1 of the grid. Reads its part of the factor once. Rows past the end are zeros.
    """
    tile, part = tl.program_id(0), tl.program_id(1)
    first_col, first = tile * BLOCK_N, part.to(tl.int64) * steps * BLOCK_K
    count = tl.minimum(rows - first, steps * BLOCK_K).to(tl.int32)
    assume_rows(wide_ptr, wide_stride, BLOCK_K)
    assume_rows(low_ptr, low_stride, BLOCK_K)
    assume_rows(low_ptr, low_r_stride, BLOCK_R)
    assume_rows(factor_ptr, factor_stride, BLOCK_N)
    assume_rows(factor_ptr, factor_r_stride, BLOCK_R)
    assume_rows(narrow_ptr, rank, BLOCK_K)
    assume_rows(sums_ptr, rank, BLOCK_N)
    assume_cols(first_col)
    n, k, r = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_R)
    inside, is_rank = first_col + n < cols, r < rank
    factor_ptr += first_col.to(tl.int64) * factor_stride
    factor_at = n[:, None] * factor_stride + r[None, :] * factor_r_stride
    factor = tl.load(factor_ptr + factor_at, mask=inside[:, None] & is_rank[None, :], other=0.0)
    wide_ptr += first * wide_stride + first_col
    low_ptr += first * low_stride
    narrow_ptr += (tile.to(tl.int64) * rows + first) * rank
    wide_at = k[:, None] * wide_stride + n[None, :]
    low_at = k[:, None] * low_stride + r[None, :] * low_r_stride
    narrow_at = k[:, None] * rank + r[None, :]
    t0 = tl.zeros([BLOCK_N, BLOCK_R], tl.float32)
    t1, t2 = t0, t0
    step = tl.full([], BLOCK_K, tl.int64)  # steps may pass 2 GiB
    for at in tl.range(0, count, BLOCK_K, num_stages=STAGES):
        here = (at + k < count)[:, None]
        wide = tl.load(wide_ptr + wide_at, mask=here & inside[None, :], other=0.0)
        low = tl.load(low_ptr + low_at, mask=here & is_rank[None, :], other=0.0)
        narrow = dot(wide, factor, tl.zeros([BLOCK_K, BLOCK_R], tl.float32))
        t0, t1, t2 = _add_dots(tl.trans(wide), low, t0, t1, t2)
        tl.store(narrow_ptr + narrow_at, narrow, mask=here & is_rank[None, :])
        wide_ptr += step * wide_stride
        low_ptr += step * low_stride
        narrow_ptr += step * rank
    sums_ptr += (part.to(tl.int64) * cols + first_col) * rank
    mask = inside[:, None] & is_rank[None, :]
    tl.store(sums_ptr + (n[:, None] * rank + r[None, :]), scale * (t0 + (t1 + t2)), mask=mask)


# --- launch configurations ---


@dataclass(frozen=True)
class WidenConfig:
    """A tile of ``block_m`` rows by ``block_n`` columns."""

    block_m: int
    block_n: int
    num_warps: int


def widen_config(info: DeviceInfo, rows: int, cols: int, rank: int, base: int) -> WidenConfig:
    """256 bytes of a row; fewer rows where a base is read and the rank leaves little to do.

    One H200, bf16, 2026-11-29: within 3 % of the best of thirteen tiles at ranks 16, 64 and 128.
    """
    block_m = max(16, min(32 if base and rank <= 16 else 64, power_of_2(rows)))
    block_n = max(16, min(128, power_of_2(cols)))
    threads = max(info.warp_size, min(128, block_m * block_n // 32))
    return WidenConfig(block_m, block_n, warps(threads, info.warp_size))


@dataclass(frozen=True)
class NarrowSumsConfig:
    """A tile of ``block_k`` rows by ``block_n`` columns.

    Attributes:
        block_n: Columns of a program.
        block_k: Rows at a time.
        stages: Loads in flight.
        parts: Programs that share the rows.
        num_warps: Warps a program.
    """

    block_n: int
    block_k: int
    stages: int
    parts: int
    num_warps: int


def narrow_sums_config(
    info: DeviceInfo, rows: int, cols: int, rank: int, size: int
) -> NarrowSumsConfig:
    """Loads in flight that fill on-chip memory: of one program a core in 16 bits, else of two.

    Two leave registers for the parts of fp32 matrices. One H200, bf16, 2026-11-29: within 2 % of
    the best of twelve tiles at rank 16.
    """
    if info.shared_bytes <= 2**17:
        per_core, block_n, block_k, most, threads = 2, 256 // size, 64 // size, 2, 128
    elif size == 2:
        per_core, block_n, block_k, most, threads = 1, 256, 128, 3, 256
    else:
        per_core, block_n, block_k, most, threads = 2, 128, 64, 4, 128
    block_n = max(16, min(block_n, power_of_2(cols)))
    block_k = max(16, min(block_k, power_of_2(rows)))
    tile_bytes = block_k * (2 * block_n + 16 * size)
    stages = max(1, min(most, info.shared_bytes * 9 // (10 * per_core * tile_bytes)))
    parts = shared_parts(cdiv(cols, block_n), cdiv(rows, block_k), per_core * info.cores)
    return NarrowSumsConfig(block_n, block_k, stages, parts, warps(threads, info.warp_size))


def shared_parts(tiles: int, steps: int, programs: int) -> int:
    """Parts of the inner axis that fill a device whose cores run ``programs`` at a time.

    Of numbers that leave every part at least four steps, the least that is within a tenth of the
    best: more parts are more partials.
    """

    def share(parts: int) -> float:
        waves = cdiv(tiles * parts, programs)
        return tiles * parts / (waves * programs)

    counts = range(1, max(1, min(MOST_PARTS, steps // 4)) + 1)
    best = max(share(parts) for parts in counts)
    return next(parts for parts in counts if share(parts) >= 0.9 * best)


# --- launchers ---


def serves(wide: Tensor, thin: Tensor, rank: int, most_rank: int) -> bool:
    """Whether these kernels multiply a wide matrix with a thin one of ``rank`` columns or rows."""
    pair = wide.dtype, thin.dtype
    return (
        pair in PAIRS
        and 0 < rank <= most_rank
        and wide.numel() > 0
        and max(wide.shape) * rank <= LONGEST_ROW.value
        and (wide.stride(1) == 1 or wide.shape[1] == 1)
        and max(wide.shape[1], wide.stride(0), *thin.stride()) < MOST_STRIDE
    )


def _block_rank(rank: int) -> int:
    return max(16, power_of_2(rank))


def _coarse(rows: int) -> int:
    """Rows rounded up to tiles, so that few numbers of them enter the cache of configurations."""
    return cdiv(rows, 64) * 64


def widen(base: Tensor | None, low: Tensor, factor: Tensor, scale: float, out: Tensor) -> Tensor:
    """``out = base + scale low @ factor``, rounded once; ``out`` may be base, or base be absent."""
    (rows, cols), rank = out.shape, low.shape[1]
    k = launch_config(
        "thin_gemm.widen",
        widen_config,
        out.device,
        rows=_coarse(rows),
        cols=cols,
        rank=rank,
        base=int(base is not None),
    )
    block_r, col_steps = min(64, _block_rank(rank)), cdiv(cols, k.block_n)
    launch(
        _widen_kernel,
        cdiv(rows, k.block_m) * col_steps,
        (
            out,
            base,
            low,
            factor,
            0 if base is None else base.stride(0),
            *low.stride(),
            *factor.stride(),
            out.stride(0),
            rows,
            cols,
            rank,
            col_steps,
            float(scale),
        ),
        (k.block_m, k.block_n, block_r, cdiv(rank, block_r), 6 if low.dtype != out.dtype else 1),
        k.num_warps,
    )
    return out


def narrow_and_sums(
    wide: Tensor, factor: Tensor, low: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """``wide @ factor`` and ``scale wide' @ low``, in the dtype of low."""
    (rows, cols), rank, dtype = wide.shape, low.shape[1], low.dtype
    k = launch_config(
        "thin_gemm.narrow_sums",
        narrow_sums_config,
        wide.device,
        rows=_coarse(rows),
        cols=cols,
        rank=rank,
        size=low.element_size(),
    )
    steps, tiles = cdiv(cdiv(rows, k.block_k), k.parts), cdiv(cols, k.block_n)
    parts = cdiv(rows, steps * k.block_k)
    narrow = torch.empty(tiles, rows * rank, dtype=torch.float32, device=wide.device)
    sums = torch.empty(parts, cols * rank, dtype=torch.float32, device=wide.device)
    launch(
        _narrow_sums_kernel,
        tiles,
        (
            wide,
            factor,
            low,
            narrow,
            sums,
            wide.stride(0),
            *factor.stride(),
            *low.stride(),
            rows,
            cols,
            rank,
            steps,
            float(scale),
        ),
        (k.block_n, k.block_k, _block_rank(rank), k.stages),
        k.num_warps,
        parts,
    )
    return sum_partials(narrow, dtype).view(rows, rank), sum_partials(sums, dtype).view(cols, rank)
