"""SwiGLU of one tensor: npu_swiglu and its backward; with multipliers, an Ascend kernel."""

import torch
from torch import Tensor

from liger_multi.backends.npu.activations.gated import packed_gated, packed_gated_gradients
from liger_multi.backends.npu.common.limits import packed_gates


def forward(gate_up: Tensor, gate_multiplier: float, down_multiplier: float) -> Tensor:
    """silu(first half) * second half."""
    multipliers = (gate_multiplier, down_multiplier)
    if multipliers == (1.0, 1.0) and packed_gates(gate_up) is None:
        return torch.ops.npu.npu_swiglu(gate_up.contiguous(), -1)
    return packed_gated("silu", gate_up, multipliers)


def backward(dy: Tensor, gate_up: Tensor, gate_multiplier: float, down_multiplier: float) -> Tensor:
    """Gradients of both halves, side by side."""
    multipliers = (gate_multiplier, down_multiplier)
    if multipliers == (1.0, 1.0) and packed_gates(gate_up) is None:
        return torch.ops.npu.npu_swiglu_backward(dy.contiguous(), gate_up.contiguous(), -1)
    return packed_gated_gradients("silu", dy, gate_up, multipliers)
