"""The code that a forward reaches, and what that code reads apart from the module and its input.

A forward may call helpers of its file, read a global number, close over a variable, append to a
global list. None of that is seen by a probe, and all of it may change after the patch. So the
bytecode is read: what it loads by a global name, through a module or a class, from a closure or
from a default is followed into every function that is not a library's. Functions, and values that
can be compared, are noted with the place where they stand, and are compared at every call. What
cannot be compared, and code that writes, is a reason to leave the module alone.
"""

from __future__ import annotations

import dis
import enum
import functools
import hashlib
import logging
import sys
from collections.abc import Iterable, Iterator
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

Place: TypeAlias = "tuple[Any, str, Any]"
"""Something with attributes, the name of one, and its value."""

_LIBRARIES = ("torch", "numpy", "transformers", "einops", "peft", "accelerate", "liger_multi")
_STATELESS = ("math", "functools", "itertools", "operator", "typing", "warnings", "logging")
_UNKNOWN = ("transformers.models", "torch.distributed")
"""Parts of libraries that are looked into: code of models, and calls that communicate."""
_CACHED = type(functools.lru_cache(dis.dis))
_FUNCTIONS = (FunctionType, BuiltinFunctionType, type, torch.jit.ScriptFunction, _CACHED)
_WITHOUT_STATE = (ModuleType, CellType, logging.Logger)


class Scope:
    """The globals of a function, as attributes."""

    def __init__(self, names: dict[str, Any]) -> None:
        self.__dict__ = names

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Scope) and vars(other) is vars(self)

    def __hash__(self) -> int:
        return id(vars(self))


class Cell:
    """A variable of a closure; cells themselves cannot be hashed."""

    def __init__(self, cell: CellType) -> None:
        self.cell = cell

    @property
    def held(self) -> Any:
        """What the variable holds; the cell itself while it holds nothing."""
        try:
            return self.cell.cell_contents
        except ValueError:
            return self.cell

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Cell) and other.cell is self.cell

    def __hash__(self) -> int:
        return id(self.cell)


class Reached:
    """What functions depend on, and the functions that they call.

    Args:
        starts: Functions, also in ``functools.partial``, in properties and bound ones.

    Attributes:
        functions: Those that are not a library's.
        by_place: What stands at which place, by owner and name.
        refusal: Why more cannot be determined, or None.
    """

    def __init__(self, starts: Iterable[Any]) -> None:
        self.functions: list[FunctionType] = []
        self.by_place: dict[tuple[Any, str], Any] = {}
        self.refusal: str | None = None
        todo, visited = [part for start in starts for part in _inside(start)], set()
        while todo and self.refusal is None:
            function = _function(todo.pop())
            if function is not None and function not in visited:
                visited.add(function)
                todo += self._read(function)

    def _read(self, function: FunctionType) -> list[Any]:
        """Note what a function reads; the functions among it, of code that is followed."""
        if is_of_library(function):
            places = [place for place in _places(function) if _is_function(place[2])]
            self.by_place.update({(owner, name): value for owner, name, value in places})
            return [value for owner, _, value in places if isinstance(owner, Cell)]  # a decorator
        self.functions.append(function)
        more: list[Any] = []
        if written := _loads(function.__code__).written:
            self.refusal = f"its code sets {', '.join(sorted(written))}"
        imported = {name for name in _loads(function.__code__).imports if not _is_known(name)}
        if imported and not _home(function).startswith("transformers."):
            self.refusal = f"its code imports {', '.join(sorted(imported))}"
        for owner, name, value in _places(function):
            compared = not (isinstance(owner, ModuleType) and is_of_library(owner))
            if _depends_on_more(value):
                self.refusal = f"its code reads {name} of {_home(value)}"
            elif _is_function(value) or (compared and token(value) is not None):
                self.by_place[owner, name] = value
                more += _inside(value)
            elif compared and not _is_settled(value):
                self.refusal = f"its code reads {_said(owner, name, value)}, which may change later"
        return more

    @property
    def places(self) -> tuple[Place, ...]:
        """What stands at which place."""
        return tuple((owner, name, value) for (owner, name), value in self.by_place.items())

    @property
    def digest(self) -> tuple[Any, ...]:
        """What tells in another process whether code and values are the same ones."""
        code = hashlib.sha256()
        for function in self.functions:
            code.update(_said_by(function.__code__))
        values = [(name, value) for _, name, value in self.places if is_plain(value)]
        return (code.hexdigest(), *values)


