"""Modules whose methods call functions of ours under global names of their modeling file.

A behavior says which calls of a class it serves, and by what. The methods are made with the class
of an instance: copies that load our function (:mod:`liger_multi.patching.evidence.redirect`).
"""

from __future__ import annotations

import functools
from types import FunctionType
from typing import Any, TypeAlias, cast

from liger_multi._torch_private import constant_in_graphs
from liger_multi.patching.evidence import redirect
from liger_multi.patching.options import Options
from liger_multi.patching.swap import Patched, Swap

Call: TypeAlias = "tuple[str, FunctionType, str, Any]"
"""A method's name, the method, a global name that it calls, and what stands there."""


class Calling(Patched):
    """A module whose methods call other functions than those of its class."""

    def __init_subclass__(cls, **keywords: Any) -> None:
        """Make the methods with the class: it is made wherever something patches or unpickles."""
        super().__init_subclass__(**keywords)
        if "_liger_multi_swap" in vars(cls):
            renew(cls)

    @staticmethod
    def find_calls(stock: type) -> list[Call]:
        """The calls of a class that are served."""
        raise NotImplementedError

    @staticmethod
    def served(name: str, called: Any, settings: Any) -> FunctionType:
        """The function that replaces a call; :func:`named` by its options."""
        raise NotImplementedError

    @staticmethod
    def whole(method: Any, copy: FunctionType, settings: Any) -> FunctionType:
        """The method that replaces one, whose ``copy`` calls the functions that are served."""
        return copy


def renew(patched_class: type) -> None:
    """Make the methods of a class of ours from those that its original class has now."""
    patched_class = next(
        k for k in patched_class.__mro__ if any(b.__base__ is Calling for b in k.__bases__)
    )
    swap: Swap = vars(patched_class)["_liger_multi_swap"]
    behavior = cast("type[Calling]", swap.behavior)
    methods: dict[str, tuple[FunctionType, dict[str, Any]]] = {}
    for method, function, name, called in behavior.find_calls(swap.stock):
        methods.setdefault(method, (function, {}))[1][name] = called
    if methods == vars(patched_class).get("_liger_multi_methods"):
        return
    for method in vars(patched_class).get("_liger_multi_methods", {}):
        delattr(patched_class, method)
    for method, (function, used) in methods.items():
        targets = {
            name: redirect.while_current(
                function, name, behavior.served(name, called, swap.settings)
            )
            for name, called in used.items()
        }
        around = functools.partial(_while_it_holds, swap=swap, name=method)
        setattr(patched_class, method, redirect.redirected(function, targets, around))
    patched_class._liger_multi_methods = methods  # type: ignore[attr-defined]


def _while_it_holds(copy: FunctionType, swap: Swap, name: str) -> FunctionType:
    """A method that is the copy, as long as the original class has what it was copied from.

    It may be called, by somebody who holds it, when the module has its original class again.
    """
    behavior, stock = cast("type[Calling]", swap.behavior), swap.stock
    ours = behavior.whole(getattr(stock, name), copy, swap.settings)

    @functools.wraps(copy)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        module_class = type(self)
        if issubclass(module_class, behavior) and _method_holds(module_class, name):
            return ours(self, *args, **kwargs)
        return getattr(stock, name)(self, *args, **kwargs)

    return cast(FunctionType, method)


@constant_in_graphs
def _method_holds(module_class: Any, name: str) -> bool:
    copied_from, _ = module_class._liger_multi_methods[name]
    return getattr(module_class._liger_multi_swap.stock, name, None) is copied_from


def named(function: Any, name: str, options: Options) -> FunctionType:
    """The name that a function has in the globals of a modeling file."""
    suffix = "".join(f"_{value}" for value in options.shown().values())
    function.__name__ = f"_liger_multi_{name}{suffix}"
    return cast(FunctionType, function)
