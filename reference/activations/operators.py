"""Gated activations of two tensors, or of one that holds both.

The equations are in gated.py and clamped.py.
"""

from torch import Tensor

from liger_multi.reference.activations import clamped, gated
from liger_multi.reference.activations.gated import GELU


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
    """Clamped SwiGLU of two tensors; see :mod:`liger_multi.reference.activations.clamped`."""

    @staticmethod
    def forward(gate: Tensor, up: Tensor, limit: float, alpha: float, up_offset: float) -> Tensor:
        """(up + offset) * gate * sigmoid(alpha * gate) of clamped values."""
        return clamped.product(gate, up, (limit, alpha, up_offset))

    @staticmethod
    def backward(
        dy: Tensor, gate: Tensor, up: Tensor, limit: float, alpha: float, up_offset: float,
        needs_gate: bool, needs_up: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Gradients of gate and up."""
        dgate, dup = clamped.gradients(dy, gate, up, (limit, alpha, up_offset))
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
        return clamped.packed_product(gate_up, (limit, alpha, up_offset), interleaved)

    @staticmethod
    def backward(
        dy: Tensor, gate_up: Tensor, limit: float, alpha: float, up_offset: float, interleaved: bool
    ) -> Tensor:
        """Gradients of both, each in its place."""
        numbers = (limit, alpha, up_offset)
        return clamped.packed_gradients(dy, gate_up, numbers, interleaved)


OPERATORS = {
    "swiglu": SwiGLU,
    "swiglu_packed": PackedSwiGLU,
    "geglu": GEGLU,
    "geglu_packed": PackedGEGLU,
    "swiglu_clamped": ClampedSwiGLU,
    "swiglu_clamped_packed": PackedClampedSwiGLU,
}
