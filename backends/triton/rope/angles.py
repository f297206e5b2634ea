"""The rotary kinds beside the plain one, whose maths and loop over heads their kernel shares.

    a' = a cos_a - b sin_a,  b' = b cos_b + a sin_b

Backward is the transposed matrix. Here the pairs may come in interleaved and go out half-split, or
the other way round, and the angles of a token may be

    channel, pair   numbers for each channel, or for both of a pair
    complex         real and imaginary part side by side for each pair
    positions       cos and sin of position * frequency, computed here

With several grids, each pair has its own row of angles, or its own position.
"""

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_multi.backends.triton.common.launching import launch
from liger_multi.backends.triton.common.rows import assume_rows, cdiv, power_of_2, round_to, warps
from liger_multi.backends.triton.rope.rope import (
    near_angles,
    near_channels,
    near_tile,
    place,
    rotate_both,
    strides,
    tokens_of,
)
from liger_multi.dispatch.launch import DeviceInfo, launch_config
from liger_multi.reference.rope.rope import dense

TWO_OVER_PI: tl.constexpr = tl.constexpr(0.6366197723675814)


# pi / 2 in parts of eight bits: their multiples by fewer than 2^16 quarter turns are exact
HALF_PI_1: tl.constexpr = tl.constexpr(1.5703125)
HALF_PI_2: tl.constexpr = tl.constexpr(0.0004825592041015625)
HALF_PI_3: tl.constexpr = tl.constexpr(1.2665987014770508e-06)
HALF_PI_4: tl.constexpr = tl.constexpr(9.920935796805404e-10)


@triton.jit
def cos_and_sin(turn):
    """Cosine and sine of an fp32 angle in radians, to an ulp or two of 1.

    The nearest multiple of pi / 2 is subtracted in four parts, whose multiples are exact. A series
    gives both in |x| <= pi / 4, and the quarter turn says which is which and its sign.
    """
    quarters = tl.floor(turn * TWO_OVER_PI + 0.5)
    x = tl.fma(-quarters, HALF_PI_1, turn)
    x = tl.fma(-quarters, HALF_PI_2, x)
    x = tl.fma(-quarters, HALF_PI_3, x)
    x = tl.fma(-quarters, HALF_PI_4, x)
    # the series, in |x| <= pi / 4
    s = x * x
    sine = x + x * s * (-1.0 / 6 + s * (1.0 / 120 + s * (-1.0 / 5040 + s * (1.0 / 362880))))
    tail = 1.0 / 24 + s * (-1.0 / 720 + s * (1.0 / 40320 - s * (1.0 / 3628800)))
    cosine = 1.0 - s * 0.5 + s * s * tail
    quarter = quarters.to(tl.int32) & 3
    odd = (quarter & 1) == 1
    first = tl.where(odd, sine, cosine)
    second = tl.where(odd, cosine, sine)
    return (
        tl.where((quarter == 1) | (quarter == 2), -first, first),
        tl.where(quarter >= 2, -second, second),
    )


@triton.jit
def _grid(pair, GRIDS: tl.constexpr, CHUNKED: tl.constexpr, ONE: tl.constexpr, TWO: tl.constexpr):
    """The grid that a pair belongs to; ONE and TWO are where sections 1 and 2 begin, or end."""
    if CHUNKED:
        return tl.where(pair >= ONE, 1, 0) + tl.where(pair >= TWO, 1, 0)
    else:
        grid = pair % GRIDS
        return tl.where(pair < tl.where(grid == 1, ONE, TWO), grid, 0)


