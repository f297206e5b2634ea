"""Gated activations whose result leaves in FP8 too, with a scale per row.

The largest element of a row decides about its codes, so a program owns whole rows, where gated.py
gives it a piece. A row that is too wide for registers is written by the kernel of gated.py, and
rounded in a pass of its own.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_multi.backends.triton.activations import gated
from liger_multi.backends.triton.activations.gated import Multipliers, gated_product
from liger_multi.backends.triton.common.float8 import coded_rows
from liger_multi.backends.triton.common.launching import launch
from liger_multi.backends.triton.common.rows import (
    assume_cols,
    assume_rows,
    cdiv,
    empty_contiguous,
    round_to,
    with_stride,
)
from liger_multi.backends.triton.float8.rows import CodeRoom
from liger_multi.backends.triton.norms.row_config import forward_config
from liger_multi.dispatch.launch import launch_config


@triton.jit
def _gated_rows_forward_kernel(
    gate_ptr, up_ptr, y_ptr, codes_ptr, scale_ptr, gate_stride, up_stride, rows, cols,
    gate_multiplier, down_multiplier, ACTIVATION: tl.constexpr, BIAS: tl.constexpr,
    WRITES: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Gated activation of rows that fit into registers, and its codes.

    Program: ROWS whole rows; reads gate and up, writes codes and scales of y as it is rounded, and
    y where WRITES. BIAS is that of the FP8 format.
    """
    first = tl.program_id(0).to(tl.int64) * ROWS
    row = tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK)
    assume_rows(gate_ptr, gate_stride, ROWS)
    assume_rows(up_ptr, up_stride, ROWS)
    assume_cols(cols, BLOCK)
    row_mask = first + row < rows
    mask = row_mask[:, None] & (col < cols)[None, :]
    gate_offset = row[:, None] * gate_stride + col[None, :]
    up_offset = row[:, None] * up_stride + col[None, :]
    gate = tl.load(gate_ptr + first * gate_stride + gate_offset, mask=mask, other=0.0)
    up = tl.load(up_ptr + first * up_stride + up_offset, mask=mask, other=0.0).to(tl.float32)
    kind: tl.constexpr = gate_ptr.dtype.element_ty
    gate = gate.to(tl.float32)
    y = gated_product(gate, up, gate_multiplier, down_multiplier, kind, ACTIVATION)
    y = round_to(y, y_ptr.dtype.element_ty)
    y_offset = row[:, None] * cols + col[None, :]
    if WRITES:
        tl.store(y_ptr + first * cols + y_offset, y, mask=mask)
    code, scale = coded_rows(y.to(tl.float32), BIAS)
    tl.store(codes_ptr + first * cols + y_offset, code, mask=mask)
    tl.store(scale_ptr + first + row, scale, mask=row_mask)


def forward(
    op: str, activation: str, gate: Tensor, up: Tensor, by: Multipliers, room: CodeRoom
) -> tuple[Tensor, Tensor, Tensor]:
    """act(gate) * up where it is wanted, its codes and scales."""
    cols = gate.shape[-1]
    rows = gate.numel() // max(cols, 1)
    k = launch_config(f"{op}_quantized.forward", forward_config, gate.device, rows=rows, cols=cols)
    if k.block < cols or not gate.numel():
        y = gated.forward(op, activation, gate, up, by)
        room.fill(y)
        return room.made(y)
    dtype = torch.promote_types(gate.dtype, up.dtype)
    y = empty_contiguous(gate, dtype) if room.writes else gate.new_empty(0, dtype=dtype)
    (gate, gate_stride), (up, up_stride) = with_stride(gate), with_stride(up)
    launch(
        _gated_rows_forward_kernel, cdiv(rows, k.rows),
        (gate, up, y, room.codes, room.scale, gate_stride, up_stride, rows, cols, *by),
        (activation, room.bias, room.writes, k.rows, k.block), k.num_warps,
    )  # fmt: skip
    return room.made(y)
