"""RMSNorm modulated by a condition (AdaLN, arXiv:2212.09748), y = w n (1 + scale) + shift.

With n = x * rstd, m = 1 + scale of the row's modulation, and w = weight + offset:

    g  = dy * m * w,  dx = rstd * (g - n * mean(g * n)),  dw = sum over rows of dy * m * n
    dscale = sum over a modulation's rows of dy * w * n,  dshift = the same sum of dy

Forward gives a program a tile of rows. Backward gives a program some modulations, or, where there
are few, some rows of one; its sums stay in registers. They leave in the dtype of the gradient, or
as fp32 partials that another kernel adds in a fixed order. How many rows a modulation serves is a
run-time number. Rows too wide for registers are read in steps.
"""

from dataclasses import dataclass

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
    power_of_2,
    round_to,
    short_offsets,
    sum_all_partials,
    sum_partials,
    warps,
)
from liger_multi.backends.triton.norms.rms_norm import _load_weight, _normalized
from liger_multi.backends.triton.norms.row_config import (
    BackwardConfig,
    backward_config,
    forward_config,
)
from liger_multi.dispatch.launch import DeviceInfo, launch_config
from liger_multi.reference.norms.rms_norm import output_dtype

# --- kernels ---


@triton.jit
def _modulation(place, each, ROWS: tl.constexpr):
    """The modulation of each row of a tile, counted from that of the first row.

    The bounds hold anyway; AMD's compiler needs them for 32-bit offsets and cannot derive them.
    """
    row = place // each
    if short_offsets():  # which AMD's compiler cannot see
        row = tl.minimum(tl.maximum(row, 0), ROWS)
    return row


@triton.jit
def _norm(x, rstd, weight, DTYPE: tl.constexpr, ROUND: tl.constexpr, NARROW: tl.constexpr):
    """What the norm returns: a number that scale multiplies; NARROW: rounded to DTYPE."""
    n = _normalized(x, rstd, DTYPE, ROUND) * weight
    if NARROW:
        n = round_to(n, DTYPE).to(tl.float32)
    return n


@triton.jit
def _of_scale(g, norm, DTYPE: tl.constexpr, SCALE: tl.constexpr, NARROW: tl.constexpr):
    """The gradient of scale of one row, rounded where PyTorch's product has the dtype of x."""
    product = g * norm
    if NARROW and SCALE == DTYPE:
        product = round_to(product, DTYPE).to(tl.float32)
    return product


