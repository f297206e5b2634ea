"""A linear layer whose GEMMs of rows are FP8; layers.py has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from liger_multi.reference.activations.linear import bias_gradient
from liger_multi.reference.common.chunking import as_rows
from liger_multi.reference.float8.frozen import input_rows
from liger_multi.reference.float8.layers import (
    input_gradient,
    layer,
    read_weight,
    weight_gradient,
)
from liger_multi.reference.float8.rows import PLAIN, Quantizer, rows_of


def implement_linear_float8(quantizer: Quantizer) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Forward and backward of the contract."""

    def forward(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        weight_scale: Tensor | None,
        codes: Tensor | None,
        codes_scale: Tensor | None,
        weight_codes: Tensor | None,
        needs_x: bool,
        needs_weight: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        row_shape = x.shape[:-1]
        weight = read_weight(weight, weight_codes)
        left = input_rows(x, codes, codes_scale, quantizer)
        coded = x.new_empty(0, dtype=torch.uint8), x.new_empty(0, dtype=torch.float32)
        if codes is None:
            coded = left.codes.view(torch.uint8).view(x.shape), left.scale.view(row_shape)
        y, new_scale = layer(left, weight, weight_scale, bias, x.dtype, quantizer)
        return y.view(*row_shape, weight.shape[0]), *coded, new_scale

    def backward(
        dy: Tensor,
        x: Tensor | None,
        weight: Tensor | None,
        weight_scale: Tensor | None,
        weight_codes: Tensor | None,
        scale: Tensor,
        weight_dtype: torch.dtype,
        needs_x: bool,
        needs_weight: bool,
        needs_bias: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        dy2d, dx = as_rows(dy), dy.new_empty(0)
        weight = read_weight(weight, weight_codes)
        if weight is not None and needs_x:
            left = rows_of(dy, scale if weight_scale is None else weight_scale, quantizer)
            dx = input_gradient(left, weight, weight_scale, scale, quantizer, dy.dtype)
            dx = dx.view(*dy.shape[:-1], weight.shape[1])
        dweight = weight_gradient(dy2d, x, needs_weight, weight_dtype)
        return dx, dweight, bias_gradient(dy2d, needs_bias)

    return forward, backward


forward, backward = implement_linear_float8(PLAIN)
