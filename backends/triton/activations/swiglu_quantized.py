"""SwiGLU whose rows leave in FP8 too; the kernel stands in gated_rows.py."""

from torch import Tensor

from liger_multi.backends.triton.activations import gated_rows, swiglu
from liger_multi.backends.triton.activations.gated import multipliers
from liger_multi.backends.triton.float8.rows import code_buffers


def forward(
    gate: Tensor, up: Tensor, gate_multiplier: float, down_multiplier: float, writes_y: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """silu(gate) * up where it is needed, its codes and scales."""
    factors = multipliers(gate_multiplier, down_multiplier)
    return gated_rows.forward("swiglu", "silu", gate, up, factors, code_buffers(gate, writes_y))


backward = swiglu.backward
