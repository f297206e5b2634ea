"""The selective scan of Mamba by Triton kernels, token after token with states in registers.

Source: Gu and Dao 2023 (arXiv:2312.00752); the kernels are in selective_scan_kernels.py and
selective_scan_team_kernels.py. Forward leaves the states before spans of tokens; backward makes the
others again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

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
from liger_multi.backends.triton.linear_attention.selective_scan_team_kernels import (
    _selective_scan_team_kernel,
)
from liger_multi.dispatch.launch import DeviceInfo, device_info, launch_config
from liger_multi.reference.linear_attention import selective_scan as reference
from liger_multi.reference.linear_attention.state_space import Nine

MOST = 256  # states of a channel
STATES = 16  # states of a thread
PROGRAMS = 32  # of a core, that backward has at a time at least
JOINED = 256  # elements of states that a program takes from span to span
TEAM = 4  # threads that share a channel where a launch table has them do so

# --- launch configuration ---


@dataclass(frozen=True)
class ScanConfig:
    """``block`` channels a program, ``step`` tokens at a time, which divide a span.

    ``ahead`` says what caches are asked for before it is loaded: B and C from 1 on, rows of
    backward from 2 on. From 3 on, rows of forward and of first passes are loaded no step ahead
    beside that.
    """

    block: int
    step: int
    num_warps: int
    ahead: int = 0


@dataclass(frozen=True)
class BackwardConfig(ScanConfig):
    """A scan configuration with ``parts`` steps per chunk; a step's states are in registers."""

    parts: int = 2


@dataclass(frozen=True)
class TeamConfig:
    """Forward of whole sequences by ``team`` threads a channel; by spans of tokens where it is 0.

    ``block`` channels a program; ``count`` times ``team`` tokens a step, which divide a span.
    """

    team: int
    block: int
    count: int
    num_warps: int


