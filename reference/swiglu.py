"""SwiGLU, ``y = silu(gate) * up``; the activation is rounded to the dtype of ``gate`` first."""

import torch
from torch import Tensor

from liger_multi.reference.chunking import as_rows, row_blocks, statistics_dtype


def forward(gate: Tensor, up: Tensor) -> Tensor:
    """One product of two tensors; silu computes in fp32 inside."""
    return (torch.nn.functional.silu(gate) * up).contiguous()


def backward(
    dy: Tensor, gate: Tensor, up: Tensor, needs_gate: bool, needs_up: bool
) -> tuple[Tensor, Tensor]:
    """``dgate = dy up s (1 + gate (1 - s))``, ``dup = dy silu(gate)``, ``s = sigmoid(gate)``."""
    dgate = (
        torch.empty_like(gate, memory_format=torch.contiguous_format)
        if needs_gate
        else gate.new_empty(0)
    )
    dup = (
        torch.empty_like(up, memory_format=torch.contiguous_format) if needs_up else up.new_empty(0)
    )
    gradients_into(dgate if needs_gate else None, dup if needs_up else None, dy, gate, up)
    return dgate, dup


def gradients_into(
    dgate: Tensor | None, dup: Tensor | None, dy: Tensor, gate: Tensor, up: Tensor
) -> None:
    """Write the wanted gradients, block by block of rows."""
    kind = statistics_dtype(gate.dtype)
    gates, ups, dys = as_rows(gate), as_rows(up), as_rows(dy)
    for block in row_blocks(gates.shape[0], 4 * gates.shape[1] * kind.itemsize):
        g, d = gates[block].to(kind), dys[block].to(kind)
        s = torch.sigmoid(g)
        if dgate is not None:
            as_rows(dgate)[block] = (d * ups[block].to(kind) * s * (1 + g * (1 - s))).to(gate.dtype)
        if dup is not None:
            as_rows(dup)[block] = (d * (g * s).to(gate.dtype)).to(up.dtype)
