"""Codes of 4 bits as numbers: a level of a table, or an integer, times the scale of its block.

Blocks of codes bound memory: of each, levels are looked up in fp32 and multiplied, and rounded
once into their place.
"""

import torch
from torch import Tensor

from liger_multi.reference.common.chunking import row_blocks, statistics_dtype

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E2M1 = (*_MAGNITUDES, *(-m for m in _MAGNITUDES))
_FP4 = (
    0.0,
    0.0052083334885537624,
    0.6666666865348816,
    1.0,
    0.3333333432674408,
    0.5,
    0.1666666716337204,
    0.25,
)
LEVELS: dict[str, tuple[float, ...]] = {
    "nf4": (
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ),
    "fp4": (*_FP4, 0.0, *(-m for m in _FP4[1:])),
    "mxfp4": _E2M1,
    "nvfp4": _E2M1,
}
"""Numbers by code; bitsandbytes states those of nf4 and fp4 in fp32."""
HIGH_FIRST = ("nf4", "fp4")
"""Formats whose first code of a byte is in its upper four bits."""
NESTED_GROUP = 256
"""Scales that share a scale of their own, under double quantization."""
MIDDLE = 8
"""What int4 subtracts without zeros."""


def integers(codes: Tensor, format: str) -> Tensor:
    """Codes in order, flat, of their bytes."""
    parts = [codes & 15, codes >> 4]
    return torch.stack(parts[::-1] if format in HIGH_FIRST else parts, -1).flatten()


def opened(
    scales: Tensor,
    global_scale: Tensor | None,
    scale_levels: Tensor | None,
    scale_absmax: Tensor | None,
    scale_offset: Tensor | None,
    format: str,
    divides: bool,
) -> Tensor:
    """Scales as numbers, flat, in fp32 at least."""
    flat = scales.reshape(-1)
    if format == "mxfp4":
        exponents = flat.view(torch.uint8).to(torch.int32)
        # the bits of a power of two; 2^-127 has no exponent bits, and 255 stands for NaN
        bits = torch.where(exponents == 0, 1 << 22, exponents << 23)
        return torch.where(exponents == 255, 0x7FC00000, bits).view(torch.float32)
    if format == "nvfp4":
        flat = flat.view(torch.float8_e4m3fn).float()
        if global_scale is None:
            return flat
        one = global_scale.reshape(())
        return flat / one if divides else flat * one
    if scale_levels is not None and scale_absmax is not None and scale_offset is not None:
        own = scale_absmax.repeat_interleave(NESTED_GROUP)[: flat.numel()]
        return scale_levels[flat.long()] * own + scale_offset.reshape(())
    return flat.to(statistics_dtype(flat.dtype))


def numbers(
    codes: Tensor, zeros: Tensor | None, format: str, dtype: torch.dtype, block: Tensor
) -> Tensor:
    """The levels of flat bytes, of which ``block`` has the block of every code."""
    index = integers(codes, format)
    if format != "int4":
        return torch.tensor(LEVELS[format], dtype=dtype, device=codes.device)[index.long()]
    return index.to(dtype) - (MIDDLE if zeros is None else zeros.reshape(-1)[block].to(dtype))


def _blocks_of(part: slice, group: int, device: torch.device) -> Tensor:
    return torch.arange(2 * part.start, 2 * part.stop, device=device) // group


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
    """Levels times scales, some bytes at a time."""
    y = codes.new_empty((*codes.shape[:-1], 2 * codes.shape[-1]), dtype=dtype)
    scale = opened(scales, global_scale, scale_levels, scale_absmax, scale_offset, format, divides)
    flat, out = codes.reshape(-1), y.view(-1)
    for part in row_blocks(flat.numel(), 32):
        block = _blocks_of(part, group, codes.device)
        level = numbers(flat[part], zeros, format, scale.dtype, block)
        out[2 * part.start : 2 * part.stop] = level * scale[block]
    return y


def _sums(rows: Tensor) -> Tensor:
    """Sums of rows, neighbors first: the library's order follows the number of rows on a GPU."""
    width = rows.shape[1]
    rows = torch.nn.functional.pad(rows, (0, (1 << (width - 1).bit_length()) - width))
    while rows.shape[1] > 1:
        rows = rows[:, ::2] + rows[:, 1::2]
    return rows[:, 0]


def backward(
    dy: Tensor,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    format: str,
    group: int,
) -> Tensor:
    """Sums over blocks of ``dy * level``."""
    acc_dtype = statistics_dtype(scales.dtype)
    flat, upstream = codes.reshape(-1), dy.reshape(-1)
    total = torch.zeros(scales.numel(), dtype=acc_dtype, device=codes.device)
    step = max(1, (1 << 20) // group) * group // 2  # whole blocks
    for start in range(0, flat.numel(), step):
        part = slice(start, min(flat.numel(), start + step))
        block = _blocks_of(part, group, codes.device)
        level = numbers(flat[part], zeros, format, acc_dtype, block)
        product = level * upstream[2 * part.start : 2 * part.stop].to(acc_dtype)
        first, missing = 2 * start // group, -product.numel() % group
        sums = _sums(torch.nn.functional.pad(product, (0, missing)).view(-1, group))
        total[first : first + sums.numel()] = sums
    return total.to(scales.dtype).view(scales.shape)
