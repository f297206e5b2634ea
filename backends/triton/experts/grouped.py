"""Grouped GEMM: rows sorted into groups, a weight for each; no size is read back.

:mod:`.pairs` says what groups are. Rows may be gathered while they are read, so that no copy of
them is written first. Where a launch table says so (``library``), PyTorch's own grouped GEMM does
the work on rows that were written before. It supports neither fp32 nor odd strides; such calls stay
here.

Gradients of grouped weights are one GEMM for every group, summed over its rows. A program owns one
tile of one group. A group without rows gets zeros, so that no fill comes first.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_multi._torch_private import grouped_mm
from liger_multi.backends.triton.common.launching import launch
from liger_multi.backends.triton.common.rows import (
    INTERPRETED,
    LONGEST_ROW,
    add_dot,
    assume_cols,
    assume_rows,
    bf16_parts,
    cdiv,
    checked_cols,
    power_of_2,
    round_to,
    warps,
)
from liger_multi.backends.triton.experts.pairs import Groups, RowOperand
from liger_multi.dispatch.launch import DeviceInfo, launch_config
from liger_multi.reference.common.stored import opened, pieces
from liger_multi.reference.common.strict import by_rows

# --- a product of every group ---

MOST_ROWS = 128  # of a tile, all formulas and tables
_forced: list[bool] = []  # not of a context: backward runs on a thread of autograd's


@dataclass(frozen=True)
class ProductConfig:
    """A tile of ``block_m`` by ``block_n``, ``block_k`` of the sum at a time; or the library's."""

    block_m: int
    block_n: int
    block_k: int
    stages: int
    num_warps: int
    library: bool = False


def product_config(
    info: DeviceInfo,
    rows: int,
    groups: int,
    cols: int,
    inner: int,
    element_bytes: int,
    factors: int = 1,
) -> ProductConfig:
    """Tiles that most groups fit in, with stages that half of the on-chip memory holds.

    Groups are uneven: a tile as large as their average reads the weights of every other one twice.
    """
    block_m = max(16, min(MOST_ROWS, power_of_2(cdiv(5 * rows, 4 * groups))))
    return fitted(info, block_m, cols, inner, element_bytes, factors)


