"""The gated delta rule by Triton kernels, in chunks of tokens.

Source: Yang et al. 2024 (arXiv:2412.06464, arXiv:2406.06484); the kernels are in
gated_delta_rule_kernels.py. Backward makes A, P, the states and N again; nothing but the arguments
is kept between forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor

from liger_multi.backends.triton.common.launching import launch
from liger_multi.backends.triton.common.rows import INTERPRETED, cdiv, power_of_2, tile_rows
from liger_multi.backends.triton.linear_attention.gated_delta_rule_kernels import (
    _delta_rule_chunks_kernel,
    _delta_rule_forward_kernel,
    _delta_rule_gates_kernel,
    _delta_rule_keys_kernel,
    _delta_rule_pairs_kernel,
    _delta_rule_queries_kernel,
    _delta_rule_reverse_kernel,
)
from liger_multi.dispatch.launch import DeviceInfo, device_info, launch_config
from liger_multi.reference.linear_attention import gated_delta_rule as reference

NARROWEST, FEWEST_STAGES = 16, 2
"""Columns of v, and stages of loads on large cards, of a pass over states at the least."""
MOST_KEYS, MOST_STATES = 128, 256
"""Columns of keys of a tile in the kernels of gradients, and in those that hold a whole state."""
ALIGNED, SHORTEST = 16, 32
"""What loads in stages take: rows of a multiple of so many bytes, heads of so many elements.

