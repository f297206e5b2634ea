"""Liger-Kernel's signatures, derived from the one function that does the work.

A loss stands in Liger-Kernel as a function, as a class with ``apply``, as a module and in
``liger_kernel.functional``, with other names and another order of the same arguments. Here one
function has the defaults, and the others are lists of names.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

Call = Callable[..., Any]


def parameters(names: str, like: Call, **defaults: Any) -> dict[str, inspect.Parameter]:
    """Parameters by name, with the defaults of ``like``; what it does not know defaults to None.

    Args:
        names: In order. ``theirs:ours`` renames one.
        like: Has the defaults.
        defaults: Defaults that differ.
    """
    known, parameters = inspect.signature(like).parameters, {}
    for name, _, ours in (entry.partition(":") for entry in names.split()):
        own = known.get(ours or name)
        default = defaults.get(name, own.default if own else None)
        parameters[name] = inspect.Parameter(
            name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default
        )
    return parameters


def adapter(call: Call, names: str, like: Call | None = None, **defaults: Any) -> Call:
    """A function that hands its arguments to ``call`` by name.

    Args:
        call: Does the work.
        names: As for :func:`parameters`. What neither ``like`` nor ``defaults`` knows is taken and
            left out.
        like: Has the signature of ``call``, where that takes any keywords.
        defaults: Defaults that differ.
    """
    like = like or call
    known = {*inspect.signature(like).parameters, *defaults}
    ours = {n: o or n for n, _, o in (entry.partition(":") for entry in names.split())}
    order, idle = tuple(ours), frozenset(n for n, o in ours.items() if o not in known)

    def run(*args: Any, **kwargs: Any) -> Any:
        if len(args) > len(order):
            raise TypeError(f"takes {len(order)} arguments ({', '.join(order)}), got {len(args)}")
        arguments = {**defaults, **dict(zip(order, args)), **kwargs}
        return call(**{ours.get(n, n): value for n, value in arguments.items() if n not in idle})

    shown = parameters(names, like, **defaults).values()
    run.__signature__ = _signature(shown)  # type: ignore[attr-defined]
    run.__doc__ = call.__doc__
    return run


def _signature(shown: Any) -> inspect.Signature:
    """One whose required arguments may stand behind optional ones, which then are required too."""
    parameters, empty = [*shown], inspect.Parameter.empty
    last = max((i for i, p in enumerate(parameters) if p.default is empty), default=-1)
    return inspect.Signature(
        [p.replace(default=empty) if i < last else p for i, p in enumerate(parameters)]
    )


class _Traced(type(torch.autograd.Function)):  # type: ignore[misc]
    """The metaclass of ``autograd.Function``, by another name.

    ``torch.compile`` takes over ``apply`` of classes of exactly that metaclass, and traces their
    forward, which these do not have. Of others it traces ``apply`` as it does any function.
    """


def function_class(name: str, call: Call) -> type[torch.autograd.Function]:
    """A class whose ``apply`` is a function; autograd is that of the operator."""
    names = {"apply": staticmethod(call), "__doc__": call.__doc__, "__module__": call.__module__}
    function: type[torch.autograd.Function] = _Traced(name, (torch.autograd.Function,), names)
    return function
