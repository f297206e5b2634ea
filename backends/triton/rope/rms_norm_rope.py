"""RMSNorm (arXiv:1910.07467) and rotation (arXiv:2104.09864) of queries or keys in one launch.

With n = x * rstd, rstd = (mean(x^2) + eps)^(-1/2), w = weight + offset and u = w * n, a pair of
channels (a, b) = (i, i + D / 2) becomes

    a' = u_a cos_a - u_b sin_a,  b' = u_b cos_b + u_a sin_b

The mean is that of a head, or of all heads of a token (WHOLE). Backward turns dy back in registers,
then is that of the norm:

    g_a = dy_a cos_a + dy_b sin_b,  g_b = dy_b cos_b - dy_a sin_a
    dx = rstd * (g w - n * mean(g w n)),  dw = sum of g * n

A tile is TOKENS x HEADS x D / 2 for both channels of the pairs, so that a rotation needs no
exchange between threads. Strides say where everything is: no layout is copied. Backward runs a few
persistent programs a core over tiles of the same heads and of every other token, so that the
weight's gradient stays in registers and leaves as one fp32 partial a program.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_multi.backends.triton.common.launching import launch
from liger_multi.backends.triton.common.rows import cdiv, power_of_2, round_to, sum_partials, warps
from liger_multi.backends.triton.norms.rms_norm import _load_weight
from liger_multi.backends.triton.rope.rope import (
    assume_tile,
    load_pairs,
    near_angles,
    near_channels,
    near_tile,
    store_pairs,
    strides,
    tokens_of,
)
from liger_multi.dispatch.launch import DeviceInfo, launch_config
from liger_multi.reference.common.strict import by_rows
from liger_multi.reference.rope.rms_norm_rope import (
    norm_dtype,
    of_tokens,
    output_dtype,
    statistics_shape,
)
from liger_multi.reference.rope.rope import dense

WIDEST = 8192
"""Channels of a token that a norm of all heads keeps in registers."""
MANY = 2**20  # tokens of a long sequence


@dataclass(frozen=True)
class TileConfig:
    """Tiles of ``tokens`` x ``heads``; ``programs`` persistent ones in backward."""

    tokens: int
    heads: int
    num_warps: int
    programs: int


def forward_config(info: DeviceInfo, seq: int, heads: int, width: int, whole: bool) -> TileConfig:
    """Tiles of 1024 channels, 16 of them a thread; all heads of a token where the norm wants it."""
    elements = 4096 if whole else 1024
    return _tiles(info, seq, heads, width, whole, elements, 16, 2)


def backward_config(info: DeviceInfo, seq: int, heads: int, width: int, whole: bool) -> TileConfig:
    """A thread keeps two tensors and the sums of the weight: 8 channels, of many threads a core."""
    return _tiles(info, seq, heads, width, whole, 2048, 16 if whole else 8, 2 if whole else 4)


def _tiles(
    info: DeviceInfo,
    seq: int,
    heads: int,
    width: int,
    whole: bool,
    elements: int,
    per_thread: int,
    per_core: int,
) -> TileConfig:
    # A tile stays within one sequence. How many sequences there are decides nothing about it:
    # other tiles lie differently in the threads, which add up a head's channels in another order.
    # Launchers name a long sequence where one token must have the bits that it has among many.
    row = power_of_2(width)
    padded_heads = power_of_2(max(heads, 1))
    block = padded_heads if whole else max(1, min(padded_heads, 8, elements // row))
    per_tile = max(1, min(elements // (block * row), 32, power_of_2(max(seq, 1))))
    threads = min(max(block * per_tile * row // per_thread, 32), 512)
    parts = 1 if whole else cdiv(max(heads, 1), block)
    programs = max(1, cdiv(per_core * info.cores, parts))
    return TileConfig(per_tile, block, warps(threads, info.warp_size), programs)


# --- kernels ---


@triton.jit
def _weights(
    weight_ptr,
    local,
    heads,
    OFFSET: tl.constexpr,
    EXACT: tl.constexpr,
    WHOLE: tl.constexpr,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
):
    """Weight plus OFFSET of both channels of every pair, of a head or (WHOLE) of every head."""
    pair = tl.arange(0, HALF)[None, None, :]
    mask = pair < WIDTH // 2
    if WHOLE:
        pair += local * WIDTH
        mask = mask & (local < heads)
    a = _load_weight(weight_ptr, pair, mask, OFFSET, EXACT)
    return a, _load_weight(weight_ptr, pair + WIDTH // 2, mask, OFFSET, EXACT)


@triton.jit
def _mean(a, b, cols, WHOLE: tl.constexpr):
    """The mean of both channels over a head, or over all heads, whose axis stays."""
    total = tl.sum(a + b, axis=2)
    if WHOLE:
        total = tl.sum(total, axis=0, keep_dims=True)
    return (total / cols)[:, :, None]


@triton.jit
def _scaled(x, rstd, weight, DTYPE: tl.constexpr, ROUND: tl.constexpr, NARROW: tl.constexpr):
    """What the norm returns; ROUND: n in the dtype of x first, NARROW: the result in it too."""
    n = x * rstd
    if ROUND:
        n = round_to(n, DTYPE).to(tl.float32)
    u = n * weight
    if NARROW:
        u = round_to(u, DTYPE).to(tl.float32)
    return u


@triton.jit(do_not_specialize=["seq", "tiles", "groups"])
def _rms_norm_rope_forward_kernel(
    x_ptr,
    weight_ptr,
    cos_ptr,
    sin_ptr,
    y_ptr,
    rstd_ptr,
    strides,
    heads,
    seq,
    tiles,
    groups,
    cols,
    eps,
    OFFSET: tl.constexpr,
    EXACT: tl.constexpr,
    ROUND: tl.constexpr,
    NARROW: tl.constexpr,
    WHOLE: tl.constexpr,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Normalize and rotate HEADS heads of TOKENS tokens.

    Program: a tile of tokens of one sequence, and one of ``groups`` blocks of heads (all of them
    where WHOLE). Reads x, weight, cos and sin, writes y and rstd. Strides go from one sequence,
    head, token and channel to the next.
    """
    x_strides = strides[0:4]
    y_strides = strides[4:7]
    rstd_strides = strides[7:10]
    angle_strides = strides[10:12]
    batch, start, token, here = tokens_of(tiles, groups, seq, TOKENS)
    first = (tl.program_id(0) % groups) * HEADS
    head = first + tl.arange(0, HEADS)[:, None, None]
    mask = here & (head < heads)
    batch_stride, head_stride, token_stride, stride = x_strides
    y_batch_stride, y_head_stride, y_token_stride = y_strides
    assume_tile(x_ptr, head_stride, token_stride, stride, HEADS, TOKENS, WIDTH)
    assume_tile(y_ptr, y_head_stride, y_token_stride, 1, HEADS, TOKENS, WIDTH)
    local = tl.arange(0, HEADS)[:, None, None]
    x_ptr += batch * batch_stride + start.to(tl.int64) * token_stride
    x_ptr += first.to(tl.int64) * head_stride
    at = local * head_stride + token * token_stride
    a, b = load_pairs(x_ptr, at, stride, mask, WIDTH, HALF, False)
    rstd = tl.rsqrt(_mean(a * a, b * b, cols, WHOLE) + eps)
    rstd_batch_stride, rstd_head_stride, rstd_token_stride = rstd_strides
    rstd_ptr += batch * rstd_batch_stride + start.to(tl.int64) * rstd_token_stride
    if WHOLE:
        tl.store(rstd_ptr + token * rstd_token_stride, rstd, mask=here)
    else:
        rstd_ptr += first.to(tl.int64) * rstd_head_stride
        rstd_at = local * rstd_head_stride + token * rstd_token_stride
        tl.store(rstd_ptr + rstd_at, rstd, mask=mask)
    weight_a, weight_b = _weights(weight_ptr, local, heads, OFFSET, EXACT, WHOLE, WIDTH, HALF)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    a = _scaled(a, rstd, weight_a, dtype, ROUND, NARROW)
    b = _scaled(b, rstd, weight_b, dtype, ROUND, NARROW)
    angle_batch_stride, angle_token_stride = angle_strides
    angle = batch * angle_batch_stride + start.to(tl.int64) * angle_token_stride
    angle_at = token * angle_token_stride
    cos_a, cos_b = load_pairs(cos_ptr + angle, angle_at, 1, here, WIDTH, HALF, False)
    sin_a, sin_b = load_pairs(sin_ptr + angle, angle_at, 1, here, WIDTH, HALF, False)
    y_ptr += batch * y_batch_stride + start.to(tl.int64) * y_token_stride
    y_ptr += first.to(tl.int64) * y_head_stride
    y_at = local * y_head_stride + token * y_token_stride
    rotated_a, rotated_b = a * cos_a - b * sin_a, b * cos_b + a * sin_b
    store_pairs(y_ptr, y_at, rotated_a, rotated_b, mask, WIDTH, HALF, False)


