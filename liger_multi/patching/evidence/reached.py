"""What the code of a forward depends on, apart from its module and its inputs.

:class:`Reached` takes functions and returns the functions that they call and the values that they
read, each with its :data:`Place`, or the reason why that cannot be determined.

A forward may call helpers of its file, read a global, close over a variable or append to a global
list. A probe notices none of that, and all of it may change after the patch. So the bytecode is
read. Names that it loads from globals, modules, classes, closures and defaults are followed into
every function that belongs to no library. Patched modules compare these places at every call. Code
that writes, or that reads what cannot be compared, is a reason to leave a module alone::

    SCALE = 2.0  # a number: recorded, and compared at every call of the patched module
    CALLS = []  # a list may change without notice: the module is left alone


    def helper(x):  # followed from ``forward``, which calls it
        CALLS.append(x.shape)
        return x * SCALE

:class:`Outcomes` records which way the branches of these functions went while a probe ran.
"""

from __future__ import annotations

import contextlib
import dis
import enum
import functools
import hashlib
import logging
import sys
import threading
from collections.abc import Iterable, Iterator
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FrameType,
    FunctionType,
    MethodType,
    ModuleType,
)
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

Place: TypeAlias = "tuple[Any, str, Any]"
"""Something with attributes, the name of one, and its value."""

_LIBRARIES = ("torch", "numpy", "transformers", "einops", "peft", "accelerate", "liger_multi")
_STATELESS = ("math", "functools", "itertools", "operator", "typing", "warnings", "logging")
_UNKNOWN = ("transformers.models", "torch.distributed")
"""Parts of these libraries whose code is followed: models, and calls that communicate."""
_CACHED = type(functools.lru_cache(dis.dis))
_FUNCTIONS = (FunctionType, BuiltinFunctionType, type, torch.jit.ScriptFunction, _CACHED)
_WITHOUT_STATE = (ModuleType, CellType, logging.Logger)


class Scope:
    """The globals of a function as attributes."""

    def __init__(self, names: dict[str, Any]) -> None:
        self.__dict__ = names

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Scope) and vars(other) is vars(self)

    def __hash__(self) -> int:
        return id(vars(self))


class Cell:
    """A variable of a closure, in a form that can be hashed."""

    def __init__(self, cell: CellType) -> None:
        self.cell = cell

    @property
    def value(self) -> Any:
        """The value of the variable; the cell itself while it has none."""
        try:
            return self.cell.cell_contents
        except ValueError:
            return self.cell

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Cell) and other.cell is self.cell

    def __hash__(self) -> int:
        return id(self.cell)


class Reached:
    """The functions that some functions call, and the values that they read.

    Args:
        starts: Functions, also bound ones, properties and ``functools.partial``.

    Attributes:
        functions: Those among them that belong to no library.
        by_place: Functions and values by owner and name.
        refusal: Why the rest cannot be determined, or None.
    """

    def __init__(self, starts: Iterable[Any]) -> None:
        self.functions: list[FunctionType] = []
        self.by_place: dict[tuple[Any, str], Any] = {}
        self.refusal: str | None = None
        todo, visited = [part for start in starts for part in _parts_of(start)], set()
        while todo and self.refusal is None:
            function = _function(todo.pop())
            if function is not None and function not in visited:
                visited.add(function)
                todo += self._read(function)

    def _read(self, function: FunctionType) -> list[Any]:
        """Record what a function reads, and return the functions in it that are to be followed."""
        if is_of_library(function):
            places = [place for place in _places_read(function) if _is_function(place[2])]
            self.by_place.update({(owner, name): value for owner, name, value in places})
            return [value for owner, _, value in places if isinstance(owner, Cell)]  # a decorator
        self.functions.append(function)
        to_follow: list[Any] = []
        if names := _loads(function.__code__).written:
            self.refusal = f"its code sets {', '.join(sorted(names))}"
        imported = {name for name in _loads(function.__code__).imports if not _is_known(name)}
        if imported and not _module_of(function).startswith("transformers."):
            self.refusal = f"its code imports {', '.join(sorted(imported))}"
        for owner, name, value in _places_read(function):
            compared = not (isinstance(owner, ModuleType) and is_of_library(owner))
            if _depends_on_state(value):
                self.refusal = f"its code reads {name} of {_module_of(value)}"
            elif _is_function(value) or (compared and token(value) is not None):
                self.by_place[owner, name] = value
                to_follow += _parts_of(value)
            elif compared and not _is_constant(value):
                description = _described(owner, name, value)
                self.refusal = f"its code reads {description}, which may change later"
        return to_follow

    @property
    def places(self) -> tuple[Place, ...]:
        """All that was reached: owner, name and value."""
        return tuple((owner, name, value) for (owner, name), value in self.by_place.items())

    @property
    def digest(self) -> tuple[Any, ...]:
        """A hash of the code, and the values: equal in another process if these are equal."""
        code = hashlib.sha256()
        for function in self.functions:
            code.update(_code_bytes(function.__code__))
        values = [(name, value) for _, name, value in self.places if is_plain(value)]
        return (code.hexdigest(), *values)


