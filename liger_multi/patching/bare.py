"""Linear layers that do nothing but multiply, so that their weights are all of them."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as module_of_torch

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
GLOBAL_HOOKS = tuple(f"_global{hooks}" for hooks in HOOKS)  # of all modules
PLAIN = (Tensor, nn.Parameter)


def globally_hooked() -> bool:
    """Whether a hook looks at every module."""
    return any(getattr(module_of_torch, hooks) for hooks in GLOBAL_HOOKS)


def is_watched(module: nn.Module) -> bool:
    """Whether a module's call is more than its class's forward."""
    held: dict[str, Any] = module.__dict__
    return "forward" in held or any(held[hooks] for hooks in HOOKS)


def is_bare(layer: nn.Module | None) -> bool:
    """Whether a layer is PyTorch's linear layer, with plain weights and nothing around its call."""
    if type(layer) is not nn.Linear or is_watched(layer):
        return False
    return all(p is None or type(p) in PLAIN for p in (layer.weight, layer.bias))
