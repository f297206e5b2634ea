"""What somebody's ``autograd.Function`` was called with, while it runs."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any

import torch

from liger_multi._torch_private import DYNAMO, function_apply_code

_METHODS = ("forward", "setup_context")
_outside: list[Callable[[FrameType, type], list[Any]]] = []


def arguments_of_functions(of_type: type) -> Iterator[Any]:
    """The arguments of a type of every ``autograd.Function`` whose forward runs in this thread."""
    look: Callable[[FrameType, type], list[Any]] = arguments_of_a_forward
    if DYNAMO in sys.modules:  # a compiler that is at work does not look into it
        if not _outside:
            _outside.append(sys.modules[DYNAMO].disable(look))
        look = _outside[0]
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if function_apply_code is None:
            yield from look(frame, of_type)
        elif frame.f_code is function_apply_code:
            yield from (x for x in frame.f_locals.get("args", ()) if isinstance(x, of_type))
        frame = frame.f_back


def arguments_of_a_forward(frame: FrameType, of_type: type) -> list[Any]:
    """The arguments of a type of a frame, if it is the forward of an ``autograd.Function``.

    ``Function.apply`` of PyTorch 2.14 and newer has no frame: it calls forward from C++.
    """
    names = inspect.getargs(frame.f_code)
    values = [frame.f_locals[n] for n in names.args if n in frame.f_locals]
    values.append(frame.f_locals.get(names.varargs or "", ()))
    several = [x for value in values if type(value) is tuple for x in value]
    matching = [x for x in (*values, *several) if isinstance(x, of_type)]
    return matching if matching and _is_forward(frame.f_code) else []


def _is_forward(code: CodeType) -> bool:
    classes: list[Any] = [torch.autograd.Function]
    while classes:
        function_class = classes.pop()
        classes += type.__subclasses__(function_class)
        if any(_code_of(vars(function_class).get(name)) is code for name in _METHODS):
            return True
    return False


def _code_of(method: Any) -> CodeType | None:
    method = getattr(method, "__func__", method)  # of a static or class method
    while hasattr(method, "func"):  # of a partial function
        method = method.func
    return getattr(method, "__code__", None)
