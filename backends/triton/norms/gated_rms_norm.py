"""RMSNorm of groups of channels times an activated gate (arXiv:2405.21060).

With a = act(gate), w = weight + offset, and u = x a where the gate comes FIRST, else u = x:

    n = u * rstd,  rstd = (mean(u^2) + eps)^(-1/2) of each group,  y = w * n  [* a]
    g = dy w [a],  du = rstd * (g - n * mean(g * n)),  dw = sum over rows of dy [a] * n
    FIRST: dx = du a, dgate = du x act'(gate);  else: dx = du, dgate = dy w n act'(gate)

n is rounded to the dtype of x under the llama casting, and so is w n before a gate. A program owns
one group of columns of a tile of rows. In backward it keeps to its group over strided tiles, so
that the weight's gradient stays in registers. Groups too wide for registers are read in steps.
"""

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_multi.backends.triton.common.launching import launch
from liger_multi.backends.triton.common.rows import (
    as_rows,
    assume_cols,
    assume_rows,
    cdiv,
    round_to,
    sigmoid,
    sum_partials,
    tile_rows,
    warps,
)
from liger_multi.backends.triton.norms.rms_norm import _load_weight
from liger_multi.backends.triton.norms.row_config import (
    BackwardConfig,
    RowConfig,
    backward_config,
    forward_config,
)
from liger_multi.dispatch.launch import DeviceInfo, launch_config

# --- kernels ---


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


@triton.jit(do_not_specialize=["rows"])
def _gated_rms_norm_forward_kernel(
    x_ptr,
    gate_ptr,
    weight_ptr,
    y_ptr,
    rstd_ptr,
    x_stride,
    gate_stride,
    rows,
    size,
    groups,
    eps,
    OFFSET: tl.constexpr,
    EXACT: tl.constexpr,
    ROUND: tl.constexpr,
    FIRST: tl.constexpr,
    SILU: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
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
    x_ptr,
    gate_ptr,
    weight_ptr,
    y_ptr,
    rstd_ptr,
    x_stride,
    gate_stride,
    size,
    groups,
    eps,
    OFFSET: tl.constexpr,
    EXACT: tl.constexpr,
    ROUND: tl.constexpr,
    FIRST: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK: tl.constexpr,
):
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


@triton.jit(do_not_specialize=["rows"])
def _gated_rms_norm_backward_kernel(
    dy_ptr,
    x_ptr,
    gate_ptr,
    weight_ptr,
    rstd_ptr,
    dx_ptr,
    dgate_ptr,
    partial_ptr,
    dy_stride,
    x_stride,
    gate_stride,
    rows,
    size,
    groups,
    OFFSET: tl.constexpr,
    EXACT: tl.constexpr,
    ROUND: tl.constexpr,
    FIRST: tl.constexpr,
    SILU: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Gradients of x and gate, and partial sums of the weight's; groups fit into registers.

    Program: persistent; one group of columns, and every ``row_programs``-th tile of ROWS rows.
    Reads dy, x, gate and rstd of each tile, writes dgate and dx where they are needed. The sum for
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
    dy_ptr,
    x_ptr,
    gate_ptr,
    weight_ptr,
    rstd_ptr,
    dx_ptr,
    dgate_ptr,
    dy_stride,
    x_stride,
    gate_stride,
    size,
    groups,
    OFFSET: tl.constexpr,
    EXACT: tl.constexpr,
    ROUND: tl.constexpr,
    FIRST: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK: tl.constexpr,
):
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
    dy_ptr,
    x_ptr,
    gate_ptr,
    rstd_ptr,
    partial_ptr,
    dy_stride,
    x_stride,
    gate_stride,
    rows,
    size,
    groups,
    row_programs,
    ROUND: tl.constexpr,
    FIRST: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
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


# --- launchers ---


def gated_forward_config(info: DeviceInfo, rows: int, cols: int) -> RowConfig:
    """The plain norm's formula with two values per lane."""
    return forward_config(info, rows, cols, sums=2)


