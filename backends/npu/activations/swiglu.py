"""SwiGLU of two tensors: an Ascend kernel, since npu_swiglu would need both in one."""

from torch import Tensor

from liger_multi.backends.npu.activations.gated import gated, gated_gradients


def forward(gate: Tensor, up: Tensor, gate_multiplier: float, down_multiplier: float) -> Tensor:
    """silu(gate) * up."""
    return gated("silu", gate, up, (gate_multiplier, down_multiplier))


def backward(
    dy: Tensor,
    gate: Tensor,
    up: Tensor,
    gate_multiplier: float,
    down_multiplier: float,
    needs_gate: bool,
    needs_up: bool,
) -> tuple[Tensor, Tensor]:
    """Gradients of gate and up."""
    multipliers = (gate_multiplier, down_multiplier)
    return gated_gradients("silu", dy, gate, up, needs_gate, needs_up, multipliers)
