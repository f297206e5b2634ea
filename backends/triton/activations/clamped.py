"""Clamped SwiGLU, y = (clamp(up, -l, l) + o) * g * sigmoid(a * g), g = min(gate, l) (GPT-OSS).

With p = sigmoid(a * g), and no gradient where a clamp holds a value:

    dgate = dy * (up + o) * (p + a * g * p * (1 - p)),  dup = dy * g * p

Tiled as :mod:`.gated` is. Gate and up are two tensors, or one whose last axis holds one after the
other, or both interleaved. An interleaved piece is loaded whole and split in registers. limit,
alpha and offset are run-time numbers.
"""

from __future__ import annotations

from typing import Optional

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_multi.backends.triton.activations.gated import flatten, tile_config
from liger_multi.backends.triton.common.launching import launch
from liger_multi.backends.triton.common.rows import (
    as_rows,
    assume_cols,
    cdiv,
    checked_cols,
    round_to,
    sigmoid,
)
from liger_multi.dispatch.launch import launch_config

Numbers = tuple[float, float, float]  # limit, alpha, offset


@triton.jit
def _load_both(
    gate_ptr, up_ptr, start, cols, INTERLEAVED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Gate and up of BLOCK columns of a row, in fp32.

    INTERLEAVED: they alternate behind ``gate_ptr``; one contiguous load is split in registers.
    """
    if INTERLEAVED:
        first = 2 * start
        assume_cols(first)
        at = first + tl.arange(0, 2 * BLOCK)
        both = tl.load(gate_ptr + at, mask=at < 2 * cols, other=0.0).to(tl.float32)
        return tl.split(tl.reshape(both, [BLOCK, 2]))
    else:
        col = start + tl.arange(0, BLOCK)
        gate = tl.load(gate_ptr + col, mask=col < cols, other=0.0).to(tl.float32)
        up = tl.load(up_ptr + col, mask=col < cols, other=0.0).to(tl.float32)
        return gate, up


@triton.jit
def _clamped_forward_kernel(
    gate_ptr, up_ptr, y_ptr, gate_stride, up_stride, y_stride, cols, tiles, limit, alpha, offset,
    INTERLEAVED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Clamped SwiGLU of one piece of a row.

    Program: BLOCK columns of one row; reads gate and up, writes y. The activation is rounded to the
    dtype of gate before the multiplication, as in Hugging Face.
    """
    row = (tl.program_id(0) // tiles).to(tl.int64)
    start = (tl.program_id(0) % tiles) * BLOCK
    assume_cols(start)
    gate_ptr += row * gate_stride
    up_ptr += row * up_stride
    gate, up = _load_both(gate_ptr, up_ptr, start, cols, INTERLEAVED, BLOCK)
    # comparisons, since a minimum would lose a NaN
    gate = tl.where(gate > limit, limit, gate)
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    act = round_to(gate * sigmoid(gate * alpha), gate_ptr.dtype.element_ty).to(tl.float32)
    y = round_to(act * (up + offset), y_ptr.dtype.element_ty)
    col = start + tl.arange(0, BLOCK)
    tl.store(y_ptr + row * y_stride + col, y, mask=col < cols)


@triton.jit
def _clamped_backward_kernel(
    dy_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr, dy_stride, gate_stride, up_stride, dgate_stride,
    dup_stride, cols, tiles, limit, alpha, offset, INTERLEAVED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Gradients of gate and up of one piece of a row.

    Program: BLOCK columns of one row; reads dy, gate and up, writes dgate and dup where they are
    wanted. INTERLEAVED: both are joined in registers and leave in one contiguous store.
    """
    row = (tl.program_id(0) // tiles).to(tl.int64)
    start = (tl.program_id(0) % tiles) * BLOCK
    assume_cols(start)
    col = start + tl.arange(0, BLOCK)
    dy = tl.load(dy_ptr + row * dy_stride + col, mask=col < cols, other=0.0).to(tl.float32)
    gate_ptr += row * gate_stride
    up_ptr += row * up_stride
    gate, up = _load_both(gate_ptr, up_ptr, start, cols, INTERLEAVED, BLOCK)
    g = tl.where(gate > limit, limit, gate)
    p = sigmoid(g * alpha)
    act = round_to(g * p, gate_ptr.dtype.element_ty).to(tl.float32)
    dup = tl.where((up > limit) | (up < -limit), 0.0, dy * act)
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    dgate = dy * (up + offset) * (p + alpha * g * p * (1.0 - p))
    dgate = tl.where(gate > limit, 0.0, dgate)
    if INTERLEAVED:
        both = tl.reshape(tl.join(dgate, dup), [2 * BLOCK])
        first = 2 * start
        assume_cols(first)
        at = first + tl.arange(0, 2 * BLOCK)
        both = round_to(both, dgate_ptr.dtype.element_ty)
        tl.store(dgate_ptr + row * dgate_stride + at, both, mask=at < 2 * cols)
    else:
        if dgate_ptr is not None:
            dgate = round_to(dgate, dgate_ptr.dtype.element_ty)
            tl.store(dgate_ptr + row * dgate_stride + col, dgate, mask=col < cols)
        if dup_ptr is not None:
            dup = round_to(dup, dup_ptr.dtype.element_ty)
            tl.store(dup_ptr + row * dup_stride + col, dup, mask=col < cols)


def _launch(
    name: str, kernel: object, tensors: tuple[Optional[Tensor], ...], shape: tuple[int, ...],
    numbers: Numbers, interleaved: bool,
) -> None:  # fmt: skip
    """All tensors are rows with adjacent columns; interleaved ones have twice the columns."""
    some = next(t for t in tensors if t is not None)
    rows, cols = shape
    checked_cols(2 * cols if interleaved else cols)
    k = launch_config(name, tile_config, some.device, rows=rows, cols=cols)
    tiles = cdiv(cols, k.block)
    strides = [0 if t is None else t.stride(0) for t in tensors]
    launch(
        kernel, rows * tiles, (*tensors, *strides, cols, tiles, *numbers),
        (interleaved, k.block), k.num_warps,
    )  # fmt: skip


def forward(gate: Tensor, up: Tensor, numbers: Numbers) -> Tensor:
    """The result in the promoted dtype."""
    y = gate.new_empty(gate.shape, dtype=torch.promote_types(gate.dtype, up.dtype))
    if y.numel():
        gate, up, out = flatten(gate, up, y)
        name, shape = "swiglu_clamped.forward", out.shape
        _launch(name, _clamped_forward_kernel, (gate, up, out), shape, numbers, False)
    return y


def backward(
    dy: Tensor, gate: Tensor, up: Tensor, numbers: Numbers, needs_gate: bool, needs_up: bool
) -> tuple[Tensor, Tensor]:
    """Gradients of gate and up; one that nobody needs is an empty tensor."""
    dgate = gate.new_empty(gate.shape if needs_gate else 0)
    dup = up.new_empty(up.shape if needs_up else 0)
    wanted = [t for t, needed in ((dgate, needs_gate), (dup, needs_up)) if needed]
    if wanted and dy.numel():
        dy, gate, up, first, last = flatten(dy, gate, up, wanted[0], wanted[-1])
        tensors = (dy, gate, up, first if needs_gate else None, last if needs_up else None)
        name, shape = "swiglu_clamped.backward", dy.shape
        _launch(name, _clamped_backward_kernel, tensors, shape, numbers, False)
    return dgate, dup


def packed_forward(gate_up: Tensor, numbers: Numbers, interleaved: bool) -> Tensor:
    """The same of one tensor with both."""
    half = gate_up.shape[-1] // 2
    y = gate_up.new_empty((*gate_up.shape[:-1], half))
    if y.numel():
        packed, out = flatten(gate_up, y) if interleaved else (as_rows(gate_up), as_rows(y))
        gate, up = (packed, packed) if interleaved else (packed[:, :half], packed[:, half:])
        name, shape = "swiglu_clamped_packed.forward", out.shape
        _launch(name, _clamped_forward_kernel, (gate, up, out), shape, numbers, interleaved)
    return y


def packed_backward(dy: Tensor, gate_up: Tensor, numbers: Numbers, interleaved: bool) -> Tensor:
    """Gradient of gate_up in one buffer."""
    half = gate_up.shape[-1] // 2
    out = gate_up.new_empty(gate_up.shape)
    if dy.numel():
        tensors = [gate_up, out, dy]
        packed, made, dys = flatten(*tensors) if interleaved else [as_rows(t) for t in tensors]
        parts = (packed, packed, made, made)
        if not interleaved:
            parts = (packed[:, :half], packed[:, half:], made[:, :half], made[:, half:])
        name, shape = "swiglu_clamped_packed.backward", dys.shape
        _launch(name, _clamped_backward_kernel, (dys, *parts), shape, numbers, interleaved)
    return out
