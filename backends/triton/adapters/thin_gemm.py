"""GEMMs of a wide matrix with a thin one, whose cost is to read or write the wide one.

With wide (rows, K), of 16 bits, low (rows, r) and factor (K, r) or (r, K), r at most MOST_RANK:

    narrow    low = wide factor                      reads wide
    widen     out = base + scale low factor          reads base if there is one, writes out
    sums      gradient = scale wide' low             reads wide

A vendor's library reads a wide matrix at about half of the bandwidth here. Rows are loaded with
several stages in flight. Where tiles are too few for a device, programs share the inner axis and
leave partials in fp32, which a small kernel adds in a fixed order. The scale meets sums in fp32,
which are rounded once. Thin matrices have any strides; they are of the wide one's dtype, or fp32
beside bf16: then they are three bf16 parts made in registers, whose products are exact.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_multi.backends.triton.common.launching import launch
from liger_multi.backends.triton.common.rows import (
    assume_cols,
    assume_rows,
    bf16_parts,
    cdiv,
    power_of_2,
    round_to,
    warps,
)
from liger_multi.backends.triton.experts.grouped import dot, load_factor
from liger_multi.dispatch.launch import DeviceInfo, launch_config

MOST_RANK = 128
"""The most columns of a thin matrix; a product with more is the library's."""
MOST_PARTS = 32  # of a sum that programs share
MOST_STRIDE = 2**22  # elements, so that a tile along any axis ends within 2 GiB (see assume_rows)

PAIRS = (
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
    (torch.bfloat16, torch.float32),
)
"""Dtypes of wide and thin matrices."""
WIDE_DTYPES = (torch.bfloat16, torch.float16)

# --- helpers ---


@triton.jit
def _add_dots(a, b, t0, t1, t2):
    """Add ``a @ b`` to sums: to one, or those of the parts of the one in fp32 to one each.

    Compilers get several dots of one turn through one accumulator wrong (ci.static.patterns).
    """
    if a.dtype == b.dtype:
        t0 = dot(a, b, t0)
    elif a.dtype == tl.float32:
        a0, a1, a2 = bf16_parts(a)
        t0, t1, t2 = dot(a0, b, t0), dot(a1, b, t1), dot(a2, b, t2)
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


