"""One table of plain formulas and peers by operator.

A formula takes the operator's tensors and those of its options that it supports, by name. Where a
sample sets an option that a formula has not, the provider is skipped with that reason.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_multi.bench import (
    divergences,
    formulas_attention,
    formulas_experts,
    formulas_norms,
    formulas_rope,
)

Formula = Callable[..., Any]


# --- formulas ---


def _rms_norm(
    x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, *, offset: float = 0.0
) -> Tensor:
    wide = x.float()
    normed = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)
    return normed if weight is None else (weight + offset if offset else weight) * normed


def _rms_norm_aten(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def _fused_add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
) -> tuple[Tensor, Tensor]:
    total = x + residual
    return _rms_norm(total, weight, eps, offset=offset), total


def _fused_add_rms_norm_aten(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    total = x + residual
    return F.rms_norm(total, x.shape[-1:], weight, eps), total


def _layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    centered = x.float() - x.float().mean(-1, keepdim=True)
    y = centered * torch.rsqrt(centered.pow(2).mean(-1, keepdim=True) + eps)
    y = y if weight is None else y * weight
    return (y if bias is None else y + bias).to(x.dtype)


def _layer_norm_aten(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def _swiglu(
    gate: Tensor, up: Tensor, *, gate_multiplier: float = 1.0, down_multiplier: float = 1.0
) -> Tensor:
    if gate_multiplier == down_multiplier == 1.0:
        return F.silu(gate) * up
    return F.silu(gate * gate_multiplier) * up * down_multiplier


def _swiglu_packed(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def _gated_mlp(x: Tensor, gate_weight: Tensor, up_weight: Tensor, down_weight: Tensor) -> Tensor:
    return F.linear(_swiglu(F.linear(x, gate_weight), F.linear(x, up_weight)), down_weight)


def _lora_update(base: Tensor, x: Tensor, a: Tensor, b: Tensor, *, scale: float = 1.0) -> Tensor:
    """As PEFT adds an adapter: in the adapter's dtype, and back."""
    low = F.linear(F.linear(x.to(a.dtype), a), b)
    return (base + low * scale).to(base.dtype)


def _lora_mlp(
    x: Tensor, gate_weight: Tensor, up_weight: Tensor, down_weight: Tensor, gate_a: Tensor,
    gate_b: Tensor, up_a: Tensor, up_b: Tensor, down_a: Tensor, down_b: Tensor, *,
    gate_scale: float = 1.0, up_scale: float = 1.0, down_scale: float = 1.0,
) -> Tensor:  # fmt: skip
    gate = _lora_update(F.linear(x, gate_weight), x, gate_a, gate_b, scale=gate_scale)
    up = _lora_update(F.linear(x, up_weight), x, up_a, up_b, scale=up_scale)
    inner = _swiglu(gate, up)
    return _lora_update(F.linear(inner, down_weight), inner, down_a, down_b, scale=down_scale)


def _lora_qkv(
    x: Tensor, q_weight: Tensor, k_weight: Tensor, v_weight: Tensor, q_a: Tensor, q_b: Tensor,
    k_a: Tensor, k_b: Tensor, v_a: Tensor, v_b: Tensor, *, q_scale: float = 1.0,
    k_scale: float = 1.0, v_scale: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    q = _lora_update(F.linear(x, q_weight), x, q_a, q_b, scale=q_scale)
    k = _lora_update(F.linear(x, k_weight), x, k_a, k_b, scale=k_scale)
    return q, k, _lora_update(F.linear(x, v_weight), x, v_a, v_b, scale=v_scale)


def _swiglu_clamped(
    gate: Tensor, up: Tensor, *, limit: float = 7.0, alpha: float = 1.702, up_offset: float = 1.0
) -> Tensor:
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + up_offset) * (gate * torch.sigmoid(gate * alpha))


