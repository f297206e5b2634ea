"""Kimi delta attention by Triton kernels, in chunks of tokens.

Source: Kimi Team 2025 (arXiv:2510.26692); the kernels are in kimi_delta_attention_kernels.py.
Backward makes the gates, A, P, the states and N again; nothing but the arguments is kept between
forward and backward.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_multi.backends.triton.common.launching import launch
from liger_multi.backends.triton.common.rows import INTERPRETED, cdiv
from liger_multi.backends.triton.linear_attention import gated_delta_rule as delta_rule
from liger_multi.backends.triton.linear_attention.gated_delta_rule import (
    FEWEST_STAGES,
    Call,
    DeltaConfig,
    States,
    _is_large,
    _nonempty,
    _padded,
    _rows,
    _steps,
    call,
    chunk_config,
    launch_isolated,
    pairs_config,
    states_config,
)
from liger_multi.backends.triton.linear_attention.kimi_delta_attention_kernels import (
    _kimi_delta_forward_kernel,
    _kimi_delta_gates_kernel,
    _kimi_delta_keys_kernel,
    _kimi_delta_norms_kernel,
    _kimi_delta_pairs_kernel,
    _kimi_delta_queries_kernel,
    _kimi_delta_reverse_kernel,
    _kimi_delta_scores_kernel,
)
from liger_multi.dispatch.launch import DeviceInfo, device_info
from liger_multi.reference.linear_attention import kimi_delta_attention as reference

RULE = "kimi_delta_attention"
STEP = 16  # elements of heads in 16 bits on Hopper


@dataclass(frozen=True)
class ChannelConfig(DeltaConfig):
    """``channels`` of a key a program."""

    channels: int


def tiles_config(info: DeviceInfo, tokens: int, dim: int, value: int, item: int) -> DeltaConfig:
    """Several tiles of a chunk's keys are in registers, 32 numbers a thread each at most."""
    chunk = chunk_config(info, tokens, dim, value, item).block
    warps = max(2, min(8, chunk * _padded(dim) // (32 * info.warp_size)))
    return DeltaConfig(chunk, 1, warps)


def scores_config(info: DeviceInfo, tokens: int, dim: int, value: int, item: int) -> ChannelConfig:
    """Enough warps that tiles of keys and squares of a chunk take 16 numbers per thread each."""
    config = tiles_config(info, tokens, dim, value, item)
    squares = min(8, config.block**2 // (16 * info.warp_size))
    return ChannelConfig(config.block, config.stages, max(config.num_warps, squares), _padded(dim))


def gradients_config(
    info: DeviceInfo, tokens: int, dim: int, value: int, item: int
) -> ChannelConfig:
    """Five tiles of rows by channels are in registers, of few numbers a thread."""
    chunk = chunk_config(info, tokens, dim, value, item).block
    channels = min(64, _padded(dim))
    numbers_per_thread = 16 if _is_large(info) else 8
    warps = max(2, min(8, chunk * channels // (numbers_per_thread * info.warp_size)))
    return ChannelConfig(32 if item == 4 else 64, FEWEST_STAGES, warps, channels)


def passes_config(info: DeviceInfo, tokens: int, dim: int, value: int, item: int) -> DeltaConfig:
    """The gated delta rule's formula with one more tile of keys, which 64 KiB cannot hold."""
    config = states_config(info, tokens, dim, value, item)
    if dim <= 32 and not _is_large(info):
        return replace(config, stages=1)  # a second one takes registers that are not there
    if dim <= 64:
        return config
    return replace(config, stages=1 if info.shared_bytes <= 65536 else FEWEST_STAGES)


class Prepared(NamedTuple):
    """Gates, rows of q and k with gates, norms, and P, C and A of every chunk."""

    sums: Tensor
    queries: Tensor
    keys: Tensor
    kept: Tensor
    last: Tensor
    rstd: Tensor | None
    scores: Tensor
    solve: Tensor
    adjoint: Tensor | None


def _staged(c: Call, k: DeltaConfig) -> DeltaConfig:
    """The configuration with the stages that a loop over GEMMs needs on Hopper."""
    fewest = FEWEST_STAGES if _is_large(device_info(c.k.device)) else 1
    return replace(k, stages=max(fewest, k.stages))


def _levels(c: Call) -> int:
    return c.chunk.bit_length() - 1


def _prepare(c: Call, backward: bool) -> Prepared:
    """Compute everything that needs no state, with A if backward needs it."""
    (batch, _, heads, dim), padded = c.k.shape, c.chunks * c.chunk
    size, dtype = _padded(dim), torch.float32
    planes = 2 if c.q.element_size() == 4 else 1
    sums = c.q.new_empty(planes, c.streams, padded, size, dtype=dtype)
    queries, keys, decayed_keys = (c.q.new_empty(c.streams, padded, dim) for _ in range(3))
    last = c.q.new_empty(c.streams, c.chunks, size, dtype=dtype)
    rstd = c.q.new_empty(2, batch * heads, padded, dtype=dtype) if c.normed else None
    scores, solve = (c.q.new_empty(c.streams, padded, c.chunk) for _ in range(2))
    adjoint = torch.empty_like(scores) if backward else None
    prepared = Prepared(
        sums, queries, keys, decayed_keys, last, rstd, scores, solve, adjoint=adjoint
    )
    count = c.streams * c.chunks
    warps = c.config("gates", tiles_config).num_warps
    args: tuple[Any, ...] = (
        c.q,
        c.k,
        c.g,
        c.first,
        *prepared[:6],
        c.flags,
        _steps(c.k),
        _steps(c.g),
        c.first_step,
        c.sizes(),
        c.scale,
    )
    launch(_kimi_delta_gates_kernel, count, args, (*c.keys(), c.chunk), warps)
    k = c.config("scores", scores_config)
    args = (
        c.q,
        c.k,
        c.beta,
        c.first,
        sums,
        rstd,
        *prepared[6:],
        c.flags,
        _steps(c.k),
        c.beta.stride(),
        c.first_step,
        c.sizes(),
        c.scale,
    )
    constants = (*c.keys(), c.chunk, min(k.channels, size), _levels(c))
    launch_isolated(c.flags, _kimi_delta_scores_kernel, count, args, constants, k.num_warps)
    return prepared


def _pass(c: Call, prepared: Prepared, initial: Tensor | None, outputs: States) -> None:
    k = c.config("forward" if outputs.y is not None else "states", passes_config)
    args = (
        c.v,
        c.beta,
        c.first,
        *prepared[1:5],
        prepared.scores,
        prepared.solve,
        c.flags,
        None if initial is None else initial.contiguous(),
        *outputs,
        _steps(c.v),
        c.beta.stride(),
        c.document_step,
        c.pass_sizes(),
        c.chunks,
    )
    constants = c.columns(_staged(c, k))
    count = c.streams * cdiv(c.v.shape[3], constants[0][4])
    launch_isolated(c.flags, _kimi_delta_forward_kernel, count, args, constants, k.num_warps)


def _call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    first: Tensor | None,
    scale: float,
    normed: bool,
) -> Call:
    return call(RULE, q, k, v, _rows(g), beta, first, scale=scale, normed=normed)


def supports(k: Tensor, v: Tensor) -> str | None:
    """Why a call is refused, or None.

    Of keys and values of two sizes, or of 72 elements, ptxas 12.8 (Triton 3.6) makes wrong code for
    Hopper at times: see ``ALIGNED`` of the gated delta rule. Of sizes that are left it never did.
    """
    info, sizes = device_info(k.device), (k.shape[3], v.shape[3])
    if _is_large(info) and k.element_size() == 2 and not INTERPRETED:
        if sizes[0] != sizes[1] or sizes[0] % STEP:
            return (
                f"takes keys and values of one size, a multiple of {STEP}, in 16 bits on "
                f"{info.arch} (its compiler), got {sizes[0]} and {sizes[1]}"
            )
    return delta_rule.supports(k, v)


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
    """Two launches for all chunks, one that passes over them."""
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
    c = _call(q, k, v, g, beta, first, scale, qk_l2norm)
    y = v.new_empty(v.shape)
    shape = (v.shape[0], v.shape[2], k.shape[3], v.shape[3]) if output_final_state else (0,)
    final = v.new_empty(shape, dtype=torch.float32)
    outputs = States(y, final if output_final_state else None)
    _pass(c, _prepare(c, False), initial_state, outputs)
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
    c = _call(q, k, v, g, beta, first, scale, qk_l2norm)
    dy = torch.zeros_like(v) if dy is None else _rows(dy)
    prepared = _prepare(c, True)
    states, dstates = (v.new_empty(c.streams, c.chunks, k.shape[3], v.shape[3]) for _ in range(2))
    values = v.new_empty(c.streams, *v.shape[1::2])
    _pass(c, prepared, initial_state, States(states=states, values=values))
    dv, dinitial = v.new_empty(v.shape), q.new_empty(0)
    if initial_state is not None:
        dinitial = initial_state.new_empty(initial_state.shape if needs_initial_state else 0)
    partial = _reverse(c, prepared, dy, dfinal_state, values, dv, dstates, dinitial)
    dbeta = _pairs(c, prepared, dy, values, dv, partial)
    dq, dk, dg = _gradients(c, prepared, dy, (states, dstates, values, dv))
    needs = (needs_q, needs_k, needs_v, needs_g, needs_beta)
    pairs = zip((dq, dk, dv, dg, dbeta), needs, strict=True)
    dq, dk, dv, dg, dbeta = (x if is_needed else x.new_empty(0) for x, is_needed in pairs)
    return dq, dk, dv, dg, dbeta, dinitial


def _reverse(
    c: Call,
    prepared: Prepared,
    dy: Tensor,
    dfinal: Tensor | None,
    values: Tensor,
    dv: Tensor,
    dstates: Tensor,
    dinitial: Tensor,
) -> Tensor:
    """Write dv and gradients of states; return the parts of dbeta."""
    k = c.config("reverse", passes_config)
    constants = c.columns(_staged(c, k))
    blocks = cdiv(c.v.shape[3], constants[0][4])
    partial = prepared.sums.new_empty(blocks, c.streams, c.chunks * c.chunk)
    args = (
        dy,
        c.beta,
        c.first,
        *prepared[1:5],
        prepared.scores,
        prepared.adjoint,
        values,
        c.flags,
        None if dfinal is None else dfinal.contiguous(),
        dv,
        dstates,
        partial,
        _nonempty(dinitial),
        _steps(dy),
        c.beta.stride(),
        c.document_step,
        c.pass_sizes(),
        c.chunks,
    )
    count = c.streams * blocks
    launch_isolated(c.flags, _kimi_delta_reverse_kernel, count, args, constants, k.num_warps)
    return partial


def _pairs(
    c: Call, prepared: Prepared, dy: Tensor, values: Tensor, dv: Tensor, partial: Tensor
) -> Tensor:
    """Write dP in the place of P and M in that of A; return dbeta."""
    dbeta = c.beta.new_empty(c.beta.shape)
    k = c.config("pairs", pairs_config)
    args = (
        dy,
        c.beta,
        c.first,
        values,
        dv,
        prepared.scores,
        prepared.adjoint,
        partial,
        dbeta,
        len(partial),
        _steps(dy),
        c.beta.stride(),
        c.first_step,
        c.sizes(),
    )
    count = c.streams * c.chunks
    launch(_kimi_delta_pairs_kernel, count, args, c.columns(k), k.num_warps)
    return dbeta


def _gradients(
    c: Call, prepared: Prepared, dy: Tensor, passes: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dg, from the states, their gradients, N and dv."""
    states, dstates, values, dv = passes
    dq, dk, dg = (x.new_empty(x.shape) for x in (c.q, c.k, c.g))
    rows = prepared.sums.new_empty(2, *prepared.sums.shape[1:])  # of Q; of G, then of K
    size = rows.shape[3]
    k = c.config("queries", gradients_config)
    width = min(k.channels, size)
    count = c.streams * c.chunks * (size // width)
    args: tuple[Any, ...] = (
        dy,
        c.q,
        c.k,
        c.first,
        states,
        prepared.sums,
        prepared.queries,
        prepared.rstd,
        prepared.scores,
        *rows,
        c.flags,
        _steps(dy),
        _steps(c.k),
        c.first_step,
        c.sizes(),
        c.scale,
    )
    constants = (*c.columns(k), width, _levels(c))
    launch_isolated(c.flags, _kimi_delta_queries_kernel, count, args, constants, k.num_warps)
    k = c.config("keys", gradients_config)
    width = min(k.channels, size)
    count = c.streams * c.chunks * (size // width)
    args = (
        c.q,
        c.k,
        c.beta,
        c.first,
        states,
        dstates,
        values,
        dv,
        prepared.sums,
        prepared.keys,
        prepared.kept,
        prepared.last,
        prepared.rstd,
        prepared.scores,
        prepared.adjoint,
        rows[1],
        dg,
        c.flags,
        (*_steps(c.k), *c.beta.stride(), c.first_step),
        c.sizes(),
        c.scale,
    )
    shape, stages = c.columns(k)
    constants = (shape, (stages, width, _levels(c)))
    launch_isolated(c.flags, _kimi_delta_keys_kernel, count, args, constants, k.num_warps)
    args = (c.q, c.k, prepared.rstd, *rows, dq, dk, _steps(c.k), c.sizes(), c.scale)
    warps = c.config("norms", tiles_config).num_warps
    count = c.streams * c.chunks // c.group
    launch(_kimi_delta_norms_kernel, count, args, (*c.keys(), c.chunk), warps)
    return dq, dk, dg
