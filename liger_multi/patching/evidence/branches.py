"""Branches on the input that a probe took one way only.

A forward may do something else for a long sequence, for one dtype, on one kind of device, or where
a number overflows. A probe runs one side, and its result holds for that side only. So the probe is
traced: a condition that reads more than the module and had one outcome only is a reason to leave
the module alone. It is no reason where the other side raises an error.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import sys
import threading
from collections.abc import Iterable, Iterator
from types import CodeType, FrameType, FunctionType
from typing import Any

import torch

from liger_multi.patching.evidence.reached import codes

_monitoring = threading.RLock()


class Outcomes:
    """Where the conditions of some functions went."""

    def __init__(self, functions: Iterable[FunctionType]) -> None:
        self.codes = {code for function in functions for code in codes(function.__code__)}
        self.branches_taken: dict[tuple[CodeType, int], set[int]] = {}

    def watched(self) -> contextlib.AbstractContextManager[None]:
        """Note them while the functions run in this thread."""
        return self._monitored() if sys.version_info >= (3, 12) else self._traced()

    @contextlib.contextmanager
    def _monitored(self) -> Iterator[None]:
        """By branch events, one thread at a time: there are six places for tools in a process.

        Where debuggers and profilers took all of them, by a trace.
        """
        with _monitoring:
            tools: Any = sys.monitoring  # type: ignore[attr-defined, unused-ignore]
            free = [i for i in range(6) if tools.get_tool(i) is None]
            with self._events(free[-1]) if free else self._traced():
                yield

    @contextlib.contextmanager
    def _events(self, tool: int) -> Iterator[None]:
        """By branch events of these functions alone, alongside debuggers and profilers."""
        monitoring: Any = sys.monitoring  # type: ignore[attr-defined, unused-ignore]
        kinds = [getattr(monitoring.events, name, 0) for name in ("BRANCH_LEFT", "BRANCH_RIGHT")]
        kinds = [event for event in kinds if event] or [monitoring.events.BRANCH]
        thread = threading.get_ident()

        def branch(code: CodeType, at: int, to: int) -> None:
            if threading.get_ident() == thread:
                self.branches_taken.setdefault((code, at), set()).add(to)

        monitoring.use_tool_id(tool, "liger_multi")
        try:
            for event in kinds:
                monitoring.register_callback(tool, event, branch)
            for code in self.codes:
                monitoring.set_local_events(tool, code, sum(kinds))
            yield
        finally:
            for code in self.codes:
                monitoring.set_local_events(tool, code, 0)
            for event in kinds:
                monitoring.register_callback(tool, event, None)
            monitoring.free_tool_id(tool)

    @contextlib.contextmanager
    def _traced(self) -> Iterator[None]:
        """By a trace of every instruction; that of a debugger comes back."""
        before = sys.gettrace()
        sys.settrace(self._called)
        try:
            yield
        finally:
            sys.settrace(before)

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
        """Why the module is left: a condition on the input had one outcome only; or None.

        Args:
            argument_count: How many arguments the calls had after the module.
        """
        for code in self.codes:
            for jump in _jumps(code):
                went = self._went(code, jump.at)
                if len(went) != 1 or not jump.reads - _constants(code, argument_count):
                    continue
                (taken,) = went
                other = sum(jump.sides) - taken
                if not _raises(code, other) and not self._meet(code, taken, other):
                    place = f"{code.co_filename}:{jump.line}"
                    return f"it has a branch that depends on its input ({place})"
        return None

    def _went(self, code: CodeType, at: int) -> set[int]:
        """The instructions that followed one."""
        return {_from(code, offset) for offset in self.branches_taken.get((code, at), ())}

    def _meet(self, code: CodeType, at: int, other: int) -> bool:
        """Whether what was run from here on came to ``other`` by conditions alone."""
        for step in _steps(code):
            if step.offset < at:
                continue
            if step.offset == other or step.opname.startswith(_ENDS):
                return step.offset == other
            if "JUMP" in step.opname:
                went = self._went(code, step.offset) if "_IF_" in step.opname else {step.argval}
                if len(went) != 1:
                    return False
                (at,) = went
        return False


class _Jump:
    """A conditional jump: where it stands, where it may go, and the variables of its condition.

    Those are all that are loaded since something was stored, dropped or returned, or another
    condition was asked, so rather more than fewer.
    """

    def __init__(self, code: CodeType, steps: list[dis.Instruction], i: int) -> None:
        self.at = steps[i].offset
        self.sides = (_from(code, steps[i].argval), steps[i + 1].offset)
        lines = [line for start, line in dis.findlinestarts(code) if line and start <= self.at]
        self.line = lines[-1] if lines else code.co_firstlineno
        self.reads: set[str] = set()
        condition = list(self._back(steps, i))
        for step in condition:
            if "LOAD_FAST" in step.opname or step.opname == "LOAD_DEREF":  # one or two at once
                self.reads |= {step.argval} if isinstance(step.argval, str) else {*step.argval}
        if _asks_for_none(steps[i], condition):
            self.reads -= {*code.co_varnames[: code.co_argcount]}  # the same in all calls
        if _asks_for_mps(condition) and not torch.backends.mps.is_available():
            self.reads = set()  # no tensor of this process can be there

    def _back(self, steps: list[dis.Instruction], i: int) -> Iterator[dis.Instruction]:
        for step in reversed(steps[:i]):
            jumps = "JUMP" in step.opname and step.argval > self.at
            both = step.opname == "STORE_FAST_LOAD_FAST"
            if jumps or (step.opname.startswith(_ENDS) and not both):
                return
            yield step
            if both:
                return


def _asks_for_none(jump: dis.Instruction, condition: list[dis.Instruction]) -> bool:
    """Whether a condition is ``x is None`` of a variable, or the opposite."""
    names = [step.opname for step in condition]
    if jump.opname.endswith("_NONE"):
        return len(names) == 1
    return names[:2] == ["IS_OP", "LOAD_CONST"] and len(names) == 3 and condition[1].argval is None


def _asks_for_mps(condition: list[dis.Instruction]) -> bool:
    """Whether a condition is ``x.device.type == "mps"`` of a variable, or the opposite.

    Models ask so for the type under which they switch autocast off.
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
    """The first instruction from an offset on that does something."""
    return next(step.offset for step in _steps(code) if step.offset >= offset)


@functools.lru_cache(maxsize=1024)
def _jumps(code: CodeType) -> list[_Jump]:
    steps = _steps(code)
    conditional = ["JUMP" in step.opname and "_IF_" in step.opname for step in steps]
    return [_Jump(code, steps, i) for i, it_is in enumerate(conditional[:-1]) if it_is]


def _constants(code: CodeType, argument_count: int) -> set[str]:
    """The module, and the arguments of a forward that calls leave out."""
    left_out = code.co_varnames[1 + argument_count : code.co_argcount + code.co_kwonlyargcount]
    return {"self", "cls", *(left_out if code.co_name == "forward" else ())}


def _raises(code: CodeType, start: int) -> bool:
    """Whether code does nothing else from here on but raise an error."""
    for step in _steps(code):
        if step.offset < start:
            continue
        if step.opname == "RAISE_VARARGS":
            return True
        if "JUMP" in step.opname or step.opname.startswith(("STORE", "RETURN")):
            return False
    return False
