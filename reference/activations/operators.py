"""Gated activations of two tensors, or of one that holds both; linear, gated MLP, squared ReLU.

The equations of gated activations are in gated.py. The gated MLP, ``y = (act(x Wg') * (x Wu'))
Wd'``, computes its inner product again in backward: :func:`implement_gated_mlp` makes forward and
backward from a backend's activation; the products are PyTorch's. The squared rectifier,
``y = relu(x)^2``, has one rounding, as the rectifier has none.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Optional, Protocol

import torch
from torch import Tensor

from liger_multi.reference.activations import gated
from liger_multi.reference.activations.gated import GELU
from liger_multi.reference.activations.pointwise import pointwise
from liger_multi.reference.common.chunking import as_rows, statistics_dtype
from liger_multi.reference.common.implementation import Implementation
from liger_multi.reference.common.strict import linear, matmul
from liger_multi.reference.float8.quantized import with_codes
from liger_multi.reference.float8.rows import PLAIN, Float8Rows, rows_of


class SwiGLU:
    """SwiGLU, ``y = silu(gate) * up``; see :mod:`liger_multi.reference.activations.gated`."""

    @staticmethod
    def forward(gate: Tensor, up: Tensor, gate_multiplier: float, down_multiplier: float) -> Tensor:
        """silu(gate) * up."""
        return gated.forward(gate, up, "silu", (gate_multiplier, down_multiplier))

    @staticmethod
    def backward(
        dy: Tensor, gate: Tensor, up: Tensor, gate_multiplier: float, down_multiplier: float,
        needs_gate: bool, needs_up: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Gradients of gate and up."""
        by = (gate_multiplier, down_multiplier)
        return gated.backward(dy, gate, up, "silu", needs_gate, needs_up, by)


class PackedSwiGLU:
    """SwiGLU of one tensor that holds gate and up side by side in its last axis."""

    @staticmethod
    def forward(gate_up: Tensor, gate_multiplier: float, down_multiplier: float) -> Tensor:
        """silu(first half) * second half."""
        return gated.packed_forward(gate_up, "silu", (gate_multiplier, down_multiplier))

    @staticmethod
    def backward(
        dy: Tensor, gate_up: Tensor, gate_multiplier: float, down_multiplier: float
    ) -> Tensor:
        """Gradients of both halves, side by side."""
        return gated.packed_backward(dy, gate_up, "silu", (gate_multiplier, down_multiplier))


class GEGLU:
    """GEGLU, ``y = gelu(gate) * up``; see :mod:`liger_multi.reference.activations.gated`."""

    @staticmethod
    def forward(gate: Tensor, up: Tensor, approximate: str) -> Tensor:
        """gelu(gate) * up."""
        return gated.forward(gate, up, GELU[approximate])

    @staticmethod
    def backward(
        dy: Tensor, gate: Tensor, up: Tensor, approximate: str, needs_gate: bool, needs_up: bool
    ) -> tuple[Tensor, Tensor]:
        """Gradients of gate and up."""
        return gated.backward(dy, gate, up, GELU[approximate], needs_gate, needs_up)


class PackedGEGLU:
    """GEGLU of one tensor that holds gate and up side by side in its last axis."""

    @staticmethod
    def forward(gate_up: Tensor, approximate: str) -> Tensor:
        """gelu(first half) * second half."""
        return gated.packed_forward(gate_up, GELU[approximate])

    @staticmethod
    def backward(dy: Tensor, gate_up: Tensor, approximate: str) -> Tensor:
        """Gradients of both halves, side by side."""
        return gated.packed_backward(dy, gate_up, GELU[approximate])


