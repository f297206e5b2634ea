"""What a patch call did, as plain data that can be printed."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from liger_multi._torch_private import Losses, module_call, replace_module_call
from liger_multi.dispatch.config import in_quarantine
from liger_multi.dispatch.op import Op
from liger_multi.patching.options import ROTATED

# --- modules and operators that run in a block ---

# Patched modules run their original forward if they have hooks, or if ``nn.Module.__call__`` is
# replaced. So modules are recorded below that call, and operators in their dispatch. There is no
# cost outside of a block.


@dataclass
class Executed:
    """The modules of a model and the operators that ran in a block.

    Attributes:
        ran: Paths of the modules whose forward returned.
        called: Operators by the path of the innermost module that called them; None for calls
            outside of the model.
        paths: Paths by the identity of modules.
        losses: Paths of loss modules.
    """

    ran: set[str] = field(default_factory=set)
    called: dict[str | None, Counter[str]] = field(default_factory=dict)
    paths: Mapping[int, str] = field(default_factory=dict, repr=False)
    losses: tuple[str, ...] = ()

    @property
    def calls(self) -> Counter[str]:
        """Calls by operator."""
        return sum(self.called.values(), Counter())

    def calls_of(self, path: str | None) -> Counter[str]:
        """Calls by operator of a module, without its submodules."""
        return self.called.get(path, Counter())

    def _count(self, op: str, active_modules: list[int]) -> None:
        paths = (self.paths[module] for module in reversed(active_modules) if module in self.paths)
        self.called.setdefault(next(paths, None), Counter())[op] += 1


@contextlib.contextmanager
def executed(model: nn.Module) -> Iterator[Executed]:
    """Record modules and operators in a block, in all threads and without hooks.

    Blocks may overlap. Compiled modules are not recorded.
    """
    modules = list(model.named_modules())
    losses = tuple(path for path, module in modules if isinstance(module, Losses))
    current = Executed(paths={id(module): path for path, module in modules}, losses=losses)
    with _lock:
        _records.append(current)
        if len(_records) == 1:
            _install(_call, _dispatch)
    try:
        yield current
    finally:
        with _lock:
            _records[:] = [record for record in _records if record is not current]
            if not _records:
                _install(*_ORIGINAL)


def _install(call: Any, dispatch: Any) -> None:
    replace_module_call(call)
    Op.__call__ = dispatch  # type: ignore[method-assign]


_ORIGINAL: Any = (module_call, Op.__call__)
_lock, _records = threading.Lock(), list[Executed]()


class _ActiveModules(threading.local):
    """Identities of the modules that run in a thread, the innermost last."""

    def __init__(self) -> None:
        self.modules: list[int] = []


_active = _ActiveModules()


def _call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    if torch.compiler.is_compiling():
        return _ORIGINAL[0](module, *args, **kwargs)
    _active.modules.append(id(module))
    try:
        result = _ORIGINAL[0](module, *args, **kwargs)
    finally:
        _active.modules.pop()
    for record in tuple(_records):
        if id(module) in record.paths:
            record.ran.add(record.paths[id(module)])
    return result


def _dispatch(op: Op, *args: Any, **kwargs: Any) -> Any:
    if not torch.compiler.is_compiling():
        for record in tuple(_records):
            record._count(op.name, _active.modules)
    return _ORIGINAL[1](op, *args, **kwargs)


# --- whether a patched module called its operator ---


def serves(op: str, path: str, record: Executed) -> bool:
    """Whether the module at ``path``, patched for an operator, called it in a block."""
    if op in _HEADS:  # the loss may be computed around the head, or after the model
        return any(
            record.calls_of(path_of_call)[op]
            for path_of_call in (None, *_with_outer(path), *record.losses)
        )
    if op == "lora":
        return bool(record.calls_of(path)) or _computed_with_others(path, record)
    if op in ("rope", ROTATED) and _with_norms(path, record):
        return True
    # an attention module rotates, and may call other operators
    return any(name.startswith("rope") == (op == "rope") for name in record.calls_of(path))


def _with_norms(path: str, record: Executed) -> bool:
    """Whether norms within an attention module called ``rms_norm_rope``."""
    return any(
        ROTATED in calls
        for inner_path, calls in record.called.items()
        if (inner_path or "").startswith(f"{path}.")
    )


_HEADS = ("fused_linear_cross_entropy", "cross_entropy")


def _with_outer(path: str) -> list[str]:
    """A path and those of the modules around it, the model's own last."""
    parts = path.split(".") if path else []
    return [".".join(parts[:n]) for n in range(len(parts), -1, -1)]


