"""Gated activations, ``y = act(gate) * up``: silu, gelu, and gelu by tanh.

All three are ``act(x) = x p(x)``: ``p`` is the sigmoid for silu, the normal distribution for gelu,
and ``sigmoid(2 u)``, which is ``(1 + tanh(u)) / 2``, for its approximation. The activation is
rounded to the dtype of ``gate`` before the product.
"""

import math

import torch
from torch import Tensor

from liger_multi.reference.chunking import as_rows, row_blocks, statistics_dtype

GELU = {"tanh": "gelu_tanh", "none": "gelu"}  # by the argument ``approximate``


def activate(gate: Tensor, activation: str) -> Tensor:
    """The activation in the dtype of ``gate``; PyTorch computes it in fp32 inside."""
    if activation == "silu":
        return torch.nn.functional.silu(gate)
    by = "tanh" if activation == "gelu_tanh" else "none"
    return torch.nn.functional.gelu(gate, approximate=by)


def share(x: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """``p(x)`` and its derivative."""
    if activation == "gelu":
        density = torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
        return 0.5 * (1 + torch.erf(x * math.sqrt(0.5))), density
    if activation == "silu":
        p = torch.sigmoid(x)
        return p, p * (1 - p)
    # p is 0 or 1 where the clamp holds; without it, 0 * inf is NaN from |x| = 1e13 on
    square = (x * x).clamp(max=100.0)
    p = torch.sigmoid(math.sqrt(8 / math.pi) * x * (1 + 0.044715 * square))
    return p, p * (1 - p) * (math.sqrt(8 / math.pi) * (1 + 3 * 0.044715 * square))


def forward(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """One product of two tensors."""
    y = activate(gate, activation) * up
    return y if y.is_contiguous() else y.contiguous()


def backward(
    dy: Tensor, gate: Tensor, up: Tensor, activation: str, needs_gate: bool, needs_up: bool
) -> tuple[Tensor, Tensor]:
    """Both gradients, block by block of rows; in one piece where a compiler fuses them."""
    if torch.compiler.is_compiling():
        dgate, dup = gradients(dy, gate, up, activation)
        dgate, dup = dgate.contiguous(), dup.contiguous()
        return (dgate if needs_gate else gate.new_empty(0), dup if needs_up else up.new_empty(0))
    dgate = gate.new_empty(gate.shape if needs_gate else (0,))
    dup = up.new_empty(up.shape if needs_up else (0,))
    rooms = (dgate if needs_gate else None, dup if needs_up else None)
    gradients_into(*rooms, dy, gate, up, activation)
    return dgate, dup


def gradients(dy: Tensor, gate: Tensor, up: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """``dgate = dy up (p + gate p')``, ``dup = dy (gate p)``."""
    kind = statistics_dtype(gate.dtype)
    g, d = gate.to(kind), dy.to(kind)
    p, slope = share(g, activation)
    dgate = (d * up.to(kind) * (p + g * slope)).to(gate.dtype)
    return dgate, (d * (g * p).to(gate.dtype)).to(up.dtype)


def gradients_into(
    dgate: Tensor | None, dup: Tensor | None, dy: Tensor, gate: Tensor, up: Tensor, activation: str
) -> None:
    """Write the wanted gradients, block by block of rows."""
    gates, ups, dys = as_rows(gate), as_rows(up), as_rows(dy)
    row_bytes = 4 * gates.shape[1] * statistics_dtype(gate.dtype).itemsize
    for block in row_blocks(gates.shape[0], row_bytes):
        made = gradients(dys[block], gates[block], ups[block], activation)
        for room, part in zip((dgate, dup), made, strict=True):
            if room is not None:
                as_rows(room)[block] = part


def packed_forward(gate_up: Tensor, activation: str) -> Tensor:
    """Gate is the first half of the last axis, up the second; neither is copied."""
    gate, up = gate_up.chunk(2, -1)
    return forward(gate, up, activation)


def packed_backward(dy: Tensor, gate_up: Tensor, activation: str) -> Tensor:
    """Both gradients side by side, written where a concatenation would copy them."""
    if torch.compiler.is_compiling():
        gate, up = gate_up.chunk(2, -1)
        return torch.cat(gradients(dy, gate, up, activation), -1)
    rows = as_rows(gate_up)
    packed = rows.new_empty(rows.shape)
    gate, up = rows.chunk(2, -1)
    dgate, dup = packed.chunk(2, -1)
    gradients_into(dgate, dup, as_rows(dy), gate, up, activation)
    return packed.view(gate_up.shape)
