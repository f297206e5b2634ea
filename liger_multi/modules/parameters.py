"""Where the tensors of a module are read, and which of them a read computes.

``torch.nn.utils.parametrize`` puts a property in the place of a parameter. Every read evaluates it:
spectral norm makes a step of its power iteration, noise is drawn, QAT updates its observers. So a
module is looked at through :func:`stored`, which evaluates nothing, and a forward reads a computed
weight once, through :class:`Evaluated`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn


def is_computed(module: nn.Module, name: str = "weight") -> bool:
    """Whether reading an attribute of a module runs code: a parametrization, or a property."""
    if hasattr(type(module), name):  # a property, which hides what the tables hold
        return True
    attributes = module.__dict__
    return not (
        name in attributes["_parameters"] or name in attributes["_buffers"] or name in attributes
    )


def stored(module: nn.Module, name: str = "weight") -> Tensor | None:
    """The tensor that a module holds under a name; None where a read would compute it."""
    if is_computed(module, name):
        return None
    attributes: dict[str, Any] = module.__dict__
    for table in (attributes["_parameters"], attributes["_buffers"], attributes):
        value = table.get(name)
        if isinstance(value, Tensor):
            return value
    return None


def has(module: nn.Module | None, name: str) -> bool:
    """Whether a module has a tensor of a name, which is not evaluated if it is computed."""
    if module is None:
        return False
    return hasattr(type(module), name) or stored(module, name) is not None


def declared(module: nn.Module, name: str = "weight") -> Tensor | None:
    """A stored tensor, or the original of a parametrization that keeps its shape and dtype.

    A parametrization does unless it was registered as unsafe. None for all other computed tensors.
    """
    lists: Any = module._modules.get("parametrizations")
    if lists is None or name not in lists:
        return stored(module, name)
    original = None if getattr(lists[name], "unsafe", True) else getattr(lists[name], "original", 0)
    return original if isinstance(original, Tensor) else None


def dtype_of(module: nn.Module, name: str = "weight") -> torch.dtype | None:
    """The dtype of a tensor of a module; computed only where nothing else tells it."""
    tensor = declared(module, name)
    tensor = getattr(module, name, None) if tensor is None else tensor
    return tensor.dtype if isinstance(tensor, Tensor) else None


class Job:
    """What a head should do instead of a plain forward; passed through ``head.__call__``.

    Going through the call lets the hooks of FSDP and ZeRO gather the weight first.
    """

    def __init__(self, run: Callable[[Any, Tensor], Any]) -> None:
        self.run = run


class Evaluated:
    """A linear layer whose computed weight and bias were read once; the rest is the layer's.

    Args:
        layer: The layer.
        forward: Its own forward, called with this object, where it finds the tensors.
    """

    def __init__(self, layer: Any, forward: Callable[..., Any] = nn.Linear.forward) -> None:
        self.layer, self.own_forward = layer, forward
        self.weight: Tensor = layer.weight
        self.bias: Tensor | None = layer.bias

    def stock_forward(self, hidden: Tensor) -> Tensor:
        """The forward of the layer."""
        return cast(Tensor, self.own_forward(self, hidden))

    def __getattr__(self, name: str) -> Any:
        """All that was not read before."""
        return getattr(self.layer, name)