def _computed_with_others(path: str, record: Executed) -> bool:
    """Whether an adapter was computed with others, by its MLP or by the first projection.

    An adapter that ran PEFT's forward called its own low-rank layers.
    """
    parent = path.rpartition(".")[0]
    if any(path_ran.startswith(f"{path}.lora_") for path_ran in record.ran):
        return False
    neighbors = (
        calls
        for neighbor, calls in record.called.items()
        if neighbor and neighbor.rpartition(".")[0] == parent
    )
    return record.calls_of(parent)["lora_mlp"] > 0 or any(calls["lora_qkv"] for calls in neighbors)


@dataclass(frozen=True)
class Entry:
    """One module whose forward was replaced or restored.

    Attributes:
        path: Dotted path of the module in the model; empty for the model itself.
        op: Operator.
        stock: Name of the original class.
        replaced_by: The operator that the forward calls.
        options: Options that differ from their defaults.
        status: "patched", "already patched", "options changed" or "restored".
    """

    path: str
    op: str
    stock: str
    replaced_by: str
    options: dict[str, Any] = field(default_factory=dict)
    status: str = "patched"


@dataclass(frozen=True)
class Skipped:
    """A module that was not patched for a requested operator, with the reason.

    Attributes:
        path: Dotted path of the module in the model; empty for the model itself.
        op: Operator.
        reason: Why it was not patched.
        strict: Whether ``strict=True`` raises; not if the model has no module for an operator that
            is on by default.
    """

    path: str
    op: str
    reason: str
    strict: bool = True


@dataclass
class PatchReport:
    """The outcome of one patch call; ``str`` gives a compact table.

    Attributes:
        target: The class of the model, or the model type.
        entries: Replaced and restored modules.
        skipped: Modules that were not patched.
        of_type: Whether the report is of a model type, for models that are built later.
        call: ``"patch"`` or ``"unpatch"``.
    """

    target: str
    entries: list[Entry] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    of_type: bool = False
    call: str = "patch"

    def count(self, op: str) -> int:
        """Number of modules that run ``op`` after the call."""
        return sum(e.op == op and e.status != "restored" for e in self.entries)

    def rows(self) -> list[tuple[str, ...]]:
        """Table rows (op, modules, replaced by, where, status); equal layers share a row."""
        groups: dict[tuple[str, ...], list[str]] = {}
        for e in self.entries:
            options = ", ".join(f"{k}={v}" for k, v in e.options.items())
            replacement = f"{e.replaced_by} ({options})" if options else e.replaced_by
            groups.setdefault((e.op, e.stock, replacement, _pattern(e.path), e.status), []).append(
                e.path
            )
        return [
            (op, f"{len(paths)} x {stock}", replacement, where, status)
            for (op, stock, replacement, where, status), paths in groups.items()
        ]

    def skipped_rows(self) -> list[tuple[str, ...]]:
        """Table rows (op, modules, reason) of modules that were not patched."""
        groups = Counter((s.op, _pattern(s.path), s.reason) for s in self.skipped)
        return [(op, f"{n} x {where}", reason) for (op, where, reason), n in groups.items()]

    @contextlib.contextmanager
    def watch(self, model: nn.Module) -> Iterator[Watched]:
        """Record in a block which patched modules run, and which of them call an operator.

        Args:
            model: The patched model. Call it, or a wrapper of it, within the block; compiled parts
                are not recorded.

        Raises:
            ValueError: The report is of a model type, or the model lacks a module of it.
        """
        if self.of_type:
            raise ValueError(f"watch needs the report of one model, got that of {self.target}")
        entries = [e for e in self.entries if e.status != "restored" and e.op != "packing"]
        strange = {e.path for e in entries} - {path for path, _ in model.named_modules()}
        if strange:
            raise ValueError(
                f"watch needs the {self.target} that was patched, got a {type(model).__name__} "
                f"without {min(strange)!r}"
            )
        with executed(model) as executed_ops:
            yield Watched(entries, executed_ops)

    def __str__(self) -> str:
        """Plain text, aligned, no colors."""
        nothing = "  nothing restored" if self.call == "unpatch" else "  nothing replaced"
        lines = [f"{self.call} {self.target}"]
        lines += _aligned([_HEADER, *self.rows()]) if self.entries else [nothing]
        if self.skipped:
            lines += ["skipped", *_aligned([_SKIPPED, *self.skipped_rows()])]
        return "\n".join([*lines, *self.quarantine()])

    def quarantine(self) -> list[str]:
        """Backends that a quarantine of `liger-multi verify` excludes for these operators."""
        return in_quarantine({entry.op for entry in self.entries})

    def __rich__(self) -> Any:
        """A rich renderable; only rich calls this."""
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        def table(title: str, header: tuple[str, ...], rows: list[tuple[str, ...]]) -> Table:
            table = Table(title=title, title_justify="left", show_edge=False)
            for name in header:
                table.add_column(name, overflow="fold")  # paths have no spaces to break at
            for row in rows:
                table.add_row(*map(Text, row))  # brackets are no markup here
            return table

        parts: list[Any] = [table(f"{self.call} {self.target}", _HEADER, self.rows())]
        if self.skipped:
            parts.append(table("skipped", _SKIPPED, self.skipped_rows()))
        parts += map(Text, self.quarantine())
        return Group(*parts)


