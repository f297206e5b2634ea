"""Gated activations, MLPs of them, linear layers with low-rank adapters, and experts.

Adapters are added as PEFT does: in the adapter's dtype, and back. A mixture of experts is computed
densely: every token through every expert.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_multi.ops import LoraQKVOutput
from liger_multi.ops._float8 import OUTPUTS, QuantizedOutput
from liger_multi.testing.formulas.float8 import either, rounded

# --- gated activations, and an MLP of them ---

APPROXIMATIONS = {"gelu": "none", "gelu_tanh": "tanh"}
"""The argument of GELU by the name of an MLP's activation."""


def swiglu(
    gate: Tensor,
    up: Tensor,
    *,
    gate_multiplier: float = 1.0,
    down_multiplier: float = 1.0,
    quantize: str | None = None,
    outputs: tuple[str, ...] = OUTPUTS,
) -> Tensor | QuantizedOutput:
    """``silu(gate_multiplier * gate) * up * down_multiplier``."""
    return either(_swiglu(gate, up, gate_multiplier, down_multiplier), quantize, outputs)


def _swiglu(gate: Tensor, up: Tensor, gate_multiplier: float, down_multiplier: float) -> Tensor:
    if gate_multiplier == down_multiplier == 1.0:
        return F.silu(gate) * up
    return F.silu(gate * gate_multiplier) * up * down_multiplier


def swiglu_packed(
    gate_up: Tensor, *, gate_multiplier: float = 1.0, down_multiplier: float = 1.0
) -> Tensor:
    """SwiGLU of the first and the second half of the last axis."""
    gate, up = gate_up.chunk(2, dim=-1)
    return _swiglu(gate, up, gate_multiplier, down_multiplier)


def swiglu_clamped(
    gate: Tensor, up: Tensor, *, limit: float = 7.0, alpha: float = 1.702, up_offset: float = 1.0
) -> Tensor:
    """``(up + up_offset) * gate * sigmoid(alpha * gate)`` of clamped inputs."""
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + up_offset) * (gate * torch.sigmoid(gate * alpha))


def swiglu_clamped_packed(
    gate_up: Tensor,
    *,
    limit: float = 7.0,
    alpha: float = 1.702,
    up_offset: float = 1.0,
    interleaved: bool = True,
) -> Tensor:
    """The same of every second column, or of the two halves of the last axis."""
    pair = (gate_up[..., ::2], gate_up[..., 1::2]) if interleaved else gate_up.chunk(2, dim=-1)
    return swiglu_clamped(*pair, limit=limit, alpha=alpha, up_offset=up_offset)


def geglu(
    gate: Tensor,
    up: Tensor,
    approximate: str = "tanh",
    *,
    quantize: str | None = None,
    outputs: tuple[str, ...] = OUTPUTS,
) -> Tensor | QuantizedOutput:
    """``gelu(gate) * up``."""
    return either(F.gelu(gate, approximate=approximate) * up, quantize, outputs)


def geglu_packed(gate_up: Tensor, approximate: str = "tanh") -> Tensor:
    """GeGLU of the first and the second half of the last axis."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate=approximate) * up


def relu_squared(x: Tensor) -> Tensor:
    """``relu(x)^2``."""
    return torch.square(F.relu(x))


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """``activation(gate) * up`` by the name of an MLP's activation."""
    if activation in APPROXIMATIONS:
        return F.gelu(gate, approximate=APPROXIMATIONS[activation]) * up
    return _swiglu(gate, up, 1.0, 1.0)


