"""A gated MLP whose GEMMs of rows are FP8; layers.py has them.

It keeps x, gate and up, and rounds three times what layers around an activation round: x, the
product ``act(gate) * up`` and, by the kernel that makes them, the gradients of gate and up. Its
bits are those of such layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from liger_multi.reference.activations.gated_mlp import CodedActivation, ReferenceActivation
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


def _forward_of(kernels: CodedActivation, quantizer: Quantizer) -> Callable[..., Any]:
    """The forward pass of the contract, as a function of tensors."""

    def forward(
        x: Tensor,
        gate_weight: Tensor,
        up_weight: Tensor,
        down_weight: Tensor,
        gate_bias: Tensor | None,
        up_bias: Tensor | None,
        down_bias: Tensor | None,
        activation: str,
        gate_weight_scale: Tensor | None,
        up_weight_scale: Tensor | None,
        down_weight_scale: Tensor | None,
        codes: Tensor | None,
        codes_scale: Tensor | None,
        gate_weight_codes: Tensor | None,
        up_weight_codes: Tensor | None,
        down_weight_codes: Tensor | None,
        needs_x: bool,
        needs_gate_weight: bool,
        needs_up_weight: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        gate_weight = read_weight(gate_weight, gate_weight_codes)
        up_weight = read_weight(up_weight, up_weight_codes)
        down_weight = read_weight(down_weight, down_weight_codes)
        left, row_shape = input_rows(x, codes, codes_scale, quantizer), x.shape[:-1]
        gate, first = layer(left, gate_weight, gate_weight_scale, gate_bias, x.dtype, quantizer)
        up, second = layer(left, up_weight, up_weight_scale, up_bias, x.dtype, quantizer)
        _, left = kernels.coded(gate, up, activation, False)
        y, third = layer(left, down_weight, down_weight_scale, down_bias, x.dtype, quantizer)
        y, gate, up = [t.view(*row_shape, t.shape[1]) for t in (y, gate, up)]
        return y, gate, up, first, second, third

    return forward


def _backward_of(kernels: CodedActivation, quantizer: Quantizer) -> Callable[..., Any]:
    """The backward pass of the contract, as a function of tensors."""

    def backward(
        dy: Tensor,
        x: Tensor | None,
        gate_weight: Tensor | None,
        up_weight: Tensor | None,
        down_weight: Tensor,
        gate: Tensor,
        up: Tensor,
        activation: str,
        gate_weight_scale: Tensor | None,
        up_weight_scale: Tensor | None,
        down_weight_scale: Tensor | None,
        gate_weight_codes: Tensor | None,
        up_weight_codes: Tensor | None,
        down_weight_codes: Tensor | None,
        gate_scale: Tensor,
        up_scale: Tensor,
        down_scale: Tensor,
        gate_weight_dtype: torch.dtype,
        up_weight_dtype: torch.dtype,
        needs_x: bool,
        needs_gate_weight: bool,
        needs_up_weight: bool,
        needs_down_weight: bool,
        needs_gate_bias: bool,
        needs_up_bias: bool,
        needs_down_bias: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        dy2d, dtype, down_dtype = as_rows(dy), dy.dtype, down_weight.dtype
        gate_weight = read_weight(gate_weight, gate_weight_codes)
        up_weight = read_weight(up_weight, up_weight_codes)
        down_weight = read_weight(down_weight, down_weight_codes)
        left = rows_of(
            dy, down_scale if down_weight_scale is None else down_weight_scale, quantizer
        )
        dproduct = input_gradient(
            left, down_weight, down_weight_scale, down_scale, quantizer, dtype
        )
        column_scales = (
            gate_scale if gate_weight_scale is None else gate_weight_scale,
            up_scale if up_weight_scale is None else up_weight_scale,
        )
        needs_output = needs_gate_weight or needs_gate_bias, needs_up_weight or needs_up_bias
        dgate, dup, product, gate_rows, up_rows = kernels.coded_gradients(
            dproduct,
            as_rows(gate),
            as_rows(up),
            activation,
            column_scales if needs_x else (None, None),
            needs_output,
            needs_down_weight,
        )
        del dproduct
        ddown = weight_gradient(dy2d, product, needs_down_weight, down_dtype)
        del product
        dx = gate.new_empty(0)
        if gate_rows is not None and up_rows is not None:
            assert gate_weight is not None
            assert up_weight is not None
            dx = input_gradient(
                gate_rows, gate_weight, gate_weight_scale, gate_scale, quantizer, dtype
            )
            del gate_rows
            dx = input_gradient(up_rows, up_weight, up_weight_scale, up_scale, quantizer, dtype, dx)
            dx = dx.view(*dy.shape[:-1], gate_weight.shape[1])
        return (
            dx,
            weight_gradient(dgate, x, needs_gate_weight, gate_weight_dtype),
            weight_gradient(dup, x, needs_up_weight, up_weight_dtype),
            ddown,
            bias_gradient(dgate, needs_gate_bias),
            bias_gradient(dup, needs_up_bias),
            bias_gradient(dy2d, needs_down_bias),
        )

    return backward


def implement_gated_mlp_float8(
    kernels: CodedActivation, quantizer: Quantizer
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Forward and backward of the contract over a backend's activation."""
    return _forward_of(kernels, quantizer), _backward_of(kernels, quantizer)


forward, backward = implement_gated_mlp_float8(ReferenceActivation(), PLAIN)