@dataclass
class Watched:
    """The record of a block of :meth:`PatchReport.watch`; ``str`` gives a compact table.

    Attributes:
        entries: The patched modules.
        seen: Modules and operators that ran.
    """

    entries: list[Entry]
    seen: Executed

    @property
    def served(self) -> list[Entry]:
        """Modules that called their operator."""
        return self._in_state("called it")

    @property
    def stock(self) -> list[Entry]:
        """Modules that ran without calling their operator."""
        return self._in_state("ran without")

    @property
    def idle(self) -> list[Entry]:
        """Modules that did not run, and that no other module computed."""
        return self._in_state("did not run")

    def _in_state(self, state: str) -> list[Entry]:
        return [e for e in self.entries if self._state(e) == state]

    def _state(self, entry: Entry) -> str:
        if serves(entry.op, entry.path, self.seen):
            return "called it"
        return "ran without" if entry.path in self.seen.ran else "did not run"

    def rows(self) -> list[tuple[str, ...]]:
        """Table rows, a number of modules in each state; equal layers share a row."""
        groups: dict[tuple[str, str], Counter[str]] = {}
        for e in self.entries:
            groups.setdefault((e.op, _pattern(e.path)), Counter())[self._state(e)] += 1
        return [
            (*operator_and_path, str(n.total()), *(str(n[state]) for state in _WATCHED[3:]))
            for operator_and_path, n in groups.items()
        ]

    def __str__(self) -> str:
        """Plain text, aligned, no colors."""
        return "\n".join(_aligned([_WATCHED, *self.rows()]))


_HEADER = ("op", "modules", "now runs", "where", "status")
_SKIPPED = ("op", "where", "reason")
_WATCHED = ("op", "where", "modules", "called it", "ran without", "did not run")


def _pattern(path: str) -> str:
    """The path with stars for layer numbers, which groups equal layers."""
    return ".".join("*" if part.isdigit() else part for part in path.split(".")) or "(model)"


def _aligned(rows: Iterable[tuple[str, ...]]) -> list[str]:
    table = list(rows)
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        "  " + "  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)).rstrip() for r in table
    ]


def promised(model_type: str, enabled: Mapping[str, Any]) -> PatchReport:
    """The report for a model type: the enabled operators with their options."""
    report = PatchReport(f"models of type {model_type} built from now on", of_type=True)
    for op, options in enabled.items():
        report.entries.append(Entry("", op, model_type, op, options.shown()))
    return report


def caller_level() -> tuple[int, str]:
    """Stack level and place of the first frame outside of torch and of this package."""
    package = str(Path(os.path.abspath(__file__)).parents[1])
    skipped_prefixes = (package + os.sep, os.path.dirname(torch.__file__) + os.sep)
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(skipped_prefixes):
        frame, level = frame.f_back, level + 1
    return level, f"{frame.f_code.co_filename}:{frame.f_lineno}"


_warned: set[str] = set()


def warn_once(message: str, key: str | None = None) -> None:
    """Warn at the caller's line, once per key (the line itself by default)."""
    level, location = caller_level()
    if (key or location) not in _warned:
        _warned.add(key or location)
        warnings.warn(message.replace("{place}", location), stacklevel=level, category=UserWarning)
