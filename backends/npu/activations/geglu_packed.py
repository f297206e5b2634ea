"""GEGLU of one tensor: npu_geglu forward, an Ascend kernel backward.

npu_geglu activates the right half unless told otherwise, and its gradient needs the activation,
which is not kept: the kernel recomputes it without a second tensor.
"""

import torch
from torch import Tensor

from liger_multi.backends.npu.activations.gated import packed_gated, packed_gated_gradients
from liger_multi.backends.npu.common.limits import packed_gates
from liger_multi.reference.activations.gated import GELU

APPROXIMATE = {"tanh": 1, "none": 0}


def forward(gate_up: Tensor, approximate: str) -> Tensor:
    """gelu(first half) * second half."""
    if packed_gates(gate_up) is None:
        y, _ = torch.ops.npu.npu_geglu(
            gate_up.contiguous(), -1, APPROXIMATE[approximate], activate_left=True
        )
        return y
    return packed_gated(GELU[approximate], gate_up)


def backward(dy: Tensor, gate_up: Tensor, approximate: str) -> Tensor:
    """Gradients of both halves, side by side."""
    return packed_gated_gradients(GELU[approximate], dy, gate_up)