@triton.jit(do_not_specialize=["seq", "tiles", "all_tiles", "groups"])
def _rms_norm_rope_backward_kernel(
    dy_ptr,
    x_ptr,
    weight_ptr,
    cos_ptr,
    sin_ptr,
    rstd_ptr,
    dx_ptr,
    partial_ptr,
    strides,
    heads,
    seq,
    tiles,
    all_tiles,
    groups,
    cols,
    OFFSET: tl.constexpr,
    ROUND: tl.constexpr,
    WHOLE: tl.constexpr,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Gradient of x, and partial sums of the weight's.

    Program: persistent; one of ``groups`` blocks of HEADS heads (all where WHOLE), and every
    (programs / groups)-th of ``all_tiles`` tiles of TOKENS tokens, of which a sequence has
    ``tiles``. Reads dy, x, rstd, cos and sin of a tile a step, and writes dx. The sum for the
    weight stays in registers and leaves as one fp32 partial a program, of a head's width, or
    (WHOLE) of all heads'.
    """
    dy_strides = strides[0:4]
    x_strides = strides[4:8]
    dx_strides = strides[8:11]
    rstd_strides = strides[11:14]
    angle_strides = strides[14:16]
    group = tl.program_id(0) % groups
    first = group * HEADS
    local = tl.arange(0, HEADS)[:, None, None]
    head, token = first + local, tl.arange(0, TOKENS)[None, :, None]
    pair = tl.arange(0, HALF)[None, None, :]
    weight_a, weight_b = _weights(weight_ptr, local, heads, OFFSET, True, WHOLE, WIDTH, HALF)
    sum_a = tl.zeros([HEADS, TOKENS, HALF], tl.float32)
    sum_b = tl.zeros([HEADS, TOKENS, HALF], tl.float32)
    assume_tile(x_ptr, x_strides[1], x_strides[2], x_strides[3], HEADS, TOKENS, WIDTH)
    assume_tile(dy_ptr, dy_strides[1], dy_strides[2], dy_strides[3], HEADS, TOKENS, WIDTH)
    assume_tile(dx_ptr, dx_strides[1], dx_strides[2], 1, HEADS, TOKENS, WIDTH)
    for tile in tl.range(tl.program_id(0) // groups, all_tiles, tl.num_programs(0) // groups):
        batch, start = (tile // tiles).to(tl.int64), (tile % tiles) * TOKENS
        begin, block = start.to(tl.int64), first.to(tl.int64)
        here = start + token < seq
        mask = here & (head < heads)
        x = x_ptr + batch * x_strides[0] + block * x_strides[1] + begin * x_strides[2]
        dy = dy_ptr + batch * dy_strides[0] + block * dy_strides[1] + begin * dy_strides[2]
        at, dy_at = local * x_strides[1] + token * x_strides[2], local * dy_strides[1]
        a, b = load_pairs(x, at, x_strides[3], mask, WIDTH, HALF, False)
        dy_at += token * dy_strides[2]
        dy_a, dy_b = load_pairs(dy, dy_at, dy_strides[3], mask, WIDTH, HALF, False)
        angle = batch * angle_strides[0] + begin * angle_strides[1]
        angle_at = token * angle_strides[1]
        cos_a, cos_b = load_pairs(cos_ptr + angle, angle_at, 1, here, WIDTH, HALF, False)
        sin_a, sin_b = load_pairs(sin_ptr + angle, angle_at, 1, here, WIDTH, HALF, False)
        g_a, g_b = dy_a * cos_a + dy_b * sin_b, dy_b * cos_b - dy_a * sin_a
        rows = rstd_ptr + batch * rstd_strides[0] + begin * rstd_strides[2]
        if WHOLE:
            rstd = tl.load(rows + token * rstd_strides[2], mask=here, other=0.0)
        else:
            rows_at = local * rstd_strides[1] + token * rstd_strides[2]
            rstd = tl.load(rows + block * rstd_strides[1] + rows_at, mask=mask, other=0.0)
        n_a, n_b = a * rstd, b * rstd
        if partial_ptr is not None:
            if ROUND:
                sum_a += g_a * round_to(n_a, x_ptr.dtype.element_ty).to(tl.float32)
                sum_b += g_b * round_to(n_b, x_ptr.dtype.element_ty).to(tl.float32)
            else:
                sum_a += g_a * n_a
                sum_b += g_b * n_b
        if dx_ptr is not None:
            v_a, v_b = g_a * weight_a, g_b * weight_b
            mean = _mean(v_a * n_a, v_b * n_b, cols, WHOLE)
            dx = dx_ptr + batch * dx_strides[0] + block * dx_strides[1] + begin * dx_strides[2]
            dx_at = local * dx_strides[1] + token * dx_strides[2]
            dx_a, dx_b = (v_a - n_a * mean) * rstd, (v_b - n_b * mean) * rstd
            store_pairs(dx, dx_at, dx_a, dx_b, mask, WIDTH, HALF, False)
    if partial_ptr is not None:
        partial_ptr += tl.program_id(0).to(tl.int64) * (cols if WHOLE else WIDTH)
        total_a = tl.sum(sum_a, axis=1, keep_dims=True)
        total_b = tl.sum(sum_b, axis=1, keep_dims=True)
        keep = pair < WIDTH // 2
        if WHOLE:
            pair += local * WIDTH
            keep = keep & (local < heads)
        else:
            total_a = tl.sum(total_a, axis=0, keep_dims=True)
            total_b = tl.sum(total_b, axis=0, keep_dims=True)
        tl.store(partial_ptr + pair, total_a, mask=keep)
        tl.store(partial_ptr + (pair + WIDTH // 2), total_b, mask=keep)


# --- launchers ---


def supports(x: Tensor, weight: Tensor) -> str | None:
    """Why a call is left to another backend."""
    if of_tokens(x, weight) and weight.shape[0] > WIDEST:
        return f"its norm has rows of {weight.shape[0]} channels, and at most {WIDEST} are kept"
    return None


def _angles(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, tuple[int, int]]:
    """Cos and sin with their channels side by side, and the steps of both."""
    steps = cos.stride()
    if steps[-1] != 1 or sin.stride() != steps:
        cos, sin = cos.contiguous(), sin.contiguous()
    cos, sin = near_angles(cos), near_angles(sin)
    steps = cos.stride()
    return cos, sin, (steps[0] if cos.ndim == 3 and cos.shape[0] > 1 else 0, steps[-2])


def _statistics_steps(rstd: Tensor, head_axis: int) -> tuple[int, int, int]:
    """Strides of sequences, heads and tokens in the statistics."""
    steps = rstd.stride()
    if rstd.ndim == 2:
        return steps[0], 0, steps[1]
    return steps[0], steps[head_axis], steps[3 - head_axis]


def forward(
    x: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    offset: float,
    casting: str,
    rope_casting: str,
    head_axis: int,
    x_order: str,
) -> tuple[Tensor, Tensor]:
    """Normalize and rotate; return y and rstd (fp32)."""
    y = dense(x, x_order, output_dtype(x, weight, cos, sin, casting, rope_casting))
    rstd = x.new_empty(statistics_shape(x, weight, head_axis), dtype=torch.float32)
    if x.numel() == 0:
        return y, rstd.fill_(float("nan"))  # there is no mean over zero channels
    over_heads, x = of_tokens(x, weight), near_channels(x)
    heads, seq, width = x.shape[head_axis], x.shape[3 - head_axis], x.shape[-1]
    cos, sin, angle = _angles(cos, sin)
    k = launch_config(
        "rms_norm_rope.forward",
        forward_config,
        x.device,
        seq=MANY if by_rows() else seq,
        heads=heads,
        width=width,
        whole=over_heads,
    )
    steps = [strides(t, head_axis) for t in (x, y)]
    k = k if over_heads else near_tile(k, steps, (x, y))
    groups, tiles = 1 if over_heads else cdiv(heads, k.heads), cdiv(seq, k.tokens)
    rounds, narrow = casting == "llama", norm_dtype(x, weight, casting) == x.dtype
    launch(
        _rms_norm_rope_forward_kernel,
        x.shape[0] * tiles * groups,
        (
            x,
            weight.contiguous(),
            cos,
            sin,
            y,
            rstd,
            (*steps[0], *steps[1][:3], *_statistics_steps(rstd, head_axis), *angle),
            heads,
            seq,
            tiles,
            groups,
            heads * width if over_heads else width,
            eps,
        ),
        (
            offset,
            casting == "gemma",
            rounds,
            narrow,
            over_heads,
            width,
            power_of_2(width // 2),
            k.tokens,
            k.heads,
        ),
        k.num_warps,
    )
    return y, rstd


def backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    rstd: Tensor,
    offset: float,
    casting: str,
    rope_casting: str,
    head_axis: int,
    x_order: str,
    needs_x: bool,
    needs_weight: bool,
) -> tuple[Tensor, Tensor]:
    """Gradients of x and weight; empty tensors if not needed."""
    dx = dense(x, x_order, x.dtype) if needs_x else x.new_empty(0)
    if x.numel() == 0 or not (needs_x or needs_weight):
        return dx, torch.zeros_like(weight) if needs_weight else weight.new_empty(0)
    over_heads, x, dy = of_tokens(x, weight), near_channels(x), near_channels(dy)
    heads, seq, width = x.shape[head_axis], x.shape[3 - head_axis], x.shape[-1]
    cos, sin, angle = _angles(cos, sin)
    k = launch_config(
        "rms_norm_rope.backward",
        backward_config,
        x.device,
        seq=MANY if by_rows() else seq,
        heads=heads,
        width=width,
        whole=over_heads,
    )
    target = dx if needs_x else x
    steps = [strides(t, head_axis) for t in (dy, x, target)]
    k = k if over_heads else near_tile(k, steps, (dy, x, target))
    groups, tiles = 1 if over_heads else cdiv(heads, k.heads), cdiv(seq, k.tokens)
    cols = heads * width if over_heads else width
    all_tiles = x.shape[0] * tiles
    programs = min(k.programs, all_tiles) * groups
    partial = x.new_empty(programs, cols, dtype=torch.float32) if needs_weight else None
    launch(
        _rms_norm_rope_backward_kernel,
        programs,
        (
            dy,
            x,
            weight.contiguous(),
            cos,
            sin,
            rstd,
            dx if needs_x else None,
            partial,
            (*steps[0], *steps[1], *steps[2][:3], *_statistics_steps(rstd, head_axis), *angle),
            heads,
            seq,
            tiles,
            all_tiles,
            groups,
            cols,
        ),
        (offset, casting == "llama", over_heads, width, power_of_2(width // 2), k.tokens, k.heads),
        k.num_warps,
    )
    if partial is None:
        return dx, weight.new_empty(0)
    return dx, sum_partials(partial, weight.dtype)
