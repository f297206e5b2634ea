"""What the Triton kernels share: rounding, row views and the sum of per-program partials."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_multi.backends.triton.launching import launch
from liger_multi.launch import DeviceInfo, knobs

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)
LARGEST_TILE = 8192  # elements of several rows that a kernel takes at a time
INTERPRETED: tl.constexpr = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@dataclass(frozen=True)
class ReduceKnobs:
    """Tile of the sum over partials: ``block_rows`` partials by ``block`` columns."""

    block_rows: int = 32
    block: int = 64
    num_warps: int = 4


@triton.jit
def round_to(value, DTYPE: tl.constexpr):
    """Cast fp32 to DTYPE, to nearest even; Triton's interpreter would truncate to bf16."""
    if INTERPRETED and DTYPE == tl.bfloat16:
        bits = value.to(tl.uint32, bitcast=True)
        near = (bits & 0xFFFF0000) + ((((bits & 0xFFFF) + 0x7FFF + ((bits >> 16) & 1)) >> 16) << 16)
        value = tl.where(value == value, near.to(tl.float32, bitcast=True), value)
    return value.to(DTYPE)


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)) of an fp32 x; 0 and 1 in the limits."""
    return 1.0 / (1.0 + tl.exp2(x * -LOG2E))


@triton.jit
def tanh(x):
    """The hyperbolic tangent of an fp32 x."""
    # tanh(|x|) = (1 - t) / (1 + t), t = exp(-2 |x|), loses digits near 0: there the series to x^9
    t = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
    far = tl.where(x < 0.0, t - 1.0, 1.0 - t) / (1.0 + t)
    s = x * x
    near = 0.13333333333 + s * (-0.05396825397 + s * 0.02186948854)
    return tl.where(tl.abs(x) < 0.25, x + x * s * (-0.33333333333 + s * near), far)


@triton.jit
def _sum_partials_kernel(
    partial_ptr, out_ptr, other_ptr, partials, cols, BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    col = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.arange(0, BLOCK_ROWS)
    which = tl.program_id(1)
    partial_ptr += which.to(tl.int64) * partials * cols
    total = tl.zeros([BLOCK_ROWS, BLOCK], tl.float32)
    offset = row.to(tl.int64)[:, None] * cols + col[None, :]
    for start in tl.range(0, partials, BLOCK_ROWS):
        mask = (start + row < partials)[:, None] & (col < cols)[None, :]
        total += tl.load(partial_ptr + offset, mask=mask, other=0.0)
        partial_ptr += BLOCK_ROWS * cols
    total = tl.sum(total, axis=0)
    if which == 0:
        tl.store(out_ptr + col, round_to(total, out_ptr.dtype.element_ty), mask=col < cols)
    elif other_ptr is not None:
        tl.store(other_ptr + col, round_to(total, other_ptr.dtype.element_ty), mask=col < cols)


def reduce_knobs(info: DeviceInfo, rows: int, cols: int) -> ReduceKnobs:
    """Few columns: narrower tiles, so that more programs share the work."""
    return ReduceKnobs() if cols > 2048 else ReduceKnobs(128, 16)


def sum_partials(partial: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum fp32 partials (programs, cols) over the programs, in a fixed order, and cast."""
    return sum_all_partials(partial[None], dtype)[0]


def sum_all_partials(partial: Tensor, *dtypes: torch.dtype) -> tuple[Tensor, ...]:
    """The same of one or two sets of partials (sets, programs, cols), with a dtype for each."""
    _, count, cols = partial.shape
    outs = tuple(partial.new_empty(cols, dtype=d) for d in dtypes)
    k = knobs("sum_partials", reduce_knobs, partial.device, rows=count, cols=cols)
    launch(
        _sum_partials_kernel, cdiv(cols, k.block),
        (partial, outs[0], outs[1] if len(outs) > 1 else None, count, cols),
        (k.block_rows, k.block), k.num_warps, len(outs),
    )  # fmt: skip
    return outs


def as_rows(x: Tensor, width: int = 0) -> Tensor:
    """View ``x`` as (rows, cols) with adjacent columns; copies only where no such view exists.

    Also where rows stand so far apart that the offsets within a tile of them leave 32 bits; a tile
    has ``width`` columns of each, or all.
    """
    cols = x.shape[-1]
    rows = x if x.dim() == 2 else x.reshape(x.numel() // max(cols, 1), cols)
    near = rows.stride(0) * min(rows.shape[0], LARGEST_TILE // max(width or cols, 1)) < 2**31
    return rows if near and (rows.stride(1) == 1 or cols == 1) else rows.contiguous()


def cdiv(a: int, b: int) -> int:
    """``a / b`` rounded up; Triton's own costs the host some microseconds a call."""
    return -(-a // b)


def power_of_2(value: int) -> int:
    """The least power of two that is not less than ``value`` (at least 1)."""
    return 1 << max(value - 1, 0).bit_length()


def warps(threads: int, warp_size: int) -> int:
    """Warps that hold about ``threads`` threads, a power of two and at least one."""
    return max(power_of_2(threads) // warp_size, 1)