@triton.jit
def _load_angles(
    cos_ptr,
    sin_ptr,
    token,
    mask,
    scaling,
    ANGLES: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ROUND: tl.constexpr,
    ROTARY: tl.constexpr,
    HALF: tl.constexpr,
):
    """Cos and sin of both channels of every pair; ``token`` has the offsets of rows.

    "positions": ``cos_ptr`` holds positions and ``sin_ptr`` frequencies; the result is rounded to
    the dtype (ROUND) that stored angles would have. "complex": ``cos_ptr`` holds both parts.
    """
    pair = tl.arange(0, HALF)[None, None, :]
    mask = mask & (pair < ROTARY // 2)
    if ANGLES == "positions":
        position = tl.load(cos_ptr + token, mask=mask, other=0).to(tl.float32)
        frequency = tl.load(sin_ptr + pair, mask=pair < ROTARY // 2, other=0.0).to(tl.float32)
        cos_a, sin_a = cos_and_sin(position * frequency)
        cos_a *= scaling
        sin_a *= scaling
        if ROUND == "bf16":
            cos_a = round_to(cos_a, tl.bfloat16).to(tl.float32)
            sin_a = round_to(sin_a, tl.bfloat16).to(tl.float32)
        elif ROUND == "fp16":
            cos_a = round_to(cos_a, tl.float16).to(tl.float32)
            sin_a = round_to(sin_a, tl.float16).to(tl.float32)
        return cos_a, cos_a, sin_a, sin_a
    elif ANGLES == "complex":
        real = tl.load(place(cos_ptr, token, 2 * pair), mask=mask, other=0.0)
        imaginary = tl.load(place(cos_ptr, token, 2 * pair + 1), mask=mask, other=0.0)
        real, imaginary = real.to(tl.float32), imaginary.to(tl.float32)
        return real, real, imaginary, imaginary
    elif ANGLES == "pair":
        cos_a = tl.load(place(cos_ptr, token, pair), mask=mask, other=0.0).to(tl.float32)
        sin_a = tl.load(place(sin_ptr, token, pair), mask=mask, other=0.0).to(tl.float32)
        return cos_a, cos_a, sin_a, sin_a
    else:
        at = 2 * pair if INTERLEAVED else pair
        gap = 1 if INTERLEAVED else ROTARY // 2
        cos_a = tl.load(place(cos_ptr, token, at), mask=mask, other=0.0).to(tl.float32)
        cos_b = tl.load(place(cos_ptr, token, at + gap), mask=mask, other=0.0).to(tl.float32)
        sin_a = tl.load(place(sin_ptr, token, at), mask=mask, other=0.0).to(tl.float32)
        sin_b = tl.load(place(sin_ptr, token, at + gap), mask=mask, other=0.0).to(tl.float32)
        return cos_a, cos_b, sin_a, sin_b


@triton.jit(do_not_specialize=["seq", "tiles", "groups", "share"])
def _rope_angles_kernel(
    q_ptr,
    k_ptr,
    cos_ptr,
    sin_ptr,
    q_out_ptr,
    k_out_ptr,
    strides,
    q_heads,
    k_heads,
    seq,
    tiles,
    groups,
    share,
    scaling,
    WIDTH: tl.constexpr,
    ROTARY: tl.constexpr,
    ANGLES: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    INTERLEAVED_IN: tl.constexpr,
    INTERLEAVED_OUT: tl.constexpr,
    ROUND: tl.constexpr,
    SECTIONS: tl.constexpr,
    INVERSE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Rotate the heads of q and k of some tokens, with angles of any kind.

    Program: TOKENS tokens of one sequence, and ``share`` blocks of HEADS heads, q's before k's, as
    in the plain kernel.
    Strides as there; those of angles go from one grid, sequence and token to the next.
    Reads or computes the angles of its tokens once; with GRIDS > 1, a pair's angles come from its
    grid. INTERLEAVED_IN and INTERLEAVED_OUT: whether pairs are interleaved where they are read and
    where they are written.
    """
    GRIDS: tl.constexpr = SECTIONS[0]
    CHUNKED: tl.constexpr = SECTIONS[1]
    ONE: tl.constexpr = SECTIONS[2]
    TWO: tl.constexpr = SECTIONS[3]
    TOKENS: tl.constexpr = TILE[0]
    HEADS: tl.constexpr = TILE[1]
    HALF: tl.constexpr = TILE[2]
    PASS: tl.constexpr = TILE[3]
    grid_stride, angle_batch_stride, angle_token_stride = strides[14:17]
    batch, start, token, mask = tokens_of(tiles, groups, seq, TOKENS)
    assume_rows(cos_ptr, angle_token_stride, 4 * TOKENS)
    angle = batch * angle_batch_stride + start.to(tl.int64) * angle_token_stride
    row, cos_ptr = token * angle_token_stride, cos_ptr + angle
    if ANGLES != "positions":  # positions: frequencies, the same for all
        sin_ptr += angle
    if GRIDS > 1:  # whole tensors apart
        pair = tl.arange(0, HALF)[None, None, :]
        grid = _grid(pair, GRIDS, CHUNKED, ONE, TWO).to(tl.int64) * grid_stride
        cos_ptr += grid
        if ANGLES != "positions":
            sin_ptr += grid
    cos_a, cos_b, sin_a, sin_b = _load_angles(
        cos_ptr,
        sin_ptr,
        row,
        mask,
        scaling,
        ANGLES,
        INTERLEAVED,
        ROUND=ROUND,
        ROTARY=ROTARY,
        HALF=HALF,
    )
    if INVERSE:
        sin_a, sin_b = -sin_b, -sin_a
    rotate_both(
        q_ptr,
        k_ptr,
        q_out_ptr,
        k_out_ptr,
        strides,
        q_heads,
        k_heads,
        groups,
        share=share,
        batch=batch,
        start=start,
        mask=mask,
        cos_a=cos_a,
        cos_b=cos_b,
        sin_a=sin_a,
        sin_b=sin_b,
        WIDTH=WIDTH,
        ROTARY=ROTARY,
        HALF=HALF,
        TOKENS=TOKENS,
        HEADS=HEADS,
        PASS=PASS,
        INTERLEAVED_IN=INTERLEAVED_IN,
        INTERLEAVED_OUT=INTERLEAVED_OUT,
    )


@dataclass(frozen=True)
class AnglesConfig:
    """Tiles of ``heads`` x ``tokens``; a program loops over ``share`` of them with its tokens."""

    tokens: int
    heads: int
    share: int
    num_warps: int


def angles_config(
    info: DeviceInfo, rows: int, cols: int, q_heads: int, k_heads: int, element_bytes: int
) -> AnglesConfig:
    """Tiles of 4096 elements, 16 per thread; many programs per core rather than long loops.

    ``element_bytes`` of queries and keys is for launch tables.
    """
    common = math.gcd(q_heads, k_heads) or 1
    block = min(common & -common, 16)  # no head is masked
    width = power_of_2(cols)
    per_tile = max(1, min(4096 // (block * width), 32))
    threads = max(32, block * per_tile * width // 16)
    blocks = max(1, (q_heads + k_heads) // block)
    groups = min(blocks, cdiv(8 * info.cores, cdiv(rows, per_tile)))
    return AnglesConfig(per_tile, block, cdiv(blocks, groups), warps(threads, info.warp_size))


@dataclass(frozen=True)
class Angles:
    """Where the angles of a call are, and how they are read.

    Attributes:
        layout: ``channel``, ``pair``, ``complex`` or ``positions``.
        first: cos, complex numbers or positions, with the axes grids, batch, tokens and perhaps
            channels.
        second: sin, or frequencies.
        rotary: How many channels are rotated.
        interleaved: Whether the two channels of a pair are neighbors in cos and sin.
        sections: Numbers of pairs of each grid, comma-joined, or empty.
        chunked: Whether a section is a run of pairs.
        scaling: Of cos and sin that are made of positions.
        round: The dtype that those are rounded to, or empty.
    """

    layout: str
    first: Tensor
    second: Tensor
    rotary: int
    interleaved: bool = False
    sections: str = ""
    chunked: bool = True
    scaling: float = 1.0
    round: str = ""

    def constants(self) -> tuple[object, ...]:
        """GRIDS, CHUNKED, ONE and TWO of the kernel."""
        if not self.sections:
            return 1, True, 0, 0
        sizes = [int(size) for size in self.sections.split(",")]
        count = len(sizes)
        if self.chunked:
            return count, True, sizes[0], sizes[0] + sizes[1]
        return count, False, count * sizes[1], count * sizes[-1]


def angles(
    layout: str, cos: Tensor, sin: Tensor, rotary: int, **rest: bool | str | float
) -> Angles:
    """The :class:`Angles` of cos and sin, with axes (grids, batch, tokens, channels)."""
    if cos.stride(-1) != 1 or sin.stride() != cos.stride():
        cos, sin = cos.contiguous(), sin.contiguous()
    cos, sin = near_angles(cos), near_angles(sin)
    cos, sin = (t.view((1,) * (4 - t.ndim) + t.shape) if t.ndim < 4 else t for t in (cos, sin))
    layout = layout or ("channel" if cos.shape[-1] == rotary else "pair")
    return Angles(layout, cos, sin, rotary, **rest)  # type: ignore[arg-type]


def _step(x: Tensor, axis: int) -> int:
    return x.stride(axis) if x.shape[axis] > 1 else 0


def rotate(
    op: str,
    sources: tuple[Tensor | None, Tensor | None],
    orders: tuple[str, str],
    dtypes: tuple[torch.dtype, torch.dtype],
    head_axis: int,
    rotation: Angles,
    interleaved: tuple[bool, bool],
    inverse: bool,
) -> tuple[Tensor, Tensor]:
    """Rotate q and k, either of which may be absent.

    ``interleaved`` says of the inputs and of the outputs whether pairs are neighbors.
    """
    outputs = [
        rotation.second.new_empty(0, dtype=dtype) if x is None else dense(x, order, dtype)
        for x, order, dtype in zip(sources, orders, dtypes, strict=True)
    ]
    inputs = [None if x is None else near_channels(x) for x in sources]
    tensor = next((x for x in inputs if x is not None), None)
    if tensor is None or (tensor.numel() == 0 and sum(x.numel() for x in outputs) == 0):
        return outputs[0], outputs[1]
    heads = [0 if x is None else x.shape[head_axis] for x in sources]
    pairs = [
        (tensor, tensor) if x is None else (x, out) for x, out in zip(inputs, outputs, strict=True)
    ]
    (q, q_out), (k, k_out) = pairs
    tokens, width = (
        tensor.numel() // max(tensor.shape[head_axis] * tensor.shape[-1], 1),
        tensor.shape[-1],
    )
    n = launch_config(
        f"{op}.{'backward' if inverse else 'forward'}",
        angles_config,
        tensor.device,
        rows=tokens,
        cols=width,
        q_heads=heads[0],
        k_heads=heads[1],
        element_bytes=tensor.element_size(),
    )
    steps = [strides(x, head_axis) for x in (q, k, q_out, k_out)]
    n = near_tile(n, steps, (q, k, q_out, k_out))
    groups = cdiv(sum(cdiv(h, n.heads) for h in heads), n.share)
    rotary, first = rotation.rotary, rotation.first
    tiles = cdiv(first.shape[2], n.tokens)
    passed_channels = power_of_2(width - rotary) if width > rotary else 0
    launch(
        _rope_angles_kernel,
        tokens // first.shape[2] * tiles * groups,
        (
            q,
            k,
            first,
            rotation.second,
            q_out,
            k_out,
            (
                *steps[0],
                *steps[1],
                *steps[2][:3],
                *steps[3][:3],
                _step(first, 0),
                _step(first, 1),
                first.stride(2),
            ),
            *heads,
            first.shape[2],
            tiles,
            groups,
            n.share,
            rotation.scaling,
        ),
        (
            width,
            rotary,
            rotation.layout,
            rotation.interleaved,
            *interleaved,
            rotation.round,
            rotation.constants(),
            inverse,
            (n.tokens, n.heads, power_of_2(rotary // 2), passed_channels),
        ),
        n.num_warps,
    )
    return outputs[0], outputs[1]
