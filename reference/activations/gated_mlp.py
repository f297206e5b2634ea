"""A gated MLP, ``y = (act(x Wg') * (x Wu')) Wd'``, whose inner product backward computes again.

:func:`forward_and_backward` makes forward and backward from a backend's activation; the products
are PyTorch's.
"""

from collections.abc import Callable
from typing import Any, Optional, Protocol

from torch import Tensor
from torch.nn.functional import linear

from liger_multi.reference.activations import gated
from liger_multi.reference.common.chunking import as_rows, statistics_dtype


class Activation(Protocol):
    """What a backend supplies."""

    def product(self, gate: Tensor, up: Tensor, activation: str) -> Tensor:
        """act(gate) * up."""

    def gradients(
        self, dproduct: Tensor, gate: Tensor, up: Tensor, activation: str
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of gate and up, and the product, which may stand in ``dproduct``."""


class ReferenceActivation:
    """The activation in plain PyTorch."""

    product = staticmethod(gated.forward)
    gradients = staticmethod(gated.gradients_and_product)


def forward_and_backward(kernels: Activation) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Forward and backward of the contract over a backend's activation."""

    def forward(
        x: Tensor, gate_weight: Tensor, up_weight: Tensor, down_weight: Tensor,
        gate_bias: Optional[Tensor], up_bias: Optional[Tensor], down_bias: Optional[Tensor],
        activation: str, needs_x: bool, needs_gate_weight: bool, needs_up_weight: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        gate, up = linear(x, gate_weight, gate_bias), linear(x, up_weight, up_bias)
        y = linear(kernels.product(gate, up, activation), down_weight, down_bias)
        return _dense(y), _dense(gate), _dense(up)

    def backward(
        dy: Tensor, x: Optional[Tensor], gate_weight: Optional[Tensor],
        up_weight: Optional[Tensor], down_weight: Tensor, gate: Tensor, up: Tensor,
        activation: str, needs_x: bool, needs_gate_weight: bool, needs_up_weight: bool,
        needs_down_weight: bool, needs_gate_bias: bool, needs_up_bias: bool, needs_down_bias: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        upstream, inner = as_rows(dy), (as_rows(gate), as_rows(up))
        dgate, dup, product = kernels.gradients(upstream @ down_weight, *inner, activation)
        ddown_weight = _product(upstream, product, needs_down_weight)
        del product
        dgate_weight = _product(dgate, x, needs_gate_weight)
        dup_weight = _product(dup, x, needs_up_weight)
        dx = gate.new_empty(0)
        if needs_x and gate_weight is not None and up_weight is not None:
            dx = (dgate @ gate_weight).addmm_(dup, up_weight)
            dx = dx.view(*dy.shape[:-1], gate_weight.shape[1])
        biases = ((dgate, needs_gate_bias), (dup, needs_up_bias), (upstream, needs_down_bias))
        return dx, dgate_weight, dup_weight, ddown_weight, *[_sum(*b) for b in biases]  # type: ignore[return-value]

    return forward, backward


def _dense(x: Tensor) -> Tensor:
    return x if x.is_contiguous() else x.contiguous()


def _product(left: Tensor, right: Optional[Tensor], needed: bool) -> Tensor:
    """The gradient of a weight: left' right, or nothing."""
    return left.t() @ as_rows(right) if needed and right is not None else left.new_empty(0)


def _sum(rows: Tensor, needed: bool) -> Tensor:
    """The gradient of a bias, or nothing."""
    if not needed:
        return rows.new_empty(0)
    return rows.sum(0, dtype=statistics_dtype(rows.dtype)).to(rows.dtype)


forward, backward = forward_and_backward(ReferenceActivation())