def fitted(
    info: DeviceInfo, m: int, cols: int, inner: int, element_bytes: int, factors: int = 1
) -> ProductConfig:
    """Tiles of ``m`` rows, for ``factors`` right-hand sides of one left.

    In fp32, waves of 64 with much memory would copy ahead of the sum 4 bytes at a time, and cores
    of some memory spill with so few threads, or stages, as others take (ci.static, triton 3.9).
    """
    large = info.shared_bytes > 2**16
    stages_limit, share = 4 if large else 2, 32
    n = max(16, min(128 // factors, power_of_2(cols)))
    k = max(16, min((128 if large else 64) // element_bytes, power_of_2(inner)))
    if element_bytes > 2:  # multiply-adds from registers
        m, n, k = min(m, 64), min(n, 64 // factors), 16
        if large and info.warp_size == 64:
            stages_limit = 1
        elif large and info.shared_bytes < 200_000:
            stages_limit, share = 2, 16
    stage = (m + factors * n) * k * element_bytes
    budget = info.shared_bytes // (2 if large else 1)
    stages = max(1, min(stages_limit, budget // stage))
    threads = max(info.warp_size, min(256, m * n * factors // share))
    return ProductConfig(m, n, k, stages, warps(threads, info.warp_size))


@triton.jit
def dot(a, b, total, PARTS: tl.constexpr = 3):
    """``total + a @ b`` in fp32; Triton's interpreter cannot multiply bf16, so there it is cast.

    Beside bf16, fp32 is taken as three parts in bf16, whose products are exact; or as two.
    """
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision="ieee")
    elif a.dtype == b.dtype:
        return tl.dot(a, b, total, input_precision="ieee")
    elif a.dtype == tl.bfloat16:
        b0, b1, b2 = bf16_parts(b)
        total = add_dot(a, b1, tl.dot(a, b0, total, input_precision="ieee"))
        return add_dot(a, b2, total) if PARTS == 3 else total
    elif b.dtype == tl.bfloat16:
        a0, a1, a2 = bf16_parts(a)
        total = add_dot(a1, b, tl.dot(a0, b, total, input_precision="ieee"))
        return add_dot(a2, b, total) if PARTS == 3 else total
    else:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision="ieee")


@triton.jit
def source_rows(order_ptr, row, stop, per):
    """Rows of the source for some sorted rows: by ``order_ptr``, or the same.

    Rows past the group's end repeat its last one, so that no load needs a mask; they are not
    stored.
    """
    row = tl.minimum(row, stop - 1)
    if order_ptr is not None:
        row = tl.load(order_ptr + row) // per
    return row.to(tl.int64)


@triton.jit
def load_factor(ptrs, k_mask, n_mask, EVEN_K: tl.constexpr, EVEN_N: tl.constexpr):
    """A tile of a weight, masked along the axes that it does not divide."""
    if EVEN_K and EVEN_N:
        return tl.load(ptrs)
    elif EVEN_K:
        return tl.load(ptrs, mask=n_mask, other=0.0)
    elif EVEN_N:
        return tl.load(ptrs, mask=k_mask, other=0.0)
    else:
        return tl.load(ptrs, mask=k_mask & n_mask, other=0.0)


@triton.jit
def _grouped_product_kernel(
    a_ptr,
    w_ptr,
    out_ptr,
    tiles_ptr,
    offsets_ptr,
    order_ptr,
    a_stride,
    w_stride,
    n_stride,
    k_stride,
    cols,
    inner,
    per,
    steps,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Grouped GEMM: out[s, n] = sum over k of a[source(s), k] w[group(s), n, k].

    Program: BLOCK_M sorted rows of one group by BLOCK_N columns. The table of tiles names the group
    and the first row; programs past its last tile return, since the grid is the largest that any
    partition needs.
    Reads the rows of a and the group's weight, of any strides, BLOCK_K at a time; writes its tile.
    """
    tile = tl.program_id(0) // steps
    group = tl.load(tiles_ptr + 2 * tile)
    if group < 0:
        return
    stop = tl.load(offsets_ptr + group + 1)
    first, m = tl.load(tiles_ptr + 2 * tile + 1), tl.arange(0, BLOCK_M)
    first_col = (tl.program_id(0) % steps) * BLOCK_N
    assume_cols(cols, LONGEST_ROW // (2 * BLOCK_M))
    assume_cols(first_col, LONGEST_ROW // (2 * BLOCK_M))
    row, col = first + m, first_col + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    source = source_rows(order_ptr, row, stop, per)
    a_ptrs = a_ptr + source[:, None] * a_stride + k[None, :]
    w_ptr += group.to(tl.int64) * w_stride
    w_ptrs = w_ptr + col[None, :] * n_stride + k[:, None] * k_stride
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in tl.range(0, inner, BLOCK_K, num_stages=STAGES):
        mask = start + k < inner
        if EVEN_K:
            a = tl.load(a_ptrs)
        else:
            a = tl.load(a_ptrs, mask=mask[None, :], other=0.0)
        w = load_factor(w_ptrs, mask[:, None], (col < cols)[None, :], EVEN_K, EVEN_N)
        total = dot(a, w, total)
        a_ptrs += BLOCK_K
        w_ptrs += BLOCK_K * k_stride
    out_ptrs = out_ptr + first.to(tl.int64) * cols + (m[:, None] * cols + col[None, :])
    mask = (row < stop)[:, None] & (col < cols)[None, :]
    tl.store(out_ptrs, round_to(total, out_ptr.dtype.element_ty), mask=mask)


@contextlib.contextmanager
def products_by(library: bool) -> Iterator[None]:
    """Take PyTorch's grouped GEMM where it is possible, or never, whatever the tables say."""
    _forced.append(library)
    try:
        yield
    finally:
        _forced.pop()


def by_library(k: ProductConfig, *tensors: Tensor) -> bool:
    """Whether PyTorch's grouped GEMM takes this call; its requirements are not documented."""
    requested = not by_rows() and (_forced[-1] if _forced else k.library) and grouped_mm is not None
    return requested and all(
        t.dtype == torch.bfloat16
        and t.data_ptr() % 16 == 0
        and all(s % 8 == 0 for s in t.shape[1:])
        for t in tensors
    )


def library_gemm(k: ProductConfig, a: RowOperand, weight: Tensor, groups: Groups) -> Tensor | None:
    """PyTorch's grouped GEMM, or None where it does not take this call."""
    dense = weight if weight.stride(2) == 1 else weight.mT
    lines = dense.stride(2) == 1 and all(s % 8 == 0 for s in dense.stride()[:2])
    if lines and by_library(k, a.source, dense):
        return grouped_mm(a.written(groups), weight.mT, groups.offsets[1:])
    return None


def product(
    name: str, a: RowOperand, weight: Tensor, groups: Groups, dtype: torch.dtype | None = None
) -> Tensor:
    """Rows (rows, K) times the transposed weights (E, N, K) of their groups; (rows, N).

    The result has the dtype of the rows, if no other one is given. Columns of a large weight that
    is stored in another form are opened and multiplied one piece after the other.
    """
    parts = pieces(weight)
    if len(parts) > 1:
        out = a.source.new_empty(groups.rows, weight.shape[1], dtype=dtype)
        for part, out_part in zip(parts, out.split([p.shape[1] for p in parts], 1), strict=True):
            out_part.copy_(product(name, a, part, groups, dtype))
        return out
    weight = opened(weight)
    x, (_, cols, inner) = a.source, weight.shape
    k = choice(name, product_config, x, groups, cols, inner)
    library_product = library_gemm(k, a, weight, groups) if dtype is None else None
    if library_product is not None:
        return library_product
    out, tiles = x.new_empty(groups.rows, cols, dtype=dtype), groups.tiles(k.block_m)
    steps = cdiv(cols, k.block_n)
    launch(
        _grouped_product_kernel,
        tiles.shape[0] * steps,
        (
            x,
            weight,
            out,
            tiles,
            groups.offsets,
            groups.order if a.gather else None,
            x.stride(0),
            *weight.stride(),
            cols,
            inner,
            groups.per,
            steps,
        ),
        (k.block_m, k.block_n, k.block_k, cols % k.block_n == 0, inner % k.block_k == 0, k.stages),
        k.num_warps,
    )
    return out


def choice(
    name: str,
    formula: Callable[..., ProductConfig],
    a: Tensor,
    groups: Groups,
    cols: int,
    inner: int,
) -> ProductConfig:
    """Launch configuration of a GEMM; a power of two of rows, so that few enter the cache."""
    checked_cols(2 * MOST_ROWS * max(cols, inner))  # a tile of either stays below 2 GiB
    rows = groups.count * MOST_ROWS if by_rows() else power_of_2(groups.rows)
    config: ProductConfig = launch_config(
        name,
        formula,
        a.device,
        rows=rows,
        groups=groups.count,
        cols=cols,
        inner=inner,
        element_bytes=a.element_size(),
    )
    return config


# --- gradients of weights ---


def weight_config(
    info: DeviceInfo, rows: int, groups: int, cols: int, inner: int, element_bytes: int
) -> ProductConfig:
    """The same for gradients of weights, whose tiles are columns of both and sums go over rows."""
    m, factors = max(16, min(128, power_of_2(cols))), 2 if element_bytes > 2 else 1
    return fitted(info, m, inner, cdiv(rows, groups), element_bytes, factors)


@triton.jit
def _grouped_weight_kernel(
    p_ptr,
    q_ptr,
    out_ptr,
    offsets_ptr,
    done_ptr,
    p_order_ptr,
    q_order_ptr,
    p_stride,
    q_stride,
    m_size,
    n_size,
    per,
    m_steps,
    n_steps,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Gradient of a weight: out[e, m, n] = sum over rows s of e of p[source(s), m] q[source(s), n].

    Program: a tile of BLOCK_M by BLOCK_N of one group; passes over the group's rows, BLOCK_K at a
    time. Rows past the end are masked to zeros. A group without rows runs no step and writes zeros.
    Groups within the first rows, whose number is at ``done_ptr``, are another's, and are skipped.
    """
    group = tl.program_id(0) // (m_steps * n_steps)
    tile = tl.program_id(0) % (m_steps * n_steps)
    first_m, first_n = (tile // n_steps) * BLOCK_M, (tile % n_steps) * BLOCK_N
    m, n = first_m + tl.arange(0, BLOCK_M), first_n + tl.arange(0, BLOCK_N)
    start, stop = tl.load(offsets_ptr + group), tl.load(offsets_ptr + group + 1)
    if done_ptr is not None:
        if stop <= tl.load(done_ptr):
            return
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
        total = dot(tl.trans(p), q, total, PARTS)
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
    name: str,
    left: RowOperand,
    right: RowOperand,
    groups: Groups,
    transposed: bool,
    dtype: torch.dtype | None = None,
    parts: int = 3,
    scratch: Tensor | None = None,
) -> Tensor:
    """Left' right for every group, (E, M, N); or its transpose, (E, N, M), when ``transposed``.

    The result has the dtype of the left rows, if no other one is given. ``parts``: bf16 numbers
    that stand for one in fp32 beside rows in bf16. ``scratch``: what rows of the same dtype that
    are gathered may overwrite.
    """
    if transposed:
        left, right = right, left
    p, q = left.source, right.source
    m, n = p.shape[1], q.shape[1]
    k = choice(name, weight_config, p, groups, m, n)
    if dtype is None and by_library(k, p, q):
        return _gradient_by_library(k, left, right, groups, scratch)
    out = p.new_empty(groups.count, m, n, dtype=dtype)
    return _gradient_by_kernel(k, left, right, groups, out, parts=parts)


WRITTEN_BYTES = 2**26  # gathered rows that take no more are written to memory of their own
SCRATCH_SHARE = 0.7  # of the rows, at least: our kernel is slower than the library's on the others


def _rows_in(scratch: Tensor | None, sides: Sequence[RowOperand], groups: Groups) -> int:
    """How many rows are gathered to scratch; none where they get memory of their own."""
    gathered = [side.source for side in sides if side.gather and side.cached is None]
    if scratch is None or len(gathered) != 1:
        return 0
    (source,) = gathered
    rows = min(groups.rows, scratch.numel() // source.shape[1])
    is_large = groups.rows * source.shape[1] * source.element_size() > WRITTEN_BYTES
    return rows if is_large and rows >= SCRATCH_SHARE * groups.rows else 0


def _gradient_by_library(
    k: ProductConfig,
    left: RowOperand,
    right: RowOperand,
    groups: Groups,
    scratch: Tensor | None = None,
) -> Tensor:
    """The library's grouped GEMM on rows that are written before.

    Where these take much memory and there is scratch, they are those of the first groups, as far as
    it reaches, and our kernel gathers those of the other groups while it reads them. Which groups
    they are is decided on the device: the library leaves groups without rows as they are.
    """
    sides, computed_rows = (left, right), None
    rows = _rows_in(scratch, sides, groups)
    if scratch is not None and rows:
        computed_rows = torch.where(groups.offsets <= rows, groups.offsets, 0).amax()
        offsets = torch.minimum(groups.offsets, computed_rows)
        p, q = (side.first(groups, offsets, rows, scratch) for side in sides)
    else:
        offsets, (p, q) = groups.offsets, (side.written(groups) for side in sides)
    gradient = grouped_mm(p.mT, q, offsets[1:])
    del p, q
    size = gradient.shape[1] * gradient.shape[2]
    launch(_zero_groups_kernel, groups.count * 16, (gradient, groups.offsets, size, 16), (256,), 4)
    return (
        gradient
        if computed_rows is None
        else _gradient_by_kernel(k, *sides, groups, gradient, computed_rows)
    )


def _gradient_by_kernel(
    k: ProductConfig,
    left: RowOperand,
    right: RowOperand,
    groups: Groups,
    out: Tensor,
    computed_rows: Tensor | None = None,
    parts: int = 3,
) -> Tensor:
    """Fill ``out`` for all groups but those within the first ``computed_rows`` rows."""
    p, q = left.source, right.source
    m, n = p.shape[1], q.shape[1]
    m_steps, n_steps = cdiv(m, k.block_m), cdiv(n, k.block_n)
    orders = [groups.order if side.gather else None for side in (left, right)]
    launch(
        _grouped_weight_kernel,
        groups.count * m_steps * n_steps,
        (
            p,
            q,
            out,
            groups.offsets,
            computed_rows,
            *orders,
            p.stride(0),
            q.stride(0),
            m,
            n,
            groups.per,
            m_steps,
            n_steps,
        ),
        (k.block_m, k.block_n, k.block_k, k.stages, parts),
        k.num_warps,
    )
    return out
