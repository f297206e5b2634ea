"""A gated MLP of frozen layers with LoRA adapters, whose gradients need no dense product.

:func:`forward_and_backward` makes forward and backward from a backend's activation; wide products
are PyTorch's. Kept are x, gate and up; everything of rank r, and the inner product, is computed
again.
"""

from collections.abc import Callable
from typing import Any, Optional

from torch import Tensor
from torch.nn.functional import linear

from liger_multi.reference.activations.gated_mlp import Activation, ReferenceActivation
from liger_multi.reference.adapters.low_rank import LowRank
from liger_multi.reference.common.chunking import as_rows


def forward_and_backward(
    kernels: Activation, thin: LowRank
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Forward and backward of the contract over a backend's activation and thin products."""

    def forward(
        x: Tensor, gate_weight: Tensor, up_weight: Tensor, down_weight: Tensor,
        gate_a: Optional[Tensor], gate_b: Optional[Tensor], up_a: Optional[Tensor],
        up_b: Optional[Tensor], down_a: Optional[Tensor], down_b: Optional[Tensor],
        gate_bias: Optional[Tensor], up_bias: Optional[Tensor], down_bias: Optional[Tensor],
        gate_scale: float, up_scale: float, down_scale: float, activation: str,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        rows, lead = as_rows(x), x.shape[:-1]
        gate = _layer(thin, rows, gate_weight, gate_bias, gate_a, gate_b, gate_scale)
        up = _layer(thin, rows, up_weight, up_bias, up_a, up_b, up_scale)
        inner = kernels.product(gate, up, activation)
        y = _layer(thin, inner, down_weight, down_bias, down_a, down_b, down_scale)
        return tuple(t.view(*lead, t.shape[-1]) for t in (y, gate, up))  # type: ignore[return-value]

    def backward(
        dy: Tensor, x: Tensor, gate_weight: Tensor, up_weight: Tensor, down_weight: Tensor,
        gate_a: Optional[Tensor], gate_b: Optional[Tensor], up_a: Optional[Tensor],
        up_b: Optional[Tensor], down_a: Optional[Tensor], down_b: Optional[Tensor],
        gate: Tensor, up: Tensor, gate_scale: float, up_scale: float, down_scale: float,
        activation: str, needs_x: bool, needs_gate_a: bool, needs_gate_b: bool, needs_up_a: bool,
        needs_up_b: bool, needs_down_a: bool, needs_down_b: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        rows, upstream = as_rows(x), as_rows(dy)
        dinner, low = _input_gradient(thin, upstream, down_weight, down_a, down_b, down_scale)
        dgate, dup, inner = kernels.gradients(dinner, as_rows(gate), as_rows(up), activation)
        needs = (needs_down_a, needs_down_b)
        ddown = _gradients(thin, inner, upstream, low, down_a, down_b, down_scale, *needs)
        del inner, dinner
        dx, low = _input_gradient(
            thin, dgate, gate_weight, gate_a, gate_b, gate_scale, None, needs_x
        )
        needs = (needs_gate_a, needs_gate_b)
        dgates = _gradients(thin, rows, dgate, low, gate_a, gate_b, gate_scale, *needs)
        dx, low = _input_gradient(thin, dup, up_weight, up_a, up_b, up_scale, dx, needs_x)
        dups = _gradients(thin, rows, dup, low, up_a, up_b, up_scale, needs_up_a, needs_up_b)
        return (dx.view(x.shape) if needs_x else dx, *dgates, *dups, *ddown)

    return forward, backward


def _layer(
    thin: LowRank, rows: Tensor, weight: Tensor, bias: Optional[Tensor], a: Optional[Tensor],
    b: Optional[Tensor], scale: float,
) -> Tensor:  # fmt: skip
    y = linear(rows, weight, bias)
    if a is None or b is None:
        return y
    return thin.add_(y, thin.narrow(rows, a.t()), b.t(), scale)


def _input_gradient(
    thin: LowRank, dy: Tensor, weight: Tensor, a: Optional[Tensor], b: Optional[Tensor],
    scale: float, into: Tensor | None = None, needed: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gradient of a layer's input, added to ``into``, and ``dy @ b``."""
    low = dy.new_empty(0) if b is None else thin.narrow(dy, b)
    if not needed:
        return dy.new_empty(0), low
    dx = dy @ weight if into is None else into.addmm_(dy, weight)
    return (dx if a is None else thin.add_(dx, low, a, scale)), low


def _gradients(
    thin: LowRank, rows: Tensor, dy: Tensor, low: Tensor, a: Optional[Tensor],
    b: Optional[Tensor], scale: float, needs_a: bool, needs_b: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gradients of a and b, empty where nobody needs them."""
    da, db = dy.new_empty(0), dy.new_empty(0)
    if a is not None and b is not None:
        da, db = a.new_empty(0), b.new_empty(0)
        if needs_a:
            da = thin.gradient(low, rows, scale, a.dtype)
        if needs_b:
            db = thin.gradient(dy, thin.narrow(rows, a.t()), scale, b.dtype)
    return da, db


forward, backward = forward_and_backward(ReferenceActivation(), LowRank())
