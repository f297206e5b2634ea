"""SwiGLU of one tensor that holds gate and up side by side in its last axis."""

import torch
from torch import Tensor

from liger_multi.reference import swiglu
from liger_multi.reference.chunking import as_rows


def forward(gate_up: Tensor) -> Tensor:
    """Gate is the first half of the last axis, up the second; neither is copied."""
    gate, up = gate_up.chunk(2, -1)
    return swiglu.forward(gate, up)


def backward(dy: Tensor, gate_up: Tensor) -> Tensor:
    """Both gradients side by side, written where a concatenation would copy them."""
    if torch.compiler.is_compiling():
        gate, up = gate_up.chunk(2, -1)
        return torch.cat(swiglu.gradients(dy, gate, up), -1)
    rows = as_rows(gate_up)
    packed = rows.new_empty(rows.shape)
    gate, up = rows.chunk(2, -1)
    dgate, dup = packed.chunk(2, -1)
    swiglu.gradients_into(dgate, dup, as_rows(dy), gate, up)
    return packed.view(gate_up.shape)
