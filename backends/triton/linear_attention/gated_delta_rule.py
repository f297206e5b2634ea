"""The gated delta rule by Triton kernels, in chunks of tokens.

Source: Yang et al. 2024 (arXiv:2412.06464, arXiv:2406.06484); the kernels are in
gated_delta_rule_kernels.py. Backward makes A, P, the states and N again; nothing but the arguments
is kept between forward and backward.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

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

RULE = "gated_delta_rule"
NARROWEST, FEWEST_STAGES = 16, 2
"""Columns of v, and stages of loads, of a pass over states; launch tables cannot choose less."""
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


Numbers = TypeVar("Numbers", bound=DeltaConfig)


def states_config(info: DeviceInfo, tokens: int, dim: int, value: int, item: int) -> DeltaConfig:
    """A state of up to 32 KiB in registers: programs are serial, and should have a core each."""
    if _is_large(info) and item == 2:
        return DeltaConfig(max(NARROWEST, min(64, 8192 // _padded(dim))), 3, 4)
    return DeltaConfig(32, 2, 8 if _is_tight(info, item) else 4)


def pairs_config(info: DeviceInfo, tokens: int, dim: int, value: int, item: int) -> DeltaConfig:
    """Two squares are summed over steps of 64 columns."""
    return DeltaConfig(32 if item == 4 else 64, 2 if _is_large(info) else 1, 4)


def queries_config(info: DeviceInfo, tokens: int, dim: int, value: int, item: int) -> DeltaConfig:
    """A sum of the size of the keys is in registers; of short ones, stages are not worth it."""
    if _is_large(info) and item == 2 and dim > SHORTEST:
        return DeltaConfig(64, 2, 4)
    return DeltaConfig(32 if item == 4 else 64, 1, 8)


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
    info, size = device_info(k.device), k.shape[3]
    if _is_large(info) and k.element_size() == 2 and not INTERPRETED:
        step = ALIGNED // 2
        if any(n < SHORTEST or n % step for n in (size, v.shape[3])):
            return (
                f"takes heads of at least {SHORTEST} elements in multiples of {step} on "
                f"{info.arch}, got {size} and {v.shape[3]}"
            )
    widest = 64 if k.element_size() == 4 or INTERPRETED else 128
    if _is_tight(info, 2) and not INTERPRETED:
        widest = 32
    if size > widest:
        dtype = str(k.dtype).removeprefix("torch.")
        return (
            f"takes {dtype} keys of up to {widest} elements on {info.arch} (registers), got {size}"
        )
    if tile_rows(128, max(v.shape[2] * v.shape[3], k.shape[2] * size)) == 1:
        return "takes tokens of less than 8 MiB"  # the stride of tokens in the results
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

    rule: str
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
    flags: Tensor | None

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
        """Stride of sequences in ``first``; 0 where all sequences share it."""
        return 0 if self.first is None or self.first.shape[0] == 1 else self.first.stride(0)

    @property
    def document_step(self) -> int | None:
        """``first_step``, or None for kernels that take it only with several documents."""
        return None if self.first is None else self.first_step

    def sizes(self) -> tuple[int, ...]:
        """Tokens, chunks, key heads, and the sizes of planes of value heads and of key heads."""
        return (self.q.shape[1], self.chunks, *self.pass_sizes()[1:])

    def pass_sizes(self) -> tuple[int, ...]:
        """The same for kernels that pass over the chunks, which take their number beside it."""
        padded = self.chunks * self.chunk
        planes = (self.streams * padded, self.q.shape[0] * self.q.shape[2] * padded)
        return (self.q.shape[1], self.q.shape[2], *planes)

    def keys(self) -> tuple[int, ...]:
        """The ``constexpr`` arguments that every kernel takes."""
        size = self.k.shape[3]
        return self.group, size, _padded(size)

    def config(self, name: str, formula: Callable[..., Numbers]) -> Numbers:
        """The launch configuration of a kernel."""
        return _config(f"{self.rule}.{name}", formula, self.k, self.v)

    def columns(self, config: DeltaConfig) -> tuple[Any, ...]:
        """The ``constexpr`` arguments of a kernel over blocks of columns, with its stages."""
        value = self.v.shape[3]
        block = max(NARROWEST, min(config.block, power_of_2(value)))
        return (*self.keys(), value, block, self.chunk), config.stages


def _config(name: str, formula: Callable[..., Numbers], k: Tensor, v: Tensor) -> Numbers:
    return launch_config(
        name,
        formula,
        k.device,
        tokens=k.shape[1],
        dim=k.shape[3],
        value=v.shape[3],
        item=k.element_size(),
    )


def call(
    rule: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    first: Tensor | None,
    scale: float,
    normed: bool,
) -> Call:
    """A call of a delta rule; ``rule`` is what launch tables name its kernels by."""
    chunk = _config(f"{rule}.chunk", chunk_config, k, v).block
    first = None if first is None else first.contiguous()
    chunks = cdiv(q.shape[1], chunk)
    q, k = _rows(q), _rows(k)
    if q.stride() != k.stride():
        q, k = (_rows(x.contiguous()) for x in (q, k))
    flags = None if first is None else flags_of(v)
    return Call(
        rule,
        q,
        k,
        _rows(v),
        g,
        beta,
        first,
        scale=scale,
        normed=normed,
        chunk=chunk,
        chunks=chunks,
        flags=flags,
    )


def flags_of(v: Tensor) -> Tensor:
    """A number for every head, 0 until a kernel finds something that is not finite."""
    return v.new_zeros(v.shape[0] * v.shape[2], dtype=torch.int32)


def launch_isolated(
    flags: Tensor | None,
    kernel: Any,
    programs: int,
    args: tuple[Any, ...],
    constants: tuple[Any, ...],
    num_warps: int,
) -> None:
    """Run a kernel, and again for heads that are flagged, with their documents kept apart."""
    for isolated in (False,) if flags is None else (False, True):
        launch(kernel, programs, args, (*constants, isolated), num_warps)


class Prepared(NamedTuple):
    """A and P of every chunk, gates and norms."""

    inverse: Tensor
    scores: Tensor
    gates: Tensor
    rstd: Tensor | None


def _prepare(c: Call) -> Prepared:
    """Compute everything that needs no state."""
    padded = c.chunks * c.chunk
    inverse, scores = (c.q.new_empty(c.streams, padded, c.chunk) for _ in range(2))
    gates = c.q.new_empty(4, c.streams, padded, dtype=torch.float32)
    heads = c.q.shape[0] * c.q.shape[2]
    rstd = c.q.new_empty(2, heads, padded, dtype=torch.float32) if c.normed else None
    args = (
        c.q,
        c.k,
        c.g,
        c.beta,
        c.first,
        inverse,
        scores,
        gates,
        rstd,
        c.flags,
        _steps(c.k),
        c.g.stride(),
        c.beta.stride(),
        c.first_step,
        c.sizes(),
        c.scale,
    )
    warps = c.config("chunk", chunk_config).num_warps
    count = c.streams * c.chunks
    constants = (*c.keys(), c.chunk)
    launch_isolated(c.flags, _delta_rule_chunks_kernel, count, args, constants, warps)
    return Prepared(inverse, scores, gates, rstd)


class States(NamedTuple):
    """What a pass over the states may write: y and the last state, or all states and N."""

    y: Tensor | None = None
    final: Tensor | None = None
    states: Tensor | None = None
    values: Tensor | None = None


def _pass(c: Call, prepared: Prepared, initial: Tensor | None, outputs: States) -> None:
    k = c.config("forward" if outputs.y is not None else "states", states_config)
    args = (
        c.q,
        c.k,
        c.v,
        c.beta,
        c.first,
        prepared.inverse,
        prepared.scores,
        prepared.gates,
        prepared.rstd,
        c.flags,
        None if initial is None else initial.contiguous(),
        *outputs,
        (*_steps(c.k), *_steps(c.v), *c.beta.stride()),
        c.document_step,
        c.pass_sizes(),
        c.chunks,
        c.scale,
    )
    constants = c.columns(replace(k, stages=max(FEWEST_STAGES, k.stages)))
    count = c.streams * cdiv(c.v.shape[3], constants[0][4])
    launch_isolated(c.flags, _delta_rule_forward_kernel, count, args, constants, k.num_warps)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    first: Tensor | None,
    scale: float,
    qk_l2norm: bool,
    output_final_state: bool,
) -> tuple[Tensor, Tensor]:
    """One launch for all chunks, one that passes over them."""
    if not v.numel():
        return reference.forward(
            q,
            k,
            v,
            g,
            beta,
            initial_state,
            first,
            scale=scale,
            qk_l2norm=qk_l2norm,
            output_final_state=output_final_state,
        )
    c = call(RULE, q, k, v, g, beta, first, scale=scale, normed=qk_l2norm)
    y = v.new_empty(v.shape)
    shape = (v.shape[0], v.shape[2], k.shape[3], v.shape[3]) if output_final_state else (0,)
    final = v.new_empty(shape, dtype=torch.float32)
    _pass(c, _prepare(c), initial_state, States(y, final if output_final_state else None))
    return y, final


def backward(
    dy: Tensor | None,
    dfinal_state: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    first: Tensor | None,
    scale: float,
    qk_l2norm: bool,
    needs_q: bool,
    needs_k: bool,
    needs_v: bool,
    needs_g: bool,
    needs_beta: bool,
    needs_initial_state: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The states again, their gradients in reverse, and the rest for all chunks at once."""
    if not v.numel():
        return reference.backward(
            dy,
            dfinal_state,
            q,
            k,
            v,
            g,
            beta,
            initial_state,
            first=first,
            scale=scale,
            qk_l2norm=qk_l2norm,
            needs_q=needs_q,
            needs_k=needs_k,
            needs_v=needs_v,
            needs_g=needs_g,
            needs_beta=needs_beta,
            needs_initial_state=needs_initial_state,
        )
    c = call(RULE, q, k, v, g, beta, first, scale=scale, normed=qk_l2norm)
    dy = torch.zeros_like(v) if dy is None else _rows(dy)
    prepared = _prepare(c)
    states, dstates = (v.new_empty(c.streams, c.chunks, k.shape[3], v.shape[3]) for _ in range(2))
    values = v.new_empty(c.streams, *v.shape[1::2])
    _pass(c, prepared, initial_state, States(states=states, values=values))
    dq, dk, dg, dbeta = (x.new_empty(x.shape) for x in (q, k, g, beta))
    dv, dinitial = v.new_empty(v.shape), q.new_empty(0)
    if initial_state is not None:
        dinitial = initial_state.new_empty(initial_state.shape if needs_initial_state else 0)
    _reverse(c, prepared, dy, dfinal_state, dv, dstates, dinitial)
    _gradients(c, prepared, dy, (states, dstates, values, dv), (dq, dk, dg, dbeta))
    needs = (needs_q, needs_k, needs_v, needs_g, needs_beta)
    pairs = zip((dq, dk, dv, dg, dbeta), needs, strict=True)
    dq, dk, dv, dg, dbeta = (x if is_needed else x.new_empty(0) for x, is_needed in pairs)
    return dq, dk, dv, dg, dbeta, dinitial


