"""Codes of 4 bits as numbers, y = level(code) * scale of the block.

A program owns some pieces of blocks: adjacent bytes that share a scale, so that a scale is loaded
once for all of them. Levels of nf4 and fp4 are looked up in a table of 16 numbers, which stays in
the first cache; those of E2M1 are made of the bits,

    4 bits s e e m: |level| = 0.5 m for e = 0, else 2^(e - 1) (1 + m / 2),

which are exponent and mantissa of fp32 with another bias: one multiplication changes it, also for
e = 0, whose numbers are subnormal in fp32 as well. Both codes of a byte are decoded at once
and joined, so that stores are contiguous. Everything is fp32, rounded once.
"""

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_multi.backends.triton.common.launching import launch
from liger_multi.backends.triton.common.rows import cdiv, round_to, warps
from liger_multi.dispatch.launch import DeviceInfo, launch_config
from liger_multi.reference.quantized.dequantize import HIGH_FIRST, LEVELS, NESTED_GROUP

_TABLES = ("nf4", "fp4")
_NESTED: tl.constexpr = tl.constexpr(NESTED_GROUP)


@dataclass(frozen=True)
class DequantizeConfig:
    """Bytes a program, and its warps."""

    bytes: int
    num_warps: int


def dequantize_config(info: DeviceInfo, piece: int) -> DequantizeConfig:
    """16 bytes a thread, of which 64 are written in 16 bits."""
    size = max(2048, piece)
    return DequantizeConfig(size, warps(size // 16, info.warp_size))


@triton.jit
def _e2m1(code):
    """Levels of E2M1 codes, of which only the lower four bits count; the sign of zero is kept."""
    # Two exponent bits and one of the mantissa, where fp32 has its lowest ones, are the level
    # times 2^-126: codes without an exponent are subnormal numbers of both formats.
    bits = ((code << 28) & -2147483648) | ((code << 22) & 0x01C00000)
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37


@triton.jit
def _level(code, zero, levels_ptr, FORMAT: tl.constexpr):
    """The number that a code of 4 bits (int32) stands for."""
    if FORMAT == "int4":
        return code.to(tl.float32) - zero
    elif FORMAT == "nf4" or FORMAT == "fp4":
        return tl.load(levels_ptr + code)
    else:
        return _e2m1(code)


@triton.jit
def _block_scale(
    raw, scale_levels_ptr, scale_absmax_ptr, extra, block, mask, hidden_zero,
    FORMAT: tl.constexpr, DIVIDES: tl.constexpr,
):  # fmt: skip
    """Scales of blocks in fp32; ``extra`` is the global scale, or the offset of nested ones."""
    if FORMAT == "mxfp4":
        exponent = raw.to(tl.int32)
        bits = tl.where(exponent == 0, 1 << 22, exponent << 23)
        return tl.where(exponent == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)
    elif FORMAT == "nvfp4":
        # E4M3 in the same way: its bits from bit 20 on are the scale times 2^-120
        code = raw.to(tl.int32)
        bits = ((code & 128) << 24) | ((code & 127) << 20)
        scale = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36
        scale = tl.where((code & 127) == 127, float("nan"), scale)
        if extra is None:
            return scale
        elif DIVIDES:
            return tl.div_rn(scale, tl.zeros_like(scale) + extra)
        else:
            return scale * extra
    elif scale_levels_ptr is not None:
        product = tl.load(scale_levels_ptr + raw.to(tl.int32))
        product = product * tl.load(scale_absmax_ptr + block // _NESTED, mask=mask, other=0.0)
        # product and sum are rounded apart, as bitsandbytes does: no compiler fuses them through
        # a number that it does not know to be zero
        bits = product.to(tl.int32, bitcast=True) ^ hidden_zero
        return bits.to(tl.float32, bitcast=True) + extra
    else:
        return raw.to(tl.float32)


@triton.jit
def _dequantize_forward_kernel(
    codes_ptr,
    scales_ptr,
    extra_ptr,
    zeros_ptr,
    levels_ptr,
    scale_levels_ptr,
    scale_absmax_ptr,
    y_ptr,
    total,
    pieces_of_block,
    FORMAT: tl.constexpr,
    DIVIDES: tl.constexpr,
    HIGH_FIRST: tl.constexpr,
    PIECE: tl.constexpr,
    PIECES: tl.constexpr,
):
    """Decode PIECES pieces of PIECE bytes, each of one block.

    Program: bytes ``program * PIECES * PIECE`` and on, of ``total``. Reads them and the scale (and
    zero) of every piece, writes two numbers a byte.
    """
    first = tl.program_id(0).to(tl.int64) * PIECES
    # Both loads come first: what changes its layout does so behind a barrier, which no load is
    # moved across. Offsets within a program are short, or AMD's buffer operations are lost.
    codes_ptr += first * PIECE
    left = tl.minimum(total - first * PIECE, PIECES * PIECE).to(tl.int32)
    row = tl.arange(0, PIECES)[:, None]
    at = row * PIECE + tl.arange(0, PIECE)[None, :]
    raw_codes = tl.load(codes_ptr + at, mask=at < left, other=0)
    piece = first + tl.arange(0, PIECES)
    block, here = piece // pieces_of_block, piece * PIECE < total
    raw_scale = tl.load(scales_ptr + block, mask=here, other=0)
    extra = None
    if extra_ptr is not None:
        extra = tl.load(extra_ptr)
    hidden_zero = (tl.cast(total, tl.int64) >> 62).to(tl.int32)
    scale = _block_scale(
        raw_scale, scale_levels_ptr, scale_absmax_ptr, extra, block, here, hidden_zero,
        FORMAT=FORMAT, DIVIDES=DIVIDES,
    )  # fmt: skip
    zero = tl.full([PIECES], 8.0, tl.float32)
    if zeros_ptr is not None:
        zero = tl.load(zeros_ptr + block, mask=here, other=0).to(tl.float32)
    byte = raw_codes.to(tl.int32)
    low = _level(byte & 15, zero[:, None], levels_ptr, FORMAT) * scale[:, None]
    high = _level(byte >> 4, zero[:, None], levels_ptr, FORMAT) * scale[:, None]
    if HIGH_FIRST:
        y = tl.join(high, low)
    else:
        y = tl.join(low, high)
    y = tl.reshape(round_to(y, y_ptr.dtype.element_ty), [PIECES, 2 * PIECE])
    out = row * (2 * PIECE) + tl.arange(0, 2 * PIECE)[None, :]
    tl.store(y_ptr + 2 * first * PIECE + out, y, mask=out < 2 * left)


def supports(codes: Tensor | None, scales: Tensor) -> str | None:
    """fp64 is left to the reference."""
    return "fp64 is left to the reference" if scales.dtype == torch.float64 else None


@functools.cache
def table_of(format: str, device: torch.device) -> Tensor | None:
    """The levels of a format on a device, where its kernel looks them up."""
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
    """One pass over codes; a piece is the largest power of two of bytes that divides a block."""
    y = codes.new_empty((*codes.shape[:-1], 2 * codes.shape[-1]), dtype=dtype)
    if not codes.numel():
        return y
    half = group // 2
    piece = min(128, half & -half)
    k = launch_config("dequantize.forward", dequantize_config, codes.device, piece=piece)
    if scales.itemsize == 1:  # not every code generator knows the formats of scales
        scales = scales.view(torch.uint8)
    extra = global_scale if scale_offset is None else scale_offset
    tables = (table_of(format, codes.device), scale_levels, scale_absmax)
    launch(
        _dequantize_forward_kernel,
        cdiv(codes.numel(), k.bytes),
        (codes, scales, extra, zeros, *tables, y, codes.numel(), half // piece),
        (format, divides, format in HIGH_FIRST, piece, k.bytes // piece),
        k.num_warps,
    )
    return y