@triton.jit(do_not_specialize=["rows", "steps"])
def _narrow_kernel(
    wide_ptr,
    factor_ptr,
    out_ptr,
    wide_stride,
    k_stride,
    r_stride,
    rows,
    inner,
    rank,
    steps,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    EVEN_K: tl.constexpr,
    EVEN_R: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Product with few columns: out[s, m, r] = sum over k of part s of wide[m, k] factor[k, r].

    Program: BLOCK_M rows, and ``steps`` steps of BLOCK_K along the inner axis: part s, which is
    axis 1 of the grid. Reads its tile of wide, the last row in place of those past it, and that
    part of the factor; writes (BLOCK_M, rank) of its part.
    """
    first = tl.program_id(0).to(tl.int64) * BLOCK_M
    part = tl.program_id(1)
    start, stop = part * steps * BLOCK_K, tl.minimum(inner, (part + 1) * steps * BLOCK_K)
    assume_rows(wide_ptr, wide_stride, BLOCK_M)
    assume_rows(factor_ptr, k_stride, BLOCK_K)
    assume_cols(start)
    m, k, r = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_R)
    row = tl.minimum(m, (rows - 1 - first).to(tl.int32))
    wide_ptr += first * wide_stride + start
    factor_ptr += start.to(tl.int64) * k_stride
    wide_at = row[:, None] * wide_stride + k[None, :]
    factor_at = k[:, None] * k_stride + r[None, :] * r_stride
    t0 = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
    t1, t2 = t0, t0
    step = tl.full([], BLOCK_K, tl.int64)
    for at in tl.range(start, stop, BLOCK_K, num_stages=STAGES):
        inside = at + k < inner
        if EVEN_K:
            wide = tl.load(wide_ptr + wide_at)
        else:
            wide = tl.load(wide_ptr + wide_at, mask=inside[None, :], other=0.0)
        factor = load_factor(
            factor_ptr + factor_at, inside[:, None], (r < rank)[None, :], EVEN_K, EVEN_R
        )
        t0, t1, t2 = _add_dots(wide, factor, t0, t1, t2)
        wide_ptr += BLOCK_K
        factor_ptr += step * k_stride
    total = t0 + (t1 + t2)
    out_ptr += (part.to(tl.int64) * rows + first) * rank
    mask = (first + m < rows)[:, None] & (r < rank)[None, :]
    total = round_to(total, out_ptr.dtype.element_ty)
    tl.store(out_ptr + (m[:, None] * rank + r[None, :]), total, mask=mask)


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
def _sums_kernel(
    wide_ptr,
    low_ptr,
    out_ptr,
    wide_stride,
    low_stride,
    low_r_stride,
    n_stride,
    r_stride,
    rows,
    cols,
    rank,
    steps,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Sums over rows: out[s, n, r] = sum over rows k of part s of wide[k, n] low[k, r], in fp32.

    Program: BLOCK_N columns of wide, and ``steps`` steps of BLOCK_K rows: part s, which is axis 1
    of the grid. Rows past the end are zeros. Writes (BLOCK_N, rank) of its part, by strides.
    """
    first_col, part = tl.program_id(0) * BLOCK_N, tl.program_id(1)
    first = part.to(tl.int64) * steps * BLOCK_K
    count = tl.minimum(rows - first, steps * BLOCK_K).to(tl.int32)
    assume_rows(wide_ptr, wide_stride, BLOCK_K)
    assume_rows(low_ptr, low_stride, BLOCK_K)
    assume_cols(first_col)
    n, k, r = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_R)
    wide_ptr += first * wide_stride + first_col
    low_ptr += first * low_stride
    wide_at = k[:, None] * wide_stride + n[None, :]
    low_at = k[:, None] * low_stride + r[None, :] * low_r_stride
    inside = (first_col + n < cols)[None, :]
    t0 = tl.zeros([BLOCK_N, BLOCK_R], tl.float32)
    t1, t2 = t0, t0
    step = tl.full([], BLOCK_K, tl.int64)  # steps may pass 2 GiB
    for at in tl.range(0, count, BLOCK_K, num_stages=STAGES):
        here = (at + k < count)[:, None]
        wide = tl.load(wide_ptr + wide_at, mask=here & inside, other=0.0)
        low = tl.load(low_ptr + low_at, mask=here & (r < rank)[None, :], other=0.0)
        t0, t1, t2 = _add_dots(tl.trans(wide), low, t0, t1, t2)
        wide_ptr += step * wide_stride
        low_ptr += step * low_stride
    total = t0 + (t1 + t2)
    out_ptr += part.to(tl.int64) * cols * rank + first_col.to(tl.int64) * n_stride
    mask = (first_col + n < cols)[:, None] & (r < rank)[None, :]
    tl.store(out_ptr + (n[:, None] * n_stride + r[None, :] * r_stride), total, mask=mask)


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
    n_stride,
    r_stride,
    rows,
    cols,
    rank,
    steps,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Both products of backward that read dy, in one pass over it; partials of both, in fp32.

    narrow[t, k, r] = sum over columns n of tile t of wide[k, n] factor[n, r]
    sums[s, n, r] = sum over rows k of part s of wide[k, n] low[k, r]

    Program: BLOCK_N columns of wide, tile t, and ``steps`` steps of BLOCK_K rows, part s, which is
    axis 1 of the grid. Reads its part of the factor once. Rows past the end are zeros.
    """
    tile, part = tl.program_id(0), tl.program_id(1)
    first_col, first = tile * BLOCK_N, part.to(tl.int64) * steps * BLOCK_K
    count = tl.minimum(rows - first, steps * BLOCK_K).to(tl.int32)
    assume_rows(wide_ptr, wide_stride, BLOCK_K)
    assume_rows(low_ptr, low_stride, BLOCK_K)
    assume_rows(factor_ptr, factor_stride, BLOCK_N)
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
        zero = tl.zeros([BLOCK_K, BLOCK_R], tl.float32)
        n0, n1, n2 = _add_dots(wide, factor, zero, zero, zero)
        t0, t1, t2 = _add_dots(tl.trans(wide), low, t0, t1, t2)
        tl.store(narrow_ptr + narrow_at, n0 + (n1 + n2), mask=here & is_rank[None, :])
        wide_ptr += step * wide_stride
        low_ptr += step * low_stride
        narrow_ptr += step * rank
    sums_ptr += part.to(tl.int64) * cols * rank + first_col.to(tl.int64) * n_stride
    mask = inside[:, None] & is_rank[None, :]
    sums_at = n[:, None] * n_stride + r[None, :] * r_stride
    tl.store(sums_ptr + sums_at, t0 + (t1 + t2), mask=mask)


@triton.jit
def _add_parts_kernel(
    part_ptr, out_ptr, size, count, scale, PARTS: tl.constexpr, BLOCK: tl.constexpr
):
    """Add partials in a fixed order: out[i] = scale sum over parts of part[p, i].

    Program: BLOCK elements of every part; reads PARTS parts at a time and writes their sums,
    rounded once.
    """
    first = tl.program_id(0).to(tl.int64) * BLOCK
    p, i = tl.arange(0, PARTS), tl.arange(0, BLOCK)
    mask = first + i < size
    place = p[:, None].to(tl.int64) * size + (first + i[None, :])
    total = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, count, PARTS):
        here = (start + p < count)[:, None] & mask[None, :]
        total += tl.sum(tl.load(part_ptr + place, mask=here, other=0.0), axis=0)
        part_ptr += tl.full([], PARTS, tl.int64) * size
    total = round_to(scale * total, out_ptr.dtype.element_ty)
    tl.store(out_ptr + first + i, total, mask=mask)


# --- launch configurations ---


@dataclass(frozen=True)
class ThinConfig:
    """A tile of a thin GEMM, and how many programs share its inner axis.

    Attributes:
        block_wide: Rows of narrow, columns of the others.
        block_inner: Elements of the inner axis at a time; rows of widen.
        stages: Loads in flight.
        parts: Programs that share the inner axis; widen has one.
        num_warps: Warps a program.
    """

    block_wide: int
    block_inner: int
    stages: int
    parts: int
    num_warps: int


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


def thin_config(
    info: DeviceInfo, outer: int, inner: int, rank: int, tile_outer: int, tile_inner: int
) -> ThinConfig:
    """Two programs a core, each with loads of up to 80 KiB in flight."""
    large = info.shared_bytes > 2**16
    wide = max(16, min(tile_outer, power_of_2(outer)))
    low = max(16, power_of_2(rank))
    step = max(16, min(tile_inner if low <= 64 else tile_inner // 2, power_of_2(inner)))
    budget = min(81920, info.shared_bytes // 2) if large else info.shared_bytes // 2
    stages = max(1, min(4 if large else 2, budget // (2 * step * (wide + low))))
    parts = shared_parts(cdiv(outer, wide), cdiv(inner, step), 2 * info.cores)
    threads = 256 if wide * low > 8192 else 128
    return ThinConfig(wide, step, stages, parts, warps(threads, info.warp_size))


def narrow_config(info: DeviceInfo, rows: int, inner: int, rank: int, size: int) -> ThinConfig:
    """64 rows; of each, 256 bytes at a time."""
    return thin_config(info, rows, inner, rank, 64, 128)


def sums_config(info: DeviceInfo, rows: int, cols: int, rank: int, size: int) -> ThinConfig:
    """256 bytes of a row; 64 rows at a time."""
    return thin_config(info, cols, rows, rank, 128, 64)


def narrow_sums_config(info: DeviceInfo, rows: int, cols: int, rank: int, size: int) -> ThinConfig:
    """512 bytes of a row; 64 rows at a time."""
    return thin_config(info, cols, rows, rank, 256, 64)


def widen_config(info: DeviceInfo, rows: int, cols: int, rank: int, size: int) -> ThinConfig:
    """64 by 128 elements, 128 bytes a thread."""
    block_m, block_n = max(16, min(64, power_of_2(rows))), max(16, min(128, power_of_2(cols)))
    threads = max(info.warp_size, min(128, block_m * block_n // 32))
    return ThinConfig(block_n, block_m, 1, 1, threads // info.warp_size)


@dataclass(frozen=True)
class AddConfig:
    """Elements that a program adds of all parts."""

    block: int
    num_warps: int


def add_config(info: DeviceInfo, parts: int) -> AddConfig:
    """16 numbers a thread."""
    return AddConfig(2048 // min(MOST_PARTS, power_of_2(parts)), warps(128, info.warp_size))


# --- launchers ---


def serves(wide: Tensor, thin: Tensor, rank: int) -> bool:
    """Whether these kernels multiply a wide matrix with a thin one of ``rank`` columns or rows."""
    pair = wide.dtype, thin.dtype
    return (
        pair in PAIRS
        and 0 < rank <= MOST_RANK
        and wide.numel() > 0
        and (wide.stride(1) == 1 or wide.shape[1] == 1)
        and max(wide.shape[1], wide.stride(0), *thin.stride()) < MOST_STRIDE
    )


def _block_rank(rank: int) -> int:
    return max(16, power_of_2(rank))


def _coarse(rows: int) -> int:
    """Rows rounded up to tiles, so that few numbers of them enter the cache of configurations."""
    return cdiv(rows, 64) * 64


def narrow(wide: Tensor, factor: Tensor) -> Tensor:
    """``wide @ factor``, (rows, r), in the dtype of the factor."""
    (rows, inner), rank = wide.shape, factor.shape[1]
    out = torch.empty(rows, rank, dtype=factor.dtype, device=wide.device)
    k = launch_config(
        "thin_gemm.narrow",
        narrow_config,
        wide.device,
        rows=_coarse(rows),
        inner=inner,
        rank=rank,
        size=factor.element_size(),
    )
    steps = cdiv(cdiv(inner, k.block_inner), k.parts)
    parts = cdiv(inner, steps * k.block_inner)
    target = out if parts == 1 else out.new_empty(parts, rows, rank, dtype=torch.float32)
    block_r = _block_rank(rank)
    launch(
        _narrow_kernel,
        cdiv(rows, k.block_wide),
        (wide, factor, target, wide.stride(0), *factor.stride(), rows, inner, rank, steps),
        (
            k.block_wide,
            k.block_inner,
            block_r,
            inner % k.block_inner == 0,
            rank == block_r,
            k.stages,
        ),
        k.num_warps,
        parts,
    )
    return out if parts == 1 else _added_parts(target, out, 1.0)


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
        size=low.element_size(),
    )
    block_r, col_steps = min(64, _block_rank(rank)), cdiv(cols, k.block_wide)
    launch(
        _widen_kernel,
        cdiv(rows, k.block_inner) * col_steps,
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
        (
            k.block_inner,
            k.block_wide,
            block_r,
            cdiv(rank, block_r),
            6 if low.dtype != out.dtype else 1,
        ),
        k.num_warps,
    )
    return out


def sums(wide: Tensor, low: Tensor, out: Tensor, scale: float) -> Tensor:
    """``scale wide' @ low`` into ``out``, (cols, r): contiguous, or the transpose of such."""
    (rows, cols), rank = wide.shape, low.shape[1]
    k = launch_config(
        "thin_gemm.sums",
        sums_config,
        wide.device,
        rows=_coarse(rows),
        cols=cols,
        rank=rank,
        size=low.element_size(),
    )
    steps = cdiv(cdiv(rows, k.block_inner), k.parts)
    parts = cdiv(rows, steps * k.block_inner)
    partial = out.new_empty(parts, cols, rank, dtype=torch.float32)
    launch(
        _sums_kernel,
        cdiv(cols, k.block_wide),
        (wide, low, partial, wide.stride(0), *low.stride(), *out.stride(), rows, cols, rank, steps),
        (k.block_wide, k.block_inner, _block_rank(rank), k.stages),
        k.num_warps,
        parts,
    )
    _added_parts(partial, out, scale)
    return out


