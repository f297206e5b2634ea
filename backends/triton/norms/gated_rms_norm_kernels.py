"""Kernels of the RMSNorm of groups of columns, times an activated gate.

With a = act(gate), w = weight + offset, and u = x a where the gate comes FIRST, else u = x:

    n = u * rstd,  rstd = (mean(u^2) + eps)^(-1/2) of each group,  y = w * n  [* a]
    g = dy w [a],  du = rstd * (g - n * mean(g * n)),  dw = sum over rows of dy [a] * n
    FIRST: dx = du a, dgate = du x act'(gate);  else: dx = du, dgate = dy w n act'(gate)

n is rounded to the dtype of x under the llama casting, and so is w n before a gate. A program owns
one group of columns of a tile of rows. In backward it keeps to its group over strided tiles, so
that the weight's gradient stays in registers. Groups too wide for registers are read in steps.
"""

from __future__ import annotations

import triton
import triton.language as tl

from liger_multi.backends.triton.common.rows import assume_cols, assume_rows, round_to, sigmoid
from liger_multi.backends.triton.norms.rms_norm_kernels import _load_weight


@triton.jit
def _activate(gate, SILU: tl.constexpr):
    """Activation of the gate and its derivative: silu, or the sigmoid alone."""
    p = sigmoid(gate)
    if SILU:
        return gate * p, p * (1.0 + gate * (1.0 - p))
    else:
        return p, p * (1.0 - p)


@triton.jit
def _scaled(n, weight, x_ptr, weight_ptr, ROUND: tl.constexpr):
    """Weight times n, rounded as Hugging Face does before a gate."""
    if ROUND:
        n = round_to(n, x_ptr.dtype.element_ty).to(tl.float32) * weight
        if x_ptr.dtype.element_ty == weight_ptr.dtype.element_ty:  # else both promote to fp32
            n = round_to(n, x_ptr.dtype.element_ty).to(tl.float32)
        return n
    else:
        return n * weight