@functools.lru_cache(maxsize=4096)
def _code_bytes(code: CodeType) -> bytes:
    """The instructions, names and constants of code, without the path of its file."""
    parts = list(codes(code))
    constants = [c for part in parts for c in part.co_consts if not isinstance(c, CodeType)]
    # sets have another order in every process
    ordered = [sorted(map(repr, c)) if isinstance(c, frozenset) else c for c in constants]
    return repr([*[(part.co_code, part.co_names) for part in parts], ordered]).encode()


def reached(starts: Iterable[Any]) -> tuple[Place, ...] | str:
    """All places that functions reach (:class:`Reached`), or why they cannot be determined."""
    code = Reached(starts)
    return code.refusal or code.places


def _described(owner: Any, name: str, value: Any) -> str:
    """How a message calls a value."""
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


def _is_constant(value: Any) -> bool:
    """Whether a value that cannot be compared counts as constant: modules, transformers' tables."""
    if isinstance(value, (Tensor, nn.Module)):
        return False
    return isinstance(value, _WITHOUT_STATE) or type(value).__module__.startswith("transformers.")


def _parts_of(value: Any) -> list[Any]:
    """The functions in a value: a tuple, a class that belongs to no library, or a function."""
    if isinstance(value, tuple):
        return list(value)
    if isinstance(value, type) and not is_of_library(value):
        return list(vars(value).values())
    return [value]


def still_current(places: Iterable[Place]) -> bool:
    """Whether every place still has its recorded value."""
    for owner, name, recorded in places:
        current = getattr(owner, name, ...)
        if current is not recorded and not (
            type(current) is type(recorded) and bool(current == recorded)
        ):
            return False
    return True


def reads_values(places: Iterable[Place]) -> bool:
    """Whether some places hold values rather than functions, apart from classes of modules."""
    values = [(owner, value) for owner, _, value in places if not _is_function(value)]
    return any(
        not (isinstance(owner, type) and issubclass(owner, nn.Module)) for owner, _ in values
    )


def is_of_library(value: Any) -> bool:
    """Whether a function, class or module belongs to a library, whose behavior stays as it is."""
    return _is_known(_module_of(value))


def _is_known(module_name: str) -> bool:
    is_library = module_name.split(".")[0] in (*_LIBRARIES, *_STATELESS)
    return is_library and not module_name.startswith(_UNKNOWN)


def _module_of(value: Any) -> str:
    if isinstance(value, ModuleType):
        return value.__name__
    # of a function that says it is another's (functools.wraps), where it was written
    source_module = getattr(value, "__globals__", {}).get("__name__")
    return str(source_module or getattr(value, "__module__", None) or "builtins")


def _depends_on_state(value: Any) -> bool:
    """Whether results of a function, or of functions of a module, depend on a process's state."""
    if not isinstance(value, ModuleType) and not _is_function(value):
        return False
    module_name = _module_of(value)
    first = module_name.split(".")[0]
    state = first in sys.stdlib_module_names and first not in (*_STATELESS, "builtins")
    return state or module_name.startswith("torch.distributed")


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


