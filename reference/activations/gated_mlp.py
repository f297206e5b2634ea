"""A gated MLP, ``y = (act(x Wg') * (x Wu')) Wd'``; backward computes its inner product again.

:func:`implement_gated_mlp` makes forward and backward from a backend's activation; the GEMMs are
PyTorch's.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from liger_multi.reference.activations import gated
from liger_multi.reference.activations.linear import bias_gradient, dense, weight_gradient
from liger_multi.reference.common.chunking import as_rows
from liger_multi.reference.common.stored import gradient_of, linear_of
from liger_multi.reference.float8.rows import PLAIN, Float8Rows, rows_of


class Activation(Protocol):
    """The activation of a gated MLP, which a backend supplies."""

    def product(self, gate: Tensor, up: Tensor, activation: str) -> Tensor:
        """act(gate) * up."""

    def gradients(
        self, dproduct: Tensor, gate: Tensor, up: Tensor, activation: str
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of gate and up, and the product, which may stand in ``dproduct``."""


Columns = tuple[Tensor | None, Tensor | None]
"""Scales of the rows of gate's and up's weight, by which a gradient is multiplied before it is
coded; None: no codes."""


class CodedGradients(NamedTuple):
    """Gradients of a gated activation, empty where they are not needed, and their codes.

    Attributes:
        dgate: Of gate.
        dup: Of up.
        product: act(gate) * up; what was given as its gradient where that is not needed.
        dgate_rows: Of gate, times the numbers of columns.
        dup_rows: Of up, times the numbers of columns.
    """

    dgate: Tensor
    dup: Tensor
    product: Tensor
    dgate_rows: Float8Rows | None
    dup_rows: Float8Rows | None


class CodedActivation(Activation, Protocol):
    """The same for an MLP whose weights may be held in FP8."""

    def coded(
        self, gate: Tensor, up: Tensor, activation: str, needs_output: bool
    ) -> tuple[Tensor, Float8Rows]:
        """act(gate) * up where it is needed, and its rows in FP8."""

    def coded_gradients(
        self,
        dproduct: Tensor,
        gate: Tensor,
        up: Tensor,
        activation: str,
        columns: Columns,
        needs_output: tuple[bool, bool],
        product: bool,
    ) -> CodedGradients:
        """The gradients where they are needed, and codes of those with numbers per column.

        All are rows. The product, if it is needed, may stand in ``dproduct``.
        """


class ReferenceActivation:
    """The activation in plain PyTorch."""

    @staticmethod
    def coded(
        gate: Tensor, up: Tensor, activation: str, needs_output: bool
    ) -> tuple[Tensor, Float8Rows]:
        """act(gate) * up where it is needed, and its rows in FP8."""
        y = gated.forward(gate, up, activation)
        return y if needs_output else y.new_empty(0), rows_of(y, None, PLAIN)

    @staticmethod
    def coded_gradients(
        dproduct: Tensor,
        gate: Tensor,
        up: Tensor,
        activation: str,
        columns: Columns,
        needs_output: tuple[bool, bool],
        product: bool,
    ) -> CodedGradients:
        """The gradients where they are needed, and codes of those with numbers per column."""
        if product:
            *output, dproduct = gated.gradients_and_product(dproduct, gate, up, activation)
        else:
            needs = [w or c is not None for w, c in zip(needs_output, columns, strict=True)]
            output = list(gated.backward(dproduct, gate, up, activation, needs[0], needs[1]))
        pairs = zip(output, columns, strict=True)
        codes = [None if c is None else rows_of(grad, c, PLAIN) for grad, c in pairs]
        gradients = [g if w else g.new_empty(0) for g, w in zip(output, needs_output, strict=True)]
        return CodedGradients(gradients[0], gradients[1], dproduct, *codes)

    product = staticmethod(gated.forward)
    gradients = staticmethod(gated.gradients_and_product)


def implement_gated_mlp(kernels: Activation) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Forward and backward of the contract over a backend's activation."""

    def forward(
        x: Tensor,
        gate_weight: Tensor,
        up_weight: Tensor,
        down_weight: Tensor,
        gate_bias: Tensor | None,
        up_bias: Tensor | None,
        down_bias: Tensor | None,
        activation: str,
        needs_x: bool,
        needs_gate_weight: bool,
        needs_up_weight: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        gate, up = linear_of(x, gate_weight, gate_bias), linear_of(x, up_weight, up_bias)
        y = linear_of(kernels.product(gate, up, activation), down_weight, down_bias)
        return dense(y), dense(gate), dense(up)

    def backward(
        dy: Tensor,
        x: Tensor | None,
        gate_weight: Tensor | None,
        up_weight: Tensor | None,
        down_weight: Tensor,
        gate: Tensor,
        up: Tensor,
        activation: str,
        needs_x: bool,
        needs_gate_weight: bool,
        needs_up_weight: bool,
        needs_down_weight: bool,
        needs_gate_bias: bool,
        needs_up_bias: bool,
        needs_down_bias: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        dy2d, inner = as_rows(dy), (as_rows(gate), as_rows(up))
        dproduct = gradient_of(dy2d, down_weight)
        dgate, dup, product = kernels.gradients(dproduct, *inner, activation)
        del dproduct
        ddown_weight = weight_gradient(dy2d, product, needs_down_weight)
        del product
        dgate_weight = weight_gradient(dgate, x, needs_gate_weight)
        dup_weight = weight_gradient(dup, x, needs_up_weight)
        dx = gate.new_empty(0)
        if needs_x and gate_weight is not None and up_weight is not None:
            dx = gradient_of(dup, up_weight, gradient_of(dgate, gate_weight))
            dx = dx.view(*dy.shape[:-1], gate_weight.shape[1])
        biases = ((dgate, needs_gate_bias), (dup, needs_up_bias), (dy2d, needs_down_bias))
        return dx, dgate_weight, dup_weight, ddown_weight, *[bias_gradient(*b) for b in biases]  # type: ignore[return-value]

    return forward, backward


forward, backward = implement_gated_mlp(ReferenceActivation())
