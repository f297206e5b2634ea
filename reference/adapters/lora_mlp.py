"""A gated MLP of frozen layers with LoRA: its gradients need no dense product.

Kept are x, gate and up; everything of rank r, and the inner product, is computed again.
:func:`implement_lora_mlp` makes forward and backward from a backend's activation and its products
with thin matrices; wide products are PyTorch's.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from liger_multi.reference.activations.gated_mlp import CodedActivation, ReferenceActivation
from liger_multi.reference.adapters.low_rank import LowRank
from liger_multi.reference.common.chunking import as_rows
from liger_multi.reference.float8.frozen import (
    Weight,
    frozen_gradient,
    frozen_linear,
    shared_rows,
    weight_or_codes,
)
from liger_multi.reference.float8.rows import Float8Rows


def _forward_of(kernels: CodedActivation, lora: LowRank) -> Callable[..., Any]:
    """The forward pass of the contract, as a function of tensors."""

    def forward(
        x: Tensor,
        gate_weight: Tensor,
        up_weight: Tensor,
        down_weight: Tensor,
        gate_a: Tensor | None,
        gate_b: Tensor | None,
        up_a: Tensor | None,
        up_b: Tensor | None,
        down_a: Tensor | None,
        down_b: Tensor | None,
        gate_bias: Tensor | None,
        up_bias: Tensor | None,
        down_bias: Tensor | None,
        gate_scale: float,
        up_scale: float,
        down_scale: float,
        activation: str,
        gate_weight_scale: Tensor | None,
        up_weight_scale: Tensor | None,
        down_weight_scale: Tensor | None,
        codes: Tensor | None,
        codes_scale: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        x2d, row_shape = as_rows(x), x.shape[:-1]
        first, second = (
            weight_or_codes(gate_weight, gate_weight_scale, lora.quantizer),
            weight_or_codes(up_weight, up_weight_scale, lora.quantizer),
        )
        left = shared_rows(x, codes, codes_scale, lora.quantizer, first, second)
        gate = adapted_layer(lora, x2d, first, gate_bias, gate_a, gate_b, gate_scale, left)
        up = adapted_layer(lora, x2d, second, up_bias, up_a, up_b, up_scale, left)
        third, left = weight_or_codes(down_weight, down_weight_scale, lora.quantizer), None
        if isinstance(third, Float8Rows):
            inner, left = kernels.coded(gate, up, activation, down_a is not None)
        else:
            inner = kernels.product(gate, up, activation)
        y = adapted_layer(lora, inner, third, down_bias, down_a, down_b, down_scale, left)
        return tuple(t.view(*row_shape, t.shape[-1]) for t in (y, gate, up))  # type: ignore[return-value]

    return forward


def _backward_of(kernels: CodedActivation, lora: LowRank) -> Callable[..., Any]:
    """The backward pass of the contract, as a function of tensors."""

    def backward(
        dy: Tensor,
        x: Tensor,
        gate_weight: Tensor,
        up_weight: Tensor,
        down_weight: Tensor,
        gate_a: Tensor | None,
        gate_b: Tensor | None,
        up_a: Tensor | None,
        up_b: Tensor | None,
        down_a: Tensor | None,
        down_b: Tensor | None,
        gate: Tensor,
        up: Tensor,
        gate_scale: float,
        up_scale: float,
        down_scale: float,
        activation: str,
        gate_weight_scale: Tensor | None,
        up_weight_scale: Tensor | None,
        down_weight_scale: Tensor | None,
        needs_x: bool,
        needs_gate_a: bool,
        needs_gate_b: bool,
        needs_up_a: bool,
        needs_up_b: bool,
        needs_down_a: bool,
        needs_down_b: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        x2d, dy2d = as_rows(x), as_rows(dy)
        wide = weight_or_codes(down_weight, down_weight_scale, lora.quantizer)
        dinner, dproj = input_gradient(lora, dy2d, wide, down_a, down_b, down_scale)
        needs = (needs_down_a, needs_down_b)
        columns = (gate_weight_scale, up_weight_scale) if needs_x else (None, None)
        needs_output = [  # read by adapters, and by a weight that is not in FP8
            b is not None or (needs_x and scale is None)
            for b, scale in ((gate_b, gate_weight_scale), (up_b, up_weight_scale))
        ]
        grads = kernels.coded_gradients(
            dinner,
            as_rows(gate),
            as_rows(up),
            activation,
            columns,
            (needs_output[0], needs_output[1]),
            any(needs),
        )
        dgate, dup, inner, gate_rows, up_rows = grads
        ddown = adapter_gradients(lora, inner, dy2d, dproj, down_a, down_b, down_scale, *needs)
        del inner, dinner, grads
        wide = weight_or_codes(gate_weight, gate_weight_scale, lora.quantizer)
        layer = (x2d, dgate, wide, gate_a, gate_b, gate_scale, needs_gate_a, needs_gate_b)
        dx, dgate_a, dgate_b = layer_gradients(lora, *layer, None, needs_x, gate_rows)
        del dgate, gate_rows, layer
        wide = weight_or_codes(up_weight, up_weight_scale, lora.quantizer)
        layer = (x2d, dup, wide, up_a, up_b, up_scale, needs_up_a, needs_up_b)
        dx, dup_a, dup_b = layer_gradients(lora, *layer, dx, needs_x, up_rows)
        return (dx.view(x.shape) if needs_x else dx, dgate_a, dgate_b, dup_a, dup_b, *ddown)

    return backward


def implement_lora_mlp(
    kernels: CodedActivation, lora: LowRank
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Forward and backward of the contract over a backend's activation and thin products."""
    return _forward_of(kernels, lora), _backward_of(kernels, lora)


