"""Private helpers of ``liger_kernel.transformers.monkey_patch``: one module becomes ours in place.

People use them for model types of their own, in functions that they register in
``MODEL_TYPE_TO_APPLY_LIGER_FN``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from liger_multi import ops
from liger_multi.compat.liger_kernel.functional import casting_of, liger_rms_norm


def _bind_method_to_module(module: nn.Module, method_name: str, new_method: Callable) -> None:  # type: ignore[type-arg]
    """Give one module a method of its own."""
    vars(module)[method_name] = new_method.__get__(module, type(module))


def _parts(module: nn.Module) -> Iterator[nn.Module]:
    """The module, or the copies that an adapter's wrapper has of it."""
    copies = getattr(module, "modules_to_save", None)
    if isinstance(copies, nn.ModuleDict):
        yield from copies.values()
        yield module.original_module  # type: ignore[misc]
    else:
        yield module


def _rms_norm(self: Any, hidden_states: Tensor) -> Tensor:
    return liger_rms_norm(
        hidden_states, self.weight, self.variance_epsilon, self.offset, self.casting_mode
    )


def _layer_norm(self: Any, hidden_states: Tensor) -> Tensor:
    return ops.layer_norm(hidden_states, self.weight, self.bias, self.variance_epsilon)


def _eps_of(module: Any, usual: float) -> float:
    names = ("variance_epsilon", "eps")
    eps = next((getattr(module, name) for name in names if getattr(module, name, None)), usual)
    return float(eps)


def _patch_rms_norm_module(
    module: nn.Module,
    offset: float = 0.0,
    eps: float = 1e-6,
    casting_mode: str | int = "llama",
    in_place: bool = True,
    row_mode: bool | None = None,
) -> None:
    """Let a norm with a weight run :func:`liger_multi.ops.rms_norm`; its own eps has precedence."""
    for part in _parts(module):
        own: Any = part
        own.offset, own.casting_mode = offset, casting_mode
        own.casting = casting_of("rms_norm", casting_mode)
        own.variance_epsilon, own.in_place, own.row_mode = _eps_of(part, eps), in_place, row_mode
        _bind_method_to_module(part, "forward", _rms_norm)


def _patch_layer_norm_module(module: nn.Module, eps: float = 1e-6) -> None:
    """Let a layer norm run :func:`liger_multi.ops.layer_norm`; its own eps has precedence."""
    for part in _parts(module):
        own: Any = part
        own.variance_epsilon = _eps_of(part, eps)
        _bind_method_to_module(part, "forward", _layer_norm)


def _patch_swiglu_module(module: nn.Module, liger_module: type[nn.Module]) -> None:
    """Let an MLP run the forward of one of the MLPs of ``liger_kernel.transformers``."""
    for name, value in inspect.getmembers(liger_module, lambda x: isinstance(x, property)):
        if not hasattr(module, name):  # what forward reads of the configuration
            setattr(module, name, value.fget(module))
    _bind_method_to_module(module, "forward", liger_module.forward)


def _gelu_mlp(self: Any, x: Tensor) -> Tensor:
    inner = ops.geglu(self.gate_proj(x), self.up_proj(x), approximate="tanh")
    result: Tensor = self.down_proj(inner)
    return result


def _patch_geglu_module(module: nn.Module) -> None:
    """Let an MLP with gate_proj, up_proj and down_proj run :func:`liger_multi.ops.geglu`."""
    _bind_method_to_module(module, "forward", _gelu_mlp)
