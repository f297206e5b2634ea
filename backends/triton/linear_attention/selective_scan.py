"""The selective scan of Mamba by Triton kernels, token after token with states in registers.

Source: Gu and Dao 2023 (arXiv:2312.00752); the kernels are in selective_scan_kernels.py. Backward
makes the states again; nothing but the arguments is kept between forward and backward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor

from liger_multi.backends.triton.common.launching import launch
from liger_multi.backends.triton.common.rows import (
    LONGEST_ROW,
    cdiv,
    power_of_2,
    sum_rows,
    warps,
)
from liger_multi.backends.triton.linear_attention.selective_scan_kernels import (
    _selective_scan_backward_kernel,
    _selective_scan_forward_kernel,
    _selective_scan_join_kernel,
    _selective_scan_states_kernel,
)
from liger_multi.dispatch.launch import DeviceInfo, device_info, launch_config
from liger_multi.reference.linear_attention import selective_scan as reference
from liger_multi.reference.linear_attention.state_space import Nine

MOST = 256  # states of a channel
HELD = 16  # states of a thread
JOINED = 256  # elements of states that a program takes from span to span

# --- launch configuration ---


@dataclass(frozen=True)
class ScanConfig:
    """``block`` channels and ``span`` tokens a program, ``step`` tokens at a time.

    ``ahead`` says what caches are asked for before it is loaded: B and C from 1 on, rows of
    backward from 2 on.
    """

    block: int
    span: int
    step: int
    num_warps: int
    ahead: int = 0


@dataclass(frozen=True)
class BackwardConfig(ScanConfig):
    """And ``parts`` steps a chunk; the states of a step's tokens are in registers."""

    parts: int = 2