def gated_mlp(
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    down_weight: Tensor,
    *,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: str = "silu",
) -> Tensor:
    """``down(activation(gate(x)) * up(x))``."""
    gate, up = F.linear(x, gate_weight, gate_bias), F.linear(x, up_weight, up_bias)
    return F.linear(gated(gate, up, activation), down_weight, down_bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias``."""
    return F.linear(x, weight, bias)


# --- linear layers in FP8 ---


class _LinearFloat8(torch.autograd.Function):
    """Both rounded products; rounding itself has no gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, scale: Tensor | None, given_weight: Tensor | None
    ) -> Tensor:
        held = weight if given_weight is None else given_weight
        codes, own = rounded(weight) if scale is None else (held.to(x.dtype), scale[:, None])
        ctx.save_for_backward(x, codes, own)
        rows, rows_scale = rounded(x)
        return F.linear(rows, codes) * rows_scale * own.squeeze(1)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (dy,), (x, codes, scale) = upstream, ctx.saved_tensors
        rows, rows_scale = rounded(dy * scale.squeeze(1))
        dweight = torch.atleast_2d(dy).flatten(0, -2).t() @ torch.atleast_2d(x).flatten(0, -2)
        return (rows @ codes) * rows_scale, dweight, None, None


def linear_float8(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    weight_scale: Tensor | None = None,
    weight_codes: Tensor | None = None,
    quantized: Any = None,
    return_quantized: bool = False,
) -> Tensor:
    """``q(x) @ q(weight).T + bias``, and the input gradient from the same codes of weight."""
    y: Tensor = _LinearFloat8.apply(x, weight, weight_scale, weight_codes)  # type: ignore[no-untyped-call]
    return y if bias is None else y + bias


def gated_mlp_float8(
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    down_weight: Tensor,
    *,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: str = "silu",
    gate_weight_scale: Tensor | None = None,
    up_weight_scale: Tensor | None = None,
    down_weight_scale: Tensor | None = None,
    gate_weight_codes: Tensor | None = None,
    up_weight_codes: Tensor | None = None,
    down_weight_codes: Tensor | None = None,
    quantized: Any = None,
) -> Tensor:
    """A gated MLP of such layers."""

    def layer(x: Tensor, *parameters: Any) -> Tensor:
        weight, bias, scale, codes = parameters
        return linear_float8(x, weight, bias, weight_scale=scale, weight_codes=codes)

    gate = layer(x, gate_weight, gate_bias, gate_weight_scale, gate_weight_codes)
    up = layer(x, up_weight, up_bias, up_weight_scale, up_weight_codes)
    inner = gated(gate, up, activation)
    return layer(inner, down_weight, down_bias, down_weight_scale, down_weight_codes)


# --- adapters ---


def lora_update(base: Tensor, x: Tensor, a: Tensor, b: Tensor, *, scale: float = 1.0) -> Tensor:
    """``base + scale * (x @ a.T) @ b.T``."""
    low = F.linear(F.linear(x.to(a.dtype), a), b)
    return (base + low * scale).to(base.dtype)


def _layer(
    x: Tensor,
    weight: Tensor,
    a: Tensor | None,
    b: Tensor | None,
    bias: Tensor | None,
    scale: float,
    weight_scale: Tensor | None,
) -> Tensor:
    if weight_scale is None:
        base = F.linear(x, weight, bias)
    else:
        base = linear_float8(x, weight, bias, weight_scale=weight_scale)
    return base if a is None or b is None else lora_update(base, x, a, b, scale=scale)


def lora_mlp(
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    down_weight: Tensor,
    gate_a: Tensor | None = None,
    gate_b: Tensor | None = None,
    up_a: Tensor | None = None,
    up_b: Tensor | None = None,
    down_a: Tensor | None = None,
    down_b: Tensor | None = None,
    *,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    gate_scale: float = 1.0,
    up_scale: float = 1.0,
    down_scale: float = 1.0,
    activation: str = "silu",
    gate_weight_scale: Tensor | None = None,
    up_weight_scale: Tensor | None = None,
    down_weight_scale: Tensor | None = None,
    quantized: Any = None,
) -> Tensor:
    """A gated MLP, each of whose layers may have an adapter, and a weight in FP8."""
    gate = _layer(x, gate_weight, gate_a, gate_b, gate_bias, gate_scale, gate_weight_scale)
    up = _layer(x, up_weight, up_a, up_b, up_bias, up_scale, up_weight_scale)
    inner = gated(gate, up, activation)
    return _layer(inner, down_weight, down_a, down_b, down_bias, down_scale, down_weight_scale)