@functools.lru_cache(maxsize=4096)
def _said_by(code: CodeType) -> bytes:
    """The instructions, names and constants of code, wherever its file is."""
    parts = list(codes(code))
    constants = [c for part in parts for c in part.co_consts if not isinstance(c, CodeType)]
    # sets have another order in every process
    known = [sorted(map(repr, c)) if isinstance(c, frozenset) else c for c in constants]
    return repr([*[(part.co_code, part.co_names) for part in parts], known]).encode()


def reached(starts: Iterable[Any]) -> tuple[Place, ...] | str:
    """What functions depend on, or why that cannot be determined; see :class:`Reached`."""
    code = Reached(starts)
    return code.refusal or code.places


def _said(owner: Any, name: str, value: Any) -> str:
    if isinstance(owner, FunctionType):
        return "a default that is mutable"
    class_name = type(value).__name__
    return (
        f"a variable of a closure ({class_name})"
        if isinstance(owner, Cell)
        else f"{name} ({class_name})"
    )


def _is_function(value: Any) -> bool:
    bound = isinstance(value, MethodType) and isinstance(value.__self__, (type, ModuleType))
    return bound or isinstance(value, _FUNCTIONS)


def _is_settled(value: Any) -> bool:
    """Whether a value that cannot be compared is left alone: a module, tables of transformers."""
    if isinstance(value, (Tensor, nn.Module)):
        return False
    return isinstance(value, _WITHOUT_STATE) or type(value).__module__.startswith("transformers.")


def _inside(value: Any) -> list[Any]:
    """The functions that a value stands for, or brings."""
    if isinstance(value, tuple):
        return list(value)
    if isinstance(value, type) and not is_of_library(value):
        return list(vars(value).values())
    return [value]


def holds(places: Iterable[Place]) -> bool:
    """Whether every place has the value that it had."""
    for owner, name, recorded in places:
        now = getattr(owner, name, ...)
        if now is not recorded and not (type(now) is type(recorded) and bool(now == recorded)):
            return False
    return True


def reads_values(places: Iterable[Place]) -> bool:
    """Whether there are values among them, those of modules' classes aside."""
    values = [(owner, value) for owner, _, value in places if not _is_function(value)]
    return any(
        not (isinstance(owner, type) and issubclass(owner, nn.Module)) for owner, _ in values
    )


def is_of_library(value: Any) -> bool:
    """Whether a function, class or module belongs to a library, whose behavior stays as it is."""
    return _is_known(_home(value))


def _is_known(home: str) -> bool:
    known = home.split(".")[0] in (*_LIBRARIES, *_STATELESS)
    return known and not home.startswith(_UNKNOWN)


def _home(value: Any) -> str:
    if isinstance(value, ModuleType):
        return value.__name__
    # of a function that says it is another's (functools.wraps), where it was written
    written = getattr(value, "__globals__", {}).get("__name__")
    return str(written or getattr(value, "__module__", None) or "builtins")


def _depends_on_more(value: Any) -> bool:
    """Whether a function or a module has results that depend on more than its arguments."""
    if not isinstance(value, ModuleType) and not _is_function(value):
        return False
    home = _home(value)
    first = home.split(".")[0]
    state = first in sys.stdlib_module_names and first not in (*_STATELESS, "builtins")
    return state or home.startswith("torch.distributed")


def _function(value: Any) -> FunctionType | None:
    while True:
        if isinstance(value, functools.partial):
            value = value.func
        elif isinstance(value, (MethodType, staticmethod, classmethod)):
            value = value.__func__
        elif isinstance(value, property):
            value = value.fget
        elif isinstance(value, _CACHED):
            value = value.__wrapped__
        else:
            return value if isinstance(value, FunctionType) else None


