"""The scan of Mamba-2 (arXiv:2405.21060) by the kernels of the delta rule, without its correction.

C, B, x and dt stand for q, k, v and beta, dt A for the gates. Step sizes and the gate z are around
the scan; backward makes y again where z needs a gradient.
"""

from __future__ import annotations

from typing import NamedTuple, Optional

import torch
from torch import Tensor

from liger_multi.backends.triton.activations.operators import SwiGLU
from liger_multi.backends.triton.linear_attention import gated_delta_rule as rule
from liger_multi.reference.linear_attention import ssd_scan as reference
from liger_multi.reference.linear_attention.state_space import Nine, StepSizes


def supports(x: Tensor, B: Tensor, C: Tensor) -> str | None:
    """Why a call is refused, or None."""
    if not x.dtype == B.dtype == C.dtype:
        return f"takes x, B and C of one dtype, got {x.dtype}, {B.dtype} and {C.dtype}"
    return rule.refused(B, x, False)


class Scan(NamedTuple):
    """A call, and the step sizes that it was made of."""

    call: rule.Call
    sizes: StepSizes
    raw: Tensor
    initial_state: Tensor | None

    def back(self, dbeta: Tensor, dg: Tensor, A: Tensor) -> Tensor:
        """Gradient of the raw step sizes, which are factors of rows and of gates."""
        return self.sizes.gradient(torch.addcmul(dbeta, dg, A.to(dg.dtype)), self.raw)


def _scan(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None,
    dt_bias: Tensor | None, initial_state: Tensor | None, first: Tensor | None, sizes: StepSizes,
    most: int,
) -> Scan:  # fmt: skip
    raw = dt.float() if dt_bias is None else dt.float() + dt_bias.float()
    steps = sizes.of(raw)
    if D is not None:
        skip = (D if D.ndim == 2 else D[:, None]).float().expand(x.shape[2:]).contiguous()
    call = rule.call_of(
        C, B, x, steps * A.float(), steps, first, 1.0, False, corrected=False,
        skip=None if D is None else skip, most=most,
    )  # fmt: skip
    state = None if initial_state is None else initial_state.mT
    return Scan(call, sizes, raw, state)


def forward(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Optional[Tensor],
    z: Optional[Tensor], dt_bias: Optional[Tensor], initial_state: Optional[Tensor],
    first: Optional[Tensor], dt_softplus: bool, dt_min: float, dt_max: float, chunk: int,
    output_final_state: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The passes over chunks, and the gate in a launch of its own."""
    if not x.numel():
        return reference.forward(
            x, dt, A, B, C, D, z, dt_bias, initial_state, first, dt_softplus, dt_min, dt_max,
            chunk, output_final_state,
        )  # fmt: skip
    sizes = StepSizes(dt_softplus, dt_min, dt_max)
    s = _scan(x, dt, A, B, C, D, dt_bias, initial_state, first, sizes, chunk)
    y, final = rule.scan(s.call, s.initial_state, output_final_state)
    if output_final_state:
        final = final.mT.contiguous()
    return y if z is None else SwiGLU.forward(z, y, 1.0, 1.0).to(y.dtype), final


def backward(
    dy: Optional[Tensor], dfinal_state: Optional[Tensor], x: Tensor, dt: Tensor, A: Tensor,
    B: Tensor, C: Tensor, D: Optional[Tensor], z: Optional[Tensor], dt_bias: Optional[Tensor],
    initial_state: Optional[Tensor], first: Optional[Tensor], dt_softplus: bool, dt_min: float,
    dt_max: float, chunk: int, needs_x: bool, needs_dt: bool, needs_A: bool, needs_B: bool,
    needs_C: bool, needs_D: bool, needs_z: bool, needs_dt_bias: bool, needs_initial_state: bool,
) -> Nine:  # fmt: skip
    """The passes of the delta rule; sums over tokens of what they give to dt, A, D and the bias."""
    if not x.numel():
        return reference.backward(
            dy, dfinal_state, x, dt, A, B, C, D, z, dt_bias, initial_state, first, dt_softplus,
            dt_min, dt_max, chunk, needs_x, needs_dt, needs_A, needs_B, needs_C, needs_D, needs_z,
            needs_dt_bias, needs_initial_state,
        )  # fmt: skip
    sizes = StepSizes(dt_softplus, dt_min, dt_max)
    s = _scan(x, dt, A, B, C, D, dt_bias, initial_state, first, sizes, chunk)
    dy, dz = _through_gate(s, dy, z)
    dfinal = None if dfinal_state is None else dfinal_state.mT
    made = rule.gradients(s.call, dy, dfinal, s.initial_state, needs_initial_state)
    found = {"B": made.k, "C": made.q, "x": made.v, "z": dz}
    if needs_dt or needs_dt_bias:
        found["dt"] = s.back(made.beta, made.g, A)
        found["dt_bias"] = found["dt"].sum((0, 1))
    if needs_A:
        found["A"] = (made.g * s.call.beta).sum((0, 1))
    if D is not None and made.skip is not None:
        found["D"] = made.skip.sum((0, 2) if D.ndim == 2 else (0, 2, 3))
    if needs_initial_state and initial_state is not None:
        found["initial_state"] = made.initial_state.mT

    def given(name: str, like: Tensor | None, needed: bool) -> Tensor:
        """The gradient of a tensor, empty where nobody needs it."""
        if like is None or not needed:
            return x.new_empty(0) if like is None else like.new_empty(0)
        return found[name].to(like.dtype).contiguous()

    return (
        given("x", x, needs_x), given("dt", dt, needs_dt), given("A", A, needs_A),
        given("B", B, needs_B), given("C", C, needs_C), given("D", D, needs_D),
        given("z", z, needs_z), given("dt_bias", dt_bias, needs_dt_bias),
        given("initial_state", initial_state, needs_initial_state),
    )  # fmt: skip


def _through_gate(
    s: Scan, dy: Tensor | None, z: Tensor | None
) -> tuple[Tensor | None, Tensor]:  # fmt: skip
    """Gradients of y before the gate, and of z."""
    if z is None:
        return dy, s.raw.new_empty(0)
    if dy is None:
        return None, torch.zeros_like(z)
    y, _ = rule.scan(s.call, s.initial_state, False)
    dz, dy = SwiGLU.backward(dy, z, y, 1.0, 1.0, True, True)
    return dy, dz
