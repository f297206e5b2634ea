"""Codes of 4 bits as numbers on vector cores, y = level(code) * scale of the block.

A piece is some blocks: adjacent bytes, as rows of one block each, which share its scale. Vector
cores have no lookup that their compiler takes without scalar loads, so levels are computed. Those
of E2M1 are the largest of three lines of the magnitude m, 0.5 m, m - 2 and 2 m - 8; the 16 of nf4
and fp4 are selected one after another. Scales of E8M0 and E4M3 are made of their bits, since Atlas
A2 has no numbers in FP8; scales that are quantized themselves are opened by PyTorch before.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_multi.backends.npu.common.launching import block_of, jitted, start
from liger_multi.reference.quantized.dequantize import HIGH_FIRST, LEVELS, opened

_TABLES = ("nf4", "fp4")
LEAST, MOST = 16, 1024
"""Elements of a block: 32 bytes of fp32 for its bytes, and rows of the smallest piece."""


@triton.jit
def _level(code, zero, levels_ptr, FORMAT: tl.constexpr):
    """The numbers that codes of 4 bits (int32) stand for; the sign of zero is kept."""
    if FORMAT == "int4":
        return code.to(tl.float32) - zero
    elif levels_ptr is not None:
        level = code.to(tl.float32)
        for i in tl.static_range(16):
            level = tl.where(code == i, tl.load(levels_ptr + i), level)
        return level
    else:
        m = (code & 7).to(tl.float32)
        level = tl.maximum(0.5 * m, tl.maximum(m - 2.0, 2.0 * m - 8.0))
        return level * tl.where(code < 8, 1.0, -1.0)


@triton.jit
def _block_scale(raw, global_ptr, FORMAT: tl.constexpr, DIVIDES: tl.constexpr):
    """Scales of blocks in fp32."""
    if FORMAT == "mxfp4":
        exponent = raw.to(tl.int32)
        bits = tl.where(exponent == 0, 1 << 22, exponent << 23)
        return tl.where(exponent == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)
    elif FORMAT == "nvfp4":
        # E4M3: exponent and mantissa, from bit 20 on, with another bias; below 2^-6 integers
        code = raw.to(tl.int32)
        size = code & 127
        bits = tl.where(size == 127, 0x7FC00000, (size << 20) + (120 << 23))
        scale = bits.to(tl.float32, bitcast=True)
        scale = tl.where(size < 8, size.to(tl.float32) * 0.001953125, scale)
        scale = scale * tl.where(code < 128, 1.0, -1.0)
        if global_ptr is None:
            return scale
        elif DIVIDES:
            return scale / tl.load(global_ptr)
        else:
            return scale * tl.load(global_ptr)
    else:
        return raw.to(tl.float32)


@jitted
def _dequantize_kernel(
    codes_ptr,
    scales_ptr,
    global_ptr,
    zeros_ptr,
    levels_ptr,
    y_ptr,
    total,
    pieces,
    FORMAT: tl.constexpr,
    DIVIDES: tl.constexpr,
    HIGH_FIRST: tl.constexpr,
    GROUP_BYTES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Decode codes, piece by piece.

    Program: every num_programs-th piece of BLOCK bytes of ``total``, which are whole blocks. Reads
    them, their scales and zeros, and writes two numbers a byte.
    """
    BLOCKS: tl.constexpr = BLOCK // GROUP_BYTES
    at, out, row = tl.arange(0, BLOCK), tl.arange(0, 2 * BLOCK), tl.arange(0, BLOCKS)
    for piece in range(tl.program_id(0), pieces, tl.num_programs(0)):
        first = tl.cast(piece, tl.int64) * BLOCKS
        left = total - first * GROUP_BYTES
        some = row < (left + GROUP_BYTES - 1) // GROUP_BYTES
        raw = tl.load(codes_ptr + first * GROUP_BYTES + at, mask=at < left, other=0)
        scale = tl.load(scales_ptr + first + row, mask=some, other=0)
        scale = _block_scale(scale, global_ptr, FORMAT, DIVIDES)[:, None]
        zero = 8.0
        if zeros_ptr is not None:
            zero = tl.load(zeros_ptr + first + row, mask=some, other=0.0)[:, None]
        code = tl.reshape(raw.to(tl.int32), (BLOCKS, GROUP_BYTES))
        low = _level(code & 15, zero, levels_ptr, FORMAT) * scale
        high = _level(code >> 4, zero, levels_ptr, FORMAT) * scale
        if HIGH_FIRST:
            y = tl.interleave(high, low)
        else:
            y = tl.interleave(low, high)
        y = tl.reshape(y.to(y_ptr.dtype.element_ty), (2 * BLOCK,))
        tl.store(y_ptr + 2 * first * GROUP_BYTES + out, y, mask=out < 2 * left)


def supports(scales: Tensor, group: int) -> str | None:
    """Blocks of a power of two, of which pieces have many; fp64 is left to the reference."""
    if scales.dtype == torch.float64:
        return "fp64 is left to the reference"
    if group & (group - 1) or not LEAST <= group <= MOST:
        return f"takes blocks of {LEAST} to {MOST} elements, a power of two, got {group}"
    return None


@functools.cache
def _table_of(format: str, device: torch.device) -> Tensor | None:
    """The levels of a format whose levels follow no formula."""
    if format not in _TABLES:
        return None
    return torch.tensor(LEVELS[format], dtype=torch.float32, device=device)


def forward(
    codes: Tensor,
    scales: Tensor,
    global_scale: Tensor | None,
    zeros: Tensor | None,
    scale_levels: Tensor | None,
    scale_absmax: Tensor | None,
    scale_offset: Tensor | None,
    format: str,
    group: int,
    divides: bool,
    dtype: torch.dtype,
) -> Tensor:
    """One pass over codes, after one over scales that are quantized themselves."""
    y = codes.new_empty((*codes.shape[:-1], 2 * codes.shape[-1]), dtype=dtype)
    if not codes.numel():
        return y
    if scale_levels is not None:
        scales = opened(scales, None, scale_levels, scale_absmax, scale_offset, format, False)
    elif scales.itemsize == 1:
        scales = scales.view(torch.uint8)
    half, total = group // 2, codes.numel()
    block = block_of("dequantize", y, total, smallest=MOST // 2)
    pieces = -(-total // block)
    start(
        _dequantize_kernel,
        pieces,
        codes,
        scales,
        global_scale,
        None if zeros is None else zeros.to(torch.float32),
        _table_of(format, codes.device),
        y,
        total,
        pieces,
        FORMAT=format,
        DIVIDES=divides,
        HIGH_FIRST=format in HIGH_FIRST,
        GROUP_BYTES=half,
        BLOCK=block,
    )
    return y