def _places(function: FunctionType) -> Iterator[Place]:
    """What the code of a function reads that is no argument and no variable of its own."""
    for cell in function.__closure__ or ():
        held = Cell(cell)
        yield held, "held", held.held
    for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
        if token(value) is None:
            yield function, "__defaults__", value
    names = function.__globals__
    for first, *rest in _loads(function.__code__).chains:
        if first not in names:
            continue
        owner: Any = Scope(names)
        name, value = first, names[first]
        for name_of_next in rest:
            if not isinstance(value, (ModuleType, type)) or not hasattr(value, name_of_next):
                break
            owner, name, value = value, name_of_next, getattr(value, name_of_next)
        yield owner, name, value


class _Loads:
    """What code loads by global names, imports, and sets apart from its own variables."""

    def __init__(self, code: CodeType) -> None:
        self.chains: dict[tuple[str, ...], None] = {}
        self.imports: set[str] = set()
        self.written: set[str] = set()
        for part in codes(code):
            self._read(part)

    def _read(self, code: CodeType) -> None:
        steps = [step for step in dis.get_instructions(code) if step.opname not in _SKIPPED]
        chain: list[str] = []
        for i, step in enumerate(steps):
            if step.opname in ("LOAD_ATTR", "LOAD_METHOD") and chain:
                chain.append(step.argval)
                continue
            if chain:
                self.chains[tuple(chain)] = None
            chain = [step.argval] if step.opname in ("LOAD_GLOBAL", "LOAD_NAME") else []
            if step.opname == "IMPORT_NAME":
                self.imports.add(step.argval)
            outside = step.opname == "STORE_DEREF" and step.argval in code.co_freevars
            outside |= step.opname == "STORE_ATTR" and _owner(steps, i) not in code.co_varnames[:1]
            if outside or step.opname == "STORE_GLOBAL":
                self.written.add(step.argval)


def _owner(steps: list[dis.Instruction], i: int) -> Any:
    """The variable whose attribute an instruction sets."""
    owner = steps[i - 1]
    if owner.opname in ("SWAP", "ROT_TWO"):  # x.name += 1
        name = steps[i].argval
        asked = [
            at
            for at in range(2, i)
            if steps[at].argval == name and steps[at - 1].opname in ("COPY", "DUP_TOP")
        ]
        owner = steps[asked[-1] - 2] if asked else owner
    if "LOAD_FAST" not in owner.opname:
        return None
    return owner.argval[-1] if isinstance(owner.argval, tuple) else owner.argval


_SKIPPED = ("CACHE", "EXTENDED_ARG", "PUSH_NULL", "NOP")


@functools.lru_cache(maxsize=4096)
def _loads(code: CodeType) -> _Loads:
    return _Loads(code)


def codes(code: CodeType) -> Iterator[CodeType]:
    """The code of a function, and of the functions and comprehensions in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes(constant)


_VALUES = (int, float, bool, complex, str, bytes, type(None), torch.dtype, torch.device, type)


def is_plain(value: Any) -> bool:
    """Whether a value is a number, a text or another one that is equal in another process."""
    if isinstance(value, tuple):
        return all(map(is_plain, value))
    return isinstance(value, (*_VALUES, enum.Enum)) and not isinstance(value, type)


def token(value: Any, owner: nn.Module | None = None) -> tuple[type, Any] | None:
    """Type and value of an attribute that can be compared at every call, or None.

    The owner of a bound method is left out, so that equal modules have equal tokens.
    """
    value_class = type(value)
    if isinstance(value, (*_VALUES, enum.Enum)):
        return value_class, value
    if value_class is tuple:
        return (value_class, value) if all(token(v) for v in value) else None
    if value_class is FunctionType:
        inside = (_held(cell) for cell in value.__closure__ or ())
        return (value_class, value) if all(token(v) for v in inside) else None
    if value_class is BuiltinFunctionType:
        of = getattr(value, "__self__", None)
        return (value_class, value) if isinstance(of, (type(None), ModuleType, type)) else None
    if value_class is MethodType:
        same = value.__self__ is owner and owner is not None
        return (value_class, value.__func__) if same else None
    if value_class is functools.partial:
        parts = (value.func, value.args, *value.keywords.items())
        return (value_class, parts) if all(token(v) for v in parts) else None
    return None


def _held(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return None
