"""Attention over lists of keys by Triton kernels; sparse_attention_kernels.py has them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from liger_multi.backends.triton.attention.attention import core_type
from liger_multi.backends.triton.attention.pairs_of_lists import summed
from liger_multi.backends.triton.attention.sparse_attention_kernels import (
    _sparse_attention_backward_kernel,
    _sparse_attention_forward_kernel,
    _sparse_attention_keys_kernel,
    _sparse_attention_weights_kernel,
)
from liger_multi.backends.triton.common.launching import launch
from liger_multi.backends.triton.common.rows import INTERPRETED, cdiv, power_of_2, warps
from liger_multi.dispatch.launch import DeviceInfo, device_info, launch_config

# --- launches ---


@dataclass(frozen=True)
class SparseConfig:
    """Tile of heads by listed keys; ``stages`` of loads in flight."""

    block_h: int
    block_n: int
    stages: int
    num_warps: int


def _padded(size: int) -> int:
    return max(16, power_of_2(size)) if size else 0


class Channels(NamedTuple):
    """Sizes of a key's two parts and of a value; ``shared`` where the first part is the value."""

    lead: int
    rest: int
    value: int
    shared: bool

    @classmethod
    def of(cls, dim: int, value: int, shared: bool) -> Channels:
        """The first part is the value, or the largest power of two."""
        leading = value if shared else 1 << (dim.bit_length() - 1)
        return cls(leading, dim - leading, value, shared)

    @property
    def constants(self) -> tuple[int, ...]:
        """Sizes as kernels take them; a part that is not there is padded like the least."""
        return (self.lead, _padded(self.lead), self.rest, _padded(self.rest) or 16)

    @property
    def key(self) -> int:
        """Padded channels of a key."""
        return _padded(self.lead) + _padded(self.rest)

    @property
    def both(self) -> int:
        """Padded channels that are loaded for a key and its value."""
        return self.key + (0 if self.shared else _padded(self.value))

    @property
    def width(self) -> int:
        """Numbers that a query gives to a key and its value."""
        return self.lead + self.rest + (0 if self.shared else self.value)


@dataclass(frozen=True)
class KeysConfig:
    """Tile of listed keys by columns of their gradients; ``block_h`` heads at a time."""

    block_n: int
    block_c: int
    block_h: int
    stages: int
    num_warps: int


# Tiles (heads, listed keys, stages, warps) of forward, backward and weights, by kind of core and
# widest channels: the widest that ci.static finds to spill no register.
TILES = {
    ("much memory", 512): ((32, 32, 1, 8), (32, 32, 1, 8), (64, 32, 1, 8)),
    ("much memory", 256): ((64, 64, 2, 8), (32, 32, 1, 8), (64, 64, 1, 8)),
    ("much memory", 128): ((64, 64, 2, 16), (64, 32, 1, 8), (64, 64, 1, 8)),
    ("some memory", 512): ((64, 32, 2, 8), (32, 32, 1, 8), (32, 32, 1, 4)),
    ("some memory", 256): ((64, 64, 2, 16), (32, 32, 1, 8), (64, 64, 1, 8)),
    ("some memory", 128): ((64, 64, 2, 16), (64, 32, 1, 8), (64, 64, 1, 8)),
    ("waves of 64", 512): ((32, 16, 1, 8), (16, 32, 1, 4), (32, 32, 1, 4)),
    ("waves of 64", 256): ((32, 32, 1, 8), (32, 16, 1, 8), (64, 64, 1, 8)),
    ("waves of 64", 128): ((64, 32, 2, 8), (64, 32, 1, 8), (64, 64, 1, 8)),
    ("little memory", 64): ((16, 16, 1, 4),) * 3,
}
FEW_HEADS, WIDE = (16, 16, 1, 4), (16, 16, 1, 8)
"""Tiles where few heads share a list, and of fp32, whose GEMMs have no matrix units."""
WIDEST_FP32 = 128
LARGEST_LIST = 1024
"""Slots that are looked at together for where a list ends."""