Without stages, ptxas 12.8 (Triton 3.6) makes wrong code for Hopper: in the first turn of a loop,
the descriptors of a GEMM's factors are kernel arguments. The static checks look for this.
"""


@dataclass(frozen=True)
class DeltaConfig:
    """``block`` columns of v a program or step, ``stages`` of loads in flight."""

    block: int
    stages: int
    num_warps: int


def states_config(info: DeviceInfo, tokens: int, dim: int, value: int, item: int) -> DeltaConfig:
    """A state of up to 32 KiB in registers: programs are serial, and should have a core each."""
    if _is_large(info) and item == 2:
        return DeltaConfig(max(NARROWEST, min(64, 8192 // _padded(dim))), 3 if dim <= 128 else 2, 4)
    block = 32 if value > 64 or item == 4 else 16
    return DeltaConfig(block, 2 if dim <= 128 else 1, 8 if _is_tight(info, item) else 4)


def pairs_config(info: DeviceInfo, tokens: int, dim: int, value: int, item: int) -> DeltaConfig:
    """Two squares are summed over steps of 64 columns."""
    return DeltaConfig(32 if item == 4 else 64, 2 if _is_large(info) else 1, 4)


def queries_config(info: DeviceInfo, tokens: int, dim: int, value: int, item: int) -> DeltaConfig:
    """A sum of the size of the keys is in registers; stages are for several steps of large ones."""
    if _is_large(info) and item == 2 and dim > SHORTEST and value > 64:
        return DeltaConfig(64, 2, 4)
    return DeltaConfig(32 if item == 4 or value <= 64 else 64, 1, 8)


def keys_config(info: DeviceInfo, tokens: int, dim: int, value: int, item: int) -> DeltaConfig:
    """Two sums of the size of the keys are in registers."""
    if _is_large(info) and item == 2:
        return DeltaConfig(128, 1, 8)
    return DeltaConfig(32 if item == 4 else 64, 1, 8)


def chunk_config(info: DeviceInfo, tokens: int, dim: int, value: int, item: int) -> DeltaConfig:
    """``block`` tokens make a chunk, in all kernels: 64 where registers hold its squares."""
    if _is_tight(info, item):
        return DeltaConfig(16, 1, 2)
    return DeltaConfig(64 if _is_large(info) or info.warp_size == 64 else 32, 1, 4)


def _is_large(info: DeviceInfo) -> bool:
    """Whether a core has the on-chip memory of Hopper and its successors."""
    return info.shared_bytes > 200_000


def _is_tight(info: DeviceInfo, item: int) -> bool:
    """Whether tiles take many registers: fp32 without matrix units, or few registers a core."""
    return item == 4 or (info.warp_size == 32 and info.shared_bytes <= 65536)


def _padded(size: int) -> int:
    return max(16, power_of_2(size))


def supports(k: Tensor, v: Tensor) -> str | None:
    """Why a call is refused, or None."""
    return refused(k, v, True)


def refused(k: Tensor, v: Tensor, corrected: bool) -> str | None:
    """Why there are no kernels for these heads, or None."""
    info, size = device_info(k.device), k.shape[3]
    if _is_large(info) and k.element_size() == 2 and not INTERPRETED:
        step = ALIGNED // 2
        if any(n < SHORTEST or n % step for n in (size, v.shape[3])):
            return (
                f"takes heads of at least {SHORTEST} elements in multiples of {step} on "
                f"{info.arch}, got {size} and {v.shape[3]}"
            )
    widest = MOST_KEYS if corrected else MOST_STATES
    if k.element_size() == 4 and not INTERPRETED:
        widest = 64
    if corrected and INTERPRETED:
        widest = 64
    if _is_tight(info, 2) and not INTERPRETED:
        widest = 32
    if size > widest:
        kind = str(k.dtype).removeprefix("torch.")
        return (
            f"takes {kind} keys of up to {widest} elements on {info.arch} (registers), got {size}"
        )
    if tile_rows(128, max(v.shape[2] * v.shape[3], k.shape[2] * size)) == 1:
        return "takes tokens of less than 8 MiB"  # what the results are stored by
    return None


def _rows(x: Tensor) -> Tensor:
    """Aligned heads of adjacent elements, a chunk of which is no 2 GiB long (see assume_rows)."""
    steps = [x.data_ptr(), *(step * x.element_size() for step in x.stride()[:3])]
    is_near = tile_rows(128, x.stride(1)) > 1 and (x.stride(3) == 1 or x.shape[3] == 1)
    is_aligned = x.element_size() != 2 or not any(step % ALIGNED for step in steps)
    return x if is_near and is_aligned else x.clone(memory_format=torch.contiguous_format)


def _steps(x: Tensor) -> tuple[int, int, int]:
    return x.stride(0), x.stride(1), x.stride(2)


class Call(NamedTuple):
    """The tensors of a call as kernels take them, and what its kernels share."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    first: Tensor | None
    scale: float
    normed: bool
    chunk: int
    chunks: int
    corrected: bool = True  # by what the state already holds; without, a state space model
    skip: Tensor | None = None  # (value heads, V) in fp32: y has ``skip v`` added

    @property
    def group(self) -> int:
        """Value heads of a key head."""
        return self.v.shape[2] // self.q.shape[2]

    @property
    def streams(self) -> int:
        """Value heads of all sequences."""
        return self.v.shape[0] * self.v.shape[2]

    @property
    def first_step(self) -> int:
        """From the documents of a sequence to those of the next."""
        return 0 if self.first is None or self.first.shape[0] == 1 else self.first.stride(0)

    def sizes(self) -> tuple[Any, ...]:
        """Numbers that every kernel takes, from the tokens to the scale."""
        padded = self.chunks * self.chunk
        planes = (self.streams * padded, self.q.shape[0] * self.q.shape[2] * padded)
        return (self.q.shape[1], self.chunks, self.q.shape[2], *planes, self.scale)

    def keys(self, most: int = MOST_STATES) -> tuple[Any, ...]:
        """Constants that every kernel takes; a tile has up to ``most`` columns of keys."""
        size = self.k.shape[3]
        return self.group, self.normed, size, min(most, _padded(size))

    @property
    def parts(self) -> int:
        """Parts of the keys in the last kernels."""
        return cdiv(self.k.shape[3], MOST_KEYS)

    def config(self, name: str, formula: Callable[..., DeltaConfig]) -> DeltaConfig:
        """Launch numbers of a kernel."""
        return _config(name, formula, self.k, self.v, self.corrected)

    def passing(self, config: DeltaConfig) -> tuple[Any, ...]:
        """Constants of a pass over states, whose loads are in stages where they have to be."""
        fewest = FEWEST_STAGES if _is_large(device_info(self.k.device)) else 1
        return self.columns(replace(config, stages=max(fewest, config.stages)))

    def columns(self, config: DeltaConfig, most: int = MOST_STATES) -> tuple[Any, ...]:
        """Constants of a kernel that takes blocks of columns."""
        value = self.v.shape[3]
        block = max(NARROWEST, min(config.block, power_of_2(value)))
        return (*self.keys(most), value, block, self.chunk, config.stages)


def _config(
    name: str, formula: Callable[..., DeltaConfig], k: Tensor, v: Tensor, corrected: bool
) -> DeltaConfig:
    op = "gated_delta_rule" if corrected else "ssd_scan"
    return launch_config(
        f"{op}.{name}", formula, k.device, tokens=k.shape[1], dim=k.shape[3],
        value=v.shape[3], item=k.element_size(),
    )  # fmt: skip