def _shape(info: DeviceInfo, states: int) -> tuple[int, int]:
    """Channels and warps of a program whose threads have ``STATES`` states or fewer.

    Of more than 256 threads, each would have fewer registers.
    """
    size = power_of_2(states)
    block = min(info.warp_size, 256 * STATES // size)
    return block, warps(size * block // STATES, info.warp_size)


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
    return ScanConfig(block, 4, count, 1)


def team_config(info: DeviceInfo, rows: int, length: int, channels: int, states: int) -> TeamConfig:
    """Spans of tokens. Launch tables say which sequences are work for a whole card without them.

    Args:
        info: Limits of the device.
        rows: Sequences. Entries bound them, so that they are left out where a sequence must have
            the same bits whatever is beside it: a team adds states in another order.
        length: Tokens of a sequence.
        channels: Of all sequences together.
        states: Of a channel.
    """
    return TeamConfig(0, 2 * info.warp_size // TEAM, 4, 1)


def backward_config(info: DeviceInfo, length: int, cols: int, states: int) -> BackwardConfig:
    """Two tokens a step, whose states all cards hold in registers, and chunks of two steps."""
    block, count = _shape(info, states)
    return BackwardConfig(block, 2, count, 2, 2)


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
    D: Tensor | None
    z: Tensor | None
    bias: Tensor | None
    initial: Tensor | None
    first: Tensor | None
    softplus: bool

    @property
    def first_step(self) -> int:
        """Stride of sequences in ``first``; 0 where all sequences share it."""
        shared = self.first is None or self.first.shape[0] == 1
        return 0 if shared or self.first is None else self.first.stride(0)

    def strides(self, dy: Tensor | None = None) -> tuple[int, ...]:
        """Strides of sequences (u, delta, dy, z, ``first``), then of tokens (u, delta, dy, z)."""
        u, delta, z = self.u, self.delta, self.u if self.z is None else self.z
        up = (0, 0) if dy is None else (dy.stride(0), dy.stride(1))
        return (
            u.stride(0),
            delta.stride(0),
            up[0],
            z.stride(0),
            self.first_step,
            u.stride(1),
            delta.stride(1),
            up[1],
            z.stride(1),
        )

    def by_state(self) -> Call:
        """The call whose A and initial states have channels last, for contiguous loads."""
        return self._replace(A=self.A.mT.contiguous(), initial=_by_state(self.initial))

    def even(self, tokens: int, block: int) -> bool:
        """Whether spans of ``tokens`` and blocks of channels have nothing past the last ones."""
        _, length, cols = self.u.shape
        return not (length % tokens or cols % block)

    def constants(self, *values: Any) -> tuple[Any, ...]:
        """The last arguments of every kernel, which are ``constexpr``."""
        states = self.B.shape[2]
        return states, power_of_2(states), self.softplus, *values

    def config(self, name: str) -> Any:
        """The launch configuration of a kernel."""
        rows, length, cols = self.u.shape
        width = {"rows": rows, "channels": rows * cols} if name == "team" else {"cols": cols}
        shape = {"length": length, "states": self.B.shape[2], **width}
        return launch_config(f"selective_scan.{name}", FORMULAS[name], self.u.device, **shape)

    def numbers(self, *leading: int) -> Tensor:
        """An fp32 buffer with a number for every sequence, leading index and channel."""
        batch, _, cols = self.u.shape
        return self.u.new_empty(batch, *leading, cols, dtype=torch.float32)

    def states(self, spans: int) -> Tensor:
        """An fp32 buffer for the states of all channels."""
        return self.numbers(spans, self.B.shape[2])

    def tiles(self, block: int, *leading: int) -> Tensor:
        """An fp32 buffer for tiles of states of ``block`` channels; a tile is contiguous."""
        batch, _, cols = self.u.shape
        elements = cdiv(cols, block) * power_of_2(self.B.shape[2]) * block
        return self.u.new_empty(batch, *leading, elements, dtype=torch.float32)

    def pairs(self, tokens: int) -> Tensor:
        """B and C in fp32 side by side, 0 past the last state and up to ``tokens``.

        Every thread reads all of a token's numbers, at distances known to the compiler.
        """
        batch, length, states = self.B.shape
        out = self.u.new_zeros(batch, tokens, 2, power_of_2(states), dtype=torch.float32)
        for i, x in enumerate((self.B, self.C)):
            out[:, :length, i, :states].copy_(x)
        return out


FORMULAS: dict[str, Callable[..., Any]] = {
    "forward": forward_config,
    "backward": backward_config,
    "team": team_config,
}


def _exchanges(c: Call, k: BackwardConfig) -> int:
    """How often threads halve the states whose sums over channels they hold (``_put_sums``).

    Each of a warp's threads has one channel, and as many states as are left by the
    other threads of that channel.
    """
    warps = max(1, device_info(c.u.device).warp_size // k.block)
    states = power_of_2(c.B.shape[2]) // warps
    return states.bit_length() - 1 if k.num_warps == 1 and 1 < states <= k.block else 0


class Spans(NamedTuple):
    """How the tokens of a sequence are divided among programs, and theirs into chunks of steps."""

    spans: int
    chunks: int
    parts: int
    step: int

    @classmethod
    def of(cls, length: int, k: ScanConfig, parts: int = 1) -> Spans:
        """Whole chunks of a shorter sequence, or spans of SPAN tokens."""
        if reference.SPAN % (parts * k.step):
            raise ValueError(f"a chunk of {parts} x {k.step} tokens must divide {reference.SPAN}")
        chunks = cdiv(min(reference.SPAN, length), parts * k.step)
        return cls(cdiv(length, reference.SPAN), chunks, parts, k.step)

    @property
    def tokens(self) -> int:
        """Tokens of a span."""
        return self.chunks * self.parts * self.step


def _adjacent(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _dense(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def _by_state(x: Tensor | None) -> Tensor | None:
    """States (batch, channels, N) as kernels have them, (batch, N, channels)."""
    return None if x is None else x.mT.contiguous()


def _call(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    delta_bias: Tensor | None,
    initial_state: Tensor | None,
    first: Tensor | None,
    delta_softplus: bool,
) -> Call:
    return Call(
        _adjacent(u),
        _adjacent(delta),
        A.contiguous(),
        B,
        C,
        _dense(D),
        None if z is None else _adjacent(z),
        _dense(delta_bias),
        initial=_dense(initial_state),
        first=_dense(first),
        softplus=delta_softplus,
    )


class FirstPass(NamedTuple):
    """What the first pass leaves where there are tensors: of spans, and before chunks."""

    ends: Tensor | None = None
    sums: Tensor | None = None
    states: Tensor | None = None
    dends: Tensor | None = None


def _first_pass(
    c: Call,
    k: ScanConfig,
    parts: Spans,
    pairs: Tensor,
    out: FirstPass,
    dy: Tensor | None = None,
    states_before: Tensor | None = None,
) -> None:
    """Run the first pass over all spans; for ends without the last one, which nothing follows."""
    active = parts.spans - (out.ends is not None)
    batch, length, cols = c.u.shape
    args = (
        c.u,
        c.delta,
        c.A,
        pairs,
        dy,
        c.z,
        c.bias,
        states_before,
        c.first,
        *out,
        c.strides(dy),
        (length, cols, parts.spans, active),
        parts.chunks,
        0,
    )
    is_even, count = c.even(parts.tokens, k.block), cdiv(cols, k.block)
    constants = c.constants(k.block, (parts.parts, parts.step), k.ahead, is_even)
    launch(_selective_scan_states_kernel, batch * active * count, args, constants, k.num_warps)


def _join(
    c: Call, parts: Spans, ends: Tensor, sums: Tensor | None, initial: Tensor | None, reverse: bool
) -> Tensor:
    """What is before spans (after them, in reverse), in place of what they leave."""
    batch, length, cols = c.u.shape
    states = c.B.shape[2]
    launch(
        _selective_scan_join_kernel,
        batch * cdiv(states * cols, JOINED),
        (ends, sums, c.A, initial, c.first, c.first_step, length, cols, parts.spans, parts.tokens),
        (states, JOINED, reverse),
        4,
    )
    return ends


def _states_before(c: Call, k: ScanConfig, parts: Spans, pairs: Tensor) -> Tensor:
    """The states before spans, (batch, spans, N, channels)."""
    ends, sums = c.states(parts.spans), c.numbers(parts.spans)
    _first_pass(c, k, parts, pairs, FirstPass(ends, sums))
    return _join(c, parts, ends, sums, c.initial, False)


def _starts_of_reverse(
    c: Call,
    k: ScanConfig,
    parts: Spans,
    pairs: Tensor,
    dy: Tensor,
    dfinal: Tensor | None,
    states: Tensor,
) -> tuple[Tensor | None, Tensor | None]:
    """What the reverse pass starts from: gradients after spans, and states before chunks."""
    at_chunks = c.tiles(k.block, parts.spans, parts.chunks)
    if parts.spans == 1:
        _first_pass(c, k, parts, pairs, FirstPass(states=at_chunks), None, c.initial)
        return dfinal, at_chunks
    dstates_after, sums = c.states(parts.spans), c.numbers(parts.spans)
    _first_pass(c, k, parts, pairs, FirstPass(None, sums, at_chunks, dstates_after), dy, states)
    return _join(c, parts, dstates_after, sums, dfinal, True), at_chunks


def _by_spans(c: Call, y: Tensor, needs_final: bool) -> tuple[Tensor | None, Tensor | None]:
    """Write results; return the last states, and those before spans if there are several."""
    k = c.config("forward")
    batch, length, cols = y.shape
    parts = Spans.of(length, k)
    pairs = c.pairs(parts.spans * parts.tokens)
    split = parts.spans > 1
    states_before = _states_before(c, k, parts, pairs) if split else c.initial
    final = c.numbers(c.B.shape[2]) if needs_final else None
    args = (
        c.u,
        c.delta,
        c.A,
        pairs,
        c.D,
        c.z,
        c.bias,
        states_before,
        c.first,
        y,
        final,
        c.strides(),
        (length, cols, parts.spans),
        parts.chunks,
        0,
    )
    programs = batch * parts.spans * cdiv(cols, k.block)
    constants = c.constants(k.step, k.block, k.ahead, c.even(parts.tokens, k.block))
    launch(_selective_scan_forward_kernel, programs, args, constants, k.num_warps)
    return None if final is None else final.mT.contiguous(), states_before if split else None


def _by_teams(
    c: Call, k: TeamConfig, y: Tensor, needs_final: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Write results and states as :func:`_by_spans` does, in one pass over the tokens."""
    batch, length, cols = y.shape
    tokens, spans = k.team * k.count, cdiv(length, reference.SPAN)
    if reference.SPAN % tokens:
        raise ValueError(f"a step of {tokens} tokens must divide {reference.SPAN}")
    steps = cdiv(length, tokens)
    final = y.new_empty(batch, *c.A.shape, dtype=torch.float32) if needs_final else None
    states_before = c.states(spans) if spans > 1 else None
    args = (
        c.u,
        c.delta,
        c.A,
        c.pairs((steps + 1) * tokens),
        c.D,
        c.z,
        c.bias,
        c.initial,
        c.first,
        y,
        final,
        states_before,
        c.strides(),
        (length, cols, spans),
        steps,
        0,
    )
    levels, is_even = k.team.bit_length() - 1, c.even(tokens, k.block)
    constants = c.constants(k.block, (k.team, levels, k.count, reference.SPAN), is_even)
    programs = batch * cdiv(cols, k.block)
    launch(_selective_scan_team_kernel, programs, args, constants, k.num_warps)
    return final, states_before


def forward(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    delta_bias: Tensor | None,
    initial_state: Tensor | None,
    first: Tensor | None,
    delta_softplus: bool,
    output_final_state: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """One launch, or three where spans of tokens share the work of a channel's thread."""
    if not u.numel():
        return reference.forward(
            u,
            delta,
            A,
            B,
            C,
            D,
            z,
            delta_bias,
            initial_state=initial_state,
            first=first,
            delta_softplus=delta_softplus,
            output_final_state=output_final_state,
        )
    c = _call(
        u,
        delta,
        A,
        B,
        C,
        D,
        z,
        delta_bias,
        initial_state=initial_state,
        first=first,
        delta_softplus=delta_softplus,
    )
    y, k = u.new_empty(u.shape), c.config("team")
    final, states_before = (
        _by_teams(c, k, y, output_final_state)
        if k.team
        else _by_spans(c.by_state(), y, output_final_state)
    )
    final, states_before = (
        u.new_empty(0, dtype=torch.float32) if x is None else x for x in (final, states_before)
    )
    return y, final, states_before


class Gradients(NamedTuple):
    """Where the kernel writes: gradients of rows, and parts of those that are sums.

    Of every sequence, so that some of them can go first. Parts of the gradients of B and C are side
    by side, (blocks, batch, tokens, 2, N), and those of some sequences at a time.
    """

    u: Tensor | None
    delta: Tensor | None
    z: Tensor | None
    A: Tensor | None
    pairs: Tensor | None
    D: Tensor | None
    delta_bias: Tensor | None
    initial_state: Tensor | None

    def of(self, name: str, tensor: Tensor) -> Tensor:
        """The gradient of a tensor, its parts summed; empty if not needed."""
        gradient: Tensor | None = getattr(self, name)
        if gradient is None:
            return tensor.new_empty(0)
        if name == "initial_state":
            return gradient.mT.to(tensor.dtype).contiguous()
        if name not in SUMS:
            return gradient
        total = sum_rows(gradient.flatten(0, 1).flatten(1), tensor.dtype)
        return (
            total.view(tensor.mT.shape).mT.contiguous() if name == "A" else total.view(tensor.shape)
        )


SUMS = ("A", "D", "delta_bias")


def _buffers(c: Call, spans: int, needs: dict[str, bool]) -> Gradients:
    """Buffers for the gradients that are needed."""
    (batch, _, cols), states = c.u.shape, c.B.shape[2]

    def allocate(name: str, tensor: Tensor | None, *shape: int) -> Tensor | None:
        acc_dtype = torch.float32 if tensor is None else tensor.dtype
        return c.u.new_empty(shape, dtype=acc_dtype) if needs[name] else None

    return Gradients(
        allocate("u", c.u, *c.u.shape),
        allocate("delta", c.delta, *c.u.shape),
        allocate("z", c.z, *c.u.shape),
        allocate("A", None, batch, spans, states, cols),
        None,
        allocate("D", None, batch, spans, cols),
        allocate("delta_bias", None, batch, spans, cols),
        allocate("initial_state", None, batch, states, cols),
    )


def _part(value: Any, sequences: slice) -> Any:
    """Some sequences of the tensors of a call or of gradients."""
    parameters = ("A", "D", "bias") if isinstance(value, Call) else ()
    is_single = isinstance(value, Call) and value.first_step == 0
    shared_names = (*parameters, "first") if is_single else parameters
    return value._replace(
        **{
            name: x[sequences]
            for name, x in value._asdict().items()
            if isinstance(x, Tensor) and name not in shared_names
        }
    )


def _groups(c: Call, parts: Spans, block: int) -> list[slice]:
    """Sequences whose programs are work for all cores; each group has its states in turn."""
    batch, _, cols = c.u.shape
    programs, cores = parts.spans * cdiv(cols, block), device_info(c.u.device).cores
    count = max(1, cdiv(PROGRAMS * cores, programs))
    return [slice(b, min(b + count, batch)) for b in range(0, batch, count)]


def _reverse(
    c: Call,
    k: BackwardConfig,
    parts: Spans,
    pairs: Tensor,
    dy: Tensor,
    dfinal: Tensor | None,
    states: Tensor,
    out: Gradients,
    summed: bool,
) -> Tensor | None:
    """Write the gradients of some sequences; return those of B and C, side by side."""
    batch, length, cols = c.u.shape
    dstates_after, at_chunks = _starts_of_reverse(c, k, parts, pairs, dy, dfinal, states)
    blocks = cdiv(cols, k.block)
    sums = pairs.new_empty(blocks, *pairs.shape) if summed else None
    args = (
        c.u,
        dy,
        c.delta,
        c.A,
        pairs,
        c.D,
        c.z,
        c.bias,
        c.first,
        at_chunks,
        dstates_after,
        *out._replace(pairs=sums),
        c.strides(dy),
        (length, cols, parts.spans, batch),
        parts.chunks,
        0,
    )
    is_even = c.even(parts.tokens, k.block)
    shape = c.constants(k.block, k.parts, k.step, _exchanges(c, k), k.ahead, is_even)
    programs = batch * parts.spans * blocks
    launch(_selective_scan_backward_kernel, programs, args, (shape,), k.num_warps)
    if sums is None:
        return None
    return sum_rows(sums.flatten(1), torch.float32).view(pairs.shape)


def _gradient_of_rows(total: Tensor | None, i: int, tensor: Tensor) -> Tensor:
    """The gradient of B or of C."""
    if total is None:
        return tensor.new_empty(0)
    x = total[:, : tensor.shape[1], i, : tensor.shape[2]]
    return x.to(tensor.dtype).contiguous()


def backward(
    dy: Tensor | None,
    dfinal_state: Tensor | None,
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    delta_bias: Tensor | None,
    initial_state: Tensor | None,
    first: Tensor | None,
    states: Tensor,
    delta_softplus: bool,
    needs_u: bool,
    needs_delta: bool,
    needs_A: bool,
    needs_B: bool,
    needs_C: bool,
    needs_D: bool,
    needs_z: bool,
    needs_delta_bias: bool,
    needs_initial_state: bool,
) -> Nine:
    """The first pass, the reverse pass, and a launch for every sum of parts."""
    tensors: dict[str, Any] = {
        "u": u,
        "delta": delta,
        "A": A,
        "B": B,
        "C": C,
        "D": D,
        "z": z,
        "delta_bias": delta_bias,
        "initial_state": initial_state,
    }
    needs = {
        "u": needs_u,
        "delta": needs_delta,
        "A": needs_A,
        "B": needs_B,
        "C": needs_C,
        "D": needs_D,
        "z": needs_z,
        "delta_bias": needs_delta_bias,
        "initial_state": needs_initial_state,
    }
    options: dict[str, Any] = {"first": first, "delta_softplus": delta_softplus}
    if not u.numel():
        flags: dict[str, Any] = {f"needs_{n}": need for n, need in needs.items()}
        return reference.backward(dy, dfinal_state, states=states, **tensors, **options, **flags)
    required = {n: need and tensors[n] is not None for n, need in needs.items()}
    c = _call(**tensors, **options).by_state()
    k = c.config("backward")
    parts = Spans.of(u.shape[1], k, k.parts)
    dy, dfinal = torch.zeros_like(c.u) if dy is None else _adjacent(dy), _by_state(dfinal_state)
    pairs, out = c.pairs(parts.spans * parts.tokens), _buffers(c, parts.spans, required)
    summed, totals = required["B"] or required["C"], []
    for sequences in _groups(c, parts, k.block):
        dBC = _reverse(
            _part(c, sequences),
            k,
            parts,
            pairs[sequences],
            dy[sequences],
            None if dfinal is None else dfinal[sequences],
            states[sequences],
            _part(out, sequences),
            summed=summed,
        )
        totals += [] if dBC is None else [dBC]
    total = torch.cat(totals) if totals else None
    numbers = {"B": (0, B), "C": (1, C)}
    gradients = [
        _gradient_of_rows(total if required[n] else None, *numbers[n])
        if n in numbers
        else out.of(n, u if x is None else x)
        for n, x in tensors.items()
    ]
    return tuple(gradients)  # type: ignore[return-value]
