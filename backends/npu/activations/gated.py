"""Gated activations, y = act(gate) * up, of two tensors or of one, on vector cores.

act(x) = x p(x), with p the sigmoid for silu, the normal distribution for gelu and, for gelu by
tanh, sigmoid(2 u). A piece is one step of columns of one row; contiguous tensors are one long row.
torch_npu's operators want gate and up in one tensor: of two, they would need a copy.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_multi.backends.npu.common.launching import as_rows, block_of, flatten, jitted, start

ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "gelu": 2}


@triton.jit
def _share(x, ACTIVATION: tl.constexpr):
    """The factor p and its derivative."""
    if ACTIVATION == 2:
        p = 0.5 + 0.5 * tl.erf(x * 0.7071067811865476)
        return p, 0.3989422804014327 * tl.exp(-0.5 * x * x)
    if ACTIVATION == 1:
        near = tl.minimum(tl.maximum(x, -20.0), 20.0)  # p is 0 or 1 beyond; squares overflow
        p = tl.sigmoid(1.5957691216057308 * near * (1.0 + 0.044715 * near * near))
        return p, p * (1.0 - p) * 1.5957691216057308 * (1.0 + 0.134145 * near * near)
    p = tl.sigmoid(x)
    return p, p * (1.0 - p)


@jitted
def _gated_forward_kernel(
    gate_ptr,
    up_ptr,
    y_ptr,
    gate_stride,
    up_stride,
    y_stride,
    rows,
    cols,
    steps,
    gate_by,
    y_by,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Gated activation, piece by piece.

    Program: every num_programs-th piece of BLOCK columns of one row; reads gate and up, writes y.
    Gate times its multiplier, and the activation, are rounded to the dtype of gate, as in Hugging
    Face.
    """
    for piece in range(tl.program_id(0), rows * steps, tl.num_programs(0)):
        row = tl.cast(piece // steps, tl.int64)
        col = (piece % steps) * BLOCK + tl.arange(0, BLOCK)
        mask = col < cols
        gate = tl.load(gate_ptr + row * gate_stride + col, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(up_ptr + row * up_stride + col, mask=mask, other=0.0).to(tl.float32)
        gate = (gate * gate_by).to(gate_ptr.dtype.element_ty).to(tl.float32)
        p, _ = _share(gate, ACTIVATION)
        y = (gate * p).to(gate_ptr.dtype.element_ty).to(tl.float32) * up * y_by
        tl.store(y_ptr + row * y_stride + col, y.to(y_ptr.dtype.element_ty), mask=mask)


@jitted
def _gated_backward_kernel(
    dy_ptr,
    gate_ptr,
    up_ptr,
    dgate_ptr,
    dup_ptr,
    dy_stride,
    gate_stride,
    up_stride,
    dgate_stride,
    dup_stride,
    rows,
    cols,
    steps,
    gate_by,
    y_by,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Gradients of gate and up, piece by piece.

    Program: every num_programs-th piece of BLOCK columns of one row; reads dy, gate and up, writes
    dup and dgate where they are needed.
    """
    for piece in range(tl.program_id(0), rows * steps, tl.num_programs(0)):
        row = tl.cast(piece // steps, tl.int64)
        col = (piece % steps) * BLOCK + tl.arange(0, BLOCK)
        mask = col < cols
        dy = tl.load(dy_ptr + row * dy_stride + col, mask=mask, other=0.0).to(tl.float32) * y_by
        gate = tl.load(gate_ptr + row * gate_stride + col, mask=mask, other=0.0).to(tl.float32)
        gate = (gate * gate_by).to(gate_ptr.dtype.element_ty).to(tl.float32)
        p, slope = _share(gate, ACTIVATION)
        if dup_ptr is not None:
            dup = dy * (gate * p).to(gate_ptr.dtype.element_ty).to(tl.float32)
            tl.store(dup_ptr + row * dup_stride + col, dup.to(dup_ptr.dtype.element_ty), mask=mask)
        if dgate_ptr is not None:
            up = tl.load(up_ptr + row * up_stride + col, mask=mask, other=0.0).to(tl.float32)
            bent = p + tl.where(slope == 0.0, 0.0, gate * slope)  # gate may be infinite there
            dgate = (dy * up * bent * gate_by).to(dgate_ptr.dtype.element_ty)
            tl.store(dgate_ptr + row * dgate_stride + col, dgate, mask=mask)


def _forward_rows(
    activation: str, multipliers: tuple[float, float], gate: Tensor, up: Tensor, y: Tensor
) -> None:
    rows, cols = y.shape
    block = block_of("gated_forward", y, cols)
    steps = -(-cols // block)
    start(
        _gated_forward_kernel,
        rows * steps,
        gate,
        up,
        y,
        gate.stride(0),
        up.stride(0),
        y.stride(0),
        rows,
        cols,
        steps,
        *multipliers,
        ACTIVATION=ACTIVATIONS[activation],
        BLOCK=block,
    )


def _backward_rows(
    activation: str,
    multipliers: tuple[float, float],
    dy: Tensor,
    gate: Tensor,
    up: Tensor,
    dgate: Tensor | None,
    dup: Tensor | None,
) -> None:
    rows, cols = dy.shape
    block = block_of("gated_backward", dy, cols)
    steps = -(-cols // block)
    strides = [0 if t is None else t.stride(0) for t in (dy, gate, up, dgate, dup)]
    start(
        _gated_backward_kernel,
        rows * steps,
        dy,
        gate,
        up,
        dgate,
        dup,
        *strides,
        rows,
        cols,
        steps,
        *multipliers,
        ACTIVATION=ACTIVATIONS[activation],
        BLOCK=block,
    )


def gated(
    activation: str, gate: Tensor, up: Tensor, multipliers: tuple[float, float] = (1.0, 1.0)
) -> Tensor:
    """act(gate) * up in the promoted dtype; ``multipliers`` are those of gate and output."""
    y = gate.new_empty(gate.shape, dtype=torch.promote_types(gate.dtype, up.dtype))
    if y.numel():
        _forward_rows(activation, multipliers, *flatten(gate, up, y))
    return y


def gated_gradients(
    activation: str,
    dy: Tensor,
    gate: Tensor,
    up: Tensor,
    needs_gate: bool,
    needs_up: bool,
    multipliers: tuple[float, float] = (1.0, 1.0),
) -> tuple[Tensor, Tensor]:
    """Gradients of gate and up; empty tensors if not needed."""
    dgate = gate.new_empty(gate.shape if needs_gate else 0)
    dup = up.new_empty(up.shape if needs_up else 0)
    outputs = [t for t, is_needed in ((dgate, needs_gate), (dup, needs_up)) if is_needed]
    if outputs and dy.numel():
        dy, gate, up, first, last = flatten(dy, gate, up, outputs[0], outputs[-1])
        buffers = (first if needs_gate else None, last if needs_up else None)
        _backward_rows(activation, multipliers, dy, gate, up, *buffers)
    return dgate, dup


def packed_gated(
    activation: str, packed: Tensor, multipliers: tuple[float, float] = (1.0, 1.0)
) -> Tensor:
    """act(gate) * up of one tensor that holds both; they are strided views of it."""
    half = packed.shape[-1] // 2
    y = packed.new_empty((*packed.shape[:-1], half))
    if y.numel():
        packed2d = as_rows(packed)
        _forward_rows(activation, multipliers, packed2d[:, :half], packed2d[:, half:], as_rows(y))
    return y


def packed_gated_gradients(
    activation: str, dy: Tensor, packed: Tensor, multipliers: tuple[float, float] = (1.0, 1.0)
) -> Tensor:
    """Gradients of gate and up, in one tensor."""
    half = packed.shape[-1] // 2
    gradient = packed.new_empty(packed.shape)
    if dy.numel():
        packed2d, out = as_rows(packed), as_rows(gradient)
        halves = (packed2d[:, :half], packed2d[:, half:], out[:, :half], out[:, half:])
        _backward_rows(activation, multipliers, as_rows(dy), *halves)
    return gradient