def _places_read(function: FunctionType) -> Iterator[Place]:
    """What the code of a function reads apart from its arguments and local variables."""
    for cell in map(Cell, function.__closure__ or ()):
        yield cell, "value", cell.value
    for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
        if token(value) is None:
            yield function, "__defaults__", value
    names = function.__globals__
    for first, *attributes in _loads(function.__code__).chains:
        if first not in names:
            continue
        owner: Any = Scope(names)
        name, value = first, names[first]
        for name_of_next in attributes:
            if not isinstance(value, (ModuleType, type)) or not hasattr(value, name_of_next):
                break
            owner, name, value = value, name_of_next, getattr(value, name_of_next)
        yield owner, name, value


class _Loads:
    """Global names that code loads, modules that it imports, and what it sets outside of itself."""

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
            writes_outside = step.opname == "STORE_DEREF" and step.argval in code.co_freevars
            writes_outside |= (
                step.opname == "STORE_ATTR" and _owner(steps, i) not in code.co_varnames[:1]
            )
            if writes_outside or step.opname == "STORE_GLOBAL":
                self.written.add(step.argval)


def _owner(steps: list[dis.Instruction], i: int) -> Any:
    """The variable whose attribute an instruction sets."""
    owner = steps[i - 1]
    if owner.opname in ("SWAP", "ROT_TWO"):  # x.name += 1
        name = steps[i].argval
        copies = [
            index
            for index in range(2, i)
            if steps[index].argval == name and steps[index - 1].opname in ("COPY", "DUP_TOP")
        ]
        owner = steps[copies[-1] - 2] if copies else owner
    if "LOAD_FAST" not in owner.opname:
        return None
    return owner.argval[-1] if isinstance(owner.argval, tuple) else owner.argval


_SKIPPED = ("CACHE", "EXTENDED_ARG", "PUSH_NULL", "NOP")


@functools.lru_cache(maxsize=4096)
def _loads(code: CodeType) -> _Loads:
    return _Loads(code)