@triton.jit
def _gated_rms_norm_forward_kernel(
    x_ptr, gate_ptr, weight_ptr, y_ptr, rstd_ptr, x_stride, gate_stride, rows, size, groups, eps,
    OFFSET: tl.constexpr, EXACT: tl.constexpr, ROUND: tl.constexpr, FIRST: tl.constexpr,
    SILU: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Gated RMSNorm of groups that fit into registers.

    Program: one group of columns of ROWS rows; reads x, gate and weight, writes rstd and y. FIRST:
    the gate multiplies x before the norm; otherwise it multiplies the result.
    """
    group = tl.program_id(0) % groups
    first = (tl.program_id(0) // groups).to(tl.int64) * ROWS
    row = tl.arange(0, ROWS)
    inner = tl.arange(0, BLOCK)
    col = group * size + inner
    row_mask = first + row < rows
    mask = row_mask[:, None] & (inner < size)[None, :]
    assume_rows(x_ptr, x_stride, ROWS)
    assume_rows(gate_ptr, gate_stride, ROWS)
    assume_rows(y_ptr, size * groups, ROWS)
    weight = _load_weight(weight_ptr, col, inner < size, OFFSET, EXACT)[None, :]
    x_ptr += first * x_stride + group * size
    x_offset = row[:, None] * x_stride + inner[None, :]
    u = tl.load(x_ptr + x_offset, mask=mask, other=0.0).to(tl.float32)
    if gate_ptr is not None:
        gate_at = gate_ptr + (first * gate_stride + group * size)
        gate_offset = row[:, None] * gate_stride + inner[None, :]
        gate = tl.load(gate_at + gate_offset, mask=mask, other=0.0)
        act, _ = _activate(gate.to(tl.float32), SILU)
        if FIRST:
            u *= act
    rstd = tl.rsqrt(tl.sum(u * u, axis=1) / size + eps)
    tl.store(rstd_ptr + (first + row) * groups + group, rstd, mask=row_mask)
    y = _scaled(u * rstd[:, None], weight, x_ptr, weight_ptr, ROUND)
    if gate_ptr is not None and not FIRST:
        y *= act
    y_ptr += first * (size * groups) + group * size
    y_offset = row[:, None] * (size * groups) + inner[None, :]
    tl.store(y_ptr + y_offset, round_to(y, y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _gated_rms_norm_forward_wide_kernel(
    x_ptr, gate_ptr, weight_ptr, y_ptr, rstd_ptr, x_stride, gate_stride, size, groups, eps,
    OFFSET: tl.constexpr, EXACT: tl.constexpr, ROUND: tl.constexpr, FIRST: tl.constexpr,
    SILU: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The same for wider groups, in two passes of BLOCK columns a step.

    Program: one group of one row. The first pass sums squares, the second reads again and writes y.
    """
    group = tl.program_id(0) % groups
    row = (tl.program_id(0) // groups).to(tl.int64)
    assume_cols(size)
    x_ptr += row * x_stride + group * size
    y_ptr += row * (size * groups) + group * size
    gate_at = row * gate_stride + group * size
    squares = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, size, BLOCK):
        inner = start + tl.arange(0, BLOCK)
        mask = inner < size
        u = tl.load(x_ptr + inner, mask=mask, other=0.0).to(tl.float32)
        if FIRST:
            gate = tl.load(gate_ptr + gate_at + inner, mask=mask, other=0.0)
            act, _ = _activate(gate.to(tl.float32), SILU)
            u *= act
        squares += u * u
    rstd = tl.rsqrt(tl.sum(squares, axis=0) / size + eps)
    tl.store(rstd_ptr + row * groups + group, rstd)
    for start in tl.range(0, size, BLOCK):
        inner = start + tl.arange(0, BLOCK)
        col = group * size + inner
        mask = inner < size
        u = tl.load(x_ptr + inner, mask=mask, other=0.0).to(tl.float32)
        if gate_ptr is not None:
            gate = tl.load(gate_ptr + gate_at + inner, mask=mask, other=0.0)
            act, _ = _activate(gate.to(tl.float32), SILU)
            if FIRST:
                u *= act
        weight = _load_weight(weight_ptr, col, mask, OFFSET, EXACT)
        y = _scaled(u * rstd, weight, x_ptr, weight_ptr, ROUND)
        if gate_ptr is not None and not FIRST:
            y *= act
        tl.store(y_ptr + inner, round_to(y, y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _gated_rms_norm_backward_kernel(
    dy_ptr, x_ptr, gate_ptr, weight_ptr, rstd_ptr, dx_ptr, dgate_ptr, partial_ptr, dy_stride,
    x_stride, gate_stride, rows, size, groups, OFFSET: tl.constexpr, EXACT: tl.constexpr,
    ROUND: tl.constexpr, FIRST: tl.constexpr, SILU: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Gradients of x and gate, and partial sums of the weight's; groups fit into registers.

    Program: persistent; one group of columns, and every ``row_programs``-th tile of ROWS rows.
    Reads dy, x, gate and rstd of each tile, writes dgate and dx where they are wanted. The sum for
    the weight stays in registers over all tiles and leaves as one fp32 partial.
    """
    group = tl.program_id(0) % groups
    row_program = tl.program_id(0) // groups
    row = tl.arange(0, ROWS)
    inner = tl.arange(0, BLOCK)
    col = group * size + inner
    width = size * groups
    weight = _load_weight(weight_ptr, col, inner < size, OFFSET, EXACT)[None, :]
    assume_rows(dy_ptr, dy_stride, ROWS)
    assume_rows(x_ptr, x_stride, ROWS)
    assume_rows(gate_ptr, gate_stride, ROWS)
    assume_rows(dx_ptr, width, ROWS)
    assume_rows(dgate_ptr, width, ROWS)
    place = group * size
    x_ptr += place
    dy_ptr += place
    x_offset = row[:, None] * x_stride + inner[None, :]
    dy_offset = row[:, None] * dy_stride + inner[None, :]
    gate_offset = row[:, None] * gate_stride + inner[None, :]
    out_offset = row[:, None] * width + inner[None, :]
    partial = tl.zeros([ROWS, BLOCK], tl.float32)
    row_programs = tl.num_programs(0) // groups
    for tile in tl.range(row_program, tl.cdiv(rows, ROWS), row_programs, num_stages=STAGES):
        first = tl.cast(tile, tl.int64) * ROWS
        out = first * width + place
        row_mask = first + row < rows
        mask = row_mask[:, None] & (inner < size)[None, :]
        g = tl.load(dy_ptr + first * dy_stride + dy_offset, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + first * x_stride + x_offset, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + (first + row) * groups + group, mask=row_mask, other=0.0)[:, None]
        n = x * rstd
        if gate_ptr is not None:
            gate_at = gate_ptr + (first * gate_stride + place)
            gate = tl.load(gate_at + gate_offset, mask=mask, other=0.0)
            act, slope = _activate(gate.to(tl.float32), SILU)
            if FIRST:
                n *= act
            else:
                if dgate_ptr is not None:
                    dgate = g * _scaled(n, weight, x_ptr, weight_ptr, ROUND) * slope
                    dgate = round_to(dgate, dgate_ptr.dtype.element_ty)
                    tl.store(dgate_ptr + out + out_offset, dgate, mask=mask)
                g *= act
        if partial_ptr is not None:
            partial += g * _scaled(n, 1.0, x_ptr, x_ptr, ROUND)
        if dx_ptr is not None or (FIRST and dgate_ptr is not None):
            g *= weight
            du = (g - n * (tl.sum(g * n, axis=1) / size)[:, None]) * rstd
            if FIRST:
                if dgate_ptr is not None:
                    dgate = round_to(du * x * slope, dgate_ptr.dtype.element_ty)
                    tl.store(dgate_ptr + out + out_offset, dgate, mask=mask)
                du *= act
            if dx_ptr is not None:
                du = round_to(du, dx_ptr.dtype.element_ty)
                tl.store(dx_ptr + out + out_offset, du, mask=mask)
    if partial_ptr is not None:
        partial_ptr += tl.cast(row_program, tl.int64) * width + place
        tl.store(partial_ptr + inner, tl.sum(partial, axis=0), mask=inner < size)


@triton.jit
def _gated_rms_norm_backward_wide_kernel(
    dy_ptr, x_ptr, gate_ptr, weight_ptr, rstd_ptr, dx_ptr, dgate_ptr, dy_stride, x_stride,
    gate_stride, size, groups, OFFSET: tl.constexpr, EXACT: tl.constexpr, ROUND: tl.constexpr,
    FIRST: tl.constexpr, SILU: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Gradients of x and gate for wider groups, in two passes of BLOCK columns a step.

    Program: one group of one row. The first pass sums g * n over the group, the second reads again
    and writes dgate and dx.
    """
    group = tl.program_id(0) % groups
    row = (tl.program_id(0) // groups).to(tl.int64)
    rstd = tl.load(rstd_ptr + row * groups + group)
    assume_cols(size)
    out = row * (size * groups) + group * size
    dy_ptr += row * dy_stride + group * size
    x_ptr += row * x_stride + group * size
    gate_at = row * gate_stride + group * size
    products = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, size, BLOCK):
        inner = start + tl.arange(0, BLOCK)
        col = group * size + inner
        mask = inner < size
        g = tl.load(dy_ptr + inner, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + inner, mask=mask, other=0.0).to(tl.float32)
        g *= _load_weight(weight_ptr, col, mask, OFFSET, EXACT)
        if gate_ptr is not None:  # the activation multiplies one factor, whichever it is
            gate = tl.load(gate_ptr + gate_at + inner, mask=mask, other=0.0)
            act, _ = _activate(gate.to(tl.float32), SILU)
            g *= act
        products += g * (x * rstd)
    along = tl.sum(products, axis=0) / size
    for start in tl.range(0, size, BLOCK):
        inner = start + tl.arange(0, BLOCK)
        col = group * size + inner
        mask = inner < size
        g = tl.load(dy_ptr + inner, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + inner, mask=mask, other=0.0).to(tl.float32)
        weight = _load_weight(weight_ptr, col, mask, OFFSET, EXACT)
        n = x * rstd
        if gate_ptr is not None:
            gate = tl.load(gate_ptr + gate_at + inner, mask=mask, other=0.0)
            act, slope = _activate(gate.to(tl.float32), SILU)
            if FIRST:
                n *= act
                dgate = (g * weight - n * along) * rstd * x * slope
            else:
                dgate = g * _scaled(n, weight, x_ptr, weight_ptr, ROUND) * slope
                g *= act
            if dgate_ptr is not None:
                dgate = round_to(dgate, dgate_ptr.dtype.element_ty)
                tl.store(dgate_ptr + out + inner, dgate, mask=mask)
        if dx_ptr is not None:
            du = (g * weight - n * along) * rstd
            if FIRST:
                du *= act
            tl.store(dx_ptr + out + inner, round_to(du, dx_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _gated_rms_norm_backward_wide_weight_kernel(
    dy_ptr, x_ptr, gate_ptr, rstd_ptr, partial_ptr, dy_stride, x_stride, gate_stride, rows, size,
    groups, row_programs, ROUND: tl.constexpr, FIRST: tl.constexpr, SILU: tl.constexpr,
    BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Partial sums of the weight's gradient for wider groups.

    Program: BLOCK columns of one group and every ``row_programs``-th row; writes one fp32 partial.
    """
    row_program = tl.program_id(0) % row_programs
    place = tl.program_id(0) // row_programs
    group = place % groups
    start = (place // groups) * BLOCK
    lane = tl.arange(0, BLOCK)
    mask = start + lane < size
    start += group * size
    partial = tl.zeros([BLOCK], tl.float32)
    for index in tl.range(row_program, rows, row_programs, num_stages=STAGES):
        row = tl.cast(index, tl.int64)
        g = tl.load(dy_ptr + (row * dy_stride + start) + lane, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + (row * x_stride + start) + lane, mask=mask, other=0.0).to(tl.float32)
        n = x * tl.load(rstd_ptr + row * groups + group)
        if gate_ptr is not None:
            gate = tl.load(gate_ptr + (row * gate_stride + start) + lane, mask=mask, other=0.0)
            act, _ = _activate(gate.to(tl.float32), SILU)
            if FIRST:
                n *= act
            else:
                g *= act
        partial += g * _scaled(n, 1.0, x_ptr, x_ptr, ROUND)
    partial_ptr += tl.cast(row_program, tl.int64) * (size * groups) + start
    tl.store(partial_ptr + lane, partial, mask=mask)