def _class(dim: int, value: int, shared: bool) -> int:
    """The row of TILES: channels of the widest part; keys beside values take more registers."""
    c = Channels.of(dim, value, shared)
    widest = max(64, _padded(c.lead), _padded(value), 2 * _padded(c.rest))
    return widest if shared or widest <= 128 else 2 * widest


def _row(info: DeviceInfo, size: int) -> tuple[str, int]:
    """The key of TILES; narrow heads use the row of 128 where that is the smallest one."""
    core = core_type(info)
    return core, size if (core, size) in TILES else max(128, size)


def _tile(
    info: DeviceInfo, kernel_index: int, heads: int, channels: Channels, item: int
) -> SparseConfig:
    """The kind's tile, or one for fewer heads."""
    if item == 4 or INTERPRETED:
        return SparseConfig(*WIDE)
    size = _class(channels.lead + channels.rest, channels.value, channels.shared)
    tile = TILES[_row(info, size)][kernel_index]
    return SparseConfig(*(tile if tile[0] <= _padded(heads) else FEW_HEADS))


def forward_config(
    info: DeviceInfo, heads: int, lead: int, rest: int, value: int, shared: int, item: int
) -> SparseConfig:
    """Queries stay on chip, the output in registers."""
    return _tile(info, 0, heads, Channels(lead, rest, value, bool(shared)), item)


def backward_config(
    info: DeviceInfo, heads: int, lead: int, rest: int, value: int, shared: int, item: int
) -> SparseConfig:
    """Upstream gradients stay beside the queries, whose gradient is in registers."""
    return _tile(info, 1, heads, Channels(lead, rest, value, bool(shared)), item)


def keys_config(info: DeviceInfo, heads: int, width: int, item: int) -> KeysConfig:
    """Small tiles, many programs a core: a GEMM of few heads. fp32 has no matrix units."""
    if item == 4 or INTERPRETED:
        return KeysConfig(32, 32, 16, 1, warps(128, info.warp_size))
    block_c, block_h = min(64, power_of_2(width)), min(64, _padded(heads))
    return KeysConfig(64, block_c, block_h, 2, warps(128, info.warp_size))


def weights_config(
    info: DeviceInfo, heads: int, lead: int, rest: int, value: int, shared: int, item: int
) -> SparseConfig:
    """Only one number per key is accumulated; the queries of all heads pass over a tile of keys."""
    return _tile(info, 2, heads, Channels(lead, rest, value, bool(shared)), item)


def supports(q: Tensor, v: Tensor | None, value_dim: int) -> str | None:
    """Why a call is refused, or None."""
    if INTERPRETED:
        return None
    info, dim = device_info(q.device), q.shape[3]
    core, size = _row(info, _class(dim, value_dim, v is None))
    largest = max(n for k, n in TILES if k == core)
    widest = WIDEST_FP32 if largest > 64 else 0
    if q.element_size() == 4 and max(dim, value_dim) > widest:
        return (
            f"takes fp32 heads of up to {widest} elements on {info.arch} (registers), got "
            f"{max(dim, value_dim)}"
        )
    if (core, size) in TILES:
        return None
    form = "latents" if v is None else "keys beside values"
    return (
        f"takes heads of up to {largest} channels beside {largest // 2} others on {info.arch} "
        f"(registers), got {form} of {dim} for values of {value_dim}"
    )


# --- calls ---


def _near_rows(x: Tensor) -> Tensor:
    """``x`` with adjacent channels; copied only where needed."""
    return x if x.stride(3) == 1 or x.shape[3] == 1 else x.contiguous()


def _steps(x: Tensor | None) -> tuple[int, int, int]:
    return (0, 0, 0) if x is None else (x.stride(0), x.stride(1), x.stride(2))


