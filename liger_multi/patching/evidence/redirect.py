"""Copies of methods that call another function under a global name.

:func:`redirected` takes a method and functions by global name. It returns a copy of the method that
calls these functions; all other callers of the names are unaffected.

A modeling file calls its rotary function by a global name, from methods that all its models share.
There are three ways to replace it for one model:

* Assign another function to the name. This acts on the whole process. Unpatched models, other
  threads and copies would have to be told apart at every call, and users would have to be counted.
* Copy the method with globals of its own. The copy would miss what the file defines or replaces
  later. Dynamo guards globals of the module that ``__name__`` names, so it would guard the wrong
  object.
* Copy the method with code that loads another name from the same globals. This is done here.

The copy is an ordinary function of its file: its other globals are live, decorators and ``super()``
keep their cells, compilers trace it, and tracebacks show the original source. The class of an
instance decides whether it runs, so ``unpatch`` restores the class and nothing else. The file keeps
one private name, which only the copies load.
"""

from __future__ import annotations

import dis
import functools
from collections.abc import Callable, Iterator, Mapping
from types import CellType, CodeType, FunctionType
from typing import Any, cast

import torch

from liger_multi._torch_private import constant_in_graphs
from liger_multi.dispatch.autograd import transforming
from liger_multi.patching.evidence import reached


def methods(module_class: type) -> dict[str, FunctionType]:
    """The methods of a module's class by name, without those of PyTorch's own classes."""
    attributes: dict[str, Any] = {}
    for owner in module_class.__mro__:
        if not owner.__module__.startswith(("torch.", "builtins")):
            for name, value in vars(owner).items():
                attributes.setdefault(name, value)
    return {name: value for name, value in attributes.items() if isinstance(value, FunctionType)}


def calls(function: FunctionType, accepts: Callable[[str, Any], bool]) -> dict[str, Any]:
    """The globals that a method, or a function that it decorates, loads and ``accepts`` takes."""
    return {
        name: layer.__globals__[name]
        for layer in _layers(function)
        for name in sorted(_names(layer.__code__))
        if name in layer.__globals__ and accepts(name, layer.__globals__[name])
    }


def while_current(function: FunctionType, name: str, target: FunctionType) -> FunctionType:
    """``target`` while the test of :func:`currency_of` is true, else what the name is then."""
    namespace, is_current = _namespace(function, name), currency_of(function, name)

    def call_current(*args: Any, **kwargs: Any) -> Any:
        if is_current():
            return target(*args, **kwargs)
        return namespace[name](*args, **kwargs)

    call_current.__name__ = target.__name__
    return cast(FunctionType, call_current)


def currency_of(function: FunctionType, name: str) -> Callable[[], bool]:
    """A test whether a global name of a method still stands for the same function.

    That function must also read the same values as now. A compiled graph would keep such values,
    so the test fails there if the function reads any.
    """
    namespace = _namespace(function, name)
    stock = namespace[name]
    places_or_refusal = reached.reached([getattr(stock, "forward", stock)])
    places = () if isinstance(places_or_refusal, str) else places_or_refusal
    has_values = reached.reads_values(places)

    @constant_in_graphs
    def current() -> bool:
        return namespace.get(name) is stock and reached.still_current(places) and not transforming()

    return lambda: current() and not (has_values and torch.compiler.is_compiling())


def _namespace(function: FunctionType, name: str) -> dict[str, Any]:
    """The globals in which a method, or a function that it decorates, looks up a name."""
    layers = [layer for layer in _layers(function) if name in _names(layer.__code__)]
    return next(layer.__globals__ for layer in layers if name in layer.__globals__)


@functools.lru_cache(maxsize=1024)
def names(function: FunctionType) -> frozenset[str]:
    """The attributes and globals that a method, and functions that it decorates, load by name."""
    return frozenset(name for layer in _layers(function) for name in _names(layer.__code__))


def variables(function: FunctionType) -> set[str]:
    """The names of the local variables of a method and of functions that it decorates."""
    return {name for layer in _layers(function) for name in layer.__code__.co_varnames}


