"""Gated activations whose result leaves in FP8 too, with a scale per row.

The largest element of a row decides about its codes, so a program owns whole rows, where gated.py
gives it a piece. A row of y that is too wide for registers is written by the kernel of gated.py,
and rounded in a pass of its own. Gradients leave in FP8 for the layers of gate and up, whose input
gradient is a GEMM of codes: a row is multiplied by the scales of that layer's weight first.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_multi.backends.triton.activations import gated
from liger_multi.backends.triton.activations.gated import (
    Multipliers,
    TileConfig,
    gated_gradients,
    gated_product,
)
from liger_multi.backends.triton.common.float8 import coded_rows, float8_row_code, row_scale
from liger_multi.backends.triton.common.launching import launch
from liger_multi.backends.triton.common.rows import (
    assume_cols,
    assume_rows,
    cdiv,
    checked_cols,
    empty_contiguous,
    load_or,
    power_of_2,
    round_to,
    warps,
    with_stride,
)
from liger_multi.backends.triton.float8.rows import CodeBuffers
from liger_multi.backends.triton.norms.row_config import forward_config
from liger_multi.dispatch.launch import DeviceInfo, launch_config
from liger_multi.reference.activations.gated_mlp import Columns


@triton.jit(do_not_specialize=["rows"])
def _gated_rows_forward_kernel(
    gate_ptr,
    up_ptr,
    y_ptr,
    codes_ptr,
    scale_ptr,
    gate_stride,
    up_stride,
    rows,
    cols,
    gate_multiplier,
    down_multiplier,
    ACTIVATION: tl.constexpr,
    BIAS: tl.constexpr,
    WRITES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
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
    dtype: tl.constexpr = gate_ptr.dtype.element_ty
    gate = gate.to(tl.float32)
    y = gated_product(gate, up, gate_multiplier, down_multiplier, dtype, ACTIVATION)
    y = round_to(y, y_ptr.dtype.element_ty)
    y_offset = row[:, None] * cols + col[None, :]
    if WRITES:
        tl.store(y_ptr + first * cols + y_offset, y, mask=mask)
    code, scale = coded_rows(y.to(tl.float32), BIAS)
    tl.store(codes_ptr + first * cols + y_offset, code, mask=mask)
    tl.store(scale_ptr + first + row, scale, mask=row_mask)


@triton.jit
def _coded_gradients_at(
    dy_ptr,
    gate_ptr,
    up_ptr,
    gate_columns_ptr,
    up_columns_ptr,
    col,
    mask,
    gate_multiplier,
    down_multiplier,
    ACTIVATION: tl.constexpr,
    POLICY: tl.constexpr,
):
    """Gradients of gate and up as they are stored, both times numbers per column, and the product.

    Pointers are those of a row. A gradient is rounded to its dtype before it is multiplied, as a
    layer would find it.
    """
    dtype: tl.constexpr = gate_ptr.dtype.element_ty
    dy = tl.load(dy_ptr + col, mask=mask, other=0.0, eviction_policy=POLICY).to(tl.float32)
    gate = tl.load(gate_ptr + col, mask=mask, other=0.0, eviction_policy=POLICY).to(tl.float32)
    up = tl.load(up_ptr + col, mask=mask, other=0.0, eviction_policy=POLICY).to(tl.float32)
    dgate, dup, act = gated_gradients(
        dy, gate, up, gate_multiplier, down_multiplier, dtype, ACTIVATION
    )
    dgate, dup = round_to(dgate, dtype), round_to(dup, up_ptr.dtype.element_ty)
    gate_times = dgate.to(tl.float32) * load_or(gate_columns_ptr, col, mask, 1.0)
    up_times = dup.to(tl.float32) * load_or(up_columns_ptr, col, mask, 1.0)
    return dgate, dup, gate_times, up_times, act * up


@triton.jit
def _gated_rows_backward_kernel(
    dy_ptr,
    gate_ptr,
    up_ptr,
    dgate_ptr,
    dup_ptr,
    dgate_codes_ptr,
    dup_codes_ptr,
    dgate_scale_ptr,
    dup_scale_ptr,
    gate_columns_ptr,
    up_columns_ptr,
    dy_stride,
    gate_stride,
    up_stride,
    cols,
    gate_multiplier,
    down_multiplier,
    ACTIVATION: tl.constexpr,
    BIAS: tl.constexpr,
    PRODUCT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Gradients of gate and up, and their codes, in two passes of BLOCK columns a step.

    Program: one row. The first pass reads dy, gate and up, and finds the largest element of each
    gradient times its numbers per column. Where both gradients are needed, it writes them, and with
    PRODUCT act(gate) * up over dy; the second pass reads its own gradients, from the cache where
    they are still there, and writes codes. Elsewhere the second pass reads and computes all again,
    and writes codes and what is needed. To keep gradients in registers in between takes more than
    there are: 14,336 columns spilled on sm90 (triton 3.9). To compute twice took 0.78 ms at
    8192 x 14336 (H100, 2026-11).
    """
    row = tl.program_id(0).to(tl.int64)
    dy_ptr += row * dy_stride
    gate_ptr += row * gate_stride
    up_ptr += row * up_stride
    out = row * cols
    assume_cols(cols)
    LARGEST: tl.constexpr = 0x600000 if BIAS == 7 else 0x700000
    BOTH: tl.constexpr = dgate_ptr is not None and dup_ptr is not None
    most_gate = tl.zeros([BLOCK], tl.int32)
    most_up = tl.zeros([BLOCK], tl.int32)
    for start in tl.range(0, cols, BLOCK):
        col = start + tl.arange(0, BLOCK)
        mask = col < cols
        dgate, dup, gate_times, up_times, product = _coded_gradients_at(
            dy_ptr,
            gate_ptr,
            up_ptr,
            gate_columns_ptr,
            up_columns_ptr,
            col,
            mask,
            gate_multiplier,
            down_multiplier=down_multiplier,
            ACTIVATION=ACTIVATION,
            POLICY="evict_first" if BOTH else "evict_last",
        )
        most_gate = tl.maximum(most_gate, gate_times.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
        most_up = tl.maximum(most_up, up_times.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
        if BOTH:
            tl.store(dgate_ptr + out + col, dgate, mask=mask)
            tl.store(dup_ptr + out + col, dup, mask=mask)
            if PRODUCT:
                product = round_to(product, dy_ptr.dtype.element_ty)
                tl.store(dy_ptr + col, product, mask=mask)
    gate_scale, gate_inverse = row_scale(tl.max(most_gate, axis=0), LARGEST, 15 - BIAS)
    up_scale, up_inverse = row_scale(tl.max(most_up, axis=0), LARGEST, 15 - BIAS)
    if BOTH:
        tl.debug_barrier()  # other threads of the program may have written what is read now
    for start in tl.range(0, cols, BLOCK):
        col = start + tl.arange(0, BLOCK)
        mask = col < cols
        if BOTH:
            gate_times = tl.load(dgate_ptr + out + col, mask=mask, other=0.0).to(tl.float32)
            gate_times *= load_or(gate_columns_ptr, col, mask, 1.0)
            up_times = tl.load(dup_ptr + out + col, mask=mask, other=0.0).to(tl.float32)
            up_times *= load_or(up_columns_ptr, col, mask, 1.0)
        else:
            dgate, dup, gate_times, up_times, product = _coded_gradients_at(
                dy_ptr,
                gate_ptr,
                up_ptr,
                gate_columns_ptr,
                up_columns_ptr,
                col,
                mask,
                gate_multiplier,
                down_multiplier=down_multiplier,
                ACTIVATION=ACTIVATION,
                POLICY="evict_first",
            )
            if PRODUCT:
                tl.store(dy_ptr + col, round_to(product, dy_ptr.dtype.element_ty), mask=mask)
            if dgate_ptr is not None:
                tl.store(dgate_ptr + out + col, dgate, mask=mask)
            if dup_ptr is not None:
                tl.store(dup_ptr + out + col, dup, mask=mask)
        if dgate_codes_ptr is not None:
            code = float8_row_code(gate_times * gate_inverse, 3, BIAS)
            tl.store(dgate_codes_ptr + out + col, code, mask=mask)
        if dup_codes_ptr is not None:
            code = float8_row_code(up_times * up_inverse, 3, BIAS)
            tl.store(dup_codes_ptr + out + col, code, mask=mask)
    if dgate_scale_ptr is not None:
        tl.store(dgate_scale_ptr + row, gate_scale)
    if dup_scale_ptr is not None:
        tl.store(dup_scale_ptr + row, up_scale)


def forward(
    op: str,
    activation: str,
    gate: Tensor,
    up: Tensor,
    multipliers: Multipliers,
    buffer: CodeBuffers,
) -> tuple[Tensor, Tensor, Tensor]:
    """act(gate) * up where it is needed, its codes and scales."""
    cols = gate.shape[-1]
    rows = gate.numel() // max(cols, 1)
    k = launch_config(f"{op}_quantized.forward", forward_config, gate.device, rows=rows, cols=cols)
    if k.block < cols or not gate.numel():
        y = gated.forward(op, activation, gate, up, multipliers)
        buffer.fill(y)
        return buffer.outputs(y)
    dtype = torch.promote_types(gate.dtype, up.dtype)
    y = empty_contiguous(gate, dtype) if buffer.writes else gate.new_empty(0, dtype=dtype)
    (gate, gate_stride), (up, up_stride) = with_stride(gate), with_stride(up)
    launch(
        _gated_rows_forward_kernel,
        cdiv(rows, k.rows),
        (gate, up, y, buffer.codes, buffer.scale, gate_stride, up_stride, rows, cols, *multipliers),
        (activation, buffer.bias, buffer.writes, k.rows, k.block),
        k.num_warps,
    )
    return buffer.outputs(y)


def backward_config(info: DeviceInfo, rows: int, cols: int) -> TileConfig:
    """8 elements of each tensor a thread, one 16-byte access of a 16-bit dtype."""
    block = max(16, min(2048, power_of_2(checked_cols(cols))))
    return TileConfig(block, warps(block // 8, info.warp_size))


BufferPair = tuple[CodeBuffers | None, CodeBuffers | None]


def backward(
    op: str,
    activation: str,
    dy: Tensor,
    gate: Tensor,
    up: Tensor,
    multipliers: Multipliers,
    buffers: BufferPair,
    columns: Columns,
    needs_output: tuple[bool, bool],
    product: bool,
) -> tuple[Tensor, Tensor]:
    """Gradients of gate and up, empty where they are not needed; codes go into buffers.

    Args:
        op: The operator whose launch configuration is used.
        activation: Of gate.
        dy: Rows; overwritten with act(gate) * up for ``product``.
        gate: Rows.
        up: Rows.
        multipliers: Multipliers.
        buffers: For codes of each gradient; None for no codes.
        columns: Numbers per column that it is multiplied by before it is coded.
        needs_output: Which gradients are needed themselves, besides their codes.
        product: Whether the product is.
    """
    rows, cols = gate.shape
    code_buffer = next((buffer for buffer in buffers if buffer is not None), None)
    if code_buffer is None or not gate.numel():
        needs = [w or r is not None or product for w, r in zip(needs_output, buffers, strict=True)]
        gradients = gated.backward(
            op,
            activation,
            dy,
            gate,
            up,
            needs[0],
            needs_up=needs[1],
            multipliers=multipliers,
            product=product,
        )
        for buffer, column, grad in zip(buffers, columns, gradients, strict=True):
            if buffer is not None:
                buffer.fill(grad, column)
    else:
        dgate = empty_contiguous(gate) if needs_output[0] else gate.new_empty(0)
        dup = empty_contiguous(up) if needs_output[1] else up.new_empty(0)
        gradients = dgate, dup
        (dy, dy_stride), (gate, gate_stride), (up, up_stride) = map(with_stride, (dy, gate, up))
        codes = [None if buffer is None else buffer.codes for buffer in buffers]
        scales = [None if buffer is None else buffer.scale for buffer in buffers]
        name = f"{op}_quantized.backward"
        k = launch_config(name, backward_config, gate.device, rows=rows, cols=cols)
        launch(
            _gated_rows_backward_kernel,
            rows,
            (
                dy,
                gate,
                up,
                dgate if needs_output[0] else None,
                dup if needs_output[1] else None,
                *codes,
                *scales,
                *columns,
                dy_stride,
                gate_stride,
                up_stride,
                cols,
                *multipliers,
            ),
            (activation, code_buffer.bias, product, k.block),
            k.num_warps,
        )
    dgate, dup = [
        grad if w else grad.new_empty(0) for grad, w in zip(gradients, needs_output, strict=True)
    ]
    return dgate, dup
