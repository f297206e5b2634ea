"""Launches of the rotary kinds beside the plain one; :mod:`.rope_kinds_kernel` has the maths."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Optional

import torch
from torch import Tensor

from liger_multi.backends.triton.common.launching import launch
from liger_multi.backends.triton.common.rows import cdiv, power_of_2, warps
from liger_multi.backends.triton.rope.rope_kinds_kernel import _rope_kinds_kernel
from liger_multi.backends.triton.rope.rope_tiles import (
    near_angles,
    near_channels,
    near_tile,
    strides,
)
from liger_multi.dispatch.launch import DeviceInfo, launch_config
from liger_multi.reference.rope.rope import dense

ROUNDED = {torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True)
class KindConfig:
    """Tiles of ``heads`` x ``tokens``; a program loops over ``share`` of them with its tokens."""

    tokens: int
    heads: int
    share: int
    num_warps: int


def kind_config(
    info: DeviceInfo, rows: int, cols: int, q_heads: int, k_heads: int, element_bytes: int
) -> KindConfig:
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
    return KindConfig(per_tile, block, cdiv(blocks, groups), warps(threads, info.warp_size))


@dataclass(frozen=True)
class Angles:
    """Where the angles of a call are, and how they are read.

    Attributes:
        kind: ``channel``, ``pair``, ``complex`` or ``positions``.
        first: cos, complex numbers or positions, with the axes grids, batch, tokens and perhaps
            channels.
        second: sin, or frequencies.
        rotary: How many channels are rotated.
        beside: Whether the two channels of a pair are neighbors in cos and sin.
        sections: Numbers of pairs of each grid, comma-joined, or empty.
        chunked: Whether a section is a run of pairs.
        scaling: Of cos and sin that are made of positions.
        round: The dtype that those are rounded to, or empty.
    """

    kind: str
    first: Tensor
    second: Tensor
    rotary: int
    beside: bool = False
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


def angles(kind: str, cos: Tensor, sin: Tensor, rotary: int, **rest: bool | str | float) -> Angles:
    """Those of cos and sin, with the axes grids, batch and tokens in front of the channels."""
    if cos.stride(-1) != 1 or sin.stride() != cos.stride():
        cos, sin = cos.contiguous(), sin.contiguous()
    cos, sin = near_angles(cos), near_angles(sin)
    cos, sin = (t.view((1,) * (4 - t.ndim) + t.shape) if t.ndim < 4 else t for t in (cos, sin))
    kind = kind or ("channel" if cos.shape[-1] == rotary else "pair")
    return Angles(kind, cos, sin, rotary, **rest)  # type: ignore[arg-type]


def _step(x: Tensor, axis: int) -> int:
    return x.stride(axis) if x.shape[axis] > 1 else 0


def rotate(
    op: str, given: tuple[Optional[Tensor], Optional[Tensor]], orders: tuple[str, str],
    dtypes: tuple[torch.dtype, torch.dtype], head_axis: int, turning: Angles,
    beside: tuple[bool, bool], inverse: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Rotate q and k, either of which may be absent; ``beside``: how pairs come and go."""
    made = [
        turning.second.new_empty(0, dtype=dtype) if x is None else dense(x, order, dtype)
        for x, order, dtype in zip(given, orders, dtypes, strict=True)
    ]
    near = [None if x is None else near_channels(x) for x in given]
    some = next((x for x in near if x is not None), None)
    if some is None or (some.numel() == 0 and sum(x.numel() for x in made) == 0):
        return made[0], made[1]
    heads = [0 if x is None else x.shape[head_axis] for x in given]
    pairs = [(some, some) if x is None else (x, out) for x, out in zip(near, made, strict=True)]
    (q, q_out), (k, k_out) = pairs
    tokens, width = some.numel() // max(some.shape[head_axis] * some.shape[-1], 1), some.shape[-1]
    n = launch_config(
        f"{op}.{'backward' if inverse else 'forward'}", kind_config, some.device, rows=tokens,
        cols=width, q_heads=heads[0], k_heads=heads[1], element_bytes=some.element_size(),
    )  # fmt: skip
    steps = [strides(x, head_axis) for x in (q, k, q_out, k_out)]
    n = near_tile(n, steps, (q, k, q_out, k_out))
    groups = cdiv(sum(cdiv(h, n.heads) for h in heads), n.share)
    rotary, first = turning.rotary, turning.first
    tiles = cdiv(first.shape[2], n.tokens)
    passed = power_of_2(width - rotary) if width > rotary else 0
    launch(
        _rope_kinds_kernel, tokens // first.shape[2] * tiles * groups,
        (q, k, first, turning.second, q_out, k_out, *steps[0], *steps[1], *steps[2][:3],
         *steps[3][:3], _step(first, 0), _step(first, 1), first.stride(2), *heads,
         first.shape[2], tiles, groups, n.share, turning.scaling),
        (width, rotary, turning.kind, turning.beside, *beside, turning.round,
         *turning.constants(), inverse, n.tokens, n.heads, power_of_2(rotary // 2), passed),
        n.num_warps,
    )  # fmt: skip
    return made[0], made[1]
