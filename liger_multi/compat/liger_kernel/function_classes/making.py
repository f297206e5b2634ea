"""How a function becomes a class with ``apply``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def function_class(call: Callable[..., Any]) -> type[torch.autograd.Function]:
    """The class of the function's name whose ``apply`` it is; autograd is that of the operator."""
    names = {"apply": staticmethod(call), "__doc__": call.__doc__, "__module__": call.__module__}
    return type(call.__name__, (torch.autograd.Function,), names)
