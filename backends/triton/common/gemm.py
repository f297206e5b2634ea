"""GEMM with independent rows: tiles that give the same bits, and no split of the sum over K.

A vendor's library chooses a kernel by the number of rows, and with it the order of every sum. Here
an element of the result is a sum over K in order, whatever stands beside it. Few rows get a lower
tile only where a launch table says that a device gave both tiles the same bits. It takes the
library's place under ``deterministic="rows"``, where it costs what these tiles cost.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_multi.backends.triton.common.launching import launch
from liger_multi.backends.triton.common.rows import assume_rows, cdiv, round_to, warps
from liger_multi.backends.triton.experts.grouped import dot, load_factor
from liger_multi.dispatch.launch import DeviceInfo, launch_config

BAND = tl.constexpr(16)  # tiles of rows whose programs share the columns of b
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FEW = 64  # the most rows that a table may give a tile of their own


@dataclass(frozen=True)
class GemmConfig:
    """A tile of ``block_m`` by ``block_n``, ``block_k`` of the sum at a time."""

    block_m: int
    block_n: int
    block_k: int
    stages: int
    num_warps: int


def gemm_config(
    info: DeviceInfo, rows: int, cols: int, element_bytes: int, narrow: int, turned: int
) -> GemmConfig:
    """The largest tiles whose sums stay in registers, of any number of rows.

    Tables may look at the columns, at ``rows`` (those above FEW count as FEW + 1), and whether b is
    ``turned``: adjacent along K, as the weight of a layer is in its forward. ``narrow`` says that K
    or N is no multiple of 16 bytes: tiles that are loaded by elements take a register for each, so
    that a shorter piece of K fits. In fp32, waves of 64 with much memory would copy ahead of the
    sum 4 bytes at a time (ci.static, triton 3.9).
    """
    large, threads = info.shared_bytes > 2**16, warps(256, info.warp_size)
    if element_bytes > 2:  # multiply-adds from registers
        return GemmConfig(64, 64, 16, 2 if large and info.warp_size < 64 else 1, threads)
    return GemmConfig(128, 128, 64 if large and not narrow else 32, 3 if large else 2, threads)


@triton.jit(do_not_specialize=["rows"])
def _gemm_by_rows_kernel(
    a_ptr,
    b_ptr,
    bias_ptr,
    out_ptr,
    a_stride,
    a_k_stride,
    b_stride,
    b_k_stride,
    out_stride,
    rows,
    cols,
    inner,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """GEMM: out[m, n] = sum over k of a[m, k] b[k, n], and bias[n].

    Program: BLOCK_M rows by BLOCK_N columns; BAND tiles of rows by all columns follow each other,
    so that parts of a and b stay in the cache. Reads a and b of any strides, BLOCK_K at a time, in
    order, the last row in place of those past it; writes its tile.
    """
    tiles_m, tiles_n = tl.cdiv(rows, BLOCK_M), tl.cdiv(cols, BLOCK_N)
    band, place = tl.program_id(0) // (BAND * tiles_n), tl.program_id(0) % (BAND * tiles_n)
    high = tl.minimum(tiles_m - band * BAND, BAND)
    first = (band * BAND + place % high).to(tl.int64) * BLOCK_M
    start_n = (place // high).to(tl.int64) * BLOCK_N
    m, n, k = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    row_mask, col_mask = (first + m < rows)[:, None], (start_n + n < cols)[None, :]
    row = tl.minimum(m, tl.maximum((rows - 1 - first).to(tl.int32), 0))
    # twice the tile: both of its axes together end within 2 GiB
    assume_rows(a_ptr, a_stride, 2 * BLOCK_M)
    assume_rows(a_ptr, a_k_stride, 2 * BLOCK_K)
    assume_rows(b_ptr, b_stride, 2 * BLOCK_N)
    assume_rows(b_ptr, b_k_stride, 2 * BLOCK_K)
    assume_rows(out_ptr, out_stride, 2 * BLOCK_M)
    a_ptr += first * a_stride
    b_ptr += start_n * b_stride
    a_at = row[:, None] * a_stride + k[None, :] * a_k_stride
    b_at = k[:, None] * b_k_stride + n[None, :] * b_stride
    step = tl.full([], BLOCK_K, tl.int64)  # steps may pass 2 GiB
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in tl.range(0, inner, BLOCK_K, num_stages=STAGES):
        inside = start + k < inner
        if EVEN_K:
            a = tl.load(a_ptr + a_at)
        else:
            a = tl.load(a_ptr + a_at, mask=inside[None, :], other=0.0)
        b = load_factor(b_ptr + b_at, inside[:, None], col_mask, EVEN_K, EVEN_N)
        total = dot(a, b, total)
        a_ptr += step * a_k_stride
        b_ptr += step * b_k_stride
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + start_n + n, mask=start_n + n < cols, other=0.0)
        total += bias.to(tl.float32)[None, :]
    out_ptr += first * out_stride + start_n
    out_ptrs = out_ptr + (m[:, None] * out_stride + n[None, :])
    tl.store(out_ptrs, round_to(total, out_ptr.dtype.element_ty), mask=row_mask & col_mask)


def _near_tiles(x: Tensor, rows: int, cols: int, limit: int) -> Tensor:
    """``x``, or a copy where a tile of it would not end within 2 GiB (see assume_rows)."""
    is_near = x.stride(0) * rows < limit and x.stride(1) * cols < limit
    return x if is_near else x.contiguous().view(-1).view(x.shape)  # an axis of 1 keeps its stride


def gemm_by_rows(a: Tensor, b: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """``out = a @ b (+ bias)``, accumulated in fp32 and rounded once; fp32 is no TF32.

    Args:
        a: ``(M, K)``, any strides, in fp32, bf16 or fp16.
        b: ``(K, N)``, any strides, the dtype of a.
        bias: ``(N,)`` or None.
        out: ``(M, N)``, any strides, a floating dtype.

    Raises:
        TypeError: Two dtypes, or one that has no kernel: sums in fp32 would not be exact enough
            for fp64, and codes of 8 bits and integers have no scale here.
        ValueError: K or N of more than four million.
    """
    (rows, inner), cols = a.shape, b.shape[1]
    if a.dtype not in DTYPES or b.dtype != a.dtype or not out.is_floating_point():
        dtypes = ", ".join(str(t.dtype).removeprefix("torch.") for t in (a, b, out))
        raise TypeError(
            "the GEMM of independent rows takes a and b of one dtype, float32, bfloat16 or "
            f"float16, got a, b and out of {dtypes}"
        )
    if not out.numel():
        return
    if out.stride(1) != 1 and cols > 1:
        product = torch.empty(rows, cols, dtype=out.dtype, device=out.device)
        gemm_by_rows(a, b, bias, product)
        out.copy_(product)
        return
    size = a.element_size()
    narrow = int(inner * size % 16 > 0 or cols * size % 16 > 0)
    k = launch_config(
        "gemm_by_rows",
        gemm_config,
        a.device,
        rows=min(rows, FEW + 1),
        cols=cols,
        element_bytes=size,
        narrow=narrow,
        turned=int(b.stride(0) == 1),
    )
    bias = None if bias is None else bias.contiguous()
    limit = 2**30 // size
    if max(inner, cols) * max(k.block_m, k.block_n) >= limit:
        raise ValueError(f"the GEMM of independent rows takes no K or N as long as {(inner, cols)}")
    a, b = _near_tiles(a, k.block_m, k.block_k, limit), _near_tiles(b, k.block_k, k.block_n, limit)
    launch(
        _gemm_by_rows_kernel,
        cdiv(rows, k.block_m) * cdiv(cols, k.block_n),
        (a, b, bias, out, *a.stride(), b.stride(1), b.stride(0), out.stride(0), rows, cols, inner),
        (k.block_m, k.block_n, k.block_k, cols % k.block_n == 0, inner % k.block_k == 0, k.stages),
        k.num_warps,
    )
