"""GEMMs with a frozen weight, which may be held in FP8."""

from __future__ import annotations

from typing import Optional

from torch import Tensor

from liger_multi.reference.common.chunking import as_rows
from liger_multi.reference.common.strict import apart, linear, matmul
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


def held(weight: Tensor, scale: Optional[Tensor]) -> Weight:
    """A weight as contracts hand it over: codes where there are scales."""
    return weight if scale is None else Float8Rows(weight, scale)


def shared_rows(
    x: Tensor, codes: Optional[Tensor], scale: Optional[Tensor], to: Quantizer, *weights: object
) -> Optional[Float8Rows]:
    """Rows of the input of layers: those given, as bytes, or rounded; None where all are plain."""
    if not any(isinstance(weight, Float8Rows) for weight in weights):
        return None
    if codes is None or scale is None:
        return rows_of(x, None, to)
    return Float8Rows(as_rows(codes).view(format_of(x.device)), scale.reshape(-1))


def frozen_linear(
    rows: Tensor, weight: Weight, bias: Optional[Tensor], left: Optional[Float8Rows]
) -> Tensor:
    """``rows @ weight.T + bias``; ``left`` are the rows in FP8, for a weight that is."""
    if isinstance(weight, Tensor):
        return linear(rows, weight, bias)
    assert left is not None
    if apart():
        return linear(dequantized(left, rows.dtype), dequantized(weight, rows.dtype), bias)
    y = product(left, weight, rows.dtype, fast=True)
    return y if bias is None else y.add_(bias)


def frozen_gradient(
    dy: Tensor, weight: Weight, to: Quantizer, onto: Optional[Tensor] = None
) -> Tensor:
    """``dy @ weight``, added to ``onto`` in its buffer; scales of a weight go into the rows."""
    if isinstance(weight, Tensor):
        return matmul(dy, weight, onto)
    left = rows_of(dy, weight.scale, to)
    if apart():
        return matmul(dequantized(left, dy.dtype), weight.codes.to(dy.dtype), onto)
    across = to.across(weight.codes, None, left.codes.dtype)
    ones = weight.scale.new_ones(across.shape[0])
    made = product(left, Float8Rows(across, ones), dy.dtype)
    return made if onto is None else onto.add_(made)
