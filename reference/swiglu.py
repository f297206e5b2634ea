"""SwiGLU, ``y = silu(gate) * up``; the activation is rounded to the dtype of ``gate`` first."""

import torch
from torch import Tensor

from liger_multi.reference.chunking import as_rows, row_blocks, statistics_dtype


def forward(gate: Tensor, up: Tensor) -> Tensor:
    """One product of two tensors; silu computes in fp32 inside."""
    y = torch.nn.functional.silu(gate) * up
    return y if y.is_contiguous() else y.contiguous()


def backward(
    dy: Tensor, gate: Tensor, up: Tensor, needs_gate: bool, needs_up: bool
) -> tuple[Tensor, Tensor]:
    """Both gradients, block by block of rows; in one piece where a compiler fuses them."""
    if torch.compiler.is_compiling():
        dgate, dup = gradients(dy, gate, up)
        dgate, dup = dgate.contiguous(), dup.contiguous()
        return (dgate if needs_gate else gate.new_empty(0), dup if needs_up else up.new_empty(0))
    dgate = gate.new_empty(gate.shape if needs_gate else (0,))
    dup = up.new_empty(up.shape if needs_up else (0,))
    gradients_into(dgate if needs_gate else None, dup if needs_up else None, dy, gate, up)
    return dgate, dup


def gradients(dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """``dgate = dy up s (1 + gate (1 - s))``, ``dup = dy silu(gate)``, ``s = sigmoid(gate)``."""
    kind = statistics_dtype(gate.dtype)
    g, d = gate.to(kind), dy.to(kind)
    s = torch.sigmoid(g)
    dgate = (d * up.to(kind) * s * (1 + g * (1 - s))).to(gate.dtype)
    return dgate, (d * (g * s).to(gate.dtype)).to(up.dtype)


def gradients_into(
    dgate: Tensor | None, dup: Tensor | None, dy: Tensor, gate: Tensor, up: Tensor
) -> None:
    """Write the wanted gradients, block by block of rows."""
    gates, ups, dys = as_rows(gate), as_rows(up), as_rows(dy)
    row_bytes = 4 * gates.shape[1] * statistics_dtype(gate.dtype).itemsize
    for block in row_blocks(gates.shape[0], row_bytes):
        made = gradients(dys[block], gates[block], ups[block])
        for room, part in zip((dgate, dup), made, strict=True):
            if room is not None:
                as_rows(room)[block] = part
