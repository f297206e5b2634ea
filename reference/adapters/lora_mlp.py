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


def _forward_of(kernels: CodedActivation, thin: LowRank) -> Callable[..., Any]:
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
        x2d, lead = as_rows(x), x.shape[:-1]
        first, second = (
            weight_or_codes(gate_weight, gate_weight_scale, thin.to),
            weight_or_codes(up_weight, up_weight_scale, thin.to),
        )
        left = shared_rows(x, codes, codes_scale, thin.to, first, second)
        gate = adapted_layer(thin, x2d, first, gate_bias, gate_a, gate_b, gate_scale, left)
        up = adapted_layer(thin, x2d, second, up_bias, up_a, up_b, up_scale, left)
        third, left = weight_or_codes(down_weight, down_weight_scale, thin.to), None
        if isinstance(third, Float8Rows):
            inner, left = kernels.coded(gate, up, activation, down_a is not None)
        else:
            inner = kernels.product(gate, up, activation)
        y = adapted_layer(thin, inner, third, down_bias, down_a, down_b, down_scale, left)
        return tuple(t.view(*lead, t.shape[-1]) for t in (y, gate, up))  # type: ignore[return-value]

    return forward


def _backward_of(kernels: CodedActivation, thin: LowRank) -> Callable[..., Any]:
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
        wide = weight_or_codes(down_weight, down_weight_scale, thin.to)
        dinner, low = input_gradient(thin, dy2d, wide, down_a, down_b, down_scale)
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
        ddown = adapter_gradients(thin, inner, dy2d, low, down_a, down_b, down_scale, *needs)
        del inner, dinner, grads
        wide = weight_or_codes(gate_weight, gate_weight_scale, thin.to)
        dx, low = input_gradient(
            thin, dgate, wide, gate_a, gate_b, gate_scale, into=None, needed=needs_x, left=gate_rows
        )
        needs = (needs_gate_a, needs_gate_b)
        dgates = adapter_gradients(thin, x2d, dgate, low, gate_a, gate_b, gate_scale, *needs)
        del dgate, gate_rows
        wide = weight_or_codes(up_weight, up_weight_scale, thin.to)
        dx, low = input_gradient(thin, dup, wide, up_a, up_b, up_scale, dx, needs_x, left=up_rows)
        dups = adapter_gradients(
            thin, x2d, dup, low, up_a, up_b, scale=up_scale, needs_a=needs_up_a, needs_b=needs_up_b
        )
        return (dx.view(x.shape) if needs_x else dx, *dgates, *dups, *ddown)

    return backward


def implement_lora_mlp(
    kernels: CodedActivation, thin: LowRank
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Forward and backward of the contract over a backend's activation and thin products."""
    return _forward_of(kernels, thin), _backward_of(kernels, thin)


def adapted_layer(
    thin: LowRank,
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
    return thin.add_(y, thin.narrow(rows, a.t()), b.t(), scale)


def input_gradient(
    thin: LowRank,
    dy: Tensor,
    weight: Weight,
    a: Tensor | None,
    b: Tensor | None,
    scale: float,
    into: Tensor | None = None,
    needed: bool = True,
    left: Float8Rows | None = None,
) -> tuple[Tensor, Tensor]:
    """The gradient of a layer's input, added to ``into``, and ``dy @ b``; ``left``: dy in FP8."""
    low = dy.new_empty(0) if b is None else thin.narrow(dy, b)
    if not needed:
        return dy.new_empty(0), low
    dx = frozen_gradient(dy, weight, thin.to, into, left)
    return (dx if a is None else thin.add_(dx, low, a, scale)), low


def adapter_gradients(
    thin: LowRank,
    rows: Tensor,
    dy: Tensor,
    low: Tensor,
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
            da = thin.gradient(low, rows, scale, a.dtype)
        if needs_b:
            db = thin.gradient(dy, thin.narrow(rows, a.t()), scale, b.dtype)
    return da, db


forward, backward = implement_lora_mlp(ReferenceActivation(), LowRank())
