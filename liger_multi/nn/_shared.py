"""Shared by modules: checks of widths, and ``extra_repr``."""

from __future__ import annotations

import inspect

from torch import Tensor, nn

from liger_multi import checks


def size(module: str, name: str, value: object) -> int:
    """A number of features."""
    number = checks.integer(module, name, value)
    if number < 1:
        raise ValueError(f"{module}: {name} must be at least 1, got {number}")
    return number


def fits(module: nn.Module, x: Tensor, width: int) -> None:
    """The last axis of an input has the width of the module, also where no weight says so."""
    if not isinstance(x, Tensor) or x.ndim == 0 or x.shape[-1] != width:
        raise ValueError(
            f"{type(module).__name__}: the last axis of the input must be {width}, "
            f"got {checks.describe(x)}"
        )


def changed(module: nn.Module) -> str:
    """Constructor arguments that differ from their defaults, as text."""
    texts = []
    for name, parameter in inspect.signature(type(module)).parameters.items():
        value = getattr(module, name, parameter.default)
        shown = parameter.default is not parameter.empty and not isinstance(value, Tensor)
        if shown and value != parameter.default:
            texts.append(f"{name}={value!r}")
    return ", ".join(texts)
