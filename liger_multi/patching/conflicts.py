"""Patches of other libraries, by where the functions come from: reported, never stacked upon."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import nn

from liger_multi.patching.swap import has_own_forward, stock_class

LIBRARIES = {
    "liger_kernel": "Liger",
    "unsloth": "Unsloth",
    "unsloth_zoo": "Unsloth",
    "kernels": "a hub kernel",
    "trl": "TRL",
    "cut_cross_entropy": "Cut Cross Entropy",
    "axolotl": "axolotl",
}
"""Top-level packages that replace forwards, functions or losses, and how messages call them."""


def owner(function: Any) -> str | None:
    """Which of these libraries a function, method or class comes from."""
    function = getattr(function, "__func__", function)
    root = str(getattr(function, "__module__", "") or "").partition(".")[0]
    return LIBRARIES.get(root)


def of_module(module: nn.Module) -> str | None:
    """Why a module is not ours to patch: its forward was replaced, on it or on its class."""
    kind = stock_class(module)
    held = vars(module).get("forward")
    if held is not None and not has_own_forward(module):
        found = owner(held)
        return f"{found} replaced its forward" if found else "somebody else replaced its forward"
    for where in (kind, kind.forward):
        found = owner(where)
        if found:
            return f"{found} serves it ({kind.__name__})"
    return None


def of_model(model: nn.Module) -> str | None:
    """Why a model's loss is not ours: the forward that holds it, or the loss function itself."""
    found = owner(vars(model).get("forward")) or owner(stock_class(model).forward)
    if found:
        return f"{found} replaced the forward of {type(model).__name__}, with the loss in it"
    found = owner(F.cross_entropy)
    return f"{found} replaced torch.nn.functional.cross_entropy" if found else None
