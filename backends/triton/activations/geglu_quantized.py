"""GEGLU whose rows leave in FP8 too; the kernel stands in gated_rows.py."""

from torch import Tensor

from liger_multi.backends.triton.activations import gated, gated_rows, geglu
from liger_multi.backends.triton.activations.gated import GELU
from liger_multi.backends.triton.float8.rows import code_buffers


def forward(
    gate: Tensor, up: Tensor, approximate: str, writes_y: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """gelu(gate) * up where it is needed, its codes and scales."""
    buffers = code_buffers(gate, writes_y)
    return gated_rows.forward("geglu", GELU[approximate], gate, up, gated.NONE, buffers)


backward = geglu.backward