def gated_backward_config(
    info: DeviceInfo, rows: int, cols: int, element_bytes: int
) -> BackwardConfig:
    """The layer norm's formula; the third input takes more registers than its second sum does.

    So there are 8 elements a thread and not 16.
    """
    k = backward_config(info, rows, cols, element_bytes, sums=2, widest=4096)
    threads = min(max(32, k.rows * k.block // 8), info.max_threads)
    return replace(k, num_warps=warps(threads, info.warp_size))


def _constants(
    weight: Tensor | None,
    gate: Tensor | None,
    offset: float,
    casting: str,
    norm_first: bool,
    activation: str,
) -> tuple[object, ...]:
    """The kernels' arguments OFFSET, EXACT, ROUND, FIRST and SILU."""
    rounds = casting == "llama" and weight is not None
    first = gate is not None and not norm_first
    return offset, casting == "gemma", rounds, first, activation == "silu"


def forward(
    x: Tensor,
    gate: Tensor | None,
    weight: Tensor | None,
    eps: float,
    offset: float,
    casting: str,
    group_size: int,
    norm_first: bool,
    activation: str,
) -> tuple[Tensor, Tensor]:
    """y, and rstd (fp32) of every group."""
    constants = _constants(weight, gate, offset, casting, norm_first, activation)
    wide = weight is not None and casting == "llama" and (gate is None or not norm_first)
    dtype = torch.promote_types(x.dtype, weight.dtype) if weight is not None and wide else x.dtype
    groups = x.shape[-1] // group_size
    y = x.new_empty(x.shape, dtype=dtype)
    rstd = x.new_empty((*x.shape[:-1], groups), dtype=torch.float32)
    if x.numel() == 0:
        return y, rstd
    x, gate = as_rows(x, group_size), None if gate is None else as_rows(gate, group_size)
    weight = None if weight is None else weight.contiguous()
    rows = x.shape[0]
    k = launch_config(
        "gated_rms_norm.forward", gated_forward_config, x.device, rows=rows, cols=group_size
    )
    strides = (x.stride(0), 0 if gate is None else gate.stride(0))
    tensors = (x, gate, weight, y, rstd)
    if k.block >= group_size:
        rows_per_tile = tile_rows(k.rows, *strides, group_size * groups)
        launch(
            _gated_rms_norm_forward_kernel,
            cdiv(rows, rows_per_tile) * groups,
            (*tensors, *strides, rows, group_size, groups, eps),
            (*constants, rows_per_tile, k.block),
            k.num_warps,
        )
    else:
        launch(
            _gated_rms_norm_forward_wide_kernel,
            rows * groups,
            (*tensors, *strides, group_size, groups, eps),
            (*constants, k.block),
            k.num_warps,
        )
    return y, rstd


def backward(
    dy: Tensor,
    x: Tensor,
    gate: Tensor | None,
    weight: Tensor | None,
    rstd: Tensor,
    offset: float,
    casting: str,
    group_size: int,
    norm_first: bool,
    activation: str,
    needs_x: bool,
    needs_gate: bool,
    needs_weight: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, gate and weight; empty tensors if not needed."""
    constants = _constants(weight, gate, offset, casting, norm_first, activation)
    needs_gate, needs_weight = needs_gate and gate is not None, needs_weight and weight is not None
    dx = x.new_empty(x.shape if needs_x else 0)
    tensor = x if gate is None else gate
    dgate = tensor.new_empty(tensor.shape if needs_gate else 0)
    if x.numel() == 0 or not (needs_x or needs_gate or needs_weight):
        dweight = x.new_empty(0) if weight is None else torch.zeros_like(weight)
        return dx, dgate, dweight if needs_weight else dweight.new_empty(0)
    dy, x, rstd = as_rows(dy, group_size), as_rows(x, group_size), rstd.contiguous()
    gate = None if gate is None else as_rows(gate, group_size)
    weight = None if weight is None else weight.contiguous()
    outputs = (dx if needs_x else None, dgate if needs_gate else None)
    partial = _launch(
        dy,
        x,
        gate,
        weight,
        rstd,
        outputs,
        size=group_size,
        constants=constants,
        needs_weight=needs_weight,
    )
    if partial is None or weight is None:
        return dx, dgate, x.new_empty(0, dtype=x.dtype if weight is None else weight.dtype)
    return dx, dgate, sum_partials(partial, weight.dtype)


def _launch(
    dy: Tensor,
    x: Tensor,
    gate: Tensor | None,
    weight: Tensor | None,
    rstd: Tensor,
    outputs: tuple[Tensor | None, Tensor | None],
    size: int,
    constants: tuple[object, ...],
    needs_weight: bool,
) -> Tensor | None:
    """Fill dx and dgate where they have elements; return partials of the weight's gradient."""
    (rows, cols), groups = x.shape, x.shape[1] // size
    read_bytes = dy.element_size() + x.element_size() + (0 if gate is None else gate.element_size())
    k = launch_config(
        "gated_rms_norm.backward",
        gated_backward_config,
        x.device,
        rows=rows * groups,
        cols=size,
        element_bytes=read_bytes,
    )
    row_programs = max(1, min(cdiv(k.programs, groups), cdiv(rows, k.rows)))
    partial = x.new_empty((row_programs, cols), dtype=torch.float32) if needs_weight else None
    strides = (dy.stride(0), x.stride(0), 0 if gate is None else gate.stride(0))
    if k.block >= size:
        launch(
            _gated_rms_norm_backward_kernel,
            row_programs * groups,
            (dy, x, gate, weight, rstd, *outputs, partial, *strides, rows, size, groups),
            (*constants, tile_rows(k.rows, *strides, cols), k.block, k.stages),
            k.num_warps,
        )
        return partial
    if outputs != (None, None):
        launch(
            _gated_rms_norm_backward_wide_kernel,
            rows * groups,
            (dy, x, gate, weight, rstd, *outputs, *strides, size, groups),
            (*constants, k.block),
            k.num_warps,
        )
    if partial is not None:
        launch(
            _gated_rms_norm_backward_wide_weight_kernel,
            row_programs * groups * cdiv(size, k.block),
            (dy, x, gate, rstd, partial, *strides, rows, size, groups, row_programs),
            (*constants[2:], k.block, k.stages),
            k.num_warps,
        )
    return partial
