"""Layers whose GEMMs of rows are FP8: one linear layer, and a gated MLP.

The GEMMs stand in frozen.py. The gradient of a weight is a GEMM of unrounded numbers. A gated MLP
keeps x, gate and up, and rounds three times what layers around an activation round: x, the product
``act(gate) * up`` and, by the kernel that makes them, the gradients of gate and up. Its bits are
those of such layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Optional, TypeVar

import torch
from torch import Tensor

from liger_multi.reference.activations.operators import CodedActivation, ReferenceActivation
from liger_multi.reference.common.chunking import as_rows, statistics_dtype
from liger_multi.reference.common.implementation import Implementation
from liger_multi.reference.float8.frozen import (
    coded_gradient,
    coded_linear,
    coded_weight,
    given_rows,
)
from liger_multi.reference.float8.rows import PLAIN, Float8Rows, Quantizer, rows_of

# --- parts of both ---

Weight = TypeVar("Weight", Tensor, Optional[Tensor])


def _read(weight: Weight, codes: Optional[Tensor]) -> Weight:
    """What is read of a weight: the codes beside it, where it has been rounded before."""
    return weight if codes is None else codes


def _layer(
    left: Float8Rows, weight: Tensor, scale: Optional[Tensor], bias: Optional[Tensor],
    dtype: torch.dtype, to: Quantizer,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """A layer's output, and the scales of its weight; empty where they were given."""
    right = coded_weight(weight, scale, left.codes.dtype, to)
    y = coded_linear(left, right, bias, dtype)
    return y, right.scale if scale is None else right.scale.new_empty(0)


def _input_gradient(
    left: Float8Rows, weight: Tensor, given: Optional[Tensor], own: Tensor, to: Quantizer,
    dtype: torch.dtype, onto: Optional[Tensor] = None,
) -> Tensor:  # fmt: skip
    """The gradient of a layer's input; a weight without given scales is rounded by its own."""
    return coded_gradient(left, weight, own if given is None else None, to, dtype, onto)


def _weight_gradient(dy: Tensor, x: Optional[Tensor], needed: bool, dtype: torch.dtype) -> Tensor:
    """``dy' x``, or nothing."""
    if not needed or x is None:
        return dy.new_empty(0, dtype=dtype)
    return (dy.t() @ as_rows(x)).to(dtype)


def _bias_gradient(dy: Tensor, needed: bool) -> Tensor:
    """The sum of rows, or nothing."""
    if not needed:
        return dy.new_empty(0)
    return dy.sum(0, dtype=statistics_dtype(dy.dtype)).to(dy.dtype)


# --- a linear layer ---


