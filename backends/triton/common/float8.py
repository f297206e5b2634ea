"""FP8 codes by integers.

A value of E4M3 or E5M2 is the sign, then the exponent and mantissa of fp32 with fewer bits, so

    code = (bits + half + odd) >> (23 - mantissa)      minus the difference of the biases

rounds to nearest even and carries into the exponent. Below the smallest normal value, a power of
two is added whose last place is the spacing there; the lowest bits of that sum are the code. Codes
are computed with integers, because not every code generator knows these formats, and those that do
differ in what overflows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

FORMATS = {  # bits of mantissa, bias
    torch.float8_e4m3fn: (3, 7),
    torch.float8_e5m2: (2, 15),
    torch.float8_e4m3fnuz: (3, 8),
    torch.float8_e5m2fnuz: (2, 16),
}


@triton.jit
def float8_code(value, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """FP8 codes of fp32 values that do not overflow; infinities and NaN become NaN.

    BIAS is a multiple of 8 in the formats without a negative zero, where that code is NaN.
    """
    SHIFT: tl.constexpr = 23 - MANTISSA
    bits = value.to(tl.uint32, bitcast=True)
    sign, bits = (bits >> 24) & 0x80, bits & 0x7FFFFFFF
    # half a unit less one, plus the last kept bit: ties go to even
    near = (bits + ((1 << (SHIFT - 1)) - 1) + ((bits >> SHIFT) & 1)) >> SHIFT
    normal = near - ((127 - BIAS) << MANTISSA)
    SPACING: tl.constexpr = 127 + 24 - BIAS - MANTISSA  # exponent of what has this last place
    magic = tl.full(bits.shape, SPACING << 23, tl.uint32)
    total = bits.to(tl.float32, bitcast=True) + magic.to(tl.float32, bitcast=True)
    small = total.to(tl.uint32, bitcast=True) - magic
    code = tl.where(bits < ((128 - BIAS) << 23), small, normal)
    if BIAS % 8 == 0:  # no negative zero: that code is what is not a number
        code = tl.where(code == 0, 0, sign | code)
        return tl.where(bits >= 0x7F800000, 0x80, code).to(tl.uint8)
    return (sign | tl.where(bits >= 0x7F800000, 0x7F, code)).to(tl.uint8)


@triton.jit
def row_scale(largest, MANTISSA: tl.constexpr, EXPONENT: tl.constexpr):
    """The smallest power of two by which magnitudes fit into a format, and its inverse.

    ``largest`` holds bits of fp32. MANTISSA and EXPONENT are those of the largest number of the
    format: a magnitude with a larger mantissa needs the next power of two. Less than 2^-100 counts
    as that, and what is not finite as infinity.
    """
    bits = tl.minimum(tl.maximum(largest, 27 << 23), 0x7F800000)
    bits = ((bits + (0x7FFFFF - MANTISSA)) & 0x7F800000) - (EXPONENT << 23)
    return bits.to(tl.float32, bitcast=True), ((254 << 23) - bits).to(tl.float32, bitcast=True)