class Call(NamedTuple):
    """The tensors of a call as kernels take them."""

    q: Tensor
    k: Tensor
    v: Tensor | None
    lists: Tensor
    channels: Channels
    scale: float

    @classmethod
    def of(
        cls, q: Tensor, k: Tensor, v: Tensor | None, lists: Tensor, value_dim: int, scale: float
    ) -> Call:
        """Strided views where channels are adjacent."""
        channels = Channels.of(q.shape[3], value_dim, v is None)
        v = None if v is None else _near_rows(v)
        return cls(_near_rows(q), _near_rows(k), v, lists.contiguous(), channels, scale)

    @property
    def list_steps(self) -> tuple[int, int, int]:
        """Strides of lists; one that is shared by all heads of keys has none between them."""
        batch, group, row = _steps(self.lists)
        return batch, group if self.lists.shape[1] > 1 else 0, row

    @property
    def steps(self) -> tuple[int, ...]:
        """Strides of q, k, v and the lists."""
        return (*_steps(self.q), *_steps(self.k), *_steps(self.v), *self.list_steps)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Heads, heads of keys, queries, keys and listed keys."""
        (_, heads, queries, _), (_, groups, keys, _) = self.q.shape, self.k.shape
        return heads, groups, queries, keys, self.lists.shape[3]

    def of_batch(self, b: int) -> Call:
        """One element of the batch."""
        v = None if self.v is None else self.v[b, None]
        q, k, lists = (x[b, None] for x in (self.q, self.k, self.lists))
        return Call(q, k, v, lists, self.channels, self.scale)

    def config(self, name: str, formula: Callable[..., SparseConfig]) -> SparseConfig:
        """Numbers of a launch."""
        c = self.channels
        return launch_config(
            f"sparse_attention.{name}",
            formula,
            self.q.device,
            heads=self.q.shape[1] // self.k.shape[1],
            lead=c.lead,
            rest=c.rest,
            value=c.value,
            shared=int(c.shared),
            item=self.q.element_size(),
        )

    def programs(self, block_h: int, queries: int) -> int:
        """Programs of blocks of heads of some queries."""
        groups = self.k.shape[1]
        return queries * groups * cdiv(self.q.shape[1] // groups, block_h)

    def constants(self, k: SparseConfig) -> tuple[int, ...]:
        """Constants of the kernels."""
        c = self.channels
        sizes = (c.value, _padded(c.value), k.block_h, k.block_n, k.stages)
        return (*c.constants, *sizes, min(LARGEST_LIST, power_of_2(max(1, self.lists.shape[3]))))


def _ordered(tensor: Tensor, size: int) -> Tensor:
    batch, heads, length, _ = tensor.shape
    return tensor.new_empty(batch, length, heads, size).transpose(1, 2)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    indices: Tensor,
    value_dim: int,
    scale: float,
    output_weights: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """One program per query and block of heads; weights by another pass over the lists."""
    y, lse = _ordered(q, value_dim), q.new_empty(q.shape[:3], dtype=torch.float32)
    weights = lse.new_empty(indices.shape if output_weights else (0,))
    c = Call.of(q, k, v, indices, value_dim, scale)
    if lse.numel():
        n = c.config("forward", forward_config)
        args = (
            c.q,
            c.k,
            c.v,
            c.lists,
            y,
            lse,
            c.steps,
            c.sizes,
            c.scale,
        )
        count = c.programs(n.block_h, q.shape[0] * q.shape[2])
        launch(_sparse_attention_forward_kernel, count, args, c.constants(n), n.num_warps)
    if weights.numel():
        _weights(c, lse, weights)
    return y, weights, lse


def _weights(c: Call, lse: Tensor, weights: Tensor) -> None:
    n = c.config("weights", weights_config)
    heads, groups, *sizes = c.sizes
    batch, lists, queries, slots = weights.shape
    args = (
        c.q,
        c.k,
        c.lists,
        lse,
        weights,
        _steps(c.q),
        _steps(c.k),
        c.list_steps,
        heads,
        groups,
        lists,
        *sizes,
        c.scale,
    )
    count = batch * lists * queries * cdiv(slots, n.block_n)
    constants = (*c.channels.constants, n.block_h, n.block_n)
    launch(_sparse_attention_weights_kernel, count, args, constants, n.num_warps)


def backward(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    indices: Tensor,
    y: Tensor,
    lse: Tensor,
    value_dim: int,
    scale: float,
    needs_q: bool,
    needs_k: bool,
    needs_v: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries alone, or with what keys are given by some queries at a time."""
    c = Call.of(q, k, v, indices, value_dim, scale)
    up = Upstream(_near_rows(dy), _near_rows(y), lse.contiguous())
    dq = _ordered(q, q.shape[3]) if needs_q else q.new_empty(0)
    dq_out = dq if needs_q else None
    if not needs_k and not (needs_v and v is not None):
        if lse.numel():
            _of_queries(c, up, dq_out, q.shape[0] * q.shape[2], 0, None)
        return dq, k.new_empty(0), k.new_empty(0)
    total = _of_keys(c, up, dq_out)
    dk = _as_heads(total[..., : q.shape[3]], k) if needs_k else k.new_empty(0)
    if v is None or not needs_v:
        return dq, dk, k.new_empty(0)
    return dq, dk, _as_heads(total[..., q.shape[3] :], v)


