"""Gated activations, y = act(gate) * up: silu, gelu, and gelu by tanh (arXiv:2002.05202).

All three are act(x) = x p(x), with p the sigmoid for silu, the normal distribution for gelu, and
sigmoid(2 u) = (1 + tanh(u)) / 2 for its approximation. act is computed in fp32 and rounded to
gate's dtype once before the multiplication, as the Hugging Face MLPs do:

    dup = dy * act(gate),  dgate = dy * up * (p(gate) + gate * p'(gate))

A program owns one piece of one row; contiguous tensors are one long row. Nothing is kept for
backward but the inputs. Rows may have any stride, so gate and up of a packed tensor need no copy.
Multipliers of gate, before the activation, and of y are run-time numbers. Without one (None), the
compiled kernel has no trace of it.

Clamped SwiGLU, y = (clamp(up, -l, l) + o) * g * sigmoid(a * g), g = min(gate, l) (GPT-OSS), is
tiled in the same way. With p = sigmoid(a * g), and no gradient where a clamp holds a value:

    dgate = dy * (up + o) * (p + a * g * p * (1 - p)),  dup = dy * g * p

Its gate and up are two tensors, or one whose last axis holds one after the other, or both
interleaved. An interleaved piece is loaded whole and split in registers. limit, alpha and offset
are run-time numbers.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_multi.backends.triton.common.launching import launch
from liger_multi.backends.triton.common.rows import (
    LOG2E,
    LONGEST_ROW,
    above,
    as_rows,
    assume_cols,
    cdiv,
    checked_cols,
    empty_contiguous,
    power_of_2,
    round_to,
    sigmoid,
    warps,
)
from liger_multi.dispatch.launch import DeviceInfo, launch_config

GELU = {"tanh": "gelu_tanh", "none": "gelu"}  # keys are values of the argument ``approximate``
CUBIC: tl.constexpr = tl.constexpr(0.044715)
SQRT_8_PI: tl.constexpr = tl.constexpr(1.5957691216057308)
SQRT_1_2: tl.constexpr = tl.constexpr(0.7071067811865476)
SQRT_1_2PI: tl.constexpr = tl.constexpr(0.3989422804014327)


@dataclass(frozen=True)
class TileConfig:
    """``block`` columns of one row a program."""

    block: int
    num_warps: int


def tile_config(info: DeviceInfo, rows: int, cols: int) -> TileConfig:
    """1024 columns, 8 of them a thread: one 16-byte access of a 16-bit dtype."""
    block = max(16, min(1024, power_of_2(checked_cols(cols))))
    return TileConfig(block, warps(block // 8, info.warp_size))


@triton.jit
def _share(x, ACTIVATION: tl.constexpr):
    """The factor p(x) of act(x) = x p(x), in fp32.

    For gelu by tanh, x^2 ends at 100, where p is 0 or 1, so that no infinity arises.
    """
    if ACTIVATION == "silu":
        return sigmoid(x)
    elif ACTIVATION == "gelu":
        return 0.5 + 0.5 * tl.erf(x * SQRT_1_2)
    else:
        return sigmoid(x * SQRT_8_PI * (1.0 + tl.minimum(x * x, 100.0) * CUBIC))


@triton.jit
def _slope(x, p, ACTIVATION: tl.constexpr):
    """The derivative of p at x, given p."""
    if ACTIVATION == "silu":
        return p * (1.0 - p)
    elif ACTIVATION == "gelu":
        return tl.exp2(x * x * (-0.5 * LOG2E)) * SQRT_1_2PI
    else:
        # from |x| = 10 on p is 0 or 1; an infinite square would make NaN of 0 * inf
        square = tl.minimum(x * x, 100.0)
        return p * (1.0 - p) * (1.0 + square * (3.0 * CUBIC)) * SQRT_8_PI


@triton.jit
def gated_product(
    gate, up, gate_multiplier, down_multiplier, DTYPE: tl.constexpr, ACTIVATION: tl.constexpr
):
    """act(gate) * up in fp32; the activation is rounded to DTYPE, that of gate."""
    if gate_multiplier is not None:
        gate = round_to(gate * gate_multiplier, DTYPE).to(tl.float32)
    y = round_to(gate * _share(gate, ACTIVATION), DTYPE).to(tl.float32) * up
    if down_multiplier is not None:
        y *= down_multiplier
    return y


@triton.jit
def gated_gradients(
    dy, gate, up, gate_multiplier, down_multiplier, DTYPE: tl.constexpr, ACTIVATION: tl.constexpr
):
    """The gradients of gate and up, and act(gate), in fp32; act is rounded to DTYPE, gate's own.

    dy, gate and up are in fp32. What is not used of the three costs nothing.
    """
    if gate_multiplier is not None:
        gate = round_to(gate * gate_multiplier, DTYPE).to(tl.float32)
    if down_multiplier is not None:
        dy *= down_multiplier
    p = _share(gate, ACTIVATION)
    act = round_to(gate * p, DTYPE).to(tl.float32)
    dgate = dy * up * (p + gate * _slope(gate, p, ACTIVATION))
    if gate_multiplier is not None:
        dgate *= gate_multiplier
    return dgate, dy * act, act


@triton.jit
def _gated_forward_kernel(
    gate_ptr,
    up_ptr,
    y_ptr,
    gate_stride,
    up_stride,
    y_stride,
    cols,
    tiles,
    gate_multiplier,
    down_multiplier,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Gated activation of one piece of a row.

    Program: BLOCK columns of one row; reads gate and up, writes y.
    """
    row = (tl.program_id(0) // tiles).to(tl.int64)
    first = (tl.program_id(0) % tiles) * BLOCK
    assume_cols(first)
    col = first + tl.arange(0, BLOCK)
    mask = col < cols
    gate = tl.load(gate_ptr + row * gate_stride + col, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + col, mask=mask, other=0.0).to(tl.float32)
    dtype: tl.constexpr = gate_ptr.dtype.element_ty
    y = gated_product(gate, up, gate_multiplier, down_multiplier, dtype, ACTIVATION)
    tl.store(y_ptr + row * y_stride + col, round_to(y, y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _gated_backward_kernel(
    dy_ptr,
    gate_ptr,
    up_ptr,
    dgate_ptr,
    dup_ptr,
    dy_stride,
    gate_stride,
    up_stride,
    out_stride,
    cols,
    tiles,
    gate_multiplier,
    down_multiplier,
    ACTIVATION: tl.constexpr,
    PRODUCT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Gradients of gate and up of one piece of a row; PRODUCT: act(gate) * up overwrites dy.

    Program: BLOCK columns of one row; reads dy, gate and, for dgate, up; writes dup and dgate where
    they are needed. PRODUCT serves a layer whose next gradient needs act(gate) * up, which forward
    has not kept; dup and dgate are needed then.
    """
    row = (tl.program_id(0) // tiles).to(tl.int64)
    first = (tl.program_id(0) % tiles) * BLOCK
    assume_cols(first)
    col = first + tl.arange(0, BLOCK)
    mask = col < cols
    dy = tl.load(dy_ptr + row * dy_stride + col, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * gate_stride + col, mask=mask, other=0.0).to(tl.float32)
    if dgate_ptr is not None:
        up = tl.load(up_ptr + row * up_stride + col, mask=mask, other=0.0).to(tl.float32)
    else:  # its gradient reads no up
        up = dy
    dtype: tl.constexpr = gate_ptr.dtype.element_ty
    dgate, dup, act = gated_gradients(
        dy, gate, up, gate_multiplier, down_multiplier, dtype, ACTIVATION
    )
    if dup_ptr is not None:
        dup = round_to(dup, dup_ptr.dtype.element_ty)
        tl.store(dup_ptr + row * out_stride + col, dup, mask=mask)
    if PRODUCT:
        product = round_to(act * up, dy_ptr.dtype.element_ty)
        tl.store(dy_ptr + row * dy_stride + col, product, mask=mask)
    if dgate_ptr is not None:
        dgate = round_to(dgate, dgate_ptr.dtype.element_ty)
        tl.store(dgate_ptr + row * out_stride + col, dgate, mask=mask)


def flatten(*tensors: Tensor) -> list[Tensor]:
    """View tensors of one shape as one long row where all are contiguous, else as rows."""
    if all(t.is_contiguous() for t in tensors) and tensors[0].numel() <= LONGEST_ROW.value:
        return [t.view(1, -1) for t in tensors]
    return [as_rows(t) for t in tensors]


Rows = tuple[tuple[Tensor, ...], int, int, tuple[int, ...]]


def by_rows(*tensors: Tensor) -> Rows:
    """Tensors of one shape, the number of their rows and columns, and the strides of rows.

    Contiguous ones are one long row and go as they are: a view costs the host 3 us.
    """
    cols = tensors[0].numel()
    if cols <= LONGEST_ROW.value and False not in [t.is_contiguous() for t in tensors]:
        return tensors, 1, cols, (cols,) * len(tensors)
    views = tuple([as_rows(t) for t in tensors])
    return views, *views[0].shape, tuple([t.stride(0) for t in views])


Multipliers = tuple[float | None, float | None]
NONE: Multipliers = (None, None)


def multipliers(gate: float, down: float) -> Multipliers:
    """What kernels are given for two multipliers: None leaves the multiplication out."""
    return None if gate == 1.0 else gate, None if down == 1.0 else down


def _launch_forward(op: str, activation: str, multipliers: Multipliers, flat: Rows) -> None:
    """Write y, the last of the tensors after gate and up."""
    tensors, rows, cols, strides = flat
    k = launch_config(f"{op}.forward", tile_config, tensors[0].device, rows=rows, cols=cols)
    tiles = cdiv(cols, k.block)
    launch(
        _gated_forward_kernel,
        rows * tiles,
        (*tensors, *strides, cols, tiles, *multipliers),
        (activation, k.block),
        k.num_warps,
    )


def _launch_backward(
    op: str,
    activation: str,
    multipliers: Multipliers,
    flat: Rows,
    needs_gate: bool = True,
    needs_up: bool = True,
    product: bool = False,
) -> None:
    """Write dgate and dup, the last of the tensors after dy, gate and up.

    Both have one row stride; a gradient that is not needed may be the other tensor. With
    ``product``, which takes both, act(gate) * up is written over dy.
    """
    (dy, gate, up, dgate, dup), rows, cols, strides = flat
    k = launch_config(f"{op}.backward", tile_config, dy.device, rows=rows, cols=cols)
    tiles = cdiv(cols, k.block)
    buffers = (dgate if needs_gate else None, dup if needs_up else None)
    launch(
        _gated_backward_kernel,
        rows * tiles,
        (dy, gate, up, *buffers, *strides[:4], cols, tiles, *multipliers),
        (activation, product, k.block),
        k.num_warps,
    )


def forward(
    op: str, activation: str, gate: Tensor, up: Tensor, multipliers: Multipliers = NONE
) -> Tensor:
    """act(gate) * up in the promoted dtype."""
    y = empty_contiguous(gate, torch.promote_types(gate.dtype, up.dtype))
    if y.numel():
        _launch_forward(op, activation, multipliers, by_rows(gate, up, y))
    return y


def backward(
    op: str,
    activation: str,
    dy: Tensor,
    gate: Tensor,
    up: Tensor,
    needs_gate: bool,
    needs_up: bool,
    multipliers: Multipliers = NONE,
    product: bool = False,
) -> tuple[Tensor, Tensor]:
    """Gradients of gate and up; empty tensors if not needed.

    With ``product``, which takes both, act(gate) * up is written over dy.
    """
    dgate = empty_contiguous(gate) if needs_gate else gate.new_empty(0)
    dup = empty_contiguous(up) if needs_up else up.new_empty(0)
    if (needs_gate or needs_up) and dy.numel():
        buffers = (dgate if needs_gate else dup, dup if needs_up else dgate)
        rows = by_rows(dy, gate, up, *buffers)
        _launch_backward(op, activation, multipliers, rows, needs_gate, needs_up, product)
    return dgate, dup


def packed_forward(
    op: str, activation: str, gate_up: Tensor, multipliers: Multipliers = NONE
) -> Tensor:
    """act(gate) * up of one tensor that holds both; they are strided views of it."""
    half = gate_up.shape[-1] // 2
    y = gate_up.new_empty((*gate_up.shape[:-1], half))
    if y.numel():
        gate_up2d = as_rows(gate_up)
        halves = (gate_up2d[:, :half], gate_up2d[:, half:])
        _launch_forward(op, activation, multipliers, by_rows(*halves, as_rows(y)))
    return y


def packed_backward(
    op: str, activation: str, dy: Tensor, gate_up: Tensor, multipliers: Multipliers = NONE
) -> Tensor:
    """Gradient of gate_up: those of gate and up in one buffer."""
    half = gate_up.shape[-1] // 2
    dgate_up = gate_up.new_empty(gate_up.shape)
    if dy.numel():
        gate_up2d, dgate_up2d = as_rows(gate_up), as_rows(dgate_up)
        halves = (
            gate_up2d[:, :half],
            gate_up2d[:, half:],
            dgate_up2d[:, :half],
            dgate_up2d[:, half:],
        )
        _launch_backward(op, activation, multipliers, by_rows(as_rows(dy), *halves))
    return dgate_up


# --- clamped ---

Numbers = tuple[float, float, float]  # limit, alpha, offset


@triton.jit
def _load_both(gate_ptr, up_ptr, start, cols, INTERLEAVED: tl.constexpr, BLOCK: tl.constexpr):
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
    gate_ptr,
    up_ptr,
    y_ptr,
    gate_stride,
    up_stride,
    y_stride,
    cols,
    tiles,
    limit,
    alpha,
    offset,
    INTERLEAVED: tl.constexpr,
    BLOCK: tl.constexpr,
):
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
    cols,
    tiles,
    limit,
    alpha,
    offset,
    INTERLEAVED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Gradients of gate and up of one piece of a row.

    Program: BLOCK columns of one row; reads dy, gate and up, writes dgate and dup where they are
    needed. INTERLEAVED: both are joined in registers and leave in one contiguous store.
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
    dup = tl.where(above(up, limit) | above(-up, limit), 0.0, dy * act)
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    dgate = dy * (up + offset) * (p + alpha * g * p * (1.0 - p))
    dgate = tl.where(above(gate, limit), 0.0, dgate)
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


def _launch_clamped(
    name: str,
    kernel: object,
    tensors: tuple[Tensor | None, ...],
    shape: tuple[int, ...],
    numbers: Numbers,
    interleaved: bool,
) -> None:
    """All tensors are rows with adjacent columns; interleaved ones have twice the columns."""
    tensor = next(t for t in tensors if t is not None)
    rows, cols = shape
    checked_cols(2 * cols if interleaved else cols)
    k = launch_config(name, tile_config, tensor.device, rows=rows, cols=cols)
    tiles = cdiv(cols, k.block)
    strides = [0 if t is None else t.stride(0) for t in tensors]
    launch(
        kernel,
        rows * tiles,
        (*tensors, *strides, cols, tiles, *numbers),
        (interleaved, k.block),
        k.num_warps,
    )


def clamped_forward(gate: Tensor, up: Tensor, numbers: Numbers) -> Tensor:
    """The result in the promoted dtype."""
    y = gate.new_empty(gate.shape, dtype=torch.promote_types(gate.dtype, up.dtype))
    if y.numel():
        gate, up, out = flatten(gate, up, y)
        name, shape = "swiglu_clamped.forward", out.shape
        _launch_clamped(name, _clamped_forward_kernel, (gate, up, out), shape, numbers, False)
    return y


def clamped_backward(
    dy: Tensor, gate: Tensor, up: Tensor, numbers: Numbers, needs_gate: bool, needs_up: bool
) -> tuple[Tensor, Tensor]:
    """Gradients of gate and up; empty tensors if not needed."""
    dgate = gate.new_empty(gate.shape if needs_gate else 0)
    dup = up.new_empty(up.shape if needs_up else 0)
    outputs = [t for t, is_needed in ((dgate, needs_gate), (dup, needs_up)) if is_needed]
    if outputs and dy.numel():
        dy, gate, up, first, last = flatten(dy, gate, up, outputs[0], outputs[-1])
        tensors = (dy, gate, up, first if needs_gate else None, last if needs_up else None)
        name, shape = "swiglu_clamped.backward", dy.shape
        _launch_clamped(name, _clamped_backward_kernel, tensors, shape, numbers, False)
    return dgate, dup


def packed_clamped_forward(gate_up: Tensor, numbers: Numbers, interleaved: bool) -> Tensor:
    """The same of one tensor with both."""
    half = gate_up.shape[-1] // 2
    y = gate_up.new_empty((*gate_up.shape[:-1], half))
    if y.numel():
        packed, out = flatten(gate_up, y) if interleaved else (as_rows(gate_up), as_rows(y))
        gate, up = (packed, packed) if interleaved else (packed[:, :half], packed[:, half:])
        name, shape = "swiglu_clamped_packed.forward", out.shape
        _launch_clamped(name, _clamped_forward_kernel, (gate, up, out), shape, numbers, interleaved)
    return y


def packed_clamped_backward(
    dy: Tensor, gate_up: Tensor, numbers: Numbers, interleaved: bool
) -> Tensor:
    """Gradient of gate_up in one buffer."""
    half = gate_up.shape[-1] // 2
    out = gate_up.new_empty(gate_up.shape)
    if dy.numel():
        tensors = [gate_up, out, dy]
        packed, dgate_up2d, dys = (
            flatten(*tensors) if interleaved else [as_rows(t) for t in tensors]
        )
        parts = (packed, packed, dgate_up2d, dgate_up2d)
        if not interleaved:
            parts = (packed[:, :half], packed[:, half:], dgate_up2d[:, :half], dgate_up2d[:, half:])
        name, shape = "swiglu_clamped_packed.backward", dys.shape
        _launch_clamped(name, _clamped_backward_kernel, (dys, *parts), shape, numbers, interleaved)
    return out
