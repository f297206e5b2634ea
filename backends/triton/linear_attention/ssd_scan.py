"""The scan of Mamba-2 by Triton kernels, in chunks of tokens.

Source: Dao and Gu 2024 (arXiv:2405.21060); the kernels are in ssd_scan_kernels.py. Backward makes
the states again; nothing but the arguments is kept between forward and backward. The gate z is a
launch of its own around the scan.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_multi.backends.triton.activations import swiglu
from liger_multi.backends.triton.common.launching import launch
from liger_multi.backends.triton.common.rows import (
    INTERPRETED,
    cdiv,
    power_of_2,
    sum_rows,
    tile_rows,
)
from liger_multi.backends.triton.linear_attention.gated_delta_rule import (
    ALIGNED,
    FEWEST_STAGES,
    NARROWEST,
    SHORTEST,
    DeltaConfig,
    _is_large,
    _is_tight,
    _padded,
    _rows,
    _steps,
    flags_of,
    launch_isolated,
)
from liger_multi.backends.triton.linear_attention.ssd_scan_kernels import (
    _ssd_gates_kernel,
    _ssd_groups_kernel,
    _ssd_outputs_kernel,
    _ssd_pairs_kernel,
    _ssd_reverse_kernel,
    _ssd_states_kernel,
    _ssd_steps_kernel,
)
from liger_multi.dispatch.launch import DeviceInfo, device_info, launch_config
from liger_multi.reference.linear_attention import ssd_scan as reference
from liger_multi.reference.linear_attention.state_space import Nine

PLANES = 5  # of numbers of tokens: e, r, two parts of G, step sizes
ROWS_OF_STATES = 128  # of a program for the gradients of B and C


def states_config(info: DeviceInfo, tokens: int, dim: int, value: int, item: int) -> DeltaConfig:
    """A state of up to 32 KiB in registers: programs are serial, and should have a core each."""
    if _is_large(info) and item == 2:
        return DeltaConfig(max(NARROWEST, min(64, 8192 // _padded(dim))), 3, 4)
    return DeltaConfig(32, 2, 8 if _is_tight(info, item) else 4)


def outputs_config(info: DeviceInfo, tokens: int, dim: int, value: int, item: int) -> DeltaConfig:
    """``block`` columns of x a step; one square of a chunk is kept from head to head."""
    return DeltaConfig(32, 1, 8) if item == 4 else DeltaConfig(64, 2, 4)


def pairs_config(info: DeviceInfo, tokens: int, dim: int, value: int, item: int) -> DeltaConfig:
    """Two squares of a chunk are kept from head to head."""
    if info.warp_size == 64:
        return DeltaConfig(64 if value <= 64 else 16, 1, 4)
    large = _is_large(info)
    return DeltaConfig(64 if large or value <= 64 else 32, 2 if large else 1, 8)


def groups_config(info: DeviceInfo, tokens: int, dim: int, value: int, item: int) -> DeltaConfig:
    """The gradients of B and C are in registers."""
    narrow = item == 4 or value > 64
    return DeltaConfig(32 if narrow else 64, 1, 4 if info.warp_size == 64 else 8)


def chunk_config(info: DeviceInfo, tokens: int, dim: int, value: int, item: int) -> DeltaConfig:
    """``block`` tokens make a chunk, in all kernels: 64 where registers hold its squares."""
    if _is_tight(info, item):
        return DeltaConfig(16, 1, 1)
    return DeltaConfig(64 if _is_large(info) or info.warp_size == 64 else 32, 1, 1)


MOST = 128 * 128
"""Elements of a head's state that fit on chip: backward of 16 bits holds several of them."""


def _pieces(value: int, size: int) -> int:
    """Number of pieces that a head is cut into, so that the state of each fits on chip."""
    return power_of_2(cdiv(value * size, MOST))


