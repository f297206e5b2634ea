"""SwiGLU of two tensors: silu(gate) * up (Shazeer 2020, arXiv:2002.05202).

silu is taken in fp32 and rounded to gate's dtype once before the product, as the Hugging Face MLP
does. With s = sigmoid(gate):

    dup = dy * silu(gate),  dgate = dy * up * s * (1 + gate * (1 - s))

A program takes one piece of one row; contiguous tensors are one long row. Nothing is kept for
backward but the inputs. Rows may have any stride, so the halves of a packed tensor need no copy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_multi.backends.triton.common import as_rows, cdiv, power_of_2, round_to, sigmoid, warps
from liger_multi.backends.triton.launching import launch
from liger_multi.launch import DeviceInfo, knobs


@dataclass(frozen=True)
class TileKnobs:
    """``block`` columns of one row a program."""

    block: int
    num_warps: int


def tile_knobs(info: DeviceInfo, rows: int, cols: int) -> TileKnobs:
    """1024 columns, 8 of them a thread: one 16-byte access of a 16-bit dtype."""
    block = max(16, min(1024, power_of_2(cols)))
    return TileKnobs(block, warps(block // 8, info.warp_size))


@triton.jit
def _swiglu_forward_kernel(
    gate_ptr, up_ptr, y_ptr, gate_stride, up_stride, y_stride, cols, tiles, BLOCK: tl.constexpr
):
    row = (tl.program_id(0) // tiles).to(tl.int64)
    col = (tl.program_id(0) % tiles) * BLOCK + tl.arange(0, BLOCK)
    mask = col < cols
    gate = tl.load(gate_ptr + row * gate_stride + col, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + col, mask=mask, other=0.0).to(tl.float32)
    silu = round_to(gate * sigmoid(gate), gate_ptr.dtype.element_ty).to(tl.float32)
    y = round_to(silu * up, y_ptr.dtype.element_ty)
    tl.store(y_ptr + row * y_stride + col, y, mask=mask)


@triton.jit
def _swiglu_backward_kernel(
    dy_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr, dy_stride, gate_stride, up_stride, out_stride,
    cols, tiles, BLOCK: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) // tiles).to(tl.int64)
    col = (tl.program_id(0) % tiles) * BLOCK + tl.arange(0, BLOCK)
    mask = col < cols
    dy = tl.load(dy_ptr + row * dy_stride + col, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * gate_stride + col, mask=mask, other=0.0).to(tl.float32)
    s = sigmoid(gate)
    if dup_ptr is not None:
        silu = round_to(gate * s, gate_ptr.dtype.element_ty).to(tl.float32)
        dup = round_to(dy * silu, dup_ptr.dtype.element_ty)
        tl.store(dup_ptr + row * out_stride + col, dup, mask=mask)
    if dgate_ptr is not None:
        up = tl.load(up_ptr + row * up_stride + col, mask=mask, other=0.0).to(tl.float32)
        dgate = dy * up * (s * (1.0 + gate * (1.0 - s)))
        dgate = round_to(dgate, dgate_ptr.dtype.element_ty)
        tl.store(dgate_ptr + row * out_stride + col, dgate, mask=mask)


def flatten(*tensors: Tensor) -> list[Tensor]:
    """View tensors of one shape as one long row where all are contiguous, else as rows."""
    # column indices are 32 bits wide and run past the end by less than one block
    if all(t.is_contiguous() for t in tensors) and tensors[0].numel() < 2**31 - 2**16:
        return [t.view(1, -1) for t in tensors]
    return [as_rows(t) for t in tensors]


def launch_forward(gate: Tensor, up: Tensor, y: Tensor) -> None:
    """Write y; all three are (rows, cols) with adjacent columns."""
    rows, cols = y.shape
    k = knobs("swiglu.forward", tile_knobs, y.device, rows=rows, cols=cols)
    tiles = cdiv(cols, k.block)
    launch(
        _swiglu_forward_kernel, rows * tiles,
        (gate, up, y, gate.stride(0), up.stride(0), y.stride(0), cols, tiles),
        (k.block,), k.num_warps,
    )  # fmt: skip


def launch_backward(
    dy: Tensor, gate: Tensor, up: Tensor, dgate: Optional[Tensor], dup: Optional[Tensor]
) -> None:
    """Write dgate and dup, which have one row stride; None skips one of them."""
    rows, cols = dy.shape
    k = knobs("swiglu.backward", tile_knobs, dy.device, rows=rows, cols=cols)
    tiles = cdiv(cols, k.block)
    out = dup if dgate is None else dgate
    assert out is not None
    strides = (dy.stride(0), gate.stride(0), up.stride(0), out.stride(0))
    launch(
        _swiglu_backward_kernel, rows * tiles, (dy, gate, up, dgate, dup, *strides, cols, tiles),
        (k.block,), k.num_warps,
    )  # fmt: skip


def forward(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up in the promoted dtype."""
    dtype = torch.promote_types(gate.dtype, up.dtype)
    y = gate.new_empty(gate.shape, dtype=dtype)
    if y.numel():
        launch_forward(*flatten(gate, up, y))
    return y


def backward(
    dy: Tensor, gate: Tensor, up: Tensor, needs_gate: bool, needs_up: bool
) -> tuple[Tensor, Tensor]:
    """Gradients of gate and up; one that nobody needs is an empty tensor."""
    dgate = gate.new_empty(gate.shape if needs_gate else 0)
    dup = up.new_empty(up.shape if needs_up else 0)
    wanted = [t for t, needed in ((dgate, needs_gate), (dup, needs_up)) if needed]
    if wanted and dy.numel():
        dy, gate, up, first, last = flatten(dy, gate, up, wanted[0], wanted[-1])
        launch_backward(dy, gate, up, first if needs_gate else None, last if needs_up else None)
    return dgate, dup