def narrow_and_sums(
    wide: Tensor, factor: Tensor, low: Tensor, scale: float, out: Tensor
) -> tuple[Tensor, Tensor]:
    """``wide @ factor`` and, in ``out``, ``scale wide' @ low``, from one pass over wide."""
    (rows, cols), rank = wide.shape, low.shape[1]
    narrow_out = torch.empty(rows, rank, dtype=factor.dtype, device=wide.device)
    k = launch_config(
        "thin_gemm.narrow_sums",
        narrow_sums_config,
        wide.device,
        rows=_coarse(rows),
        cols=cols,
        rank=rank,
        size=low.element_size(),
    )
    steps, tiles = cdiv(cdiv(rows, k.block_inner), k.parts), cdiv(cols, k.block_wide)
    parts = cdiv(rows, steps * k.block_inner)
    partial = out.new_empty(parts, cols, rank, dtype=torch.float32)
    tile_partial = out.new_empty(tiles, rows, rank, dtype=torch.float32)
    launch(
        _narrow_sums_kernel,
        tiles,
        (
            wide,
            factor,
            low,
            tile_partial,
            partial,
            wide.stride(0),
            *factor.stride(),
            *low.stride(),
            *out.stride(),
            rows,
            cols,
            rank,
            steps,
        ),
        (k.block_wide, k.block_inner, _block_rank(rank), k.stages),
        k.num_warps,
        parts,
    )
    return _added_parts(tile_partial, narrow_out, 1.0), _added_parts(partial, out, scale)


def _added_parts(partial: Tensor, out: Tensor, scale: float) -> Tensor:
    """The sum of partials (parts, ...) times the scale, in memory order, into ``out``."""
    parts, size = partial.shape[0], out.numel()
    k = launch_config("thin_gemm.add", add_config, out.device, parts=parts)
    launch(
        _add_parts_kernel,
        cdiv(size, k.block),
        (partial, out, size, parts, float(scale)),
        (min(MOST_PARTS, power_of_2(parts)), k.block),
        k.num_warps,
    )
    return out