class ClampedSwiGLU:
    """Clamped SwiGLU of two tensors; see :mod:`liger_multi.reference.activations.gated`."""

    @staticmethod
    def forward(gate: Tensor, up: Tensor, limit: float, alpha: float, up_offset: float) -> Tensor:
        """(up + offset) * gate * sigmoid(alpha * gate) of clamped values."""
        return gated.clamped_product(gate, up, (limit, alpha, up_offset))

    @staticmethod
    def backward(
        dy: Tensor, gate: Tensor, up: Tensor, limit: float, alpha: float, up_offset: float,
        needs_gate: bool, needs_up: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Gradients of gate and up."""
        dgate, dup = gated.clamped_gradients(dy, gate, up, (limit, alpha, up_offset))
        return (
            dgate.contiguous() if needs_gate else gate.new_empty(0),
            dup.contiguous() if needs_up else up.new_empty(0),
        )


class PackedClampedSwiGLU:
    """Clamped SwiGLU of one tensor that holds gate and up, in turn or as halves."""

    @staticmethod
    def forward(
        gate_up: Tensor, limit: float, alpha: float, up_offset: float, interleaved: bool
    ) -> Tensor:
        """(up + offset) * gate * sigmoid(alpha * gate) of clamped values."""
        return gated.packed_clamped_product(gate_up, (limit, alpha, up_offset), interleaved)

    @staticmethod
    def backward(
        dy: Tensor, gate_up: Tensor, limit: float, alpha: float, up_offset: float, interleaved: bool
    ) -> Tensor:
        """Gradients of both, each in its place."""
        numbers = (limit, alpha, up_offset)
        return gated.packed_clamped_gradients(dy, gate_up, numbers, interleaved)


# --- a gated MLP ---


class Activation(Protocol):
    """What a backend supplies."""

    def product(self, gate: Tensor, up: Tensor, activation: str) -> Tensor:
        """act(gate) * up."""

    def gradients(
        self, dproduct: Tensor, gate: Tensor, up: Tensor, activation: str
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of gate and up, and the product, which may stand in ``dproduct``."""


Columns = tuple[Optional[Tensor], Optional[Tensor]]
"""Scales of the rows of gate's and up's weight, by which a gradient is multiplied before it is
coded; None: no codes."""


class CodedGradients(NamedTuple):
    """Gradients of a gated activation, empty where they are not wanted, and their codes.

    Attributes:
        dgate: Of gate.
        dup: Of up.
        product: act(gate) * up; what was given as its gradient where that is not wanted.
        dgate_rows: Of gate, times the numbers of columns.
        dup_rows: Of up, times the numbers of columns.
    """

    dgate: Tensor
    dup: Tensor
    product: Tensor
    dgate_rows: Optional[Float8Rows]
    dup_rows: Optional[Float8Rows]


class CodedActivation(Activation, Protocol):
    """The same for an MLP whose weights may be held in FP8."""

    def coded(
        self, gate: Tensor, up: Tensor, activation: str, wanted: bool
    ) -> tuple[Tensor, Float8Rows]:
        """act(gate) * up where it is wanted, and its rows in FP8."""

    def coded_gradients(
        self, dproduct: Tensor, gate: Tensor, up: Tensor, activation: str, columns: Columns,
        wanted: tuple[bool, bool], product: bool,
    ) -> CodedGradients:  # fmt: skip
        """The gradients where they are wanted, and codes of those with numbers per column.

        All are rows. The product, if it is wanted, may stand in ``dproduct``.
        """


class ReferenceActivation:
    """The activation in plain PyTorch."""

    @staticmethod
    def coded(gate: Tensor, up: Tensor, activation: str, wanted: bool) -> tuple[Tensor, Float8Rows]:
        """act(gate) * up where it is wanted, and its rows in FP8."""
        y = gated.forward(gate, up, activation)
        return y if wanted else y.new_empty(0), rows_of(y, None, PLAIN)

    @staticmethod
    def coded_gradients(
        dproduct: Tensor, gate: Tensor, up: Tensor, activation: str, columns: Columns,
        wanted: tuple[bool, bool], product: bool,
    ) -> CodedGradients:  # fmt: skip
        """The gradients where they are wanted, and codes of those with numbers per column."""
        if product:
            *made, dproduct = gated.gradients_and_product(dproduct, gate, up, activation)
        else:
            needs = [w or c is not None for w, c in zip(wanted, columns, strict=True)]
            made = list(gated.backward(dproduct, gate, up, activation, needs[0], needs[1]))
        pairs = zip(made, columns, strict=True)
        codes = [None if c is None else rows_of(grad, c, PLAIN) for grad, c in pairs]
        kept = [g if w else g.new_empty(0) for g, w in zip(made, wanted, strict=True)]
        return CodedGradients(kept[0], kept[1], dproduct, *codes)

    product = staticmethod(gated.forward)
    gradients = staticmethod(gated.gradients_and_product)


def implement_gated_mlp(kernels: Activation) -> tuple[Callable[..., Any], Callable[..., Any]]:
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
        dgate, dup, product = kernels.gradients(matmul(upstream, down_weight), *inner, activation)
        ddown_weight = _product(upstream, product, needs_down_weight)
        del product
        dgate_weight = _product(dgate, x, needs_gate_weight)
        dup_weight = _product(dup, x, needs_up_weight)
        dx = gate.new_empty(0)
        if needs_x and gate_weight is not None and up_weight is not None:
            dx = matmul(dup, up_weight, matmul(dgate, gate_weight))
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


gated_mlp = Implementation(*implement_gated_mlp(ReferenceActivation()))


# --- a linear layer ---


class Linear:
    """A linear layer, ``y = x W' + b``; every GEMM is PyTorch's, or one of independent rows."""

    @staticmethod
    def forward(
        x: Tensor, weight: Tensor, bias: Optional[Tensor], needs_x: bool, needs_weight: bool
    ) -> Tensor:
        """X weight' + bias."""
        return _dense(linear(x, weight, bias))

    @staticmethod
    def backward(
        dy: Tensor, x: Optional[Tensor], weight: Optional[Tensor], needs_x: bool,
        needs_weight: bool, needs_bias: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Gradients of x, weight and bias; one that nobody needs is an empty tensor."""
        upstream, dx = as_rows(dy), dy.new_empty(0)
        if needs_x and weight is not None:
            dx = matmul(upstream, weight).view(*dy.shape[:-1], weight.shape[1])
        return dx, _product(upstream, x, needs_weight), _sum(upstream, needs_bias)


# --- squared ReLU ---

relu_squared = Implementation(
    *pointwise(value=lambda x: torch.square(torch.relu(x)), slope=lambda x: torch.relu(x) * 2)
)


OPERATORS = {
    "swiglu": SwiGLU,
    "swiglu_quantized": with_codes(SwiGLU),
    "swiglu_packed": PackedSwiGLU,
    "geglu": GEGLU,
    "geglu_quantized": with_codes(GEGLU),
    "geglu_packed": PackedGEGLU,
    "swiglu_clamped": ClampedSwiGLU,
    "swiglu_clamped_packed": PackedClampedSwiGLU,
    "gated_mlp": gated_mlp,
    "linear": Linear,
    "relu_squared": relu_squared,
}