@triton.jit(do_not_specialize=["rows"])
def _modulated_rms_norm_forward_kernel(
    x_ptr,
    scale_ptr,
    shift_ptr,
    weight_ptr,
    y_ptr,
    rstd_ptr,
    x_stride,
    rows,
    cols,
    each,
    eps,
    OFFSET: tl.constexpr,
    EXACT: tl.constexpr,
    ROUND: tl.constexpr,
    NARROW: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Modulated RMSNorm of rows that fit into registers.

    Program: ROWS whole rows, which may have several modulations; reads x, scale, shift and weight,
    writes rstd and y.
    """
    first = tl.program_id(0).to(tl.int64) * ROWS
    row = tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK)
    row_mask = first + row < rows
    mask = row_mask[:, None] & (col < cols)[None, :]
    assume_rows(x_ptr, x_stride, ROWS)
    assume_cols(cols, BLOCK)
    weight = _load_weight(weight_ptr, col, col < cols, OFFSET, EXACT)[None, :]
    x_offset = row[:, None] * x_stride + col[None, :]
    x = tl.load(x_ptr + first * x_stride + x_offset, mask=mask, other=0.0).to(tl.float32)
    # the scalar base is the modulation of the tile's first row
    which = (first // each) * cols
    at = _modulation((first % each).to(tl.int32) + row, each, ROWS)[:, None] * cols + col[None, :]
    scale = tl.load(scale_ptr + which + at, mask=mask, other=0.0).to(tl.float32)
    rstd = tl.rsqrt(tl.sum(x * x, axis=1) / cols + eps)
    tl.store(rstd_ptr + first + row, rstd, mask=row_mask)
    y = _norm(x, rstd[:, None], weight, x_ptr.dtype.element_ty, ROUND, NARROW) * (1.0 + scale)
    if shift_ptr is not None:
        y += tl.load(shift_ptr + which + at, mask=mask, other=0.0).to(tl.float32)
    y_offset = row[:, None] * cols + col[None, :]
    tl.store(y_ptr + first * cols + y_offset, round_to(y, y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _modulated_rms_norm_forward_wide_kernel(
    x_ptr,
    scale_ptr,
    shift_ptr,
    weight_ptr,
    y_ptr,
    rstd_ptr,
    x_stride,
    cols,
    each,
    eps,
    OFFSET: tl.constexpr,
    EXACT: tl.constexpr,
    ROUND: tl.constexpr,
    NARROW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The same for wider rows, in two passes of BLOCK columns a step.

    Program: one row. The first pass sums squares, the second reads x again and writes y.
    """
    row = tl.program_id(0).to(tl.int64)
    assume_cols(cols)
    at = (row // each) * cols
    x_ptr += row * x_stride
    y_ptr += row * cols
    squares = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, cols, BLOCK):
        col = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + col, mask=col < cols, other=0.0).to(tl.float32)
        squares += x * x
    rstd = tl.rsqrt(tl.sum(squares, axis=0) / cols + eps)
    tl.store(rstd_ptr + row, rstd)
    for start in tl.range(0, cols, BLOCK):
        col = start + tl.arange(0, BLOCK)
        mask = col < cols
        x = tl.load(x_ptr + col, mask=mask, other=0.0).to(tl.float32)
        scale = tl.load(scale_ptr + at + col, mask=mask, other=0.0).to(tl.float32)
        weight = _load_weight(weight_ptr, col, mask, OFFSET, EXACT)
        y = _norm(x, rstd, weight, x_ptr.dtype.element_ty, ROUND, NARROW) * (1.0 + scale)
        if shift_ptr is not None:
            y += tl.load(shift_ptr + at + col, mask=mask, other=0.0).to(tl.float32)
        tl.store(y_ptr + col, round_to(y, y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _modulated_rms_norm_backward_kernel(
    dy_ptr,
    x_ptr,
    scale_ptr,
    weight_ptr,
    rstd_ptr,
    dx_ptr,
    dscale_ptr,
    dshift_ptr,
    dweight_ptr,
    dy_stride,
    x_stride,
    cols,
    each,
    modulations,
    splits,
    OFFSET: tl.constexpr,
    EXACT: tl.constexpr,
    ROUND: tl.constexpr,
    NARROW: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Gradient of x, and sums of those of scale, shift and weight; rows fit into registers.

    Program: persistent; every so many modulations, and of their rows every ``splits``-th tile of
    ROWS rows.
    For each modulation it reads dy, x and rstd of its tiles, writes dx, and sums dscale and dshift
    in registers. They are written when the modulation ends, in the gradient's dtype or as fp32
    partials of a split. The sum for the weight runs over all modulations and leaves as one fp32
    partial a program.
    """
    program = tl.program_id(0)
    split = program % splits
    row = tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK)
    assume_rows(dy_ptr, dy_stride, ROWS)
    assume_rows(x_ptr, x_stride, ROWS)
    assume_cols(cols, BLOCK)
    weight = _load_weight(weight_ptr, col, col < cols, OFFSET, EXACT)[None, :]
    x_offset = row[:, None] * x_stride + col[None, :]
    dy_offset = row[:, None] * dy_stride + col[None, :]
    dx_offset = row[:, None] * cols + col[None, :]
    dweight = tl.zeros([ROWS, BLOCK], tl.float32)
    for which in tl.range(program // splits, modulations, tl.num_programs(0) // splits):
        begin = tl.cast(which, tl.int64) * each
        at = tl.cast(which, tl.int64) * cols
        scale = tl.load(scale_ptr + at + col, mask=col < cols, other=0.0).to(tl.float32)
        scale = 1.0 + scale[None, :]
        dscale = tl.zeros([ROWS, BLOCK], tl.float32)
        dshift = tl.zeros([ROWS, BLOCK], tl.float32)
        for tile in tl.range(split, tl.cdiv(each, ROWS), splits, num_stages=STAGES):
            row_mask = tile * ROWS + row < each
            first = begin + tile * ROWS
            mask = row_mask[:, None] & (col < cols)[None, :]
            g = tl.load(dy_ptr + first * dy_stride + dy_offset, mask=mask, other=0.0).to(tl.float32)
            x = tl.load(x_ptr + first * x_stride + x_offset, mask=mask, other=0.0).to(tl.float32)
            rstd = tl.load(rstd_ptr + first + row, mask=row_mask, other=0.0)[:, None]
            rounded = _normalized(x, rstd, x_ptr.dtype.element_ty, ROUND)
            if dshift_ptr is not None:
                dshift += g
            if dscale_ptr is not None:
                norm = _norm(x, rstd, weight, x_ptr.dtype.element_ty, ROUND, NARROW)
                dscale += _of_scale(
                    g, norm, x_ptr.dtype.element_ty, scale_ptr.dtype.element_ty, NARROW
                )
            g *= scale
            if dweight_ptr is not None:
                dweight += g * rounded
            if dx_ptr is not None:
                g *= weight
                n = x * rstd
                dx = (g - n * (tl.sum(g * n, axis=1) / cols)[:, None]) * rstd
                dx = round_to(dx, dx_ptr.dtype.element_ty)
                tl.store(dx_ptr + first * cols + dx_offset, dx, mask=mask)
        at += tl.cast(split, tl.int64) * modulations * cols
        if dscale_ptr is not None:
            total = round_to(tl.sum(dscale, axis=0), dscale_ptr.dtype.element_ty)
            tl.store(dscale_ptr + at + col, total, mask=col < cols)
        if dshift_ptr is not None:
            total = round_to(tl.sum(dshift, axis=0), dshift_ptr.dtype.element_ty)
            tl.store(dshift_ptr + at + col, total, mask=col < cols)
    if dweight_ptr is not None:
        dweight_ptr += program.to(tl.int64) * cols
        tl.store(dweight_ptr + col, tl.sum(dweight, axis=0), mask=col < cols)


@triton.jit
def _modulated_rms_norm_backward_wide_kernel(
    dy_ptr,
    x_ptr,
    scale_ptr,
    weight_ptr,
    rstd_ptr,
    dx_ptr,
    dy_stride,
    x_stride,
    cols,
    each,
    OFFSET: tl.constexpr,
    EXACT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Gradient of x for wider rows, in two passes of BLOCK columns a step.

    Program: one row. The first pass sums g * n over the row, the second reads again and writes dx.
    """
    row = tl.program_id(0).to(tl.int64)
    assume_cols(cols)
    scale_ptr += (row // each) * cols
    dy_ptr += row * dy_stride
    x_ptr += row * x_stride
    rstd = tl.load(rstd_ptr + row)
    products = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, cols, BLOCK):
        col = start + tl.arange(0, BLOCK)
        mask = col < cols
        g = tl.load(dy_ptr + col, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + col, mask=mask, other=0.0).to(tl.float32)
        g *= 1.0 + tl.load(scale_ptr + col, mask=mask, other=0.0).to(tl.float32)
        products += g * _load_weight(weight_ptr, col, mask, OFFSET, EXACT) * (x * rstd)
    along = tl.sum(products, axis=0) / cols
    for start in tl.range(0, cols, BLOCK):
        col = start + tl.arange(0, BLOCK)
        mask = col < cols
        g = tl.load(dy_ptr + col, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + col, mask=mask, other=0.0).to(tl.float32)
        g *= 1.0 + tl.load(scale_ptr + col, mask=mask, other=0.0).to(tl.float32)
        g *= _load_weight(weight_ptr, col, mask, OFFSET, EXACT)
        dx = round_to((g - x * rstd * along) * rstd, dx_ptr.dtype.element_ty)
        tl.store(dx_ptr + row * cols + col, dx, mask=mask)


@triton.jit
def _modulated_rms_norm_backward_wide_sums_kernel(
    dy_ptr,
    x_ptr,
    scale_ptr,
    weight_ptr,
    rstd_ptr,
    dscale_ptr,
    dshift_ptr,
    dweight_ptr,
    dy_stride,
    x_stride,
    cols,
    each,
    modulations,
    splits,
    programs,
    OFFSET: tl.constexpr,
    EXACT: tl.constexpr,
    ROUND: tl.constexpr,
    NARROW: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Sums of the gradients of scale, shift and weight for wider rows.

    Program: BLOCK columns, and the modulations and rows that the kernel above gives to one of
    ``programs`` programs. Writes as that kernel does.
    """
    program = tl.program_id(0) % programs
    split = program % splits
    start = (tl.program_id(0) // programs) * BLOCK
    lane = tl.arange(0, BLOCK)
    col = start + lane
    mask = col < cols
    dy_ptr += start
    x_ptr += start
    weight = _load_weight(weight_ptr, col, mask, OFFSET, EXACT)
    dweight = tl.zeros([BLOCK], tl.float32)
    for which in tl.range(program // splits, modulations, programs // splits):
        at = tl.cast(which, tl.int64) * cols + start
        scale = 1.0 + tl.load(scale_ptr + at + lane, mask=mask, other=0.0).to(tl.float32)
        dscale = tl.zeros([BLOCK], tl.float32)
        dshift = tl.zeros([BLOCK], tl.float32)
        for index in tl.range(split, each, splits, num_stages=STAGES):
            row = tl.cast(which, tl.int64) * each + index
            g = tl.load(dy_ptr + row * dy_stride + lane, mask=mask, other=0.0).to(tl.float32)
            x = tl.load(x_ptr + row * x_stride + lane, mask=mask, other=0.0).to(tl.float32)
            n = _normalized(x, tl.load(rstd_ptr + row), x_ptr.dtype.element_ty, ROUND)
            dshift += g
            norm = _norm(x, tl.load(rstd_ptr + row), weight, x_ptr.dtype.element_ty, ROUND, NARROW)
            dscale += _of_scale(g, norm, x_ptr.dtype.element_ty, scale_ptr.dtype.element_ty, NARROW)
            dweight += g * n * scale
        at += tl.cast(split, tl.int64) * modulations * cols
        if dscale_ptr is not None:
            dscale = round_to(dscale, dscale_ptr.dtype.element_ty)
            tl.store(dscale_ptr + at + lane, dscale, mask=mask)
        if dshift_ptr is not None:
            dshift = round_to(dshift, dshift_ptr.dtype.element_ty)
            tl.store(dshift_ptr + at + lane, dshift, mask=mask)
    if dweight_ptr is not None:
        dweight_ptr += program.to(tl.int64) * cols + start
        tl.store(dweight_ptr + lane, dweight, mask=mask)


# --- launchers ---


@dataclass(frozen=True)
class ModulatedConfig(BackwardConfig):
    """A BackwardConfig whose ``splits`` programs share the rows of a modulation."""

    splits: int


def modulated_backward_config(
    info: DeviceInfo, rows: int, cols: int, modulations: int, element_bytes: int
) -> ModulatedConfig:
    """The layer norm's formula, with tiles that stay within the rows of one modulation."""
    k = backward_config(info, rows, cols, element_bytes, sums=2, widest=4096)
    rows_of_modulation = max(1, rows // modulations)
    per_tile = min(k.rows, power_of_2(rows_of_modulation))
    splits = max(1, min(k.programs // modulations, cdiv(rows_of_modulation, per_tile)))
    programs = modulations * splits if splits > 1 else min(modulations, k.programs)
    threads = k.num_warps * info.warp_size * per_tile // k.rows
    num_warps = warps(max(32, threads), info.warp_size)
    return ModulatedConfig(per_tile, k.block, num_warps, programs, k.stages, splits)


def _constants(
    x: Tensor, weight: Tensor | None, offset: float, casting: str
) -> tuple[float, bool, bool, bool]:
    """The kernels' arguments OFFSET, EXACT, ROUND and NARROW."""
    is_narrow = output_dtype(x, weight, casting) == x.dtype
    return offset, casting == "gemma", casting == "llama" and weight is not None, is_narrow


def forward(
    x: Tensor,
    scale: Tensor,
    shift: Tensor | None,
    weight: Tensor | None,
    eps: float,
    offset: float,
    casting: str,
) -> tuple[Tensor, Tensor]:
    """Y and rstd (fp32)."""
    dtype = output_dtype(x, weight, casting)
    for t in (scale, shift):
        dtype = dtype if t is None else torch.promote_types(dtype, t.dtype)
    y = x.new_empty(x.shape, dtype=dtype)
    rstd = x.new_empty(x.shape[:-1], dtype=torch.float32)
    if x.numel() == 0:
        return y, rstd
    x, scale, shift = as_rows(x), scale.contiguous(), None if shift is None else shift.contiguous()
    weight = None if weight is None else weight.contiguous()
    rows, cols = x.shape
    rows_of_modulation = rows * cols // scale.numel()
    constants = _constants(x, weight, offset, casting)
    k = launch_config(
        "modulated_rms_norm.forward", forward_config, x.device, rows=rows, cols=cols, sums=2
    )
    tensors = (x, scale, shift, weight, y, rstd, x.stride(0))
    if k.block >= cols:
        launch(
            _modulated_rms_norm_forward_kernel,
            cdiv(rows, k.rows),
            (*tensors, rows, cols, rows_of_modulation, eps),
            (*constants, k.rows, k.block),
            k.num_warps,
        )
    else:
        launch(
            _modulated_rms_norm_forward_wide_kernel,
            rows,
            (*tensors, cols, rows_of_modulation, eps),
            (*constants, k.block),
            k.num_warps,
        )
    return y, rstd


def backward(
    dy: Tensor,
    x: Tensor,
    scale: Tensor,
    shift_dtype: torch.dtype | None,
    weight: Tensor | None,
    rstd: Tensor,
    offset: float,
    casting: str,
    needs_x: bool,
    needs_scale: bool,
    needs_shift: bool,
    needs_weight: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, scale, shift and weight; empty tensors if not needed."""
    tensor = x if weight is None else weight
    dx = x.new_empty(x.shape if needs_x else 0)
    if x.numel() == 0:
        needs_and_dtypes = ((needs_scale, scale.dtype), (needs_shift, shift_dtype))
        outputs = [scale.new_zeros(scale.shape if n else 0, dtype=d) for n, d in needs_and_dtypes]
        return dx, outputs[0], outputs[1], tensor.new_zeros(tensor.shape if needs_weight else 0)
    constants = _constants(x, weight, offset, casting)
    sum_dtypes = [d for n, d in ((needs_scale, scale.dtype), (needs_shift, shift_dtype)) if n and d]
    sums, partial = _launch(
        dy,
        x,
        scale,
        weight,
        rstd,
        dx if needs_x else None,
        sum_dtypes,
        needs_scale=needs_scale,
        needs_weight=needs_weight,
        constants=constants,
    )
    dscale = sums.pop(0).view(scale.shape) if needs_scale else scale.new_empty(0)
    dshift = sums.pop(0).view(scale.shape) if needs_shift else x.new_empty(0, dtype=shift_dtype)
    dweight = tensor.new_empty(0) if partial is None else sum_partials(partial, tensor.dtype)
    return dx, dscale, dshift, dweight


def _launch(
    dy: Tensor,
    x: Tensor,
    scale: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    dx: Tensor | None,
    sum_dtypes: list[torch.dtype],
    needs_scale: bool,
    needs_weight: bool,
    constants: tuple[object, ...],
) -> tuple[list[Tensor], Tensor | None]:
    """Fill dx; the sums of scale and shift in the required dtypes; partial sums of the weight's."""
    dy, x, rstd, scale = as_rows(dy), as_rows(x), rstd.contiguous(), scale.contiguous()
    weight = None if weight is None else weight.contiguous()
    (rows, cols), count = x.shape, scale.numel() // x.shape[1]
    size = dy.element_size() + x.element_size()
    k = launch_config(
        "modulated_rms_norm.backward",
        modulated_backward_config,
        x.device,
        rows=rows,
        cols=cols,
        modulations=count,
        element_bytes=size,
    )
    partial = x.new_empty((len(sum_dtypes), k.splits, count * cols), dtype=torch.float32)
    sums = (
        list(partial) if k.splits > 1 else [x.new_empty(count * cols, dtype=d) for d in sum_dtypes]
    )
    ds, db = ([*sums, None, None] if needs_scale else [None, *sums, None])[:2]
    dw = x.new_empty((k.programs, cols), dtype=torch.float32) if needs_weight else None
    inputs, strides = (dy, x, scale, weight, rstd), (dy.stride(0), x.stride(0))
    sizes = (cols, rows // count)
    if k.block >= cols:
        launch(
            _modulated_rms_norm_backward_kernel,
            k.programs,
            (*inputs, dx, ds, db, dw, *strides, *sizes, count, k.splits),
            (*constants, k.rows, k.block, k.stages),
            k.num_warps,
        )
    elif dx is not None:
        launch(
            _modulated_rms_norm_backward_wide_kernel,
            rows,
            (*inputs, dx, *strides, *sizes),
            (*constants[:2], k.block),
            k.num_warps,
        )
    if k.block < cols and (sum_dtypes or dw is not None):
        launch(
            _modulated_rms_norm_backward_wide_sums_kernel,
            k.programs * cdiv(cols, k.block),
            (*inputs, ds, db, dw, *strides, *sizes, count, k.splits, k.programs),
            (*constants, k.block, k.stages),
            k.num_warps,
        )
    if k.splits > 1 and sum_dtypes:
        sums = list(sum_all_partials(partial, *sum_dtypes))
    return sums, dw