def lora_qkv(
    x: Tensor,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    v_weight: Tensor | None = None,
    q_a: Tensor | None = None,
    q_b: Tensor | None = None,
    k_a: Tensor | None = None,
    k_b: Tensor | None = None,
    v_a: Tensor | None = None,
    v_b: Tensor | None = None,
    *,
    q_bias: Tensor | None = None,
    k_bias: Tensor | None = None,
    v_bias: Tensor | None = None,
    q_scale: float = 1.0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    q_weight_scale: Tensor | None = None,
    k_weight_scale: Tensor | None = None,
    v_weight_scale: Tensor | None = None,
    quantized: Any = None,
) -> LoraQKVOutput:
    """The projections of attention; None for one without a weight."""
    return LoraQKVOutput(
        None
        if q_weight is None
        else _layer(x, q_weight, q_a, q_b, q_bias, q_scale, q_weight_scale),
        None
        if k_weight is None
        else _layer(x, k_weight, k_a, k_b, k_bias, k_scale, k_weight_scale),
        None
        if v_weight is None
        else _layer(x, v_weight, v_a, v_b, v_bias, v_scale, v_weight_scale),
    )


# --- experts ---


def fused_moe(
    x: Tensor,
    gate_up_weight: Tensor,
    down_weight: Tensor,
    index: Tensor,
    routing: Tensor,
    *,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: str = "silu",
    limit: float = 7.0,
    alpha: float = 1.702,
    up_offset: float = 1.0,
    interleaved: bool = False,
    transposed: bool = False,
) -> Tensor:
    """Each token's chosen experts, added with its routing weights."""
    first, second = (w.mT if transposed else w for w in (gate_up_weight, down_weight))
    rows, chosen = x.reshape(-1, x.shape[-1]), index.reshape(-1, index.shape[-1])
    weights, y = routing.reshape(chosen.shape), torch.zeros_like(rows)
    # the gradient of unbind is one stack; that of a subscript has the size of all experts, for each
    for e, (up_weight, weight) in enumerate(zip(first.unbind(), second.unbind(), strict=True)):
        share = torch.where(chosen == e, weights, 0).sum(-1, keepdim=True)
        inner = rows @ up_weight.T + (0 if gate_up_bias is None else gate_up_bias[e])
        gate, up = (inner[:, ::2], inner[:, 1::2]) if interleaved else inner.chunk(2, dim=-1)
        if activation == "relu_squared":
            product = relu_squared(inner)
        elif activation == "swiglu_clamped":
            product = swiglu_clamped(gate, up, limit=limit, alpha=alpha, up_offset=up_offset)
        else:
            product = gated(gate, up, activation)
        y = y + share * (product @ weight.T + (0 if down_bias is None else down_bias[e]))
    return y.view(x.shape)


def _adapted(weight: Tensor, a: Tensor | None, b: Tensor | None, scale: float) -> Tensor:
    return weight if a is None or b is None else (weight + scale * (b @ a)).to(weight.dtype)


def lora_moe(
    x: Tensor,
    gate_up_weight: Tensor,
    down_weight: Tensor,
    index: Tensor,
    routing: Tensor,
    gate_up_a: Tensor | None = None,
    gate_up_b: Tensor | None = None,
    down_a: Tensor | None = None,
    down_b: Tensor | None = None,
    *,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    gate_up_scale: float = 1.0,
    down_scale: float = 1.0,
    activation: str = "silu",
    limit: float = 7.0,
    alpha: float = 1.702,
    up_offset: float = 1.0,
    interleaved: bool = False,
    transposed: bool = False,
) -> Tensor:
    """:func:`fused_moe` of weights to which the adapters are added first, as PEFT does."""
    first, second = (w.mT if transposed else w for w in (gate_up_weight, down_weight))
    return fused_moe(
        x,
        _adapted(first, gate_up_a, gate_up_b, gate_up_scale),
        _adapted(second, down_a, down_b, down_scale),
        index,
        routing,
        gate_up_bias=gate_up_bias,
        down_bias=down_bias,
        activation=activation,
        limit=limit,
        alpha=alpha,
        up_offset=up_offset,
        interleaved=interleaved,
    )
