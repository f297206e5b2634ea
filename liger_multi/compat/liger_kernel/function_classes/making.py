"""How a function becomes a class with ``apply``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class _Traced(type(torch.autograd.Function)):  # type: ignore[misc]
    """The metaclass of ``autograd.Function``, by another name.

    ``torch.compile`` takes over ``apply`` of classes of exactly that metaclass, and traces their
    forward, which these do not have. Of others it traces ``apply`` as it does any function.
    """


def function_class(call: Callable[..., Any]) -> type[torch.autograd.Function]:
    """The class of the function's name whose ``apply`` it is; autograd is that of the operator."""
    names = {"apply": staticmethod(call), "__doc__": call.__doc__, "__module__": call.__module__}
    made: type[torch.autograd.Function] = _Traced(call.__name__, (torch.autograd.Function,), names)
    return made
