"""Rows in FP8: E4M3 codes and one power-of-two scale per row, and GEMMs of such rows.

The scale of a row is the smallest power of two by which its largest element fits into the format:
no rounding of its own, and no row depends on another. It is computed from the bits of the largest
element, so that every backend finds the same. Rows of zeros count as rows whose largest element is
2^-100. A row with an infinity or NaN has a scale of NaN, and so has its result.

A GEMM sums products of codes in fp32 and multiplies by both scales. Where a device has none, rows
are dequantized first: codes have 4 significant bits and scales are powers of two, so this is exact
in bf16 too.
"""

import functools
from contextvars import ContextVar
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from liger_multi._torch_private import scaled_mm
from liger_multi.reference.common.chunking import as_rows, row_blocks
from liger_multi.reference.common.float8 import (
    ALIGNED,
    FORMATS,
    INFINITY_BITS,
    LARGEST,
    LEAST_BITS,
)

CODES = tuple(LARGEST)
"""The dtypes that codes may have."""


class Float8Rows(NamedTuple):
    """Rows in FP8, ``codes * scale``: codes ``(..., K)`` in E4M3, scale ``(...)`` in fp32."""

    codes: Tensor
    scale: Tensor


class Quantizer(Protocol):
    """How a backend makes codes."""

    def rows(self, x: Tensor, columns: Tensor | None, format: torch.dtype) -> Float8Rows:
        """Rows of ``x``, (rows, K), times one fp32 number per column where these are given."""

    def across(self, x: Tensor, scale: Tensor | None, format: torch.dtype) -> Tensor:
        """Codes of a matrix laid out as ``x.t()``: of ``x / scale`` by rows, or codes as given."""


def scale_of(largest: Tensor, format: torch.dtype) -> Tensor:
    """The smallest power of two by which magnitudes, given as bits of fp32, fit into a format."""
    mantissa, exponent = LARGEST[format]
    bits = largest.clamp(LEAST_BITS, INFINITY_BITS - 1)
    bits = ((bits + (0x7FFFFF - mantissa)) & INFINITY_BITS) - (exponent << 23)
    return bits.view(torch.float32).masked_fill(largest >= INFINITY_BITS, torch.nan)


class PlainQuantizer:
    """Codes in plain PyTorch, block by block of rows."""

    @staticmethod
    def rows(x: Tensor, columns: Tensor | None, format: torch.dtype) -> Float8Rows:
        """Rows of ``x``, (rows, K), times one fp32 number per column where these are given."""
        codes = torch.empty(x.shape, dtype=format, device=x.device)
        scale = x.new_empty(x.shape[0], dtype=torch.float32)
        for block in row_blocks(x.shape[0], x.shape[1] * 12):
            wide = x[block].float() if columns is None else x[block].float() * columns
            bits = wide.contiguous().view(torch.int32) & 0x7FFFFFFF
            largest = bits.amax(1) if x.shape[1] else bits.new_zeros(bits.shape[0])
            scale[block] = scale_of(largest, format)
            codes[block] = (wide / scale[block, None]).to(format)
        return Float8Rows(codes, scale)

    @staticmethod
    def across(x: Tensor, scale: Tensor | None, format: torch.dtype) -> Tensor:
        """Codes of a matrix laid out as ``x.t()``: of ``x / scale`` by rows, or codes as given."""
        out = torch.empty(x.shape[::-1], dtype=format, device=x.device)
        for block in row_blocks(x.shape[0], x.shape[1] * 8):
            part = x[block]
            if scale is not None:
                part = (part.float() / scale[block, None]).to(format)
            out[:, block] = part.t()
        return out


PLAIN = PlainQuantizer()


# --- GEMMs ---

assumed_gemms: ContextVar[bool] = ContextVar("liger_multi_assumed_gemms", default=False)
"""Whether meta tensors stand for those of a device that has FP8 GEMMs."""


