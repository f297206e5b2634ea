"""Codes of 4 bits as numbers, on vector cores.

A program loops over pieces of blocks, as the kernel for GPUs does. Reads by an index in memory are
slow on vector cores, so the 16 levels of nf4 and fp4 are chosen one after the other. The two codes
of a byte are interleaved in registers.
"""

from __future__ import annotations

import functools
from typing import Optional

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_multi.backends.npu.common.launching import block_of, jitted, start
from liger_multi.reference.quantized.dequantize import HIGH_FIRST, LEVELS, opened


@triton.jit
def _level(code, zero, levels_ptr, BLOCK: tl.constexpr):
    """The number that a code (int32) stands for: one of 16 levels, or the code less its zero."""
    if levels_ptr is None:
        return code.to(tl.float32) - zero
    else:
        level = tl.zeros([BLOCK], tl.float32)
        for k in tl.static_range(16):
            level = tl.where(code == k, tl.load(levels_ptr + k), level)
        return level


@jitted
def _dequantize_forward_kernel(
    codes_ptr,
    scales_ptr,
    zeros_ptr,
    levels_ptr,
    y_ptr,
    half,
    steps,
    blocks,
    total,
    HIGH_FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Decode blocks of ``half`` bytes.

    Program: every num_programs-th piece of BLOCK bytes of one block. Reads codes and the scale of
    the block, writes two numbers a byte.
    """
    for piece in range(tl.program_id(0), blocks * steps, tl.num_programs(0)):
        block = tl.cast(piece // steps, tl.int64)
        inside = (piece % steps) * BLOCK + tl.arange(0, BLOCK)
        mask = (inside < half) & (block * half + inside < total)
        scale = tl.load(scales_ptr + block).to(tl.float32)
        zero = 8.0
        if zeros_ptr is not None:
            zero = tl.load(zeros_ptr + block).to(tl.float32)
        byte = tl.load(codes_ptr + block * half + inside, mask=mask, other=0).to(tl.int32)
        low = _level(byte & 15, zero, levels_ptr, BLOCK) * scale
        high = _level((byte >> 4) & 15, zero, levels_ptr, BLOCK) * scale
        y = tl.interleave(high, low) if HIGH_FIRST else tl.interleave(low, high)
        out = (piece % steps) * (2 * BLOCK) + tl.arange(0, 2 * BLOCK)
        mask = (out < 2 * half) & (2 * block * half + out < 2 * total)
        y = y.to(y_ptr.dtype.element_ty)
        tl.store(y_ptr + 2 * block * half + out, y, mask=mask)


def supports(codes: Optional[Tensor], scales: Tensor) -> str | None:
    """fp64 is left to the reference."""
    return "fp64 is left to the reference" if scales.dtype == torch.float64 else None


@functools.cache
def table_of(format: str, device: torch.device) -> Optional[Tensor]:
    """The levels of a format on a device; integers need none."""
    levels = LEVELS.get(format)
    return None if levels is None else torch.tensor(levels, dtype=torch.float32, device=device)


def forward(
    codes: Tensor,
    scales: Tensor,
    global_scale: Optional[Tensor],
    zeros: Optional[Tensor],
    scale_levels: Optional[Tensor],
    scale_absmax: Optional[Tensor],
    scale_offset: Optional[Tensor],
    format: str,
    group: int,
    divides: bool,
    dtype: torch.dtype,
) -> Tensor:
    """Scales as numbers by PyTorch, for they are few; then one pass over codes."""
    y = codes.new_empty((*codes.shape[:-1], 2 * codes.shape[-1]), dtype=dtype)
    nested = (scale_levels, scale_absmax, scale_offset)
    scale = opened(scales, global_scale, *nested, format, divides)
    half = group // 2
    block = block_of("dequantize", y, half, 16)
    blocks, steps = scale.numel() if codes.numel() else 0, -(-half // block)
    start(
        _dequantize_forward_kernel,
        blocks * steps,
        codes,
        scale,
        zeros,
        table_of(format, codes.device),
        y,
        half,
        steps,
        blocks,
        codes.numel(),
        HIGH_FIRST=format in HIGH_FIRST,
        BLOCK=block,
    )
    return y