def codes(code: CodeType) -> Iterator[CodeType]:
    """The code of a function, and of all functions and comprehensions within."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes(constant)


_VALUES = (int, float, bool, complex, str, bytes, type(None), torch.dtype, torch.device, type)


def is_plain(value: Any) -> bool:
    """Whether a value, such as a number or a string, compares equal in another process."""
    if isinstance(value, tuple):
        return all(map(is_plain, value))
    return isinstance(value, (*_VALUES, enum.Enum)) and not isinstance(value, type)


def token(value: Any, owner: nn.Module | None = None) -> tuple[type, Any] | None:
    """Type and value of an attribute in a form that every call can compare; None where none is.

    A method that is bound to ``owner`` is compared by its function, so that equal modules have
    equal tokens.
    """
    value_class = type(value)
    if isinstance(value, (*_VALUES, enum.Enum)):
        return value_class, value
    if value_class is tuple:
        return (value_class, value) if all(token(v) for v in value) else None
    if value_class is FunctionType:
        cells = (contents(cell) for cell in value.__closure__ or ())
        return (value_class, value) if all(token(v) for v in cells) else None
    if value_class is BuiltinFunctionType:
        bound_to = getattr(value, "__self__", None)
        return (
            (value_class, value) if isinstance(bound_to, (type(None), ModuleType, type)) else None
        )
    if value_class is MethodType:
        is_bound = value.__self__ is owner and owner is not None
        return (value_class, value.__func__) if is_bound else None
    if value_class is functools.partial:
        parts = (value.func, value.args, *value.keywords.items())
        return (value_class, parts) if all(token(v) for v in parts) else None
    return None


def contents(cell: CellType) -> Any:
    """The value of a variable of a closure; None while it has none."""
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return None


# --- branches that a probe took one way only ---

# A forward may do something else for long sequences, for a dtype, on a device, or after an
# overflow. A probe that takes one side of a branch proves nothing about the other side. So probes
# are traced. A module is left alone if a condition on its input always had the same outcome,
# unless the other side only raises an error.

_monitoring = threading.RLock()


class Outcomes:
    """The outcomes of the conditions in some functions."""

    def __init__(self, functions: Iterable[FunctionType]) -> None:
        self.codes = {code for function in functions for code in codes(function.__code__)}
        self.branches_taken: dict[tuple[CodeType, int], set[int]] = {}

    def watched(self) -> contextlib.AbstractContextManager[None]:
        """Record outcomes while the functions run in this thread."""
        return self._monitored() if sys.version_info >= (3, 12) else self._traced()

    @contextlib.contextmanager
    def _monitored(self) -> Iterator[None]:
        """By branch events; by a trace where debuggers and profilers took all six tool ids.

        One thread at a time, since the ids are those of the process.
        """
        with _monitoring:
            tools: Any = sys.monitoring  # type: ignore[attr-defined, unused-ignore]
            free_tools = [i for i in range(6) if tools.get_tool(i) is None]
            with self._events(free_tools[-1]) if free_tools else self._traced():
                yield

    @contextlib.contextmanager
    def _events(self, tool: int) -> Iterator[None]:
        """By branch events of these functions alone, alongside debuggers and profilers."""
        monitoring: Any = sys.monitoring  # type: ignore[attr-defined, unused-ignore]
        sides = [getattr(monitoring.events, name, 0) for name in ("BRANCH_LEFT", "BRANCH_RIGHT")]
        events = [event for event in sides if event] or [monitoring.events.BRANCH]
        thread = threading.get_ident()

        def branch(code: CodeType, offset: int, target: int) -> None:
            if threading.get_ident() == thread:
                self.branches_taken.setdefault((code, offset), set()).add(target)

        monitoring.use_tool_id(tool, "liger_multi")
        try:
            for event in events:
                monitoring.register_callback(tool, event, branch)
            for code in self.codes:
                monitoring.set_local_events(tool, code, sum(events))
            yield
        finally:
            for code in self.codes:
                monitoring.set_local_events(tool, code, 0)
            for event in events:
                monitoring.register_callback(tool, event, None)
            monitoring.free_tool_id(tool)

    @contextlib.contextmanager
    def _traced(self) -> Iterator[None]:
        """By a trace of every instruction; a debugger's own trace is restored afterwards."""
        outer_trace = sys.gettrace()
        sys.settrace(self._called)
        try:
            yield
        finally:
            sys.settrace(outer_trace)

    def _called(self, frame: FrameType, event: str, arg: Any) -> Any:
        if frame.f_code not in self.codes:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        last = -1

        def step(frame: FrameType, event: str, arg: Any) -> Any:
            nonlocal last
            if event == "opcode":
                self.branches_taken.setdefault((frame.f_code, last), set()).add(frame.f_lasti)
                last = frame.f_lasti
            return step

        return step

    def one_sided(self, argument_count: int) -> str | None:
        """The place of a condition on the input that had one outcome only, as a reason; or None.

        Args:
            argument_count: Arguments of the recorded calls, without ``self``.
        """
        for code in self.codes:
            for jump in _jumps(code):
                targets = self._targets_of(code, jump.at)
                if len(targets) != 1 or not jump.reads - _constants(code, argument_count):
                    continue
                (taken,) = targets
                not_taken = sum(jump.sides) - taken
                if not _raises(code, not_taken) and not self._leads_to(code, taken, not_taken):
                    location = f"{code.co_filename}:{jump.line}"
                    return f"it has a branch that depends on its input ({location})"
        return None

    def _targets_of(self, code: CodeType, start: int) -> set[int]:
        """Offsets of the instructions that ran after the one at ``start``."""
        return {_from(code, offset) for offset in self.branches_taken.get((code, start), ())}

    def _leads_to(self, code: CodeType, offset: int, end: int) -> bool:
        """Whether the instructions from ``offset`` on led to ``end`` through conditions alone."""
        for step in _steps(code):
            if step.offset < offset:
                continue
            if step.offset == end or step.opname.startswith(_ENDS):
                return step.offset == end
            if "JUMP" in step.opname:
                targets = (
                    self._targets_of(code, step.offset) if "_IF_" in step.opname else {step.argval}
                )
                if len(targets) != 1:
                    return False
                (offset,) = targets
        return False