def call_of(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, first: Tensor | None, scale: float,
    normed: bool, corrected: bool = True, skip: Tensor | None = None, most: int = 64,
) -> Call:  # fmt: skip
    """A call as kernels take it, in chunks of at most ``most`` tokens, but of 16 or more."""
    chunk = _config("chunk", chunk_config, k, v, corrected).block
    chunk = min(chunk, max(16, power_of_2(most + 1) // 2))
    first = None if first is None else first.contiguous()
    chunks = cdiv(q.shape[1], chunk)
    q, k = _rows(q), _rows(k)
    if q.stride() != k.stride():
        q, k = (_rows(x.contiguous()) for x in (q, k))
    return Call(q, k, _rows(v), g, beta, first, scale, normed, chunk, chunks, corrected, skip)


class Prepared(NamedTuple):
    """A and P of every chunk, gates and norms."""

    inverse: Tensor | None
    scores: Tensor
    gates: Tensor
    rstd: Tensor | None


def _prepare(c: Call) -> Prepared:
    """What needs no state."""
    padded = c.chunks * c.chunk
    scores = c.q.new_empty(c.streams, padded, c.chunk)
    inverse = torch.empty_like(scores) if c.corrected else None
    gates = c.q.new_empty(4, c.streams, padded, dtype=torch.float32)
    heads = c.q.shape[0] * c.q.shape[2]
    rstd = c.q.new_empty(2, heads, padded, dtype=torch.float32) if c.normed else None
    args = (
        c.q, c.k, c.g, c.beta, c.first, inverse, scores, gates, rstd,
        _steps(c.k), c.g.stride(), c.beta.stride(), c.first_step, *c.sizes(),
    )  # fmt: skip
    warps = c.config("chunk", chunk_config).num_warps
    count = c.streams * c.chunks
    launch(_delta_rule_chunks_kernel, count, args, (*c.keys(), c.chunk), warps)
    return Prepared(inverse, scores, gates, rstd)


class States(NamedTuple):
    """What a pass over the states may write: y and the last state, or all states and N."""

    y: Tensor | None = None
    final: Tensor | None = None
    states: Tensor | None = None
    values: Tensor | None = None


def _pass(c: Call, made: Prepared, initial: Tensor | None, room: States) -> None:
    k = c.config("forward" if room.y is not None else "states", states_config)
    args = (
        c.q, c.k, c.v, c.beta, made.inverse, made.scores, made.gates, made.rstd,
        None if initial is None else initial.contiguous(), c.skip, *room, _steps(c.k),
        _steps(c.v), c.beta.stride(), *c.sizes(),
    )  # fmt: skip
    constants = c.passing(k)
    count = c.streams * cdiv(c.v.shape[3], constants[5])
    launch(_delta_rule_forward_kernel, count, args, constants, k.num_warps)


def forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Optional[Tensor],
    first: Optional[Tensor], scale: float, qk_l2norm: bool, output_final_state: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """One launch for all chunks, one that passes over them."""
    if not v.numel():
        return reference.forward(
            q, k, v, g, beta, initial_state, first, scale, qk_l2norm, output_final_state
        )
    c = call_of(q, k, v, g, beta, first, scale, qk_l2norm)
    return scan(c, initial_state, output_final_state)


def scan(c: Call, initial_state: Tensor | None, output_final_state: bool) -> tuple[Tensor, Tensor]:
    """Make y, and the states after the last token."""
    y = c.v.new_empty(c.v.shape)
    shape = (c.v.shape[0], c.v.shape[2], c.k.shape[3], c.v.shape[3]) if output_final_state else (0,)
    final = c.v.new_empty(shape, dtype=torch.float32)
    _pass(c, _prepare(c), initial_state, States(y, final if output_final_state else None))
    return y, final


def backward(
    dy: Optional[Tensor], dfinal_state: Optional[Tensor], q: Tensor, k: Tensor, v: Tensor,
    g: Tensor, beta: Tensor, initial_state: Optional[Tensor], first: Optional[Tensor],
    scale: float, qk_l2norm: bool, needs_q: bool, needs_k: bool, needs_v: bool, needs_g: bool,
    needs_beta: bool, needs_initial_state: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The states again, their gradients in reverse, and the rest for all chunks at once."""
    if not v.numel():
        return reference.backward(
            dy, dfinal_state, q, k, v, g, beta, initial_state, first, scale, qk_l2norm, needs_q,
            needs_k, needs_v, needs_g, needs_beta, needs_initial_state,
        )  # fmt: skip
    c = call_of(q, k, v, g, beta, first, scale, qk_l2norm)
    made = gradients(c, dy, dfinal_state, initial_state, needs_initial_state)
    needs = (needs_q, needs_k, needs_v, needs_g, needs_beta)
    dq, dk, dv, dg, dbeta = (
        x if needed else x.new_empty(0) for x, needed in zip(made[:5], needs, strict=True)
    )
    return dq, dk, dv, dg, dbeta, made.initial_state


class Gradients(NamedTuple):
    """Those of a call's tensors; that of skip by sequences, heads and chunks."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    initial_state: Tensor
    skip: Tensor | None


def gradients(
    c: Call, dy: Tensor | None, dfinal_state: Tensor | None, initial_state: Tensor | None,
    needs_initial_state: bool,
) -> Gradients:  # fmt: skip
    """Gradients of everything, of the initial state where it is needed."""
    dy = torch.zeros_like(c.v) if dy is None else _rows(dy)
    made, key, value = _prepare(c), c.k.shape[3], c.v.shape[3]
    states, dstates = (c.v.new_empty(c.streams, c.chunks, key, value) for _ in range(2))
    values = c.v.new_empty(c.streams, c.v.shape[1], value)
    _pass(c._replace(skip=None), made, initial_state, States(states=states, values=values))
    dq, dk, dv, dg, dbeta = (x.new_empty(x.shape) for x in (c.q, c.k, c.v, c.g, c.beta))
    dinitial = c.q.new_empty(0)
    if initial_state is not None:
        dinitial = initial_state.new_empty(initial_state.shape if needs_initial_state else 0)
    shape = (c.v.shape[0], c.v.shape[2], c.chunks, value)
    dskips = None if c.skip is None else c.skip.new_empty(shape)
    found = Gradients(dq, dk, dv, dg, dbeta, dinitial, dskips)
    _reverse(c, made, dy, dfinal_state, dv, dstates, dinitial)
    _gradients(c, made, dy, (states, dstates, values), found)
    return found


def _given(x: Tensor | None) -> Tensor | None:
    """A result that somebody needs."""
    return x if x is not None and x.numel() else None


def _reverse(
    c: Call, made: Prepared, dy: Tensor, dfinal: Tensor | None, solved: Tensor, dstates: Tensor,
    dinitial: Tensor,
) -> None:  # fmt: skip
    k = c.config("reverse", states_config)
    args = (
        dy, c.q, c.k, c.beta, made.inverse, made.scores, made.gates, made.rstd,
        None if dfinal is None else dfinal.contiguous(), solved, dstates, _given(dinitial),
        _steps(dy), _steps(c.k), c.beta.stride(), *c.sizes(),
    )  # fmt: skip
    constants = c.passing(k)
    count = c.streams * cdiv(c.v.shape[3], constants[5])
    launch(_delta_rule_reverse_kernel, count, args, constants, k.num_warps)


def _gradients(
    c: Call, made: Prepared, dy: Tensor, passed: tuple[Tensor, ...], found: Gradients
) -> None:
    """From the states, their gradients, N and Y, which becomes dv."""
    states, dstates, values = passed
    solved, sums = found.v, made.gates.new_empty(1 + c.parts, *made.gates.shape[1:])
    k = c.config("pairs", pairs_config)
    args: tuple[Any, ...] = (
        dy, c.q, c.k, c.v, c.beta, c.first, values, solved, made.gates, made.rstd, made.scores,
        made.inverse, sums, found.skip, _steps(dy), _steps(c.k), _steps(c.v), c.beta.stride(),
        c.first_step, *c.sizes(),
    )  # fmt: skip
    count = c.streams * c.chunks
    launch(_delta_rule_pairs_kernel, count, args, c.columns(k), k.num_warps)
    k = c.config("queries", queries_config)
    args = (
        dy, c.q, c.k, states, made.gates, made.rstd, made.scores, sums, found.q, _steps(dy),
        _steps(c.k), *c.sizes(),
    )  # fmt: skip
    constants = c.columns(k, MOST_KEYS)
    launch(_delta_rule_queries_kernel, count * c.parts // c.group, args, constants, k.num_warps)
    k = c.config("keys", keys_config)
    args = (
        c.q, c.k, c.beta, states, dstates, values, solved, made.gates, made.rstd, made.scores,
        made.inverse, sums, found.k, dy, c.skip, _steps(c.k), c.beta.stride(), _steps(dy),
        *c.sizes(),
    )  # fmt: skip
    constants = c.columns(k, MOST_KEYS)
    launch(_delta_rule_keys_kernel, count * c.parts // c.group, args, constants, k.num_warps)
    many, plane = c.v.shape[2], c.streams * c.chunks * c.chunk
    args = (sums, c.first, found.g, found.beta, c.first_step, c.q.shape[1], c.chunks, many, plane)
    launch(_delta_rule_gates_kernel, count, args, (c.parts, c.chunk), 4)
