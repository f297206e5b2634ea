"""RMSNorm (arXiv:1910.07467) of x or of the sum x + residual, in the roundings of Hugging Face.

With s = x + residual (or x), n = s * rstd, rstd = (mean(s^2) + eps)^(-1/2), w = weight + offset:

    y  = w * n,  n first rounded to the dtype of s under the llama casting (rstd under factor)
    ds = rstd * (g - n * mean(g * n)) + what comes from other uses of s,  g = dy * w
    dw = sum over rows of dy * n

Forward gives a program a tile of whole rows. Backward runs a few persistent programs a core over
strided tiles, so that the weight's gradient stays in registers and leaves as one fp32 partial a
program. A second kernel sums those in a fixed order. Rows too wide for registers loop over columns.

The launchers here also serve the norms of sums.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_multi.backends.triton.common.float8 import coded_rows
from liger_multi.backends.triton.common.launching import launch
from liger_multi.backends.triton.common.rows import (
    assume_cols,
    assume_rows,
    cdiv,
    empty_contiguous,
    round_to,
    sum_partials,
    with_stride,
)
from liger_multi.backends.triton.float8.rows import NO_CODES, CodeBuffers
from liger_multi.backends.triton.norms.row_config import (
    BackwardConfig,
    backward_config,
    forward_config,
)
from liger_multi.dispatch.launch import launch_config

# --- kernels ---


@triton.jit
def _load_weight(weight_ptr, col, mask, OFFSET: tl.constexpr, EXACT: tl.constexpr):
    """Weight plus OFFSET in fp32; ones where there is no weight.

    Unless EXACT, an offset is added in the dtype of the weight, as the Hugging Face class does.
    """
    if weight_ptr is None:
        return tl.full(col.shape, 1.0, tl.float32)
    else:
        weight = tl.load(weight_ptr + col, mask=mask, other=0.0).to(tl.float32) + OFFSET
        if OFFSET != 0.0 and not EXACT:
            weight = round_to(weight, weight_ptr.dtype.element_ty).to(tl.float32)
        return weight


@triton.jit
def _load_sum(x, residual_ptr, s_ptr, base, offset, mask, POLICY: tl.constexpr):
    """The sum x + residual rounded as it is stored, so that backward sees the same numbers."""
    if residual_ptr is None:
        return x.to(tl.float32)
    else:
        residual = tl.load(
            residual_ptr + base + offset, mask=mask, other=0.0, eviction_policy=POLICY
        )
        return round_to(x.to(tl.float32) + residual.to(tl.float32), s_ptr.dtype.element_ty)


@triton.jit
def _normalized(x, rstd, DTYPE: tl.constexpr, ROUND: tl.constexpr):
    """Normalize x; ROUND: the result is rounded to DTYPE, as llama does before the weight.

    ROUND of 2: so is the factor, and not the result.
    """
    if ROUND == 2:
        return x * round_to(rstd, DTYPE).to(tl.float32)
    n = x * rstd
    if ROUND:
        n = round_to(n, DTYPE).to(tl.float32)
    return n


@triton.jit(do_not_specialize=["rows"])
def _rms_norm_forward_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    y_ptr,
    s_ptr,
    rstd_ptr,
    codes_ptr,
    scale_ptr,
    x_stride,
    residual_stride,
    rows,
    cols,
    eps,
    OFFSET: tl.constexpr,
    EXACT: tl.constexpr,
    ROUND: tl.constexpr,
    BIAS: tl.constexpr,
    WRITES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """RMSNorm of rows that fit into registers, of x or of x + residual.

    Program: ROWS whole rows; reads x, residual and weight, writes s (the sum, where there is one),
    rstd, and y where WRITES. With BIAS, that of an FP8 format, it also writes codes and scales of
    y as it is rounded.
    """
    like_ptr = x_ptr if s_ptr is None else s_ptr
    first = tl.program_id(0).to(tl.int64) * ROWS
    row = tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK)
    assume_rows(x_ptr, x_stride, ROWS)
    assume_rows(residual_ptr, residual_stride, ROWS)
    assume_cols(cols, BLOCK)
    row_mask = first + row < rows
    mask = row_mask[:, None] & (col < cols)[None, :]
    weight = _load_weight(weight_ptr, col, col < cols, OFFSET, EXACT)
    x_offset = row[:, None] * x_stride + col[None, :]
    residual_offset = row[:, None] * residual_stride + col[None, :]
    y_offset = row[:, None] * cols + col[None, :]
    x = tl.load(x_ptr + first * x_stride + x_offset, mask=mask, other=0.0)
    s = _load_sum(x, residual_ptr, s_ptr, first * residual_stride, residual_offset, mask, "")
    if s_ptr is not None:
        tl.store(s_ptr + first * cols + y_offset, s, mask=mask)
    s = s.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(s * s, axis=1) / cols + eps)
    tl.store(rstd_ptr + first + row, rstd, mask=row_mask)
    y = _normalized(s, rstd[:, None], like_ptr.dtype.element_ty, ROUND) * weight[None, :]
    y = round_to(y, y_ptr.dtype.element_ty)
    if WRITES:
        tl.store(y_ptr + first * cols + y_offset, y, mask=mask)
    if BIAS:
        code, scale = coded_rows(y.to(tl.float32), BIAS)
        tl.store(codes_ptr + first * cols + y_offset, code, mask=mask)
        tl.store(scale_ptr + first + row, scale, mask=row_mask)


@triton.jit
def _rms_norm_forward_wide_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    y_ptr,
    s_ptr,
    rstd_ptr,
    x_stride,
    residual_stride,
    cols,
    eps,
    OFFSET: tl.constexpr,
    EXACT: tl.constexpr,
    ROUND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The same for wider rows, in two passes of BLOCK columns a step.

    Program: one row. The first pass sums squares. The second adds x and residual again, from the
    cache where they are still there, and writes s and y.
    """
    like_ptr = x_ptr if s_ptr is None else s_ptr
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_stride
    y_ptr += row * cols
    base = row * residual_stride
    assume_cols(cols)
    squares = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, cols, BLOCK):
        col = start + tl.arange(0, BLOCK)
        mask = col < cols
        x = tl.load(x_ptr + col, mask=mask, other=0.0, eviction_policy="evict_last")
        s = _load_sum(x, residual_ptr, s_ptr, base, col, mask, "evict_last").to(tl.float32)
        squares += s * s
    rstd = tl.rsqrt(tl.sum(squares, axis=0) / cols + eps)
    tl.store(rstd_ptr + row, rstd)
    for start in tl.range(0, cols, BLOCK):
        col = start + tl.arange(0, BLOCK)
        mask = col < cols
        x = tl.load(x_ptr + col, mask=mask, other=0.0, eviction_policy="evict_first")
        # summed again: what other threads of the program stored might not be visible yet
        s = _load_sum(x, residual_ptr, s_ptr, base, col, mask, "evict_first")
        if s_ptr is not None:
            tl.store(s_ptr + row * cols + col, s, mask=mask)
        weight = _load_weight(weight_ptr, col, mask, OFFSET, EXACT)
        y = _normalized(s.to(tl.float32), rstd, like_ptr.dtype.element_ty, ROUND) * weight
        tl.store(y_ptr + col, round_to(y, y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _rms_norm_backward_kernel(
    dy_ptr,
    ds_ptr,
    x_ptr,
    weight_ptr,
    rstd_ptr,
    dx_ptr,
    partial_ptr,
    dy_stride,
    ds_stride,
    x_stride,
    rows,
    cols,
    OFFSET: tl.constexpr,
    ROUND: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Gradient of s, and partial sums of the weight's, for rows that fit into registers.

    Program: persistent; every num_programs-th tile of ROWS rows.
    Reads dy, s (``x_ptr``), rstd, and with ``ds_ptr`` the gradient of other uses of s; writes dx.
    The sum for the weight stays in registers over all tiles and leaves as one fp32 partial a
    program.
    """
    program = tl.program_id(0)
    row = tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK)
    assume_rows(x_ptr, x_stride, ROWS)
    assume_rows(dy_ptr, dy_stride, ROWS)
    assume_rows(ds_ptr, ds_stride, ROWS)
    assume_cols(cols, BLOCK)
    x_offset = row[:, None] * x_stride + col[None, :]
    dy_offset = row[:, None] * dy_stride + col[None, :]
    ds_offset = row[:, None] * ds_stride + col[None, :]
    dx_offset = row[:, None] * cols + col[None, :]
    weight = _load_weight(weight_ptr, col, col < cols, OFFSET, True)[None, :]
    partial = tl.zeros([ROWS, BLOCK], tl.float32)
    for tile in tl.range(program, tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        first = tl.cast(tile, tl.int64) * ROWS
        row_mask = first + row < rows
        mask = row_mask[:, None] & (col < cols)[None, :]
        dy = tl.load(dy_ptr + first * dy_stride + dy_offset, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + first * x_stride + x_offset, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + first + row, mask=row_mask, other=0.0)[:, None]
        n = x * rstd
        if partial_ptr is not None:
            partial += dy * _normalized(x, rstd, x_ptr.dtype.element_ty, ROUND)
        if dx_ptr is not None:
            g = dy * weight
            dx = (g - n * (tl.sum(g * n, axis=1) / cols)[:, None]) * rstd
            if ds_ptr is not None:
                ds = tl.load(ds_ptr + first * ds_stride + ds_offset, mask=mask, other=0.0)
                dx += ds.to(tl.float32)
            dx = round_to(dx, dx_ptr.dtype.element_ty)
            tl.store(dx_ptr + first * cols + dx_offset, dx, mask=mask)
    if partial_ptr is not None:
        partial_ptr += program.to(tl.int64) * cols
        tl.store(partial_ptr + col, tl.sum(partial, axis=0), mask=col < cols)


@triton.jit
def _rms_norm_backward_wide_kernel(
    dy_ptr,
    ds_ptr,
    x_ptr,
    weight_ptr,
    rstd_ptr,
    dx_ptr,
    dy_stride,
    ds_stride,
    x_stride,
    cols,
    OFFSET: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Gradient of s for wider rows, in two passes of BLOCK columns a step.

    Program: one row. The first pass sums g * n over the row, the second reads again and writes dx.
    """
    row = tl.program_id(0).to(tl.int64)
    dy_ptr += row * dy_stride
    x_ptr += row * x_stride
    dx_ptr += row * cols
    rstd = tl.load(rstd_ptr + row)
    assume_cols(cols)
    products = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, cols, BLOCK):
        col = start + tl.arange(0, BLOCK)
        mask = col < cols
        dy = tl.load(dy_ptr + col, mask=mask, other=0.0, eviction_policy="evict_last")
        x = tl.load(x_ptr + col, mask=mask, other=0.0, eviction_policy="evict_last")
        g = dy.to(tl.float32) * _load_weight(weight_ptr, col, mask, OFFSET, True)
        products += g * (x.to(tl.float32) * rstd)
    mean = tl.sum(products, axis=0) / cols
    for start in tl.range(0, cols, BLOCK):
        col = start + tl.arange(0, BLOCK)
        mask = col < cols
        dy = tl.load(dy_ptr + col, mask=mask, other=0.0, eviction_policy="evict_first")
        x = tl.load(x_ptr + col, mask=mask, other=0.0, eviction_policy="evict_first")
        g = dy.to(tl.float32) * _load_weight(weight_ptr, col, mask, OFFSET, True)
        dx = (g - x.to(tl.float32) * rstd * mean) * rstd
        if ds_ptr is not None:
            ds = tl.load(ds_ptr + row * ds_stride + col, mask=mask, other=0.0)
            dx += ds.to(tl.float32)
        tl.store(dx_ptr + col, round_to(dx, dx_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _rms_norm_backward_wide_weight_kernel(
    dy_ptr,
    x_ptr,
    rstd_ptr,
    partial_ptr,
    dy_stride,
    x_stride,
    rows,
    cols,
    groups,
    ROUND: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Partial sums of the weight's gradient for wider rows.

    Program: BLOCK columns and every ``groups``-th row; writes one fp32 partial.
    """
    group = tl.program_id(0) % groups
    first = (tl.program_id(0) // groups) * BLOCK
    assume_cols(first)
    col = first + tl.arange(0, BLOCK)
    mask = col < cols
    partial = tl.zeros([BLOCK], tl.float32)
    for index in tl.range(group, rows, groups, num_stages=STAGES):
        row = tl.cast(index, tl.int64)
        dy = tl.load(dy_ptr + row * dy_stride + col, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + row * x_stride + col, mask=mask, other=0.0).to(tl.float32)
        partial += dy * _normalized(x, tl.load(rstd_ptr + row), x_ptr.dtype.element_ty, ROUND)
    tl.store(partial_ptr + group.to(tl.int64) * cols + col, partial, mask=mask)


# --- launchers ---


def forward(
    x: Tensor, weight: Tensor | None, eps: float, offset: float, casting: str
) -> tuple[Tensor, Tensor]:
    """Normalize the last axis; return y and rstd (fp32)."""
    y, _, rstd = normalize("rms_norm", x, None, weight, eps, offset, casting)
    return y, rstd


def backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    offset: float,
    casting: str,
    needs_x: bool,
    needs_weight: bool,
) -> tuple[Tensor, Tensor]:
    """Gradients of x and weight; empty tensors if not needed."""
    return gradients(
        "rms_norm",
        dy,
        None,
        x,
        weight,
        rstd,
        offset=offset,
        casting=casting,
        needs_x=needs_x,
        needs_weight=needs_weight,
    )


def _rounds(casting: str, weight: Tensor | None) -> int:
    # without a weight there is one rounding beside that of the output at most, that of the factor
    return 2 if casting == "factor" else int(casting == "llama" and weight is not None)


def normalize(
    name: str,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float,
    offset: float,
    casting: str,
    buffers: CodeBuffers = NO_CODES,
) -> tuple[Tensor, Tensor, Tensor]:
    """y, what it is the norm of (x, or the new sum x + residual), and rstd (fp32).

    With buffers for FP8 codes, those of y are written too; y is empty if not needed.
    """
    sum_dtype = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    rounds = _rounds(casting, weight)
    dtype = (
        torch.promote_types(sum_dtype, weight.dtype) if weight is not None and rounds else sum_dtype
    )
    *leading, cols = x.shape
    rstd = x.new_empty(leading, dtype=torch.float32)
    s = None if residual is None else empty_contiguous(x, sum_dtype)
    if x.numel() == 0:
        y = empty_contiguous(x, dtype)
        buffers.fill(y)
        # the mean of no column is NaN
        return buffers.where_written(y), x if s is None else s, rstd.fill_(float("nan"))
    source, (x, x_stride) = x, with_stride(x)
    residual, residual_stride = (None, 0) if residual is None else with_stride(residual)
    weight = None if weight is None else weight.contiguous()
    rows = x.numel() // cols
    k = launch_config(f"{name}.forward", forward_config, x.device, rows=rows, cols=cols)
    constants = (offset, casting == "gemma", rounds)
    strides = (x_stride, residual_stride)
    fused_buffers = buffers.inside(cols, k.block)
    y = empty_contiguous(source, dtype) if fused_buffers.writes else x.new_empty(0, dtype=dtype)
    tensors = (x, residual, weight, y, s, rstd)
    if k.block >= cols:
        launch(
            _rms_norm_forward_kernel,
            cdiv(rows, k.rows),
            (*tensors, fused_buffers.codes, fused_buffers.scale, *strides, rows, cols, eps),
            (*constants, fused_buffers.bias, fused_buffers.writes, k.rows, k.block),
            k.num_warps,
        )
    else:
        launch(
            _rms_norm_forward_wide_kernel,
            rows,
            (*tensors, *strides, cols, eps),
            (*constants, k.block),
            k.num_warps,
        )
    if fused_buffers is not buffers:
        buffers.fill(y)
        y = buffers.where_written(y)
    return y, source if s is None else s, rstd


def gradients(
    name: str,
    dy: Tensor,
    ds: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    offset: float,
    casting: str,
    needs_x: bool,
    needs_weight: bool,
) -> tuple[Tensor, Tensor]:
    """Gradients of what was normalized and of weight; ``ds``, from other uses of x, is added."""
    needs_weight = needs_weight and weight is not None
    dx = empty_contiguous(x) if needs_x else x.new_empty(0)
    if x.numel() == 0 or not (needs_x or needs_weight):
        dweight = x.new_empty(0) if weight is None else torch.zeros_like(weight)
        return dx, dweight if needs_weight else dweight.new_empty(0)
    (dy, dy_stride), (x, x_stride), rstd = with_stride(dy), with_stride(x), rstd.contiguous()
    ds, ds_stride = with_stride(ds) if ds is not None and needs_x else (None, 0)
    weight = None if weight is None else weight.contiguous()
    cols = x.shape[-1]
    rows = x.numel() // cols
    read_bytes = dy.element_size() + x.element_size() + (0 if ds is None else ds.element_size())
    k = launch_config(
        f"{name}.backward",
        backward_config,
        x.device,
        rows=rows,
        cols=cols,
        element_bytes=read_bytes,
    )
    partial = x.new_empty(k.programs, cols, dtype=torch.float32) if needs_weight else None
    strides = (dy_stride, ds_stride, x_stride)
    target = dx if needs_x else None
    if k.block < cols:
        _wide(
            dy,
            ds,
            x,
            weight,
            rstd,
            target,
            partial,
            strides=strides,
            rows=rows,
            offset=offset,
            casting=casting,
            k=k,
        )
    else:
        launch(
            _rms_norm_backward_kernel,
            k.programs,
            (dy, ds, x, weight, rstd, target, partial, *strides, rows, cols),
            (offset, _rounds(casting, weight), k.rows, k.block, k.stages),
            k.num_warps,
        )
    if partial is None or weight is None:
        return dx, x.new_empty(0)
    return dx, sum_partials(partial, weight.dtype)


def _wide(
    dy: Tensor,
    ds: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    dx: Tensor | None,
    partial: Tensor | None,
    strides: tuple[int, int, int],
    rows: int,
    offset: float,
    casting: str,
    k: BackwardConfig,
) -> None:
    cols = x.shape[-1]
    if dx is not None:
        launch(
            _rms_norm_backward_wide_kernel,
            rows,
            (dy, ds, x, weight, rstd, dx, *strides, cols),
            (offset, k.block),
            k.num_warps,
        )
    if partial is not None:
        groups = partial.shape[0]
        launch(
            _rms_norm_backward_wide_weight_kernel,
            groups * cdiv(cols, k.block),
            (dy, x, rstd, partial, strides[0], strides[2], rows, cols, groups),
            (_rounds(casting, weight), k.block, k.stages),
            k.num_warps,
        )
