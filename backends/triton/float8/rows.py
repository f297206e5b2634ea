"""Codes of rows: one pass over a row finds its largest element, the same or a second one rounds.

A scale is a power of two found from the bits of the largest element (``row_scale``), so it equals
the reference's. What is not finite has the largest bits of all, and makes scale and codes NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_multi.backends.triton.common.float8 import FORMATS, float8_row_code, row_scale
from liger_multi.backends.triton.common.launching import launch
from liger_multi.backends.triton.common.rows import (
    assume_cols,
    assume_rows,
    cdiv,
    empty_contiguous,
    load_or,
    tile_rows,
    warps,
    with_stride,
)
from liger_multi.backends.triton.norms.row_config import forward_config
from liger_multi.dispatch.launch import DeviceInfo, launch_config
from liger_multi.reference.common.float8 import LARGEST
from liger_multi.reference.float8.rows import PLAIN, Float8Rows, format_of

# tiles of a program that reads numbers of columns: of a bf16 row these are twice the bytes, and
# kept them at 2.1 of 3.0 TB/s (H100, 8192 x 14336, 2026-11)
STEPS = 4
WIDEST_CODED = 8192  # columns; wider, a norm that also makes codes spills on sm90 (triton 3.9)


@dataclass(frozen=True)
class AcrossConfig:
    """Rows, columns and warps of a tile that is written the other way round."""

    rows: int
    cols: int
    num_warps: int


def across_config(info: DeviceInfo) -> AcrossConfig:
    """Lines of 64 bytes in both layouts, 32 elements a thread (H100: 66 us, of 16 a thread 71)."""
    return AcrossConfig(64, 64, warps(128, info.warp_size))


def constants_of(format: torch.dtype) -> tuple[int, int, int, int]:
    """What kernels know of a format: mantissa, bias, and both numbers of its largest one."""
    return (*FORMATS[format], *LARGEST[format])


@triton.jit(do_not_specialize=["rows"])
def _quantize_rows_kernel(
    x_ptr,
    columns_ptr,
    codes_ptr,
    scale_ptr,
    x_stride,
    rows,
    cols,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    LARGEST: tl.constexpr,
    EXPONENT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Codes and scales of rows that fit into registers.

    Program: STEPS tiles of ROWS rows; reads them once, times a number per column where there are
    any, and writes contiguous codes and one scale per row. The numbers of columns, 4 bytes each,
    stay in registers over all tiles.
    """
    assume_rows(x_ptr, x_stride, ROWS)
    assume_rows(codes_ptr, cols, ROWS)
    assume_cols(cols, BLOCK)
    row, col = tl.arange(0, ROWS), tl.arange(0, BLOCK)
    at = row[:, None] * x_stride + col[None, :]
    columns = load_or(columns_ptr, col, col < cols, 1.0)[None, :]
    for step in tl.range(0, STEPS):
        first = (tl.program_id(0).to(tl.int64) * STEPS + step) * ROWS
        row_mask = first + row < rows
        mask = row_mask[:, None] & (col < cols)[None, :]
        x = tl.load(x_ptr + first * x_stride + at, mask=mask, other=0.0).to(tl.float32) * columns
        bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        scale, inverse = row_scale(tl.max(bits, axis=1), LARGEST, EXPONENT)
        code = float8_row_code(x * inverse[:, None], MANTISSA, BIAS)
        tl.store(codes_ptr + first * cols + row[:, None] * cols + col[None, :], code, mask=mask)
        tl.store(scale_ptr + first + row, scale, mask=row_mask)