def supports(x: Tensor, B: Tensor, C: Tensor) -> str | None:
    """Why a call is refused, or None."""
    if not x.dtype == B.dtype == C.dtype:
        return f"takes x, B and C of one dtype, got {x.dtype}, {B.dtype} and {C.dtype}"
    info, size, value = device_info(x.device), B.shape[3], x.shape[3]
    pieces = _pieces(value, size)
    if value % pieces:
        return (
            f"takes heads of V elements and states of N, with V * N above {MOST:,} (on-chip "
            f"memory), if V is a multiple of {pieces}, got {value} and {size}"
        )
    if not INTERPRETED:
        step = ALIGNED // 2
        is_short = any(n < SHORTEST or n % step for n in (size, value // pieces))
        if _is_large(info) and x.element_size() == 2 and is_short:
            return (
                f"takes heads and states of at least {SHORTEST} elements in multiples of {step} "
                f"on {info.arch}, got {value} and {size}"
                + (f" (in {pieces} pieces of each head)" if pieces > 1 else "")
            )
        widest = 64 if x.element_size() == 4 else 256 if _is_large(info) else 128
        widest = 32 if _is_tight(info, 2) else widest
        if size > widest:
            dtype = str(x.dtype).removeprefix("torch.")
            return f"takes {dtype} states of up to {widest} on {info.arch} (registers), got {size}"
    if tile_rows(128, max(x.shape[2] * value, B.shape[2] * size)) == 1:
        return "takes tokens of less than 8 MiB"  # the stride of tokens in the results
    return None


class StepOptions(NamedTuple):
    """How raw step sizes become step sizes."""

    softplus: bool
    low: float
    high: float


class Call(NamedTuple):
    """The tensors of a call as kernels take them, and what its kernels share."""

    x: Tensor
    dt: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    skip: Tensor | None
    bias: Tensor | None
    first: Tensor | None
    options: StepOptions
    chunk: int
    chunks: int
    flags: Tensor | None

    @property
    def groups(self) -> int:
        """Heads of B and C."""
        return self.B.shape[2]

    @property
    def streams(self) -> int:
        """Heads of all sequences."""
        return self.x.shape[0] * self.x.shape[2]

    @property
    def plane(self) -> int:
        """Elements of a plane, which has one number per token and head."""
        return self.streams * self.chunks * self.chunk

    @property
    def first_step(self) -> int:
        """Stride of sequences in ``first``; 0 where all sequences share it."""
        return 0 if self.first is None or self.first.shape[0] == 1 else self.first.stride(0)

    @property
    def document_step(self) -> int | None:
        """``first_step``, or None for kernels that take it only with several sequences."""
        return None if self.first is None else self.first_step

    @property
    def parts(self) -> int:
        """Parts of the rows of states for the gradients of B and C."""
        return cdiv(self.B.shape[3], ROWS_OF_STATES)

    def empty_states(self) -> Tensor:
        """A buffer for the state before every chunk."""
        return self.x.new_empty(self.streams, self.chunks, self.B.shape[3], self.x.shape[3])

    def tokens(self) -> tuple[Any, ...]:
        """Numbers that the kernels of step sizes take."""
        return (
            self.first_step,
            self.x.shape[1],
            self.chunks,
            self.x.shape[2],
            self.plane,
            self.options.low,
            self.options.high,
        )

    def sizes(self) -> tuple[Any, ...]:
        """Numbers that the other kernels take last."""
        return self.x.shape[1], self.chunks, self.groups, self.plane

    @property
    def group(self) -> int:
        """Heads of a group."""
        return self.x.shape[2] // self.groups

    def config(
        self, name: str, formula: Callable[..., DeltaConfig], tile_limit: int = 256
    ) -> tuple[tuple[Any, ...], int]:
        """Constants of a kernel with up to ``tile_limit`` rows of states a tile, and warps."""
        k = _config(name, formula, self.x, self.B)
        size, value = self.B.shape[3], self.x.shape[3]
        block = max(NARROWEST, min(k.block, power_of_2(value)))
        stages = max(FEWEST_STAGES if _is_large(device_info(self.x.device)) else 1, k.stages)
        tile = min(tile_limit, _padded(size))
        return (self.group, size, tile, value, block, self.chunk, stages), k.num_warps


def _config(name: str, formula: Callable[..., DeltaConfig], x: Tensor, B: Tensor) -> DeltaConfig:
    return launch_config(
        f"ssd_scan.{name}",
        formula,
        x.device,
        tokens=x.shape[1],
        dim=B.shape[3],
        value=x.shape[3],
        item=x.element_size(),
    )


def _call(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    dt_bias: Tensor | None,
    first: Tensor | None,
    options: StepOptions,
    longest: int,
) -> Call:
    """Chunks have at most ``longest`` tokens, but 16 or more."""
    chunk = min(_config("chunk", chunk_config, x, B).block, max(16, power_of_2(longest + 1) // 2))
    skip = D
    if D is not None:
        skip = (D if D.ndim == 2 else D[:, None]).float().expand(x.shape[2:]).contiguous()
    return Call(
        _rows(x),
        dt,
        A.contiguous(),
        _rows(B),
        _rows(C),
        skip,
        None if dt_bias is None else dt_bias.contiguous(),
        None if first is None else first.contiguous(),
        options=options,
        chunk=chunk,
        chunks=cdiv(x.shape[1], chunk),
        flags=None if first is None else flags_of(x),
    )


def _gates(c: Call) -> Tensor:
    gates = c.x.new_empty(PLANES, c.plane, dtype=torch.float32)
    args = (c.dt, c.A, c.bias, c.first, gates, c.dt.stride(), *c.tokens())
    warps = _config("chunk", chunk_config, c.x, c.B).num_warps
    launch(_ssd_gates_kernel, c.streams * c.chunks, args, (c.options.softplus, c.chunk), warps)
    return gates


def _states(c: Call, gates: Tensor, initial: Tensor | None, final: Tensor | None) -> Tensor:
    states = c.empty_states()
    args = (
        c.x,
        c.B,
        c.first,
        gates,
        initial,
        states,
        final,
        c.flags,
        _steps(c.x),
        _steps(c.B),
        c.document_step,
        *c.sizes(),
    )
    constants, warps = c.config("states", states_config)
    count = c.streams * cdiv(c.x.shape[3], constants[4])
    launch_isolated(c.flags, _ssd_states_kernel, count, args, constants, warps)
    return states


def _outputs(c: Call, gates: Tensor, states: Tensor) -> Tensor:
    y = c.x.new_empty(c.x.shape)
    args = (
        c.x,
        c.B,
        c.C,
        c.skip,
        c.first,
        gates,
        states,
        y,
        _steps(c.x),
        _steps(c.B),
        _steps(c.C),
        c.first_step,
        *c.sizes(),
        c.group,
    )
    constants, warps = c.config("outputs", outputs_config)
    launch(_ssd_outputs_kernel, c.x.shape[0] * c.groups * c.chunks, args, constants, warps)
    return y


# --- heads in pieces ---

INPUTS = ("x", "dt", "A", "B", "C", "D", "z", "dt_bias", "initial_state")


@dataclass(frozen=True)
class Pieces:
    """Heads whose states do not fit on chip, as several with some columns of x each.

    A column of a state depends on no other one. Pieces of a head share its step sizes, A and bias,
    which come in fp32, so that gradients of pieces are added before they are rounded.
    """

    count: int

    def rows(self, x: Tensor | None) -> Tensor | None:
        """``(batch, tokens, heads, V)`` by pieces."""
        return None if x is None else x.unflatten(3, (self.count, -1)).flatten(2, 3)

    def states(self, x: Tensor | None) -> Tensor | None:
        """``(batch, heads, V, N)`` by pieces."""
        return None if x is None else x.unflatten(2, (self.count, -1)).flatten(1, 2)

    def heads(self, x: Tensor | None) -> Tensor | None:
        """Numbers of heads, or of heads and columns."""
        if x is None:
            return None
        return x.float().repeat_interleave(self.count, -1)

    def skips(self, x: Tensor | None) -> Tensor | None:
        """D, a number for every head or column."""
        if x is None or x.ndim == 1:
            return self.heads(x)
        return x.float().unflatten(1, (self.count, -1)).flatten(0, 1)

    def call(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments of a call."""
        converters = {
            "x": self.rows,
            "z": self.rows,
            "dy": self.rows,
            "dt": self.heads,
            "A": self.heads,
            "dt_bias": self.heads,
            "D": self.skips,
            "initial_state": self.states,
            "dfinal_state": self.states,
        }
        return {
            name: converters[name](x) if name in converters else x for name, x in kwargs.items()
        }

    def joined(self, result: Tensor, tensor: Tensor | None, shared: bool) -> Tensor:
        """A gradient of pieces as that of heads; the sum over pieces where they share a tensor."""
        if tensor is None or not result.numel():
            return result if tensor is None else tensor.new_empty(0)
        if not shared:
            return result.view(tensor.shape)
        pieces = result.unflatten(-1, (-1, self.count)).unbind(-1)
        return functools.reduce(torch.add, pieces).to(tensor.dtype)


def _forward_in_pieces(**kwargs: Any) -> tuple[Tensor, Tensor]:
    x, size = kwargs["x"], kwargs["B"].shape[3]
    y, last = forward(**Pieces(_pieces(x.shape[3], size)).call(kwargs))
    state = (x.shape[0], *x.shape[2:], size)
    return y.view(x.shape), last.view(state) if last.numel() else last


def _backward_in_pieces(**kwargs: Any) -> Nine:
    pieces = Pieces(_pieces(kwargs["x"].shape[3], kwargs["B"].shape[3]))
    inputs = [kwargs[name] for name in INPUTS]
    by_head = {"dt", "A", "dt_bias"}
    by_head |= {"D"} if kwargs["D"] is not None and kwargs["D"].ndim == 1 else set()
    gradients = backward(**pieces.call(kwargs))
    gradients_of_heads = [
        pieces.joined(grad, tensor, name in by_head)
        for name, grad, tensor in zip(INPUTS, gradients, inputs, strict=True)
    ]
    return tuple(gradients_of_heads)  # type: ignore[return-value]


def _transposed(state: Tensor | None) -> Tensor | None:
    return None if state is None else state.mT.contiguous()


def forward(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    initial_state: Tensor | None,
    first: Tensor | None,
    dt_softplus: bool,
    dt_min: float,
    dt_max: float,
    chunk: int,
    output_final_state: bool,
) -> tuple[Tensor, Tensor]:
    """Step sizes, the pass over states, and y for all chunks at once."""
    if not x.numel():
        return reference.forward(
            x,
            dt,
            A,
            B,
            C,
            D,
            z,
            dt_bias,
            initial_state=initial_state,
            first=first,
            dt_softplus=dt_softplus,
            dt_min=dt_min,
            dt_max=dt_max,
            chunk=chunk,
            output_final_state=output_final_state,
        )
    if _pieces(x.shape[3], B.shape[3]) > 1:
        return _forward_in_pieces(
            x=x,
            dt=dt,
            A=A,
            B=B,
            C=C,
            D=D,
            z=z,
            dt_bias=dt_bias,
            initial_state=initial_state,
            first=first,
            dt_softplus=dt_softplus,
            dt_min=dt_min,
            dt_max=dt_max,
            chunk=chunk,
            output_final_state=output_final_state,
        )
    options = StepOptions(dt_softplus, dt_min, dt_max)
    c = _call(x, dt, A, B, C, D, dt_bias, first, options=options, longest=chunk)
    final = None
    if output_final_state:
        shape = (x.shape[0], x.shape[2], B.shape[3], x.shape[3])
        final = x.new_empty(shape, dtype=torch.float32)
    gates = _gates(c)
    y = _outputs(c, gates, _states(c, gates, _transposed(initial_state), final))
    last = _transposed(final)
    last = x.new_empty(0, dtype=torch.float32) if last is None else last
    return y if z is None else swiglu.forward(z, y, 1.0, 1.0).to(y.dtype), last


def backward(
    dy: Tensor | None,
    dfinal_state: Tensor | None,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    initial_state: Tensor | None,
    first: Tensor | None,
    dt_softplus: bool,
    dt_min: float,
    dt_max: float,
    chunk: int,
    needs_x: bool,
    needs_dt: bool,
    needs_A: bool,
    needs_B: bool,
    needs_C: bool,
    needs_D: bool,
    needs_z: bool,
    needs_dt_bias: bool,
    needs_initial_state: bool,
) -> Nine:
    """The states again, their gradients in reverse, and the rest for all chunks at once."""
    if not x.numel():
        return reference.backward(
            dy, dfinal_state, x, dt, A, B, C, D, z=z, dt_bias=dt_bias, initial_state=initial_state,
            first=first, dt_softplus=dt_softplus, dt_min=dt_min, dt_max=dt_max, chunk=chunk,
            needs_x=needs_x, needs_dt=needs_dt, needs_A=needs_A, needs_B=needs_B, needs_C=needs_C,
            needs_D=needs_D, needs_z=needs_z, needs_dt_bias=needs_dt_bias,
            needs_initial_state=needs_initial_state,
        )  # fmt: skip
    if _pieces(x.shape[3], B.shape[3]) > 1:
        return _backward_in_pieces(
            dy=dy,
            dfinal_state=dfinal_state,
            x=x,
            dt=dt,
            A=A,
            B=B,
            C=C,
            D=D,
            z=z,
            dt_bias=dt_bias,
            initial_state=initial_state,
            first=first,
            dt_softplus=dt_softplus,
            dt_min=dt_min,
            dt_max=dt_max,
            chunk=chunk,
            needs_x=needs_x,
            needs_dt=needs_dt,
            needs_A=needs_A,
            needs_B=needs_B,
            needs_C=needs_C,
            needs_D=needs_D,
            needs_z=needs_z,
            needs_dt_bias=needs_dt_bias,
            needs_initial_state=needs_initial_state,
        )
    options = StepOptions(dt_softplus, dt_min, dt_max)
    c = _call(x, dt, A, B, C, D, dt_bias, first, options=options, longest=chunk)
    gates = _gates(c)
    states = _states(c, gates, _transposed(initial_state), None)
    dy, dz = _through_gate(c, gates, states, dy, z)
    needs_state = needs_initial_state and initial_state is not None
    dinitial = (
        x.new_empty(x.shape[0], x.shape[2], B.shape[3], x.shape[3], dtype=torch.float32)
        if needs_state
        else None
    )
    dstates = _reverse(c, gates, dy, _transposed(dfinal_state), dinitial)
    gradients = _gradients(c, gates, dy, states, dstates)
    gradients |= {"z": dz, "initial_state": None if dinitial is None else dinitial.mT}
    if D is not None:
        skips = gradients["D"].transpose(1, 2).flatten(0, 1)  # by sequence and chunk
        skips = skips if D.ndim == 2 else skips.mT
        gradients["D"] = sum_rows(skips.reshape(-1, D.numel()), D.dtype).view(D.shape)

    def buffer(name: str, tensor: Tensor | None, is_needed: bool) -> Tensor:
        """The gradient of a tensor; empty if not needed."""
        if tensor is None or not is_needed:
            return x.new_empty(0) if tensor is None else tensor.new_empty(0)
        return gradients[name].to(tensor.dtype).contiguous()

    return (
        buffer("x", x, needs_x),
        buffer("dt", dt, needs_dt),
        buffer("A", A, needs_A),
        buffer("B", B, needs_B),
        buffer("C", C, needs_C),
        buffer("D", D, needs_D),
        buffer("z", z, needs_z),
        buffer("dt_bias", dt_bias, needs_dt_bias),
        buffer("initial_state", initial_state, needs_initial_state),
    )


def _through_gate(
    c: Call, gates: Tensor, states: Tensor, dy: Tensor | None, z: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Gradients of y before the gate, as kernels take it, and of z."""
    if dy is None:
        return torch.zeros_like(c.x), None if z is None else torch.zeros_like(z)
    if z is None:
        return _rows(dy), None
    dz, dy = swiglu.backward(dy, z, _outputs(c, gates, states), 1.0, 1.0, True, True)
    return _rows(dy.to(c.x.dtype)), dz


def _reverse(
    c: Call, gates: Tensor, dy: Tensor, dfinal: Tensor | None, dinitial: Tensor | None
) -> Tensor:
    dstates = c.empty_states()
    args = (
        dy,
        c.C,
        c.first,
        gates,
        dfinal,
        dstates,
        dinitial,
        c.flags,
        _steps(dy),
        _steps(c.C),
        c.document_step,
        *c.sizes(),
    )
    constants, warps = c.config("reverse", states_config)
    count = c.streams * cdiv(c.x.shape[3], constants[4])
    launch_isolated(c.flags, _ssd_reverse_kernel, count, args, constants, warps)
    return dstates


def _gradients(
    c: Call, gates: Tensor, dy: Tensor, states: Tensor, dstates: Tensor
) -> dict[str, Any]:
    """Those of x, B, C and dt; and of A, D and the bias by sequences and chunks."""
    x, (batch, _, heads, value) = c.x, c.x.shape
    dx, db, dc, ddt = (t.new_empty(t.shape) for t in (x, c.B, c.C, c.dt))
    dskips = None if c.skip is None else c.skip.new_empty(batch, heads, c.chunks, value)
    pairs = x.new_empty(batch * c.groups * c.chunks, c.chunk, c.chunk)
    sums = gates.new_empty(2 + c.parts, c.plane)
    count = batch * c.groups * c.chunks
    args: tuple[Any, ...] = (
        dy,
        x,
        c.B,
        c.C,
        c.skip,
        c.first,
        gates,
        dstates,
        dx,
        pairs,
        sums,
        dskips,
        c.flags,
        (*_steps(dy), *_steps(x), *_steps(c.B), *_steps(c.C), c.first_step),
        c.sizes(),
        c.group,
    )
    launch_isolated(c.flags, _ssd_pairs_kernel, count, args, *c.config("pairs", pairs_config))
    args = (
        dy,
        x,
        c.B,
        c.C,
        gates,
        states,
        dstates,
        pairs,
        sums,
        db,
        dc,
        (*_steps(dy), *_steps(x), *_steps(c.B), *_steps(c.C)),
        c.sizes(),
        c.group,
    )
    constants, warps = c.config("groups", groups_config, ROWS_OF_STATES)
    constants = (*constants, c.first is not None)
    launch(_ssd_groups_kernel, count * c.parts, args, constants, warps)
    of_heads = gates.new_empty(2, batch, heads, c.chunks)
    args = (
        c.dt,
        c.A,
        c.bias,
        c.first,
        gates,
        sums,
        ddt,
        of_heads,
        c.dt.stride(),
        *c.tokens(),
    )
    flags = (c.parts, c.options.softplus, c.chunk)
    launch(_ssd_steps_kernel, c.streams * c.chunks, args, flags, 4)
    by_chunk = of_heads.permute(1, 3, 0, 2).reshape(-1, 2 * heads)
    da, dbias = (part.clone() for part in sum_rows(by_chunk, torch.float32).view(2, heads))
    return {"x": dx, "dt": ddt, "A": da, "B": db, "C": dc, "D": dskips, "dt_bias": dbias}
