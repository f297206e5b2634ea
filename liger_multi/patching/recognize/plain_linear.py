"""Linear layers that do nothing but multiply, so that their weights are all of them."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as module_of_torch

from liger_multi.dispatch.primitive import constant_in_graphs

PLAIN = (Tensor, nn.Parameter)
_CALL, _FORWARD = nn.Module.__call__, nn.Linear.forward


def globally_hooked() -> bool:
    """Whether something looks at the calls of every module, or of every linear layer."""
    m = module_of_torch
    before, after = m._global_forward_pre_hooks, m._global_forward_hooks
    hooked = before or after or m._global_backward_pre_hooks or m._global_backward_hooks
    return bool(hooked) or _calls_replaced()


@constant_in_graphs
def _calls_replaced() -> bool:
    """Whether somebody put functions of theirs into PyTorch's classes."""
    return nn.Linear.__call__ is not _CALL or nn.Linear.forward is not _FORWARD


def is_watched(module: nn.Module) -> bool:
    """Whether a module's call is more than its class's forward."""
    held: dict[str, Any] = module.__dict__
    before, after = held["_forward_pre_hooks"], held["_forward_hooks"]
    hooked = before or after or held["_backward_pre_hooks"] or held["_backward_hooks"]
    return bool(hooked) or "forward" in held


_OF_LIBRARIES = ("torch.distributed.", "deepspeed.", "liger_multi.memory.")
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def is_watched_by_users(module: nn.Module) -> bool:
    """The same for a module without parameters.

    Hooks that gather parameters or measure memory stand on every module, and do nothing on this.
    """
    if not is_watched(module):
        return False
    held: dict[str, Any] = module.__dict__
    hooks = [hook for name in _HOOKS for hook in held[name].values()]
    return "forward" in held or not all(_of_library(hook) for hook in hooks)


def _of_library(hook: Any) -> bool:
    while hasattr(hook, "func"):  # a partial
        hook = hook.func
    return str(getattr(hook, "__module__", "")).startswith(_OF_LIBRARIES)


def bare_parts(layer: nn.Module | None) -> tuple[Tensor, Tensor | None] | None:
    """Weight and bias of a layer that is :func:`is_plain_linear`; None for another one."""
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


def is_plain_linear(layer: nn.Module | None) -> bool:
    """Whether a layer is PyTorch's linear layer, with plain weights and nothing around its call."""
    return bare_parts(layer) is not None
