"""What the modules share: numbers of a constructor, and the text of those that were changed."""

from __future__ import annotations

import inspect

from torch import Tensor, nn

from liger_multi import checks
from liger_multi.ops._divergence import REDUCTIONS


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
    """The arguments of the constructor that are not at their defaults, as it takes them."""
    found = []
    for name, parameter in inspect.signature(type(module)).parameters.items():
        value = getattr(module, name, parameter.default)
        shown = parameter.default is not parameter.empty and not isinstance(value, Tensor)
        if shown and value != parameter.default:
            found.append(f"{name}={value!r}")
    return ", ".join(found)


def divergence_options(name: str, temperature: float, ignore_index: int, reduction: str) -> None:
    """Check the options that all divergences share."""
    checks.number(name, "temperature", temperature, 0.0, above=True)
    checks.integer(name, "ignore_index", ignore_index)
    checks.one_of(name, "reduction", reduction, REDUCTIONS)
