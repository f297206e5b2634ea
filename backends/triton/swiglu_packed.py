"""SwiGLU of one tensor that holds gate and up side by side on its last axis (Phi-3's layout).

The kernels are those of two tensors (see swiglu.py): the halves are strided views, never copies.
"""

from __future__ import annotations

import torch
from torch import Tensor

from liger_multi.backends.triton.common import as_rows
from liger_multi.backends.triton.swiglu import launch_backward, launch_forward


def forward(gate_up: Tensor) -> Tensor:
    """silu(first half) * second half."""
    half = gate_up.shape[-1] // 2
    y = torch.empty((*gate_up.shape[:-1], half), dtype=gate_up.dtype, device=gate_up.device)
    if y.numel():
        packed = as_rows(gate_up)
        launch_forward(packed[:, :half], packed[:, half:], as_rows(y))
    return y


def backward(dy: Tensor, gate_up: Tensor) -> Tensor:
    """Gradient of gate_up, both halves in one buffer."""
    half = gate_up.shape[-1] // 2
    dgate_up = torch.empty(gate_up.shape, dtype=gate_up.dtype, device=gate_up.device)
    if dy.numel():
        packed, out = as_rows(gate_up), as_rows(dgate_up)
        launch_backward(
            as_rows(dy), packed[:, :half], packed[:, half:], out[:, :half], out[:, half:]
        )
    return dgate_up