class _Jump:
    """A conditional jump: its offset, both targets, its line, and the variables of its condition.

    The variables are those loaded since the last instruction that stores, drops or returns a value
    or jumps. They may be more than the condition reads, never fewer.
    """

    def __init__(self, code: CodeType, steps: list[dis.Instruction], i: int) -> None:
        self.at = steps[i].offset
        self.sides = (_from(code, steps[i].argval), steps[i + 1].offset)
        lines = [line for start, line in dis.findlinestarts(code) if line and start <= self.at]
        self.line = lines[-1] if lines else code.co_firstlineno
        self.reads: set[str] = set()
        condition = list(self._previous_steps(steps, i))
        for step in condition:
            if "LOAD_FAST" in step.opname or step.opname == "LOAD_DEREF":  # one or two at once
                self.reads |= {step.argval} if isinstance(step.argval, str) else {*step.argval}
        if _asks_for_none(steps[i], condition):
            self.reads -= {*code.co_varnames[: code.co_argcount]}  # equal in all calls
        if _asks_for_mps(condition) and not torch.backends.mps.is_available():
            self.reads = set()  # this process has no such tensor

    def _previous_steps(self, steps: list[dis.Instruction], i: int) -> Iterator[dis.Instruction]:
        for step in reversed(steps[:i]):
            jumps = "JUMP" in step.opname and step.argval > self.at
            stores_and_loads = step.opname == "STORE_FAST_LOAD_FAST"
            if jumps or (step.opname.startswith(_ENDS) and not stores_and_loads):
                return
            yield step
            if stores_and_loads:
                return


def _asks_for_none(jump: dis.Instruction, condition: list[dis.Instruction]) -> bool:
    """Whether a condition is ``x is None`` or ``x is not None`` of a variable."""
    names = [step.opname for step in condition]
    if jump.opname.endswith("_NONE"):
        return len(names) == 1
    return names[:2] == ["IS_OP", "LOAD_CONST"] and len(names) == 3 and condition[1].argval is None


def _asks_for_mps(condition: list[dis.Instruction]) -> bool:
    """Whether a condition is ``x.device.type == "mps"`` of a variable, or its negation.

    Models ask this to choose the device type for which they disable autocast.
    """
    names = [step.opname for step in condition[:5]]
    return (
        len(names) == 5
        and names[:4] == ["COMPARE_OP", "LOAD_CONST", "LOAD_ATTR", "LOAD_ATTR"]
        and names[4].startswith("LOAD_FAST")
        and [step.argval for step in condition[1:4]] == ["mps", "type", "device"]
    )


_ENDS = ("STORE", "RETURN", "RAISE", "POP_TOP", "JUMP_BACKWARD", "JUMP_ABSOLUTE")
_IGNORED = ("CACHE", "EXTENDED_ARG", "NOT_TAKEN", "RESUME", "MAKE_CELL", "COPY_FREE_VARS")


@functools.lru_cache(maxsize=1024)
def _steps(code: CodeType) -> list[dis.Instruction]:
    return [step for step in dis.get_instructions(code) if step.opname not in _IGNORED]


def _from(code: CodeType, offset: int) -> int:
    """The first instruction from an offset on that is not ignored."""
    return next(step.offset for step in _steps(code) if step.offset >= offset)


@functools.lru_cache(maxsize=1024)
def _jumps(code: CodeType) -> list[_Jump]:
    steps = _steps(code)
    conditional = ["JUMP" in step.opname and "_IF_" in step.opname for step in steps]
    return [_Jump(code, steps, i) for i, it_is in enumerate(conditional[:-1]) if it_is]


def _constants(code: CodeType, argument_count: int) -> set[str]:
    """Variables that do not depend on a call: the module, and arguments with their defaults."""
    left_out = code.co_varnames[1 + argument_count : code.co_argcount + code.co_kwonlyargcount]
    return {"self", "cls", *(left_out if code.co_name == "forward" else ())}


def _raises(code: CodeType, start: int) -> bool:
    """Whether code from an offset on does nothing but raise an error."""
    for step in _steps(code):
        if step.offset < start:
            continue
        if step.opname == "RAISE_VARARGS":
            return True
        if "JUMP" in step.opname or step.opname.startswith(("STORE", "RETURN")):
            return False
    return False
