"""SwiGLU of two tensors: silu(gate) * up; the kernels stand in gated.py."""

from __future__ import annotations

from torch import Tensor

from liger_multi.backends.triton import gated


def forward(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up in the promoted dtype."""
    return gated.forward("swiglu", "silu", gate, up)


def backward(
    dy: Tensor, gate: Tensor, up: Tensor, needs_gate: bool, needs_up: bool
) -> tuple[Tensor, Tensor]:
    """Gradients of gate and up; one that nobody needs is an empty tensor."""
    return gated.backward("swiglu", "silu", dy, gate, up, needs_gate, needs_up)