def _span(info: DeviceInfo, length: int, blocks: int) -> int:
    """Tokens of a span, so that one sequence has 8 warps on every core, but 256 tokens or more.

    Other sequences of a batch add programs, but must not change a sum's order.
    """
    spans = max(1, min(cdiv(8 * info.cores, blocks), length // 256))
    return cdiv(max(length, 1), spans)


def _shape(info: DeviceInfo, states: int) -> tuple[int, int]:
    """Channels and warps of a program whose threads have ``HELD`` states or fewer.

    Of more than 256 threads, each would have fewer registers.
    """
    size = power_of_2(states)
    block = min(info.warp_size, 256 * HELD // size)
    return block, warps(size * block // HELD, info.warp_size)


def forward_config(info: DeviceInfo, length: int, cols: int, states: int) -> ScanConfig:
    """One channel a thread.

    Spans cost a second pass, which pays even where all channels fill the cores with one warp each:
    3.4 ms in place of 7.0 for 2x8192x8192 (H100, Triton 3.6, 2026-11; with another layout).

    Args:
        info: Limits of the device.
        length: Tokens of a sequence.
        cols: Channels.
        states: Of a channel.
    """
    block, count = _shape(info, states)
    return ScanConfig(block, min(_span(info, length, cdiv(cols, block) * count), 256), 4, count, 1)


def states_config(info: DeviceInfo, length: int, cols: int, states: int) -> ScanConfig:
    """The first pass of both directions, which say what its spans and steps are."""
    return forward_config(info, length, cols, states)


def backward_config(info: DeviceInfo, length: int, cols: int, states: int) -> BackwardConfig:
    """Of 2, 3 and 4 tokens a step, backward of 2x8192x8192 takes 7.3, 6.4 and 7.2 ms (H100)."""
    block, count = _shape(info, states)
    span = min(_span(info, length, cdiv(cols, block) * count), 512)
    return BackwardConfig(block, span, 3, count, 2)


# --- launchers ---


def supports(B: Tensor) -> str | None:
    """Why a call is refused, or None."""
    if B.shape[2] > MOST:
        return f"takes up to {MOST} states of a channel (registers), got {B.shape[2]}"
    if B.numel() > LONGEST_ROW.value:
        return f"takes up to {LONGEST_ROW.value:,} elements of B, got {B.numel():,}"
    return None


class Call(NamedTuple):
    """The tensors of a call as kernels take them: neighbors are adjacent."""

    u: Tensor
    delta: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    D: Optional[Tensor]
    z: Optional[Tensor]
    bias: Optional[Tensor]
    initial: Optional[Tensor]
    first: Optional[Tensor]
    softplus: bool

    @property
    def first_step(self) -> int:
        """From one sequence to the next in ``first``, which all may share."""
        shared = self.first is None or self.first.shape[0] == 1
        return 0 if shared or self.first is None else self.first.stride(0)

    @property
    def strides(self) -> tuple[Any, ...]:
        """Of the sequences and tokens of u, delta and z, and of sequences of ``first``."""
        rows = (self.u, self.delta, self.u if self.z is None else self.z)
        return (*((x.stride(0), x.stride(1)) for x in rows), self.first_step)

    def even(self, tokens: int, block: int) -> bool:
        """Whether spans of ``tokens`` and blocks of channels have nothing past the last ones."""
        _, length, cols = self.u.shape
        return not (length % tokens or cols % block)

    def constants(self, *more: int) -> tuple[Any, ...]:
        """What kernels take last."""
        states = self.B.shape[2]
        return states, power_of_2(states), self.softplus, *more

    def config(self, name: str) -> Any:
        """The launch configuration of a kernel."""
        _, length, cols = self.u.shape
        return launch_config(
            f"selective_scan.{name}", FORMULAS[name], self.u.device, length=length, cols=cols,
            states=self.B.shape[2],
        )  # fmt: skip

    def numbers(self, *leading: int) -> Tensor:
        """Room for fp32 numbers of every sequence and channel."""
        batch, _, cols = self.u.shape
        return self.u.new_empty(batch, *leading, cols, dtype=torch.float32)

    def tiles(self, block: int, *leading: int) -> Tensor:
        """Room for tiles of the states of ``block`` channels: those of a tile are adjacent."""
        batch, _, cols = self.u.shape
        many = cdiv(cols, block) * power_of_2(self.B.shape[2]) * block
        return self.u.new_empty(batch, *leading, many, dtype=torch.float32)

    def pairs(self, tokens: int) -> Tensor:
        """B and C in fp32 side by side, 0 past the last state and up to ``tokens``.

        Every thread reads all of a token's numbers, at distances known to the compiler.
        """
        batch, length, states = self.B.shape
        made = self.u.new_zeros(batch, tokens, 2, power_of_2(states), dtype=torch.float32)
        for i, x in enumerate((self.B, self.C)):
            made[:, :length, i, :states].copy_(x)
        return made


FORMULAS = {"forward": forward_config, "states": states_config, "backward": backward_config}


def _exchanges(c: Call, k: BackwardConfig) -> int:
    """How often threads halve the states whose sums over channels they hold (``_put_sums``).

    Each of a warp's threads has one channel, and as many states as threads beside it leave.
    """
    beside = max(1, device_info(c.u.device).warp_size // k.block)
    held = power_of_2(c.B.shape[2]) // beside
    return held.bit_length() - 1 if k.num_warps == 1 and 1 < held <= k.block else 0


class Spans(NamedTuple):
    """How the tokens of a sequence are divided among programs, and theirs into chunks of steps."""

    spans: int
    chunks: int
    parts: int
    step: int

    @classmethod
    def of(cls, length: int, k: ScanConfig, parts: int = 1) -> Spans:
        """Spans of whole chunks."""
        chunks = cdiv(min(k.span, length), parts * k.step)
        return cls(cdiv(length, chunks * parts * k.step), chunks, parts, k.step)

    @property
    def tokens(self) -> int:
        """Of a span."""
        return self.chunks * self.parts * self.step


def _adjacent(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _dense(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def _by_state(x: Tensor | None) -> Tensor | None:
    """States (batch, channels, N) as kernels have them, (batch, N, channels)."""
    return None if x is None else x.mT.contiguous()


def _call(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None,
    bias: Tensor | None, initial: Tensor | None, first: Tensor | None, softplus: bool,
) -> Call:  # fmt: skip
    return Call(
        _adjacent(u), _adjacent(delta), A.mT.contiguous(), B, C, _dense(D),
        None if z is None else _adjacent(z), _dense(bias), _by_state(initial), _dense(first),
        softplus,
    )  # fmt: skip


class Passed(NamedTuple):
    """What the first pass leaves: before and after spans, and before chunks.

    Attributes:
        before: The states before spans, (batch, spans) tiles, None for one span.
        after: Gradients after spans.
        states: The states before chunks.
        reached: Sums of step sizes from the beginning of a span to a chunk.
    """

    before: Optional[Tensor] = None
    after: Optional[Tensor] = None
    states: Optional[Tensor] = None
    reached: Optional[Tensor] = None


def _first_pass(
    c: Call, block: int, parts: Spans, pairs: Tensor, dy: Tensor | None = None,
    dfinal: Tensor | None = None, backward: bool = False,
) -> Passed:  # fmt: skip
    """States before spans; for backward, also those before chunks and gradients after spans."""
    spans, chunks, *_ = parts
    split, after = spans > 1, None
    (batch, length, cols), states = c.u.shape, c.B.shape[2]
    before = c.tiles(block, spans) if split else None
    sums = c.numbers(spans) if split else None
    at_chunks = c.tiles(block, spans, chunks) if backward else None
    reached = c.numbers(spans, chunks) if backward and split else None
    if backward:
        after = c.tiles(block, spans) if split else _tiled(dfinal, block)
    up = dy if backward and split else None
    active = spans if backward else spans - 1  # nothing comes after the last
    args = (
        c.u, c.delta, c.A, pairs, up, c.z, c.bias, None if split else c.initial, c.first, before,
        sums, at_chunks, reached, after if split else None,
        (0, 0) if up is None else (up.stride(0), up.stride(1)), *c.strides, length, cols, spans,
        active, chunks, 0,
    )  # fmt: skip
    k = c.config("states")
    even, count = c.even(parts.tokens, block), cdiv(cols, block)
    constants = c.constants(block, parts.parts, parts.step, k.ahead, even)
    launch(_selective_scan_states_kernel, batch * active * count, args, constants, k.num_warps)
    for made, given, reverse in ((before, c.initial, False), (after, dfinal, True)):
        if made is not None and split:
            launch(
                _selective_scan_join_kernel, batch * cdiv(made.shape[-1], JOINED),
                (made, sums, c.A, given, c.first, c.first_step, length, cols, spans, parts.tokens),
                (states, power_of_2(states), block, JOINED, reverse), 4,
            )  # fmt: skip
    return Passed(before, after, at_chunks, reached)


def _tiled(x: Tensor | None, block: int) -> Tensor | None:
    """States (batch, N, channels) as tiles of ``block`` channels."""
    if x is None:
        return None
    batch, states, cols = x.shape
    blocks, size = cdiv(cols, block), power_of_2(states)
    wide = torch.nn.functional.pad(x, (0, blocks * block - cols, 0, size - states))
    return wide.view(batch, size, blocks, block).transpose(1, 2).contiguous()


def forward(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Optional[Tensor],
    z: Optional[Tensor], delta_bias: Optional[Tensor], initial_state: Optional[Tensor],
    first: Optional[Tensor], delta_softplus: bool, output_final_state: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """One launch, or three where spans of tokens share the work."""
    if not u.numel():
        return reference.forward(
            u, delta, A, B, C, D, z, delta_bias, initial_state, first, delta_softplus,
            output_final_state,
        )  # fmt: skip
    c = _call(u, delta, A, B, C, D, z, delta_bias, initial_state, first, delta_softplus)
    k = c.config("forward")
    batch, length, cols = u.shape
    parts = Spans.of(length, k)
    pairs = c.pairs(parts.spans * parts.tokens)
    before = _first_pass(c, k.block, parts, pairs).before if parts.spans > 1 else None
    y = u.new_empty(u.shape)
    final = c.numbers(B.shape[2]) if output_final_state else None
    args = (
        c.u, c.delta, c.A, pairs, c.D, c.z, c.bias, c.initial, before, c.first, y,
        final, *c.strides, length, cols, parts.spans, parts.chunks, 0,
    )  # fmt: skip
    programs = batch * parts.spans * cdiv(cols, k.block)
    constants = c.constants(k.step, k.block, k.ahead, c.even(parts.tokens, k.block))
    launch(_selective_scan_forward_kernel, programs, args, constants, k.num_warps)
    last = _by_state(final)
    return y, u.new_empty(0, dtype=torch.float32) if last is None else last


class Gradients(NamedTuple):
    """Where the kernel writes: gradients of rows, and parts of those that are sums."""

    u: Optional[Tensor]
    delta: Optional[Tensor]
    z: Optional[Tensor]
    A: Optional[Tensor]
    pairs: Optional[Tensor]
    D: Optional[Tensor]
    delta_bias: Optional[Tensor]
    initial_state: Optional[Tensor]

    def of(self, name: str, like: Tensor) -> Tensor:
        """The gradient of a tensor, its parts summed; empty where nobody needs it."""
        found: Optional[Tensor] = getattr(self, name)
        if found is None:
            return like.new_empty(0)
        if name == "initial_state":
            return found.mT.to(like.dtype, memory_format=torch.contiguous_format)
        if name not in SUMS:
            return found
        total = sum_rows(found.flatten(1), like.dtype)
        return total.view(like.mT.shape).mT.contiguous() if name == "A" else total.view(like.shape)

    def numbers(self, B: Tensor, C: Tensor, needs: dict[str, bool]) -> tuple[Tensor, Tensor]:
        """The gradients of B and C, whose parts are side by side."""
        if self.pairs is None:
            return B.new_empty(0), C.new_empty(0)
        total = sum_rows(self.pairs.flatten(1), torch.float32).view(self.pairs.shape[1:])

        def part(name: str, i: int, like: Tensor) -> Tensor:
            if not needs[name]:
                return like.new_empty(0)
            x = total[:, : like.shape[1], i, : like.shape[2]]
            return x.to(like.dtype, memory_format=torch.contiguous_format)

        return part("B", 0, B), part("C", 1, C)


SUMS = ("A", "D", "delta_bias")


def _room(c: Call, block: int, spans: Spans, pairs: Tensor, needs: dict[str, bool]) -> Gradients:
    """Memory for the gradients that are needed."""
    (batch, _, cols), states = c.u.shape, c.B.shape[2]
    sums, parts = pairs.new_empty, batch * spans.spans

    def new(name: str, like: Tensor | None, shape: tuple[int, ...]) -> Optional[Tensor]:
        kind = torch.float32 if like is None else like.dtype
        return c.u.new_empty(shape, dtype=kind) if needs[name] else None

    return Gradients(
        new("u", c.u, c.u.shape), new("delta", c.delta, c.u.shape), new("z", c.z, c.u.shape),
        new("A", None, (parts, states, cols)),
        sums(cdiv(cols, block), *pairs.shape) if needs["B"] or needs["C"] else None,
        new("D", None, (parts, cols)), new("delta_bias", None, (parts, cols)),
        new("initial_state", None, (batch, states, cols)),
    )  # fmt: skip


def backward(
    dy: Optional[Tensor], dfinal_state: Optional[Tensor], u: Tensor, delta: Tensor, A: Tensor,
    B: Tensor, C: Tensor, D: Optional[Tensor], z: Optional[Tensor], delta_bias: Optional[Tensor],
    initial_state: Optional[Tensor], first: Optional[Tensor], delta_softplus: bool, needs_u: bool,
    needs_delta: bool, needs_A: bool, needs_B: bool, needs_C: bool, needs_D: bool, needs_z: bool,
    needs_delta_bias: bool, needs_initial_state: bool,
) -> Nine:  # fmt: skip
    """The first pass, the reverse pass, and a launch for every sum of parts."""
    given = {
        "u": u, "delta": delta, "A": A, "B": B, "C": C, "D": D, "z": z, "delta_bias": delta_bias,
        "initial_state": initial_state,
    }  # fmt: skip
    if not u.numel():
        return reference.backward(
            dy, dfinal_state, u, delta, A, B, C, D, z, delta_bias, initial_state, first,
            delta_softplus, needs_u, needs_delta, needs_A, needs_B, needs_C, needs_D, needs_z,
            needs_delta_bias, needs_initial_state,
        )  # fmt: skip
    needs = (
        needs_u, needs_delta, needs_A, needs_B, needs_C, needs_D, needs_z, needs_delta_bias,
        needs_initial_state,
    )  # fmt: skip
    wanted = {n: need and given[n] is not None for n, need in zip(given, needs, strict=True)}
    c = _call(u, delta, A, B, C, D, z, delta_bias, initial_state, first, delta_softplus)
    k = c.config("backward")
    batch, length, cols = u.shape
    parts = Spans.of(length, k, k.parts)
    dy = torch.zeros_like(c.u) if dy is None else _adjacent(dy)
    pairs = c.pairs(parts.spans * parts.tokens)
    known = _first_pass(c, k.block, parts, pairs, dy, _by_state(dfinal_state), backward=True)
    out = _room(c, k.block, parts, pairs, wanted)
    args = (
        c.u, dy, c.delta, c.A, pairs, c.D, c.z, c.bias, c.first, known.states,
        known.reached, known.before, known.after, *out, (dy.stride(0), dy.stride(1)), *c.strides,
        length, cols, parts.spans, parts.chunks, batch, 0,
    )  # fmt: skip
    programs = batch * parts.spans * cdiv(cols, k.block)
    even = c.even(parts.tokens, k.block)
    constants = c.constants(k.block, k.parts, k.step, _exchanges(c, k), k.ahead, even)
    launch(_selective_scan_backward_kernel, programs, args, constants, k.num_warps)
    db, dc = out.numbers(B, C, wanted)
    made = {"B": db, "C": dc}
    found = [made[n] if n in made else out.of(n, u if x is None else x) for n, x in given.items()]
    return tuple(found)  # type: ignore[return-value]
