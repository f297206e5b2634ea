"""Rounding to FP8: one launch for the largest element, one for the values in one or two layouts."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_multi.backends.triton.common.float8 import FORMATS, float8_code
from liger_multi.backends.triton.common.launching import launch
from liger_multi.backends.triton.common.rows import assume_rows, cdiv, warps
from liger_multi.dispatch.launch import DeviceInfo, launch_config
from liger_multi.reference.common.float8 import FACTOR, Rounded
from liger_multi.reference.cross_entropy.float8 import PLAIN, scale_for

PROGRAMS = 8  # programs per core in the search for the largest element


@dataclass(frozen=True)
class FlatConfig:
    """Elements and warps of a program, and how many programs look for the largest element."""

    block: int
    programs: int
    num_warps: int


@dataclass(frozen=True)
class TileConfig:
    """Rows, columns and warps of a tile that is written in both layouts."""

    rows: int
    cols: int
    num_warps: int


def flat_config(info: DeviceInfo) -> FlatConfig:
    """8 elements a thread: one 16-byte access of a 16-bit dtype."""
    return FlatConfig(2048, PROGRAMS * info.cores, warps(256, info.warp_size))


def tile_config(info: DeviceInfo) -> TileConfig:
    """Lines of 64 bytes in both layouts, 16 elements a thread."""
    return TileConfig(64, 64, warps(256, info.warp_size))


@triton.jit
def _largest_kernel(x_ptr, out_ptr, size, steps, BLOCK: tl.constexpr):
    """The largest magnitude of each part of a tensor.

    Program: ``steps`` blocks of BLOCK elements of the contiguous tensor; writes one fp32 number.
    """
    first = tl.program_id(0).to(tl.int64) * steps * BLOCK
    lane = tl.arange(0, BLOCK)
    largest = tl.zeros((BLOCK,), tl.float32)
    for step in range(steps):
        at = first + step * BLOCK
        x = tl.load(x_ptr + at + lane, mask=at + lane < size, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(x))
    tl.store(out_ptr + tl.program_id(0), tl.max(largest, 0))


@triton.jit
def _round_8_bits_kernel(
    x_ptr,
    scale_ptr,
    out_ptr,
    size,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Round a contiguous tensor to FP8.

    Program: BLOCK elements; reads them and the scale, and writes the codes of x times 1 / scale.
    """
    first = tl.program_id(0).to(tl.int64) * BLOCK
    lane = tl.arange(0, BLOCK)
    mask = first + lane < size
    inverse = 1.0 / tl.load(scale_ptr)
    x = tl.load(x_ptr + first + lane, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + first + lane, float8_code(x * inverse, MANTISSA, BIAS), mask=mask)


@triton.jit
def _round_both_ways_kernel(
    x_ptr,
    scale_ptr,
    out_ptr,
    across_ptr,
    rows,
    cols,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """Round a matrix to FP8 in two layouts, as it is and transposed; it is read once.

    Program: a tile of ROWS by COLS; writes its codes to ``out_ptr`` and, transposed, to
    ``across_ptr``.
    """
    assume_rows(x_ptr, cols, ROWS)
    assume_rows(across_ptr, rows, COLS)
    across = tl.cdiv(cols, COLS)
    tile = tl.program_id(0)
    first_row, first_col = (tile // across).to(tl.int64) * ROWS, (tile % across) * COLS
    row, col = tl.arange(0, ROWS), tl.arange(0, COLS)
    row_mask, col_mask = first_row + row < rows, first_col + col < cols
    mask = row_mask[:, None] & col_mask[None, :]
    first, at = first_row * cols + first_col, row[:, None] * cols + col[None, :]
    inverse = 1.0 / tl.load(scale_ptr)
    x = tl.load(x_ptr + first + at, mask=mask, other=0.0).to(tl.float32)
    code = float8_code(x * inverse, MANTISSA, BIAS)
    tl.store(out_ptr + first + at, code, mask=mask)
    turned = first_col.to(tl.int64) * rows + first_row
    at = col[:, None] * rows + row[None, :]
    mask = row_mask[None, :] & col_mask[:, None]
    tl.store(across_ptr + turned + at, tl.trans(code), mask=mask)


def _scale(x: Tensor, dtype: torch.dtype, k: FlatConfig) -> Tensor:
    """The scale of a tensor without gaps; nothing is read back."""
    steps = cdiv(x.numel(), k.block * k.programs)
    partial = torch.zeros(k.programs, dtype=torch.float32, device=x.device)
    launch(_largest_kernel, k.programs, (x, partial, x.numel(), steps), (k.block,), k.num_warps)
    return scale_for(partial.max(), dtype)


class TritonRounding:
    """Rounding that reads a tensor twice and writes it once, or once in each layout."""

    @staticmethod
    def rounded(x: Tensor, dtype: torch.dtype = FACTOR) -> Rounded:
        """The nearest values, by the smallest power of two under which none overflows."""
        if not x.numel():
            return PLAIN.rounded(x, dtype)
        x, k = x.contiguous(), launch_config("float8", flat_config, x.device)
        scale = _scale(x, dtype, k)
        data = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
        args = (x, scale, data, x.numel())
        constants = (*FORMATS[dtype], k.block)
        launch(_round_8_bits_kernel, cdiv(x.numel(), k.block), args, constants, k.num_warps)
        return Rounded(data.view(dtype), scale)

    @staticmethod
    def both_ways(x: Tensor, dtype: torch.dtype = FACTOR) -> tuple[Rounded, Rounded]:
        """Rounded factors, and the same laid out as ``x.t()``; less than 2^24 rows and columns."""
        if not x.numel():
            return PLAIN.both_ways(x, dtype)
        x = x.contiguous()
        scale = _scale(x, dtype, launch_config("float8", flat_config, x.device))
        k, (rows, cols) = launch_config("float8.both_ways", tile_config, x.device), x.shape
        data = torch.empty(rows, cols, dtype=torch.uint8, device=x.device)
        transposed = torch.empty(cols, rows, dtype=torch.uint8, device=x.device)
        launch(
            _round_both_ways_kernel,
            cdiv(rows, k.rows) * cdiv(cols, k.cols),
            (x, scale, data, transposed, rows, cols),
            (*FORMATS[dtype], k.rows, k.cols),
            k.num_warps,
        )
        return Rounded(data.view(dtype), scale), Rounded(transposed.view(dtype), scale)