@triton.jit
def _quantize_wide_rows_kernel(
    x_ptr,
    columns_ptr,
    codes_ptr,
    scale_ptr,
    x_stride,
    cols,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    LARGEST: tl.constexpr,
    EXPONENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The same for wider rows, in two passes of BLOCK columns a step.

    Program: one row. The first pass finds the largest element, the second reads again, from the
    cache where the row is still there, and writes codes.
    """
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_stride
    codes_ptr += row * cols
    assume_cols(cols)
    largest = tl.zeros([BLOCK], tl.int32)
    for start in tl.range(0, cols, BLOCK):
        col = start + tl.arange(0, BLOCK)
        mask = col < cols
        x = tl.load(x_ptr + col, mask=mask, other=0.0, eviction_policy="evict_last").to(tl.float32)
        x *= load_or(columns_ptr, col, mask, 1.0)
        largest = tl.maximum(largest, x.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    scale, inverse = row_scale(tl.max(largest, axis=0), LARGEST, EXPONENT)
    tl.store(scale_ptr + row, scale)
    for start in tl.range(0, cols, BLOCK):
        col = start + tl.arange(0, BLOCK)
        mask = col < cols
        x = tl.load(x_ptr + col, mask=mask, other=0.0, eviction_policy="evict_first")
        x = x.to(tl.float32) * load_or(columns_ptr, col, mask, 1.0)
        tl.store(codes_ptr + col, float8_row_code(x * inverse, MANTISSA, BIAS), mask=mask)


@triton.jit
def _across_kernel(
    x_ptr,
    scale_ptr,
    out_ptr,
    x_stride,
    rows,
    cols,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """Codes of a matrix, transposed: of numbers divided by the scale of their row, or as given.

    Program: a tile of ROWS by COLS of x; reads it once and writes its transpose.
    """
    assume_rows(x_ptr, x_stride, ROWS)
    assume_rows(out_ptr, rows, COLS)
    tiles = tl.cdiv(cols, COLS)
    first_row = (tl.program_id(0) // tiles).to(tl.int64) * ROWS
    first_col = (tl.program_id(0) % tiles) * COLS
    row, col = tl.arange(0, ROWS), tl.arange(0, COLS)
    row_mask, col_mask = first_row + row < rows, first_col + col < cols
    at = row[:, None] * x_stride + col[None, :]
    mask = row_mask[:, None] & col_mask[None, :]
    x = tl.load(x_ptr + (first_row * x_stride + first_col) + at, mask=mask, other=0)
    if scale_ptr is None:
        code = x
    else:
        inverse = 1.0 / tl.load(scale_ptr + first_row + row, mask=row_mask, other=1.0)
        code = float8_row_code(x.to(tl.float32) * inverse[:, None], MANTISSA, BIAS)
    at = col[:, None] * rows + row[None, :]
    mask = row_mask[None, :] & col_mask[:, None]
    tl.store(out_ptr + (first_col.to(tl.int64) * rows + first_row) + at, tl.trans(code), mask=mask)


def _quantize_into(
    codes: Tensor, scale: Tensor, x: Tensor, columns: Tensor | None, format: torch.dtype
) -> None:
    """Fill codes (as bytes) and scales of the rows of a matrix."""
    (x, stride), (rows, cols) = with_stride(x), x.shape
    k = launch_config("float8_rows", forward_config, x.device, rows=rows, cols=cols)
    tensors = (x, columns, codes, scale, stride)
    if k.block >= cols:
        steps = 1 if columns is None else STEPS
        launch(
            _quantize_rows_kernel,
            cdiv(rows, k.rows * steps),
            (*tensors, rows, cols),
            (*constants_of(format), k.rows, k.block, steps),
            k.num_warps,
        )
    else:
        launch(
            _quantize_wide_rows_kernel,
            rows,
            (*tensors, cols),
            (*constants_of(format), k.block),
            k.num_warps,
        )


class CodeBuffers(NamedTuple):
    """Buffers for the FP8 codes of a kernel's result, and whether the result is written too.

    Attributes:
        codes: Bytes, with the shape of the result; None where no codes are needed.
        scale: fp32, one per row.
        bias: Exponent bias, which tells kernels the format; 0 for no codes.
        writes: Whether the result is needed.
    """

    codes: Tensor | None = None
    scale: Tensor | None = None
    bias: int = 0
    writes: bool = True

    def inside(self, cols: int, block: int) -> CodeBuffers:
        """The buffers that a norm fills from registers; none for rows with too many columns."""
        return self if cols <= block <= WIDEST_CODED else NO_CODES

    def where_written(self, y: Tensor) -> Tensor:
        """The result, or an empty tensor where it is not needed."""
        return y if self.writes else y.new_empty(0)

    def outputs(self, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The result as far as it is needed, codes and scales."""
        assert self.codes is not None
        assert self.scale is not None
        return self.where_written(y), self.codes, self.scale

    def rows_of(self, format: torch.dtype) -> Float8Rows:
        """The codes, typed, and scales."""
        assert self.codes is not None
        assert self.scale is not None
        return Float8Rows(self.codes.view(format), self.scale)

    def fill(self, y: Tensor, columns: Tensor | None = None) -> None:
        """Round a result, times a number per column where these are given, in a pass of its own."""
        if self.codes is None or self.scale is None:
            return
        cols, format = y.shape[-1], format_of(y.device)
        if y.numel():
            _quantize_into(self.codes, self.scale, y.view(-1, cols), columns, format)
        elif self.scale.numel():  # rows of no columns
            self.scale.copy_(PLAIN.rows(y.view(self.scale.numel(), 0), None, format).scale)


NO_CODES = CodeBuffers()


def code_buffers(x: Tensor, writes_y: bool) -> CodeBuffers:
    """Buffers for the codes of a result with the shape of ``x``."""
    codes = empty_contiguous(x, torch.uint8)
    scale = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    return CodeBuffers(codes, scale, FORMATS[format_of(x.device)][1], writes_y)


class TritonQuantizer:
    """Codes by kernels; the same bits as the reference's."""

    @staticmethod
    def rows(x: Tensor, columns: Tensor | None, format: torch.dtype) -> Float8Rows:
        """Rows of ``x``, (rows, K), times one fp32 number per column where these are given."""
        if not x.numel():
            return PLAIN.rows(x, columns, format)
        codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
        scale = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
        _quantize_into(codes, scale, x, columns, format)
        return Float8Rows(codes.view(format), scale)

    @staticmethod
    def across(x: Tensor, scale: Tensor | None, format: torch.dtype) -> Tensor:
        """Codes of a matrix laid out as ``x.t()``: of ``x / scale`` by rows, or codes as given."""
        if not x.numel():
            return PLAIN.across(x, scale, format)
        if scale is None:
            x = x.view(torch.uint8)
        (x, stride), (rows, cols) = with_stride(x), x.shape
        k = launch_config("float8_across", across_config, x.device)
        tile = tile_rows(k.rows, stride), tile_rows(k.cols, rows)
        out = torch.empty(cols, rows, dtype=torch.uint8, device=x.device)
        launch(
            _across_kernel,
            cdiv(rows, tile[0]) * cdiv(cols, tile[1]),
            (x, scale, out, stride, rows, cols),
            (*FORMATS[format], *tile),
            k.num_warps,
        )
        return out.view(format)
