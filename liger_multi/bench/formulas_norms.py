"""Plain formulas and peers of the norms beside the plain ones, for :mod:`.formulas`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Formula = Callable[..., Any]


def _dyt(
    x: Tensor, alpha: Tensor, weight: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    y = torch.tanh(alpha * x)
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def _gated_rms_norm(
    x: Tensor,
    gate: Tensor | None = None,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    group_size: int | None = None,
    norm_before_gate: bool = True,
) -> Tensor:
    wide, act = x.float(), None if gate is None else F.silu(gate.float())
    if act is not None and not norm_before_gate:
        wide = wide * act
    parts = wide.unflatten(-1, (-1, group_size or x.shape[-1]))
    n = parts * torch.rsqrt(parts.pow(2).mean(-1, keepdim=True) + eps)
    y = n.flatten(-2).to(x.dtype)
    y = y if weight is None else weight * y
    result: Tensor = (y * act).to(x.dtype) if act is not None and norm_before_gate else y
    return result


def _modulated_rms_norm(
    x: Tensor,
    scale: Tensor,
    shift: Tensor | None = None,
    weight: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    if scale.ndim < x.ndim:
        scale, shift = scale.unsqueeze(1), None if shift is None else shift.unsqueeze(1)
    wide = x.float()
    n = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)
    y = (n if weight is None else weight * n) * (1 + scale)
    return y if shift is None else y + shift


def _fused_scaled_add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    x_scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    total = residual + x * x_scale
    wide = total.float()
    n = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)
    return n if weight is None else weight * n, total


def _poly_norm(x: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    wide = x.float()

    def normed(u: Tensor) -> Tensor:
        return u * torch.rsqrt(u.pow(2).mean(-1, keepdim=True) + eps)

    y = weight[0] * normed(wide**3) + weight[1] * normed(wide**2) + weight[2] * normed(wide)
    return (y if bias is None else y + bias).to(x.dtype)


def _group_norm(
    x: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    parts = x.float().view(x.shape[0], num_groups, -1)
    parts = parts - parts.mean(-1, keepdim=True)
    n = parts * torch.rsqrt(parts.pow(2).mean(-1, keepdim=True) + eps)
    each = (-1, *[1] * (x.ndim - 2))
    n = n.view(x.shape)
    n = n if weight is None else n * weight.view(each)
    return (n if bias is None else n + bias.view(each)).to(x.dtype)


def _group_norm_aten(
    x: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    return F.group_norm(x, num_groups, weight, bias, eps)


TABLE: dict[str, dict[str, Formula]] = {
    "dyt": {"torch": _dyt},
    "gated_rms_norm": {"torch": _gated_rms_norm},
    "modulated_rms_norm": {"torch": _modulated_rms_norm},
    "fused_scaled_add_rms_norm": {"torch": _fused_scaled_add_rms_norm},
    "poly_norm": {"torch": _poly_norm},
    "group_norm": {"torch": _group_norm, "aten": _group_norm_aten},
}
LIGER: dict[str, tuple[str, Callable[[Formula], Formula]]] = {
    "dyt": (
        "liger_kernel.ops:LigerDyTFunction.apply",
        lambda f: lambda x, alpha, weight, bias=None: f(x, alpha, weight, bias),
    ),
    "poly_norm": (
        "liger_kernel.ops:LigerPolyNormFunction.apply",
        lambda f: lambda x, weight, bias, eps=1e-6: f(x, weight, bias, eps, False),
    ),
    "group_norm": (
        "liger_kernel.ops:LigerGroupNormFunction.apply",
        lambda f: (
            lambda x, num_groups, weight, bias, eps=1e-5: f(
                x, weight, bias, x.shape[1], num_groups, eps
            )
        ),
    ),
    "modulated_rms_norm": (
        "liger_kernel.ops:LigerModulatedRMSNormFunction.apply",
        lambda f: (
            lambda x, scale, shift=None, weight=None, eps=1e-6: f(
                x, weight, scale, shift, eps, 0.0, "llama", False
            )
        ),
    ),
}