def _swiglu_clamped_packed(gate_up: Tensor, *, interleaved: bool = True) -> Tensor:
    if interleaved:
        return _swiglu_clamped(gate_up[..., ::2], gate_up[..., 1::2])
    return _swiglu_clamped(*gate_up.chunk(2, dim=-1))


def _relu_squared(x: Tensor) -> Tensor:
    return torch.square(F.relu(x))


def _geglu(gate: Tensor, up: Tensor, *, approximate: str = "tanh") -> Tensor:
    return F.gelu(gate, approximate=approximate) * up


def _geglu_packed(gate_up: Tensor, *, approximate: str = "tanh") -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate=approximate) * up


def _rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, style: str = "half"
) -> tuple[Tensor, Tensor]:
    def rotate_half(x: Tensor) -> Tensor:
        if style == "half":
            a, b = x.chunk(2, dim=-1)
            return torch.cat((-b, a), dim=-1)
        return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)

    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def _cross_entropy(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    wide = logits.float()
    return F.cross_entropy(
        wide,
        target,
        None if weight is None else weight.float(),
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction=reduction,
    )


def _cross_entropy_aten(
    logits: Tensor, target: Tensor, *, ignore_index: int = -100, reduction: str = "mean"
) -> Tensor:
    return F.cross_entropy(logits, target, ignore_index=ignore_index, reduction=reduction)


def _linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> Tensor:
    logits = F.linear(hidden, weight, bias).float()
    return F.cross_entropy(logits, target, ignore_index=ignore_index, reduction=reduction)


def _linear_cross_entropy_aten(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> Tensor:
    logits = F.linear(hidden, weight, bias)
    return F.cross_entropy(logits, target, ignore_index=ignore_index, reduction=reduction)


def _token_log_prob(
    logits: Tensor, target: Tensor, *, outputs: tuple[str, ...] = ("log_prob",)
) -> Any:
    log_p = torch.log_softmax(logits.float(), -1)
    found = log_p.gather(-1, target.unsqueeze(-1)).squeeze(-1)
    return (found, -(log_p.exp() * log_p).sum(-1)) if "entropy" in outputs else found


def _token_log_prob_aten(
    logits: Tensor, target: Tensor, *, outputs: tuple[str, ...] = ("log_prob",)
) -> Any:
    found = -F.cross_entropy(logits, target, reduction="none")
    return (found, torch.special.entr(logits.softmax(-1)).sum(-1)) if len(outputs) > 1 else found


def _linear_log_prob(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    temperature: float = 1.0,
    outputs: tuple[str, ...] = ("log_prob",),
) -> Any:
    log_p = torch.log_softmax((hidden @ weight.mT).float() / temperature, -1)
    found = log_p.gather(-1, target.unsqueeze(-1)).squeeze(-1)
    return (found, -(log_p.exp() * log_p).sum(-1)) if "entropy" in outputs else found


def _linear_log_prob_aten(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    temperature: float = 1.0,
    outputs: tuple[str, ...] = ("log_prob",),
) -> Any:
    z = hidden @ weight.mT / temperature
    found = -F.cross_entropy(z, target, reduction="none")
    return (found, torch.special.entr(z.softmax(-1)).sum(-1)) if "entropy" in outputs else found


def _torch_fused(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    found: Tensor = F.linear_cross_entropy(hidden, weight, target)
    return found


def _cut_cross_entropy(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    peer = importlib.import_module("cut_cross_entropy")
    found: Tensor = peer.linear_cross_entropy(hidden, weight, target)
    return found


class _Products(torch.autograd.Function):
    """The three matrix products of a linear loss and nothing else."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        """Logits, kept as if they were their own gradient."""
        logits = hidden @ weight.mT
        ctx.save_for_backward(hidden, weight, logits)
        return logits.new_ones((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor, Tensor]:
        """Products with the shapes of both gradients."""
        hidden, weight, logits = ctx.saved_tensors
        return logits @ weight, logits.mT @ hidden


def _products(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    apply: Any = _Products.apply
    found: Tensor = apply(hidden, weight)
    return found


def _log_prob_products(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    temperature: float = 1.0,
    outputs: tuple[str, ...] = ("log_prob",),
) -> Any:
    found = _products(hidden, weight, target).expand(target.shape)
    return (found,) * len(outputs) if len(outputs) > 1 else found


def _softmax(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)


def _sparsemax(x: Tensor) -> Tensor:
    z = x.float()
    fallen = z.sort(-1, descending=True).values
    count = torch.arange(1, z.shape[-1] + 1, device=z.device)
    total = fallen.cumsum(-1) - 1
    k = (fallen * count > total).sum(-1, keepdim=True)
    return F.relu(z - total.gather(-1, k - 1) / k).to(x.dtype)


def _selective(logits: Tensor, index: Tensor, *, temperature: float = 1.0) -> Tensor:
    log_p = torch.log_softmax(logits.float() / temperature, -1)
    places = index if index.ndim == logits.ndim else index.unsqueeze(-1)
    return log_p.gather(-1, places).view(index.shape)


def _selective_aten(logits: Tensor, index: Tensor, *, temperature: float = 1.0) -> Tensor:
    z = logits.float() / temperature
    places = index if index.ndim == logits.ndim else index.unsqueeze(-1)
    return (z.gather(-1, places) - z.logsumexp(-1, keepdim=True)).view(index.shape)


def _embedding(index: Tensor, weight: Tensor, *, scale: float = 1.0) -> Tensor:
    y = F.embedding(index, weight)
    return y if scale == 1.0 else y * torch.tensor(scale, dtype=y.dtype, device=y.device)


TABLE: dict[str, dict[str, Formula]] = {
    **formulas_experts.TABLE,
    **formulas_attention.TABLE,
    **formulas_norms.TABLE,
    **formulas_rope.TABLE,
    "rms_norm": {"torch": _rms_norm, "aten": _rms_norm_aten},
    "fused_add_rms_norm": {"torch": _fused_add_rms_norm, "aten": _fused_add_rms_norm_aten},
    "layer_norm": {"torch": _layer_norm, "aten": _layer_norm_aten},
    "swiglu": {"torch": _swiglu},
    "swiglu_packed": {"torch": _swiglu_packed},
    "gated_mlp": {"torch": _gated_mlp},
    "lora_mlp": {"torch": _lora_mlp},
    "lora_qkv": {"torch": _lora_qkv},
    "lora_update": {"torch": _lora_update},
    "geglu": {"torch": _geglu},
    "geglu_packed": {"torch": _geglu_packed},
    "swiglu_clamped": {"torch": _swiglu_clamped},
    "swiglu_clamped_packed": {"torch": _swiglu_clamped_packed},
    "relu_squared": {"torch": _relu_squared},
    "rope": {"torch": _rope},
    "cross_entropy": {"torch": _cross_entropy, "aten": _cross_entropy_aten},
    "cross_entropy_inplace": {"torch": _cross_entropy, "aten": _cross_entropy_aten},
    "fused_linear_cross_entropy": {
        "torch": _linear_cross_entropy,
        "aten": _linear_cross_entropy_aten,
        "torch-fused": _torch_fused,
        "cce": _cut_cross_entropy,
        "products": _products,
    },
    "fused_linear_log_prob": {
        "torch": _linear_log_prob,
        "aten": _linear_log_prob_aten,
        "products": _log_prob_products,
    },
    "token_log_prob": {"torch": _token_log_prob, "aten": _token_log_prob_aten},
    "softmax": {"torch": _softmax},
    "sparsemax": {"torch": _sparsemax},
    "selective_log_softmax": {"torch": _selective, "aten": _selective_aten},
    "embedding": {"torch": _embedding},
    **divergences.TABLE,
}
FLOORS = ("products",)
PEERS = {"cce": "cut_cross_entropy"}  # modules that formulas import