class Upstream(NamedTuple):
    """What backward reads in addition to the inputs."""

    dy: Tensor
    y: Tensor
    lse: Tensor


def _of_queries(
    c: Call, up: Upstream, dq: Tensor | None, queries: int, begin: int, pairs: Tensor | None
) -> None:
    """Gradients of some queries; ``pairs`` takes probabilities and gradients of scores."""
    n = c.config("backward", backward_config)
    p, ds = (None, None) if pairs is None else pairs.unbind()
    args = (
        c.q,
        c.k,
        c.v,
        c.lists,
        up.dy,
        up.y,
        up.lse,
        dq,
        p,
        ds,
        (*c.steps, *_steps(up.dy), *_steps(up.y)),
        (begin, *c.sizes),
        c.scale,
    )
    launch(
        _sparse_attention_backward_kernel,
        c.programs(n.block_h, queries),
        args,
        c.constants(n),
        n.num_warps,
    )


def _of_keys(c: Call, up: Upstream, dq: Tensor | None) -> Tensor:
    """Gradients of keys and values beside each other, (B, G, S, width) fp32; dq is written."""
    heads, groups, _, keys, slots = c.sizes
    channels, dim = c.channels, c.q.shape[3]
    n = launch_config(
        "sparse_attention.keys",
        keys_config,
        c.q.device,
        heads=heads // groups,
        width=channels.width,
        item=c.q.element_size(),
    )
    tiles = groups * cdiv(slots, n.block_n) * cdiv(channels.width, n.block_c)
    pairs = c.q.new_empty(0)

    def write(parts: Tensor, b: int, rows: slice) -> None:
        nonlocal pairs
        count = rows.stop - rows.start
        if not pairs.numel():
            pairs = c.q.new_empty(2, parts.shape[0], slots, heads)
        call = c.of_batch(b)
        upstream = Upstream(up.dy[b, None], up.y[b, None], up.lse[b, None])
        _of_queries(call, upstream, None if dq is None else dq[b, None], count, rows.start, pairs)
        args = (
            *pairs.unbind(),
            call.q,
            upstream.dy,
            call.lists,
            parts,
            _steps(call.q),
            _steps(upstream.dy),
            call.list_steps,
            rows.start,
            groups,
            heads // groups,
            slots,
            c.scale,
        )
        constants = (
            channels.shared,
            dim,
            channels.value,
            n.block_n,
            n.block_c,
            n.block_h,
            n.stages,
        )
        launch(_sparse_attention_keys_kernel, count * tiles, args, constants, n.num_warps)

    extra_bytes = 2 * heads * c.q.element_size()
    return summed(c.lists, groups, keys if slots else 0, channels.width, write, extra_bytes)


def _as_heads(total: Tensor, x: Tensor) -> Tensor:
    """Sums as a gradient, in memory (B, S, G, D)."""
    out = x.new_empty(x.shape[0], x.shape[2], x.shape[1], x.shape[3]).transpose(1, 2)
    return out.copy_(total) if total.shape == out.shape else out.zero_()
