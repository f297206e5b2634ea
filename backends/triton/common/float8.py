"""FP8 codes by integers.

A value of E4M3 or E5M2 is the sign, then the exponent and mantissa of fp32 with fewer bits, so

    code = (bits + half + odd) >> (23 - mantissa)      minus the difference of the biases

rounds to nearest even and carries into the exponent. Below the smallest normal value, a power of
two is added whose last place is the spacing there; the lowest bits of that sum are the code. Codes
are computed with integers, because not every code generator knows these formats, and those that do
differ in what overflows.
"""

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


def _rounds_to_e4m3(_semantic=None, _builder=None):
    """Whether the device has an instruction that rounds to E4M3 (OCP's, NVIDIA since sm89)."""
    options = getattr(getattr(_semantic, "builder", _builder), "options", None)
    known = "fp8e4nv" in getattr(options, "supported_fp8_dtypes", ())
    return tl.constexpr(known and getattr(options, "backend_name", "") == "cuda")


setattr(_rounds_to_e4m3, "__triton_builtin__", True)  # noqa: B010


@triton.jit
def float8_row_code(value, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """The same of values that fit or are NaN, by an instruction where the device has one."""
    if BIAS == 7 and _rounds_to_e4m3():
        return value.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        return float8_code(value, MANTISSA, BIAS)


@triton.jit
def row_scale(largest, MANTISSA: tl.constexpr, EXPONENT: tl.constexpr):
    """The smallest power of two by which magnitudes fit into a format, and its inverse.

    ``largest`` holds bits of fp32. MANTISSA and EXPONENT are those of the largest number of the
    format: a magnitude with a larger mantissa needs the next power of two. Less than 2^-100 counts
    as that. Both are NaN where a magnitude is not finite, and so all codes of the row.
    """
    bits = tl.maximum(largest, 27 << 23)
    bits = ((bits + (0x7FFFFF - MANTISSA)) & 0x7F800000) - (EXPONENT << 23)
    bad = largest >= 0x7F800000
    scale = tl.where(bad, 0x7FC00000, bits)
    inverse = tl.where(bad, 0x7FC00000, (254 << 23) - bits)
    return scale.to(tl.float32, bitcast=True), inverse.to(tl.float32, bitcast=True)


@triton.jit
def coded_rows(y, BIAS: tl.constexpr):
    """Codes and scales of rows that a program holds: (rows, columns) in fp32, zeros past their end.

    BIAS tells the format of E4M3: 7, whose largest number is 1.75 * 2^8, or 8, with 1.875 * 2^7.
    """
    LARGEST: tl.constexpr = 0x600000 if BIAS == 7 else 0x700000
    bits = y.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    scale, inverse = row_scale(tl.max(bits, axis=1), LARGEST, 15 - BIAS)
    return float8_row_code(y * inverse[:, None], 3, BIAS), scale
