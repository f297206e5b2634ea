"""A linear layer whose products of rows are FP8.

``y = q(x) q(w)'`` with a scale per row of x and of w; ``dx = q(dy s_w) c(w)``, where ``c(w)`` are
the codes of forward and ``s_w`` their scales, which go into the rows of dy before these are
rounded. So both products use one rounding of w, and dx is the gradient of what forward computed.
The gradient of w is a product of unrounded numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Optional

import torch
from torch import Tensor

from liger_multi.reference.common.chunking import as_rows
from liger_multi.reference.common.implementation import Implementation
from liger_multi.reference.float8.rows import (
    PLAIN,
    Float8Rows,
    Quantizer,
    format_of,
    product,
    rows_of,
)


def implement_linear_float8(to: Quantizer) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Forward and backward of the contract."""

    def forward(
        x: Tensor, weight: Tensor, bias: Optional[Tensor], weight_scale: Optional[Tensor],
        codes: Optional[Tensor], codes_scale: Optional[Tensor], needs_x: bool, needs_weight: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        lead, none = x.shape[:-1], x.new_empty(0, dtype=torch.float32)
        if codes is None or codes_scale is None:
            left = rows_of(x, None, to)
            bytes_of = left.codes.view(torch.uint8)
            made = bytes_of.view(x.shape), left.scale.view(lead)
        else:
            typed = as_rows(codes).view(format_of(x.device))
            left = Float8Rows(typed, codes_scale.reshape(-1))
            made = codes.new_empty(0), none
        right = _weight(weight, weight_scale, left.codes.dtype, to)
        y = product(left, right, x.dtype, fast=True)
        if bias is not None:
            y += bias
        kept = right.scale if weight_scale is None else none
        return y.view(*lead, weight.shape[0]), *made, kept

    def backward(
        dy: Tensor, x: Optional[Tensor], weight: Optional[Tensor], weight_scale: Optional[Tensor],
        scale: Tensor, weight_dtype: torch.dtype, needs_x: bool, needs_weight: bool,
        needs_bias: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        upstream = as_rows(dy)
        dx, dweight, dbias = (dy.new_empty(0) for _ in range(3))
        if weight is not None and needs_x:
            own = scale if weight_scale is None else weight_scale
            left = rows_of(dy, own, to)
            across = to.across(weight, scale if weight_scale is None else None, left.codes.dtype)
            right = Float8Rows(across, own.new_ones(across.shape[0]))
            dx = product(left, right, dy.dtype).view(*dy.shape[:-1], across.shape[0])
        if needs_weight and x is not None:
            dweight = upstream.t() @ as_rows(x)
        if needs_bias:
            dbias = upstream.sum(0, dtype=_wide(dy.dtype)).to(dy.dtype)
        return dx, dweight.to(weight_dtype), dbias

    return forward, backward


def _weight(
    weight: Tensor, scale: Optional[Tensor], format: torch.dtype, to: Quantizer
) -> Float8Rows:
    return to.rows(as_rows(weight), None, format) if scale is None else Float8Rows(weight, scale)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype == torch.float64 else torch.float32


linear_float8 = Implementation(*implement_linear_float8(PLAIN))

OPERATORS = {"linear_float8": linear_float8}