def _nonempty(x: Tensor | None) -> Tensor | None:
    """The tensor, or None if it is empty because it is not needed."""
    return x if x is not None and x.numel() else None


def _reverse(
    c: Call,
    prepared: Prepared,
    dy: Tensor,
    dfinal: Tensor | None,
    solved: Tensor,
    dstates: Tensor,
    dinitial: Tensor,
) -> None:
    k = c.config("reverse", states_config)
    args = (
        dy,
        c.q,
        c.k,
        c.beta,
        c.first,
        prepared.inverse,
        prepared.scores,
        prepared.gates,
        prepared.rstd,
        c.flags,
        None if dfinal is None else dfinal.contiguous(),
        solved,
        dstates,
        _nonempty(dinitial),
        (*_steps(dy), *_steps(c.k), *c.beta.stride()),
        c.document_step,
        c.pass_sizes(),
        c.chunks,
        c.scale,
    )
    constants = c.columns(replace(k, stages=max(FEWEST_STAGES, k.stages)))
    count = c.streams * cdiv(c.v.shape[3], constants[0][4])
    launch_isolated(c.flags, _delta_rule_reverse_kernel, count, args, constants, k.num_warps)


def _gradients(
    c: Call, prepared: Prepared, dy: Tensor, passes: tuple[Tensor, ...], grads: tuple[Tensor, ...]
) -> None:
    """Gradients of the inputs from the states, their gradients, N and Y; Y is overwritten by dv."""
    states, dstates, values, solved = passes
    dq, dk, dg, dbeta = grads
    sums = torch.empty_like(prepared.gates[:2])
    k = c.config("pairs", pairs_config)
    args: tuple[Any, ...] = (
        dy,
        c.q,
        c.k,
        c.v,
        c.beta,
        c.first,
        values,
        solved,
        prepared.gates,
        prepared.rstd,
        prepared.scores,
        prepared.inverse,
        sums,
        _steps(dy),
        _steps(c.k),
        _steps(c.v),
        c.beta.stride(),
        c.first_step,
        c.sizes(),
        c.scale,
    )
    count = c.streams * c.chunks
    launch(_delta_rule_pairs_kernel, count, args, c.columns(k), k.num_warps)
    k = c.config("queries", queries_config)
    args = (
        dy,
        c.q,
        c.k,
        states,
        prepared.gates,
        prepared.rstd,
        prepared.scores,
        sums,
        dq,
        _steps(dy),
        _steps(c.k),
        c.sizes(),
        c.scale,
    )
    constants = (*c.columns(k), c.first is not None)
    launch(_delta_rule_queries_kernel, count // c.group, args, constants, k.num_warps)
    k = c.config("keys", keys_config)
    args = (
        c.q,
        c.k,
        c.beta,
        states,
        dstates,
        values,
        solved,
        prepared.gates,
        prepared.rstd,
        prepared.scores,
        prepared.inverse,
        sums,
        dk,
        _steps(c.k),
        c.beta.stride(),
        c.sizes(),
        c.scale,
    )
    constants = (*c.columns(k), c.first is not None)
    launch(_delta_rule_keys_kernel, count // c.group, args, constants, k.num_warps)
    value_heads, plane = c.v.shape[2], c.streams * c.chunks * c.chunk
    args = (sums, c.first, dg, dbeta, c.first_step, c.q.shape[1], c.chunks, value_heads, plane)
    launch(_delta_rule_gates_kernel, count, args, (c.chunk,), 4)