def product(a: Float8Rows, b: Float8Rows, dtype: torch.dtype, fast: bool = False) -> Tensor:
    """``a @ b.T`` of rows (M, C) and (N, C), in ``dtype``.

    Results of 16 bits are FP8 GEMMs where the device has them. Its sums keep fewer digits than
    fp32, so wider results are GEMMs of dequantized rows.

    Args:
        a: The left factor.
        b: The right factor.
        dtype: Of the result.
        fast: A Hopper card may keep 14 bits of its sums between steps, which bf16 does not show.
    """
    codes, right = a.codes, b.codes
    same_format = codes.dtype == right.dtype and dtype.itemsize == 2  # may be of another device
    if same_format and unsupported(codes.device, codes.dtype, *right.shape) is None:
        out_dtype = dtype if _can_write(codes.device, codes.dtype, dtype) else torch.bfloat16
        out = scaled_mm(
            codes,
            right.t(),
            a.scale.unsqueeze(1),
            b.scale.unsqueeze(0),
            None,
            None,
            out_dtype,
            fast and dtype == torch.bfloat16,
        )
        return out if out_dtype == dtype else out.to(dtype)
    return _dequantized_product(a, b, dtype)


def _dequantized_product(a: Float8Rows, b: Float8Rows, dtype: torch.dtype) -> Tensor:
    acc_dtype = dtype if dtype in (torch.bfloat16, torch.float64) else torch.float32
    if not len(b.scale):
        return a.scale.new_empty(len(a.scale), 0, dtype=dtype)
    left, out = (
        dequantized(a, acc_dtype),
        a.scale.new_empty(len(a.scale), len(b.scale), dtype=dtype),
    )
    for block in row_blocks(len(b.scale), b.codes.shape[1] * acc_dtype.itemsize):
        right = dequantized(Float8Rows(b.codes[block], b.scale[block]), acc_dtype)
        out[:, block] = (left @ right.t()).to(dtype)
    return out


def dequantized(rows: Float8Rows, dtype: torch.dtype) -> Tensor:
    """``codes * scale`` in ``dtype``."""
    scale = rows.scale.unsqueeze(-1)
    if dtype == torch.float16:  # float16 has a smaller range than the scales
        return (rows.codes.float() * scale).to(dtype)
    return rows.codes.to(dtype) * scale.to(dtype)


def unsupported(device: torch.device, format: torch.dtype, *shape: int) -> str | None:
    """Why a device multiplies rows by those of a matrix of ``shape`` dequantized; None if not."""
    return _unsupported(device, format, device.type == "meta" and assumed_gemms.get(), *shape)


@functools.cache
def _unsupported(
    device: torch.device, format: torch.dtype, assumed: bool, *shape: int
) -> str | None:
    if device.type in ("cpu", "meta") and not assumed:
        return f"no FP8 GEMM with a scale per row on a {device.type} device"
    if any(size % ALIGNED or not size for size in shape):
        return f"both axes must be multiples of {ALIGNED}, got {shape}"
    return None if assumed else _refused(device, format)


@functools.cache
def format_of(device: torch.device) -> torch.dtype:
    """The format of codes that a device multiplies; OCP's where it multiplies none."""
    if device.type in ("cpu", "meta"):
        return CODES[0]
    formats = (format for format, _ in FORMATS if _refused(device, format) is None)
    return next(formats, CODES[0])


def _small_gemm(device: torch.device, format: torch.dtype, dtype: torch.dtype) -> Tensor:
    codes, scale = torch.zeros(16, 16, device=device).to(format), torch.ones(16, 1, device=device)
    return scaled_mm(codes, codes.t(), scale, scale.t(), out_dtype=dtype)


@functools.cache
def _refused(device: torch.device, format: torch.dtype) -> str | None:
    """The error that the device raises for one small FP8 GEMM."""
    try:
        _small_gemm(device, format, torch.bfloat16)
    except torch.OutOfMemoryError:  # which says nothing about the device
        raise
    except (RuntimeError, TypeError, NotImplementedError, AttributeError, ValueError) as error:
        return f"no FP8 GEMM with a scale per row here: {error!s:.80}"
    return None


@functools.cache
def _can_write(device: torch.device, format: torch.dtype, dtype: torch.dtype) -> bool:
    """Whether the product can be written in a dtype; of assumed GEMMs it can."""
    try:
        _small_gemm(device, format, dtype)
    except (RuntimeError, ValueError):
        return False
    return True


def rows_of(x: Tensor, columns: Tensor | None, quantizer: Quantizer) -> Float8Rows:
    """The rows of a tensor ``(..., K)`` in the format of its device, as a matrix."""
    return quantizer.rows(as_rows(x), columns, format_of(x.device))