def implement_linear_float8(to: Quantizer) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Forward and backward of the contract."""

    def forward(
        x: Tensor, weight: Tensor, bias: Optional[Tensor], weight_scale: Optional[Tensor],
        codes: Optional[Tensor], codes_scale: Optional[Tensor], weight_codes: Optional[Tensor],
        needs_x: bool, needs_weight: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        lead = x.shape[:-1]
        weight = _read(weight, weight_codes)
        left = given_rows(x, codes, codes_scale, to)
        made = x.new_empty(0, dtype=torch.uint8), x.new_empty(0, dtype=torch.float32)
        if codes is None:
            made = left.codes.view(torch.uint8).view(x.shape), left.scale.view(lead)
        y, kept = _layer(left, weight, weight_scale, bias, x.dtype, to)
        return y.view(*lead, weight.shape[0]), *made, kept

    def backward(
        dy: Tensor, x: Optional[Tensor], weight: Optional[Tensor], weight_scale: Optional[Tensor],
        weight_codes: Optional[Tensor], scale: Tensor, weight_dtype: torch.dtype, needs_x: bool,
        needs_weight: bool, needs_bias: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        upstream, dx = as_rows(dy), dy.new_empty(0)
        weight = _read(weight, weight_codes)
        if weight is not None and needs_x:
            left = rows_of(dy, scale if weight_scale is None else weight_scale, to)
            dx = _input_gradient(left, weight, weight_scale, scale, to, dy.dtype)
            dx = dx.view(*dy.shape[:-1], weight.shape[1])
        dweight = _weight_gradient(upstream, x, needs_weight, weight_dtype)
        return dx, dweight, _bias_gradient(upstream, needs_bias)

    return forward, backward


linear_float8 = Implementation(*implement_linear_float8(PLAIN))


# --- a gated MLP ---


def implement_gated_mlp_float8(
    kernels: CodedActivation, to: Quantizer
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Forward and backward of the contract over a backend's activation."""

    def forward(
        x: Tensor, gate_weight: Tensor, up_weight: Tensor, down_weight: Tensor,
        gate_bias: Optional[Tensor], up_bias: Optional[Tensor], down_bias: Optional[Tensor],
        activation: str, gate_weight_scale: Optional[Tensor], up_weight_scale: Optional[Tensor],
        down_weight_scale: Optional[Tensor], codes: Optional[Tensor],
        codes_scale: Optional[Tensor], gate_weight_codes: Optional[Tensor],
        up_weight_codes: Optional[Tensor], down_weight_codes: Optional[Tensor], needs_x: bool,
        needs_gate_weight: bool, needs_up_weight: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        gate_weight = _read(gate_weight, gate_weight_codes)
        up_weight = _read(up_weight, up_weight_codes)
        down_weight = _read(down_weight, down_weight_codes)
        left, lead = given_rows(x, codes, codes_scale, to), x.shape[:-1]
        gate, first = _layer(left, gate_weight, gate_weight_scale, gate_bias, x.dtype, to)
        up, second = _layer(left, up_weight, up_weight_scale, up_bias, x.dtype, to)
        _, left = kernels.coded(gate, up, activation, False)
        y, third = _layer(left, down_weight, down_weight_scale, down_bias, x.dtype, to)
        y, gate, up = [t.view(*lead, t.shape[1]) for t in (y, gate, up)]
        return y, gate, up, first, second, third

    def backward(
        dy: Tensor, x: Optional[Tensor], gate_weight: Optional[Tensor],
        up_weight: Optional[Tensor], down_weight: Tensor, gate: Tensor, up: Tensor,
        activation: str, gate_weight_scale: Optional[Tensor], up_weight_scale: Optional[Tensor],
        down_weight_scale: Optional[Tensor], gate_weight_codes: Optional[Tensor],
        up_weight_codes: Optional[Tensor], down_weight_codes: Optional[Tensor],
        gate_scale: Tensor, up_scale: Tensor, down_scale: Tensor,
        gate_weight_dtype: torch.dtype, up_weight_dtype: torch.dtype, needs_x: bool,
        needs_gate_weight: bool, needs_up_weight: bool, needs_down_weight: bool,
        needs_gate_bias: bool, needs_up_bias: bool, needs_down_bias: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        upstream, kind, down_dtype = as_rows(dy), dy.dtype, down_weight.dtype
        gate_weight = _read(gate_weight, gate_weight_codes)
        up_weight = _read(up_weight, up_weight_codes)
        down_weight = _read(down_weight, down_weight_codes)
        left = rows_of(dy, down_scale if down_weight_scale is None else down_weight_scale, to)
        dproduct = _input_gradient(left, down_weight, down_weight_scale, down_scale, to, kind)
        own = (
            gate_scale if gate_weight_scale is None else gate_weight_scale,
            up_scale if up_weight_scale is None else up_weight_scale,
        )
        wanted = needs_gate_weight or needs_gate_bias, needs_up_weight or needs_up_bias
        dgate, dup, product, gate_rows, up_rows = kernels.coded_gradients(
            dproduct, as_rows(gate), as_rows(up), activation, own if needs_x else (None, None),
            wanted, needs_down_weight,
        )  # fmt: skip
        del dproduct
        ddown = _weight_gradient(upstream, product, needs_down_weight, down_dtype)
        del product
        dx = gate.new_empty(0)
        if gate_rows is not None and up_rows is not None:
            assert gate_weight is not None
            assert up_weight is not None
            dx = _input_gradient(gate_rows, gate_weight, gate_weight_scale, gate_scale, to, kind)
            del gate_rows
            dx = _input_gradient(up_rows, up_weight, up_weight_scale, up_scale, to, kind, dx)
            dx = dx.view(*dy.shape[:-1], gate_weight.shape[1])
        return (
            dx,
            _weight_gradient(dgate, x, needs_gate_weight, gate_weight_dtype),
            _weight_gradient(dup, x, needs_up_weight, up_weight_dtype),
            ddown,
            _bias_gradient(dgate, needs_gate_bias),
            _bias_gradient(dup, needs_up_bias),
            _bias_gradient(upstream, needs_down_bias),
        )

    return forward, backward


gated_mlp_float8 = Implementation(*implement_gated_mlp_float8(ReferenceActivation(), PLAIN))

OPERATORS = {"linear_float8": linear_float8, "gated_mlp_float8": gated_mlp_float8}