@functools.lru_cache(maxsize=1024)
def refusal(function: FunctionType, name: str) -> str | None:
    """Why a copy of a method cannot load another global in place of ``name``, or None."""
    for layer in _layers(function):
        for code in reached.codes(layer.__code__):
            for step in dis.get_instructions(code):
                uses_name = step.opcode in dis.hasname and step.argval == name
                if uses_name and step.opname != "LOAD_GLOBAL":
                    return (
                        f"{function.__qualname__} uses the name {name} for something else as well"
                    )
    return None


def only_calls(function: FunctionType, argument: str, method: str) -> bool:
    """Whether a method only compares an argument with None and calls one method of it.

    Unknown bytecode counts as another use.
    """
    return all(
        _is_call_or_comparison(step, next_step, method)
        for layer in _layers(function)
        for code in reached.codes(layer.__code__)
        for step, next_step in _neighbors(code)
        if step.argval == argument or (isinstance(step.argval, tuple) and argument in step.argval)
    )


def _neighbors(code: CodeType) -> Iterator[tuple[dis.Instruction, dis.Instruction | None]]:
    steps = list(dis.get_instructions(code))
    return zip(steps, [*steps[1:], None], strict=True)


def _is_call_or_comparison(
    step: dis.Instruction, next_step: dis.Instruction | None, method: str
) -> bool:
    loads = step.opname.startswith("LOAD_FAST") and isinstance(step.argval, str)
    if not loads or next_step is None:
        return False
    if next_step.opname in ("LOAD_METHOD", "LOAD_ATTR"):
        return bool(next_step.argval == method)
    is_none = next_step.opname == "LOAD_CONST" and next_step.argval is None
    jumps = next_step.opname.startswith("POP_JUMP") and next_step.opname.endswith("_NONE")
    return is_none or jumps


def redirected(
    function: FunctionType,
    targets: Mapping[str, FunctionType],
    wrap: Callable[[FunctionType], FunctionType] = lambda function_copy: function_copy,
) -> FunctionType:
    """A copy of a method that calls ``targets`` in place of the globals of these names.

    The targets are added to the globals of the method under their own ``__name__``. ``wrap``
    wraps the copy, also where the method refers to itself.
    """
    inner, inner_copy = _inner(function), None
    cells, itself = list(function.__closure__ or ()), None
    for index, cell in enumerate(cells):
        contents = reached.contents(cell)
        if inner is not None and contents is inner:
            inner_copy = redirected(inner, targets)
            cells[index] = CellType(inner_copy)
        elif contents is function:  # a function that checks whether it is the method of a class
            itself = cells[index] = CellType()
    new_names = {n: t.__name__ for n, t in targets.items() if n in _names(function.__code__)}
    function.__globals__.update({t.__name__: t for n, t in targets.items() if n in new_names})
    copied = FunctionType(
        _renamed(function.__code__, new_names),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        tuple(cells),
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    functools.update_wrapper(copied, function)
    del copied.__wrapped__  # type: ignore[attr-defined]
    if "__wrapped__" in vars(function):
        copied.__wrapped__ = inner_copy or vars(function)["__wrapped__"]  # type: ignore[attr-defined]
    copied = wrap(copied)
    if itself is not None:
        itself.cell_contents = copied
    return copied


def _layers(function: FunctionType) -> Iterator[FunctionType]:
    """A function, and the functions that its decorators wrap."""
    layer: FunctionType | None = function
    while layer is not None:
        yield layer
        layer = _inner(layer)


def _inner(function: FunctionType) -> FunctionType | None:
    """The function that a decorator wraps and keeps in a closure."""
    inner = vars(function).get("__wrapped__")
    contents = any(reached.contents(cell) is inner for cell in function.__closure__ or ())
    return inner if contents and isinstance(inner, FunctionType) else None


def _names(code: CodeType) -> set[str]:
    return {name for part in reached.codes(code) for name in part.co_names}


def _renamed(code: CodeType, names: Mapping[str, str]) -> CodeType:
    """The code with other names in its tables of names."""
    return code.replace(
        co_names=tuple(names.get(name, name) for name in code.co_names),
        co_consts=tuple(
            _renamed(c, names) if isinstance(c, CodeType) else c for c in code.co_consts
        ),
    )
