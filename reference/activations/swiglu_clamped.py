"""Clamped SwiGLU of two tensors; see :mod:`liger_multi.reference.activations.gated`."""

from torch import Tensor

from liger_multi.reference.activations import gated


def forward(gate: Tensor, up: Tensor, limit: float, alpha: float, up_offset: float) -> Tensor:
    """(up + offset) * gate * sigmoid(alpha * gate) of clamped values."""
    return gated.clamped_product(gate, up, (limit, alpha, up_offset))


def backward(
    dy: Tensor,
    gate: Tensor,
    up: Tensor,
    limit: float,
    alpha: float,
    up_offset: float,
    needs_gate: bool,
    needs_up: bool,
) -> tuple[Tensor, Tensor]:
    """Gradients of gate and up."""
    dgate, dup = gated.clamped_gradients(dy, gate, up, (limit, alpha, up_offset))
    return (
        dgate.contiguous() if needs_gate else gate.new_empty(0),
        dup.contiguous() if needs_up else up.new_empty(0),
    )
