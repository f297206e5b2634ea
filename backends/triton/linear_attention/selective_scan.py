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
)
from liger_multi.dispatch.launch import DeviceInfo, launch_config
from liger_multi.reference.linear_attention import selective_scan as reference
from liger_multi.reference.linear_attention.state_space import Nine

MOST = 256  # states of a channel

# --- launch configuration ---


@dataclass(frozen=True)
class ScanConfig:
    """``block`` channels a program and ``chunk`` tokens a step, ``kept`` at a time in backward."""

    block: int
    chunk: int
    kept: int
    num_warps: int


def _config(info: DeviceInfo, states: int, chunk: int, kept: int, each: int) -> ScanConfig:
    """``each`` states a thread, and at least 16 channels a program.

    Each program leaves a part of the gradients of B and C. Of few states, a warp is a program: its
    sums pass through no shared memory.
    """
    size = power_of_2(states)
    block = max(16, min(64, each * info.warp_size // size))
    block = min(block, 2048 // size)  # programs of more threads have fewer registers for each
    return ScanConfig(block, chunk, kept, warps(size * block // each, info.warp_size))


def forward_config(info: DeviceInfo, length: int, cols: int, states: int) -> ScanConfig:
    """As many channels as threads where there are 16 states: each computes one step size a token.

    Args:
        info: Limits of the device.
        length: Tokens of a sequence.
        cols: Channels.
        states: Of a channel.
    """
    return _config(info, states, 4, 4, 16)


def backward_config(info: DeviceInfo, length: int, cols: int, states: int) -> ScanConfig:
    """States before chunks are in memory, those of ``kept`` tokens in registers.

    With 4 of them, registers spill up to 88 bytes; with 2, none (sm90, Triton 3.9).
    """
    return _config(info, states, 8, 2, 8)


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
    first: Optional[Tensor]
    softplus: bool

    @property
    def strides(self) -> tuple[Any, ...]:
        """Of the sequences and tokens of u, delta, B, C and z, and of sequences of ``first``."""
        rows = (self.u, self.delta, self.B, self.C, self.u if self.z is None else self.z)
        shared = self.first is None or self.first.shape[0] == 1
        return (
            *((x.stride(0), x.stride(1)) for x in rows),
            0 if shared or self.first is None else self.first.stride(0),
        )

    def programs(self, k: ScanConfig) -> int:
        """Blocks of channels of all sequences."""
        return self.u.shape[0] * cdiv(self.u.shape[2], k.block)

    def constants(self, k: ScanConfig, chunk: int) -> tuple[Any, ...]:
        """What kernels take last."""
        states = self.B.shape[2]
        return states, power_of_2(states), self.softplus, chunk, k.block

    def config(self, name: str) -> ScanConfig:
        """The launch configuration of a direction."""
        formula = {"forward": forward_config, "backward": backward_config}[name]
        _, length, cols = self.u.shape
        return launch_config(
            f"selective_scan.{name}", formula, self.u.device, length=length, cols=cols,
            states=self.B.shape[2],
        )  # fmt: skip

    def empty_states(self, *leading: int) -> Tensor:
        """Room for a state, or for more, of every sequence."""
        shape = (self.u.shape[0], *leading, self.u.shape[2], self.B.shape[2])
        return self.u.new_empty(shape, dtype=torch.float32)


def _adjacent(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _call(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None,
    bias: Tensor | None, first: Tensor | None, softplus: bool,
) -> Call:  # fmt: skip
    return Call(
        _adjacent(u), _adjacent(delta), A.contiguous(), _adjacent(B), _adjacent(C),
        _dense(D), None if z is None else _adjacent(z), _dense(bias), _dense(first), softplus,
    )  # fmt: skip


def _dense(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def _scan(
    c: Call, initial: Tensor | None, y: Tensor | None, final: Tensor | None,
    states: Tensor | None, chunk: int,
) -> None:  # fmt: skip
    """Either y and the last state, or the state before every chunk."""
    k = c.config("forward")
    _, length, cols = c.u.shape
    args = (
        c.u, c.delta, c.A, c.B, c.C, c.D, c.z if states is None else None, c.bias, initial, c.first,
        y, final, states, *c.strides, length, cols, cdiv(length, chunk),
    )  # fmt: skip
    constants = c.constants(k, chunk)
    launch(_selective_scan_forward_kernel, c.programs(k), args, constants, k.num_warps)


def forward(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Optional[Tensor],
    z: Optional[Tensor], delta_bias: Optional[Tensor], initial_state: Optional[Tensor],
    first: Optional[Tensor], delta_softplus: bool, output_final_state: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """One launch."""
    if not u.numel():
        return reference.forward(
            u, delta, A, B, C, D, z, delta_bias, initial_state, first, delta_softplus,
            output_final_state,
        )  # fmt: skip
    c = _call(u, delta, A, B, C, D, z, delta_bias, first, delta_softplus)
    y = u.new_empty(u.shape)
    final = c.empty_states() if output_final_state else None
    _scan(c, _dense(initial_state), y, final, None, c.config("forward").chunk)
    return y, u.new_empty(0, dtype=torch.float32) if final is None else final


class Gradients(NamedTuple):
    """Where the kernel writes: gradients of rows, and parts of those that are sums."""

    u: Optional[Tensor]
    delta: Optional[Tensor]
    z: Optional[Tensor]
    A: Optional[Tensor]
    B: Optional[Tensor]
    C: Optional[Tensor]
    D: Optional[Tensor]
    delta_bias: Optional[Tensor]
    initial_state: Optional[Tensor]

    def of(self, name: str, like: Tensor) -> Tensor:
        """The gradient of a tensor, its parts summed; empty where nobody needs it."""
        found: Optional[Tensor] = getattr(self, name)
        if found is None:
            return like.new_empty(0)
        if name in ("A", "B", "C", "D", "delta_bias"):
            return sum_rows(found.flatten(1), like.dtype).view(like.shape)
        return found.to(like.dtype)


def _room(c: Call, k: ScanConfig, needs: dict[str, bool]) -> Gradients:
    """Memory for the gradients that are needed."""
    (batch, length, cols), states = c.u.shape, c.B.shape[2]
    sums = (cdiv(cols, k.block), batch, length, states)

    def new(name: str, like: Tensor | None, shape: tuple[int, ...]) -> Optional[Tensor]:
        kind = torch.float32 if like is None else like.dtype
        return c.u.new_empty(shape, dtype=kind) if needs[name] else None

    return Gradients(
        new("u", c.u, c.u.shape), new("delta", c.delta, c.u.shape), new("z", c.z, c.u.shape),
        new("A", None, (batch, cols, states)), new("B", None, sums), new("C", None, sums),
        new("D", None, (batch, cols)), new("delta_bias", None, (batch, cols)),
        new("initial_state", None, (batch, cols, states)),
    )  # fmt: skip


def backward(
    dy: Optional[Tensor], dfinal_state: Optional[Tensor], u: Tensor, delta: Tensor, A: Tensor,
    B: Tensor, C: Tensor, D: Optional[Tensor], z: Optional[Tensor], delta_bias: Optional[Tensor],
    initial_state: Optional[Tensor], first: Optional[Tensor], delta_softplus: bool, needs_u: bool,
    needs_delta: bool, needs_A: bool, needs_B: bool, needs_C: bool, needs_D: bool, needs_z: bool,
    needs_delta_bias: bool, needs_initial_state: bool,
) -> Nine:  # fmt: skip
    """The states before chunks, the reverse pass, and a launch for every sum of parts."""
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
    c = _call(u, delta, A, B, C, D, z, delta_bias, first, delta_softplus)
    k = c.config("backward")
    _, length, cols = u.shape
    chunks = cdiv(length, k.chunk)
    states = c.empty_states(chunks)
    _scan(c, _dense(initial_state), None, None, states, k.chunk)
    dy = torch.zeros_like(c.u) if dy is None else _adjacent(dy)
    out = _room(c, k, wanted)
    args = (
        c.u, dy, c.delta, c.A, c.B, c.C, c.D, c.z, c.bias, c.first, states, _dense(dfinal_state),
        *out, (dy.stride(0), dy.stride(1)), *c.strides, length, cols,
        chunks, u.shape[0],
    )  # fmt: skip
    constants = (*c.constants(k, k.chunk), k.kept)
    launch(_selective_scan_backward_kernel, c.programs(k), args, constants, k.num_warps)
    found = [out.of(n, u if x is None else x) for n, x in given.items()]
    return tuple(found)  # type: ignore[return-value]
