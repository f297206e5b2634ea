"""Causal probabilities of given scores around PyTorch's convolution (arXiv:2504.00927).

    p = softmax of what a row sees, 0 past the diagonal;  y = conv(p), 0 past the diagonal
    dp = conv'(dy up to the diagonal);  dscores = p (dp - sum p dp)   of sparsemax as softmax.py

cuDNN's convolutions of 2-byte numbers take heads on the last axis, and would transpose every tensor
by passes of their own. There, the kernels that copy the lower triangle anyway transpose it as well.

What is past the diagonal is not used: of the scores, of dy, p and dp the kernels read about half,
of the convolution's y nothing. Row r of an
image (R, S) sees columns 0 to r. Loads end at the next multiple of GROUP columns: the compiler
loads 16 bytes at a time only where it knows that a mask does not change within them.
Sparsemax is that of sparsemax.py, of scores that are -inf past the diagonal.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import conv2d

from liger_multi.backends.triton.common.launching import launch
from liger_multi.backends.triton.common.rows import (
    LOG2E,
    LONGEST_ROW,
    assume_cols,
    assume_rows,
    cdiv,
    checked_cols,
    empty_contiguous,
    power_of_2,
    round_to,
    tile_rows,
    warps,
)
from liger_multi.backends.triton.cross_entropy import sparsemax
from liger_multi.backends.triton.cross_entropy.softmax import _weight, tile_config
from liger_multi.dispatch.bitwise import bitwise, promise
from liger_multi.dispatch.launch import DeviceInfo, launch_config
from liger_multi.reference.common.strict import ordered_convolutions

_CONVOLUTION = "cuDNN and MIOpen choose a convolution by its sizes and the card"
BITWISE = bitwise(
    promise("repeat recompute", because={"rows": _CONVOLUTION, "cards": _CONVOLUTION}), "scores y p"
)

# --- kernels ---


GROUP: tl.constexpr = tl.constexpr(16)
LOWEST: tl.constexpr = tl.constexpr(-1e30)  # scores from here down, -inf too, have no probability


@triton.jit
def _image_and_row(rows, ROWS: tl.constexpr):
    """The image of this program and the first row of its tile."""
    tiles = tl.cdiv(rows, ROWS)
    program = tl.program_id(0)
    return (program // tiles).to(tl.int64), program % tiles * ROWS


@triton.jit
def _loaded(row):
    """Where loads of a row end: the first multiple of GROUP columns past what the row sees."""
    return (row // GROUP + 1) * GROUP


@triton.jit
def _start_of(image, row, batch_stride, head_stride, row_stride, heads):
    """Offset of a row of an image; an image is one head of one element of the batch."""
    return image // heads * batch_stride + image % heads * head_stride + row * row_stride


@triton.jit
def _store_zeros(row_ptr, first, cols, BLOCK: tl.constexpr):
    """Write zeros from column ``first`` to the end of a row."""
    zeros = tl.zeros([BLOCK], row_ptr.dtype.element_ty)
    for start in tl.range(first, cols, BLOCK):
        assume_cols(start)
        col = start + tl.arange(0, BLOCK)
        tl.store(row_ptr + col, zeros, mask=col < cols)


@triton.jit
def _multi_token_forward_kernel(
    x_ptr,
    p_ptr,
    batch_stride,
    head_stride,
    row_stride,
    heads,
    rows,
    cols,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Causal softmax of rows that fit into registers.

    Program: ROWS rows of one image; reads the scores up to the diagonal, writes whole rows, with
    zeros past it. A row of -inf gives zeros.
    """
    image, first = _image_and_row(rows, ROWS)
    x_ptr += _start_of(image, first.to(tl.int64), batch_stride, head_stride, row_stride, heads)
    p_ptr += (image * rows + first) * cols
    assume_rows(x_ptr, row_stride, ROWS)
    assume_cols(cols, BLOCK)
    lane = tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK)
    row = first + lane
    inside = (row < rows)[:, None] & (col < cols)[None, :]
    mask = inside & (col[None, :] < _loaded(row)[:, None])
    x = tl.load(x_ptr + (lane[:, None] * row_stride + col[None, :]), mask=mask, other=0.0)
    visible = (col[None, :] <= row[:, None]) & (col < cols)[None, :]
    x = tl.where(visible, x.to(tl.float32), float("-inf"))
    largest = tl.maximum(tl.max(x, axis=1), LOWEST)
    e = tl.exp2((x - largest[:, None]) * LOG2E)
    total = tl.sum(e, axis=1)
    p = e * tl.where(total == 0.0, 0.0, 1.0 / total)[:, None]
    p = tl.where(visible, p, 0.0)  # NaN stays where it is seen
    p_offset = lane[:, None] * cols + col[None, :]
    tl.store(p_ptr + p_offset, round_to(p, p_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _multi_token_forward_wide_kernel(
    x_ptr, p_ptr, batch_stride, head_stride, row_stride, heads, rows, cols, BLOCK: tl.constexpr
):
    """The same for wider rows, in two passes of BLOCK columns a step, up to the diagonal.

    Program: one row. The first pass keeps a maximum and a sum for each lane, so that no step waits
    for all threads; the lanes are merged at the end. The second pass writes the probabilities, and
    zeros follow to the end of the row.
    """
    image, row = _image_and_row(rows, 1)
    x_ptr += _start_of(image, row.to(tl.int64), batch_stride, head_stride, row_stride, heads)
    p_ptr += (image * rows + row) * cols
    assume_cols(cols)
    end = tl.minimum(row + 1, cols)
    largest = tl.full([BLOCK], LOWEST, tl.float32)  # per lane: no step needs a reduction
    total = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, end, BLOCK):
        assume_cols(start)
        col = start + tl.arange(0, BLOCK)
        mask = (col < _loaded(row)) & (col < cols)
        x = tl.load(x_ptr + col, mask=mask, other=0.0, eviction_policy="evict_last")
        x = tl.where(col < end, x.to(tl.float32), float("-inf"))
        higher = tl.maximum(largest, x)
        total = total * tl.exp2((largest - higher) * LOG2E) + tl.exp2((x - higher) * LOG2E)
        largest = higher
    anchor = tl.max(largest, axis=0)
    sum_ = tl.sum(total * tl.exp2((largest - anchor) * LOG2E), axis=0)
    scale = tl.where(sum_ == 0.0, 0.0, 1.0 / sum_)
    for start in tl.range(0, end, BLOCK):
        assume_cols(start)
        col = start + tl.arange(0, BLOCK)
        mask = (col < _loaded(row)) & (col < cols)
        x = tl.load(x_ptr + col, mask=mask, other=0.0, eviction_policy="evict_first")
        p = tl.exp2((x.to(tl.float32) - anchor) * LOG2E) * scale
        p = round_to(tl.where(col < end, p, 0.0), p_ptr.dtype.element_ty)
        tl.store(p_ptr + col, p, mask=col < cols)
    _store_zeros(p_ptr, tl.cdiv(end, BLOCK) * BLOCK, cols, BLOCK)


@triton.jit
def _multi_token_backward_kernel(
    p_ptr, dp_ptr, rows, cols, SPARSE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """Gradient of the scores, in the place of that of the probabilities; rows fit into registers.

    Program: ROWS rows of one image; reads p and dp up to the diagonal, writes whole rows over dp.
    Where the weight is 0, dp is not used, so that a NaN there does no harm.
    """
    image, first = _image_and_row(rows, ROWS)
    p_ptr += (image * rows + first) * cols
    dp_ptr += (image * rows + first) * cols
    assume_cols(cols, BLOCK)
    lane = tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK)
    row = first + lane
    inside = (row < rows)[:, None] & (col < cols)[None, :]
    mask = inside & (col[None, :] < _loaded(row)[:, None])
    offset = lane[:, None] * cols + col[None, :]
    w = _weight(tl.load(p_ptr + offset, mask=mask, other=0.0), SPARSE)
    dp = tl.load(dp_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    dp = tl.where(w == 0.0, 0.0, dp)  # this also zeros the columns past the diagonal
    mean = tl.sum(w * dp, axis=1)
    if SPARSE:
        mean = mean / tl.sum(w, axis=1)
    dx = tl.where(w == 0.0, 0.0, w * (dp - mean[:, None]))
    tl.store(dp_ptr + offset, round_to(dx, dp_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _multi_token_backward_wide_kernel(
    p_ptr, dp_ptr, rows, cols, SPARSE: tl.constexpr, BLOCK: tl.constexpr
):
    """The same for wider rows, in two passes of BLOCK columns a step, up to the diagonal.

    Program: one row. The first pass sums w * dp, the second reads again and overwrites dp; zeros
    follow to the end of the row.
    """
    image, row = _image_and_row(rows, 1)
    p_ptr += (image * rows + row) * cols
    dp_ptr += (image * rows + row) * cols
    assume_cols(cols)
    end = tl.minimum(row + 1, cols)
    total = tl.zeros([BLOCK], tl.float32)
    weights = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, end, BLOCK):
        assume_cols(start)
        col = start + tl.arange(0, BLOCK)
        mask = (col < _loaded(row)) & (col < cols)
        dp = tl.load(dp_ptr + col, mask=mask, other=0.0, eviction_policy="evict_last")
        p = tl.load(p_ptr + col, mask=mask, other=0.0, eviction_policy="evict_last")
        w = _weight(p, SPARSE)
        total += tl.where(w == 0.0, 0.0, w * dp.to(tl.float32))
        if SPARSE:
            weights += w
    mean = tl.sum(total, axis=0)
    if SPARSE:
        mean = mean / tl.sum(weights, axis=0)
    for start in tl.range(0, end, BLOCK):
        assume_cols(start)
        col = start + tl.arange(0, BLOCK)
        mask = (col < _loaded(row)) & (col < cols)
        dp = tl.load(dp_ptr + col, mask=mask, other=0.0, eviction_policy="evict_first")
        p = tl.load(p_ptr + col, mask=mask, other=0.0, eviction_policy="evict_first")
        w = _weight(p, SPARSE)
        dx = tl.where(w == 0.0, 0.0, w * (dp.to(tl.float32) - mean))
        tl.store(dp_ptr + col, round_to(dx, dp_ptr.dtype.element_ty), mask=col < cols)
    _store_zeros(dp_ptr, tl.cdiv(end, BLOCK) * BLOCK, cols, BLOCK)


@triton.jit
def _multi_token_lower_kernel(
    x_ptr,
    y_ptr,
    batch_stride,
    head_stride,
    row_stride,
    heads,
    rows,
    cols,
    LOWEST_PAST: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy of an image that is -inf (LOWEST_PAST) or 0 past the diagonal.

    Program: ROWS rows of one image, in steps of BLOCK columns; reads any strides up to the
    diagonal, writes contiguous rows.
    """
    image, first = _image_and_row(rows, ROWS)
    x_ptr += _start_of(image, first.to(tl.int64), batch_stride, head_stride, row_stride, heads)
    y_ptr += (image * rows + first) * cols
    assume_rows(x_ptr, row_stride, ROWS)
    assume_rows(y_ptr, cols, ROWS)
    assume_cols(cols)
    lane = tl.arange(0, ROWS)
    row = first + lane
    past = float("-inf") if LOWEST_PAST else 0.0
    for start in tl.range(0, cols, BLOCK):
        assume_cols(start, LONGEST_ROW // ROWS)
        col = start + tl.arange(0, BLOCK)
        inside = (row < rows)[:, None] & (col < cols)[None, :]
        mask = inside & (col[None, :] < _loaded(row)[:, None])
        x = tl.load(x_ptr + (lane[:, None] * row_stride + col[None, :]), mask=mask, other=0.0)
        x = tl.where(col[None, :] <= row[:, None], x, past).to(y_ptr.dtype.element_ty)
        tl.store(y_ptr + (lane[:, None] * cols + col[None, :]), x, mask=inside)


@triton.jit
def _multi_token_zero_kernel(y_ptr, rows, cols, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Write zeros past the diagonal of images.

    Program: ROWS rows of one image; ROWS is GROUP or 1. It writes the group of columns that the
    diagonal crosses with a mask, and the columns past it in steps of BLOCK.
    """
    DTYPE: tl.constexpr = y_ptr.dtype.element_ty
    image, first = _image_and_row(rows, ROWS)
    y_ptr += (image * rows + first) * cols
    assume_rows(y_ptr, cols, ROWS)
    assume_cols(cols)
    lane = tl.arange(0, ROWS)
    row = first + lane
    offset = lane[:, None] * cols
    near = first // GROUP * GROUP + tl.arange(0, GROUP)
    past = (row < rows)[:, None] & (near < cols)[None, :] & (near[None, :] > row[:, None])
    tl.store(y_ptr + (offset + near[None, :]), tl.zeros([ROWS, GROUP], DTYPE), mask=past)
    for start in tl.range(_loaded(first), cols, BLOCK):
        assume_cols(start, LONGEST_ROW // ROWS)
        col = start + tl.arange(0, BLOCK)
        mask = (row < rows)[:, None] & (col < cols)[None, :]
        tl.store(y_ptr + (offset + col[None, :]), tl.zeros([ROWS, BLOCK], DTYPE), mask=mask)


@triton.jit
def _multi_token_turn_kernel(
    x_ptr,
    y_ptr,
    batch_stride,
    head_stride,
    row_stride,
    rows,
    cols,
    pieces,
    TO_LAST: tl.constexpr,
    HEADS: tl.constexpr,
    TALL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Transpose heads to the last axis (B, R, S, C), or back: up to the diagonal, 0 past it.

    Program: BLOCK columns of one row of one element of the batch, of all HEADS heads (padded to
    TALL). TO_LAST: reads the heads, which stand ``head_stride`` apart, and writes them side by
    side; otherwise the other way round.
    """
    image = (tl.program_id(0) // pieces).to(tl.int64)  # a row of an element of the batch
    start = (tl.program_id(0) % pieces) * BLOCK
    row = image % rows
    head, lane = tl.arange(0, TALL)[None, :], tl.arange(0, BLOCK)[:, None]
    col = start + lane
    inside = (head < HEADS) & (col < cols)
    mask = inside & (col < _loaded(row))
    last, apart = (image * cols + start) * HEADS, head * head_stride + lane
    place = lane * HEADS + head
    if TO_LAST:
        assume_rows(x_ptr, head_stride, TALL)
        x_ptr += image // rows * batch_stride + row * row_stride + start
        x = tl.load(x_ptr + apart, mask=mask, other=0.0)
        tl.store(y_ptr + last + place, tl.where(col <= row, x, 0.0).to(x.dtype), mask=inside)
    else:
        assume_rows(y_ptr, head_stride, TALL)
        y_ptr += image // rows * batch_stride + row * row_stride + start
        x = tl.load(x_ptr + last + place, mask=mask, other=0.0)
        tl.store(y_ptr + apart, tl.where(col <= row, x, 0.0).to(x.dtype), mask=inside)


# --- launches ---


FAR = 2**31  # bytes that a tile of all heads may span


@dataclass(frozen=True)
class ZeroConfig:
    """Columns a step of as many rows as a group has columns, and warps a program."""

    block: int
    num_warps: int


def zero_config(info: DeviceInfo, rows: int, cols: int) -> ZeroConfig:
    """Steps of 2048 elements, 16 a thread."""
    return ZeroConfig(2048 // GROUP.value, warps(128, info.warp_size))


@dataclass(frozen=True)
class TransposeConfig:
    """``block`` columns of all heads a program; none where convolutions keep the layout."""

    block: int
    num_warps: int


def transpose_config(
    info: DeviceInfo, heads: int, others: int, size: int, unit: int
) -> TransposeConfig:
    """Tiles of 4096 elements, where convolutions are cuDNN's and have instructions for them.

    ``unit``: what numbers of heads are multiples of. With 8 heads the gradients of a convolution
    gain a third by it, but forward takes half as long again (H200, 1x8x4096).
    """
    fit = all(n % unit == 0 and 0 < n <= 128 for n in (heads, others))
    if not (info.arch.startswith("sm") and size == 2 and fit):
        return TransposeConfig(0, 1)
    return TransposeConfig(4096 // power_of_2(max(heads, others)), warps(128, info.warp_size))


def supports(weight: Tensor) -> str | None:
    """No fp64: probabilities are fp32 inside."""
    double = weight.element_size() == 8
    return "its probabilities are float32 inside, got float64" if double else None


# --- launchers ---


def _by_rows(x: Tensor) -> Tensor:
    """``x`` with adjacent columns."""
    return x if x.stride(3) == 1 or x.shape[3] == 1 else x.contiguous()


def _sizes_and_strides(x: Tensor) -> tuple[int, ...]:
    """What kernels need to find the rows of ``x`` (B, C, R, S)."""
    return (*x.stride()[:3], *x.shape[1:])


def _softmax(scores: Tensor) -> Tensor:
    p, x = empty_contiguous(scores), _by_rows(scores)
    if not p.numel():
        return p
    images, (rows, cols) = x.shape[0] * x.shape[1], x.shape[2:]
    k = launch_config(
        "multi_token_attention.forward", tile_config, x.device, rows=rows, cols=cols, arrays=1
    )
    if k.block < cols:
        launch(
            _multi_token_forward_wide_kernel,
            images * rows,
            (x, p, *_sizes_and_strides(x)),
            (k.block,),
            k.num_warps,
        )
        return p
    tall = tile_rows(k.rows, x.stride(2), cols)
    launch(
        _multi_token_forward_kernel,
        images * cdiv(rows, tall),
        (x, p, *_sizes_and_strides(x)),
        (tall, k.block),
        k.num_warps,
    )
    return p


def _softmax_backward_(p: Tensor, dp: Tensor, sparse: bool) -> None:
    """Overwrite the gradient of probabilities with that of scores; both contiguous."""
    if not p.numel():
        return
    images, (rows, cols) = p.shape[0] * p.shape[1], p.shape[2:]
    k = launch_config(
        "multi_token_attention.backward", tile_config, p.device, rows=rows, cols=cols, arrays=2
    )
    if k.block < cols:
        launch(
            _multi_token_backward_wide_kernel,
            images * rows,
            (p, dp, rows, cols),
            (sparse, k.block),
            k.num_warps,
        )
        return
    tall = tile_rows(k.rows, cols)
    launch(
        _multi_token_backward_kernel,
        images * cdiv(rows, tall),
        (p, dp, rows, cols),
        (sparse, tall, k.block),
        k.num_warps,
    )


def _lower(x: Tensor, lowest: bool) -> Tensor:
    """A contiguous copy that is 0 past the diagonal, or -inf where ``lowest``."""
    out, x = empty_contiguous(x), _by_rows(x)
    if not out.numel():
        return out
    images, (rows, cols) = x.shape[0] * x.shape[1], x.shape[2:]
    k = launch_config(
        "multi_token_attention.lower", tile_config, x.device, rows=rows, cols=cols, arrays=1
    )
    tall = tile_rows(k.rows, x.stride(2), cols)
    launch(
        _multi_token_lower_kernel,
        images * cdiv(rows, tall),
        (x, out, *_sizes_and_strides(x)),
        (lowest, tall, k.block),
        k.num_warps,
    )
    return out


def _zero_(y: Tensor) -> Tensor:
    """Write zeros past the diagonal of a contiguous tensor of our own."""
    if not y.numel():
        return y
    images, (rows, cols) = y.shape[0] * y.shape[1], y.shape[2:]
    k = launch_config("multi_token_attention.zero", zero_config, y.device, rows=rows, cols=cols)
    tall = tile_rows(GROUP.value, checked_cols(cols))
    launch(
        _multi_token_zero_kernel,
        images * cdiv(rows, tall),
        (y, rows, cols),
        (tall, k.block),
        k.num_warps,
    )
    return y


def _transpose(x: Tensor, k: TransposeConfig, to_last: bool) -> Tensor:
    """The lower triangle of ``x`` with heads adjacent, or with columns adjacent again."""
    (batch, heads, rows, cols), pieces = x.shape, cdiv(x.shape[3], k.block)
    layout = torch.channels_last if to_last else torch.contiguous_format
    x = _by_rows(x) if to_last else x.contiguous(memory_format=torch.channels_last)
    distance = x.stride(1) if to_last else rows * cols
    if distance * power_of_2(heads) * x.element_size() >= FAR:
        transposed = _lower(x, False) if to_last else x
        transposed = transposed.contiguous(memory_format=layout)
        return transposed if to_last else _zero_(transposed)
    out = torch.empty_like(x, memory_format=layout)
    strides = (x if to_last else out).stride()[:3]
    if out.numel():
        launch(
            _multi_token_turn_kernel,
            batch * rows * pieces,
            (x, out, *strides, rows, cols, pieces),
            (to_last, heads, power_of_2(heads), k.block),
            k.num_warps,
        )
    return out


def _transposing(weight: Tensor, p: Tensor, unit: int) -> TransposeConfig:
    sizes = {"heads": p.shape[1], "others": weight.shape[0], "size": p.element_size()}
    config: TransposeConfig = launch_config(
        "multi_token_attention.transpose", transpose_config, p.device, **sizes, unit=unit
    )
    return config


def forward(
    scores: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: int,
    padding: int,
    dilation: int,
    groups: int,
    sparse: bool,
) -> tuple[Tensor, Tensor]:
    """Probabilities, their convolution, and zeros past its diagonal."""
    p = sparsemax.forward(_lower(scores, True)) if sparse else _softmax(scores)
    convolution_options, k = (stride, padding, dilation, groups), _transposing(weight, p, 16)
    with ordered_convolutions(p.device):
        y = conv2d(_transpose(p, k, True) if k.block else p, weight, bias, *convolution_options)
    return _transpose(y, k, False) if k.block else _zero_(y.contiguous()), p


def backward(
    dy: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    p: Tensor,
    stride: int,
    padding: int,
    dilation: int,
    groups: int,
    sparse: bool,
    needs_scores: bool,
    needs_weight: bool,
    needs_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The convolution's gradients; that of the probabilities becomes the one of the scores."""
    k = _transposing(weight, p, 8)
    sides = (_transpose(dy, k, True), _transpose(p, k, True)) if k.block else (_lower(dy, False), p)
    with ordered_convolutions(p.device):
        gradients = torch.ops.aten.convolution_backward(
            *sides,
            weight,
            None if bias is None else list(bias.shape),
            [stride] * 2,
            [padding] * 2,
            [dilation] * 2,
            False,
            [0, 0],
            groups,
            [needs_scores, needs_weight, bias is not None and needs_bias],
        )
    dp, dweight, dbias = (weight.new_empty(0) if x is None else x for x in gradients)
    if needs_scores:
        dp = _transpose(dp, k, False) if k.block else dp.contiguous()
        _softmax_backward_(p.contiguous(), dp, sparse)
    return dp, dweight.contiguous(), dbias
