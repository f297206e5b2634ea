"""Linear layers that do nothing but multiply, so that their weights are all of them."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as module_of_torch

PLAIN = (Tensor, nn.Parameter)


def globally_hooked() -> bool:
    """Whether a hook looks at every module."""
    m = module_of_torch
    before, after = m._global_forward_pre_hooks, m._global_forward_hooks
    return bool(before or after or m._global_backward_pre_hooks or m._global_backward_hooks)


def is_watched(module: nn.Module) -> bool:
    """Whether a module's call is more than its class's forward."""
    held: dict[str, Any] = module.__dict__
    before, after = held["_forward_pre_hooks"], held["_forward_hooks"]
    hooked = before or after or held["_backward_pre_hooks"] or held["_backward_hooks"]
    return bool(hooked) or "forward" in held


def bare_parts(layer: nn.Module | None) -> tuple[Tensor, Tensor | None] | None:
    """Weight and bias of a layer that is :func:`is_bare`; None for another one."""
    if type(layer) is not nn.Linear or is_watched(layer):
        return None
    held: Any = layer._parameters  # asking for an attribute takes eight times as long
    weight: Tensor | None = held.get("weight")
    bias: Tensor | None = held.get("bias")
    if weight is None or "bias" not in held:  # tensors stand in the place of parameters
        weight, bias = layer.weight, layer.bias
    if type(weight) not in PLAIN or (bias is not None and type(bias) not in PLAIN):
        return None
    return weight, bias


def is_bare(layer: nn.Module | None) -> bool:
    """Whether a layer is PyTorch's linear layer, with plain weights and nothing around its call."""
    return bare_parts(layer) is not None
