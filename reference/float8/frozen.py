"""GEMMs with a weight that is held in FP8, or is rounded to it, or is neither.

``y = q(x) q(w)'`` with a scale per row of x and of w; ``dx = q(dy s_w) c(w)``, where ``c(w)`` are
the codes of forward and ``s_w`` their scales, which go into the rows of dy before these are
rounded. So both GEMMs use one rounding of w, and dx is the gradient of what forward computed.
"""

import torch
from torch import Tensor

from liger_multi.reference.common.chunking import as_rows
from liger_multi.reference.common.stored import gradient_of, linear_of, opened
from liger_multi.reference.common.strict import has_own_gemm, linear, matmul
from liger_multi.reference.float8.rows import (
    Float8Rows,
    Quantizer,
    dequantized,
    format_of,
    product,
    rows_of,
)

Weight = Tensor | Float8Rows
"""A weight (N, K) as it is, or codes and scales of its rows."""


def weight_or_codes(weight: Tensor, scale: Tensor | None, quantizer: Quantizer) -> Weight:
    """A weight as a contract passes it: codes if it comes with scales.

    A 4-bit weight with the flag ``float8`` is rounded to rows in FP8.
    """
    if scale is not None:
        return Float8Rows(weight, scale)
    if not getattr(weight, "float8", False):
        return weight
    return quantizer.rows(opened(weight), None, format_of(weight.device))


def coded_weight(
    weight: Tensor, scale: Tensor | None, format: torch.dtype, quantizer: Quantizer
) -> Float8Rows:
    """A weight in FP8: its codes if it comes with scales, else rounded."""
    return (
        quantizer.rows(as_rows(weight), None, format)
        if scale is None
        else Float8Rows(weight, scale)
    )


def input_rows(
    x: Tensor, codes: Tensor | None, scale: Tensor | None, quantizer: Quantizer
) -> Float8Rows:
    """Rows of an input in FP8: its codes (bytes) if the caller has them, else rounded."""
    if codes is None or scale is None:
        return rows_of(x, None, quantizer)
    return Float8Rows(as_rows(codes).view(format_of(x.device)), scale.reshape(-1))


def shared_rows(
    x: Tensor, codes: Tensor | None, scale: Tensor | None, quantizer: Quantizer, *weights: object
) -> Float8Rows | None:
    """Rows of several layers' input as :func:`input_rows`; None if no layer is in FP8."""
    if not any(isinstance(weight, Float8Rows) for weight in weights):
        return None
    return input_rows(x, codes, scale, quantizer)


def coded_linear(
    left: Float8Rows, weight: Float8Rows, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """``left @ weight.T + bias``."""
    if has_own_gemm():
        return linear(dequantized(left, dtype), dequantized(weight, dtype), bias)
    y = product(left, weight, dtype, fast=True)
    return y if bias is None else y.add_(bias)


def frozen_linear(
    rows: Tensor, weight: Weight, bias: Tensor | None, left: Float8Rows | None
) -> Tensor:
    """``rows @ weight.T + bias``; ``left`` are the rows in FP8, for a weight that is."""
    if isinstance(weight, Tensor):
        return linear_of(rows, weight, bias)
    assert left is not None
    return coded_linear(left, weight, bias, rows.dtype)


def coded_gradient(
    left: Float8Rows,
    weight: Tensor,
    scale: Tensor | None,
    quantizer: Quantizer,
    dtype: torch.dtype,
    onto: Tensor | None = None,
) -> Tensor:
    """``left @ codes(weight)``, added to ``onto`` in its buffer.

    Args:
        left: Rows of a gradient, times the scales of the weight.
        weight: Codes, or numbers.
        scale: Of its rows, where they are numbers: they are rounded as in forward.
        quantizer: What makes codes.
        dtype: Of the result.
        onto: What it is added to.
    """
    columns = quantizer.across(weight, scale, left.codes.dtype)
    if has_own_gemm():
        return matmul(dequantized(left, dtype), columns.t().to(dtype), onto)
    unit_scales = left.scale.new_ones(columns.shape[0])
    y = product(left, Float8Rows(columns, unit_scales), dtype)
    return y if onto is None else onto.add_(y)


def frozen_gradient(
    dy: Tensor,
    weight: Weight,
    quantizer: Quantizer,
    onto: Tensor | None = None,
    left: Float8Rows | None = None,
) -> Tensor:
    """``dy @ weight``, added to ``onto`` in its buffer; ``left`` are its rows in FP8, if known."""
    if isinstance(weight, Tensor):
        return gradient_of(dy, weight, onto)
    left = rows_of(dy, weight.scale, quantizer) if left is None else left
    return coded_gradient(left, weight.codes, None, quantizer, dy.dtype, onto)