def adapted_layer(
    lora: LowRank,
    rows: Tensor,
    weight: Weight,
    bias: Tensor | None,
    a: Tensor | None,
    b: Tensor | None,
    scale: float,
    left: Float8Rows | None = None,
) -> Tensor:
    """A linear layer's output, with what its adapter adds; ``left`` are its rows in FP8."""
    y = frozen_linear(rows, weight, bias, left)
    if a is None or b is None:
        return y
    return lora.add_(y, lora.narrow(rows, a.t()), b.t(), scale)


def input_gradient(
    lora: LowRank,
    dy: Tensor,
    weight: Weight,
    a: Tensor | None,
    b: Tensor | None,
    scale: float,
    total: Tensor | None = None,
    is_needed: bool = True,
    left: Float8Rows | None = None,
    dproj: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The gradient of a layer's input, added to ``total``, and ``dy @ b``; ``left``: dy in FP8."""
    if dproj is None:
        dproj = dy.new_empty(0) if b is None else lora.narrow(dy, b)
    if not is_needed:
        return dy.new_empty(0), dproj
    dx = frozen_gradient(dy, weight, lora.quantizer, total, left)
    return (dx if a is None else lora.add_(dx, dproj, a, scale)), dproj


def layer_gradients(
    lora: LowRank,
    rows: Tensor,
    dy: Tensor,
    weight: Weight,
    a: Tensor | None,
    b: Tensor | None,
    scale: float,
    needs_a: bool,
    needs_b: bool,
    total: Tensor | None,
    needs_input: bool,
    left: Float8Rows | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of a layer's input, added to ``total``, and of a and b; empty if not needed."""
    dproj, db = None, dy.new_empty(0)
    if a is not None and b is not None:
        low = lora.narrow(rows, a.t()) if needs_b else a.new_empty(0, a.shape[0])
        dproj, db = lora.narrow_and_gradient(dy, b, low, scale, needs_input or needs_a, needs_b)
    dx, dproj = input_gradient(lora, dy, weight, a, b, scale, total, needs_input, left, dproj)
    da, _ = adapter_gradients(lora, rows, dy, dproj, a, b, scale, needs_a, False)
    return dx, da, db


def adapter_gradients(
    lora: LowRank,
    rows: Tensor,
    dy: Tensor,
    dproj: Tensor,
    a: Tensor | None,
    b: Tensor | None,
    scale: float,
    needs_a: bool,
    needs_b: bool,
) -> tuple[Tensor, Tensor]:
    """The gradients of a and b; empty if not needed."""
    da, db = dy.new_empty(0), dy.new_empty(0)
    if a is not None and b is not None:
        da, db = a.new_empty(0), b.new_empty(0)
        if needs_a:
            da = lora.gradient(dproj, rows, scale, a.dtype)
        if needs_b:
            db = lora.gradient(dy, lora.narrow(rows, a.t()), scale, b.dtype)
    return da, db


forward, backward = implement_lora_mlp(ReferenceActivation(), LowRank())
