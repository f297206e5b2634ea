"""What a patch call did, as plain data that can be printed."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from liger_multi.dispatch.config import in_quarantine
from liger_multi.patching.watch import Executed, executed, serves


@dataclass(frozen=True)
class Entry:
    """One module that now runs, or again runs, another forward.

    Attributes:
        path: Dotted path of the module in the model; empty for the model itself.
        op: Operator.
        stock: Name of the class that the model was built with.
        replaced_by: What the forward calls now.
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
    """A place that an operator was asked for and did not take, with the reason.

    Attributes:
        path: Dotted path of the module in the model; empty for the model itself.
        op: Operator.
        reason: Why.
        strict: Whether ``strict=True`` raises for it. Not where the model just has no place for
            an operator that is on by default.
    """

    path: str
    op: str
    reason: str
    strict: bool = True


@dataclass
class PatchReport:
    """The outcome of one patch call; ``str`` gives a compact table.

    Attributes:
        target: The model, or the model type.
        entries: Modules that run another forward.
        skipped: Places that were left alone.
        of_type: Whether it is of models that are built from now on.
        call: The function that it is the report of: ``"patch"`` or ``"unpatch"``.
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
            by = f"{e.replaced_by} ({options})" if options else e.replaced_by
            groups.setdefault((e.op, e.stock, by, _pattern(e.path), e.status), []).append(e.path)
        return [
            (op, f"{len(paths)} x {stock}", by, place, status)
            for (op, stock, by, place, status), paths in groups.items()
        ]

    def skipped_rows(self) -> list[tuple[str, ...]]:
        """Table rows (op, modules, reason) of what was left alone."""
        groups = Counter((s.op, _pattern(s.path), s.reason) for s in self.skipped)
        return [(op, f"{n} x {place}", why) for (op, place, why), n in groups.items()]

    @contextlib.contextmanager
    def watch(self, model: nn.Module) -> Iterator[Watched]:
        """Record in the block which patched modules run, and which call an operator.

        Args:
            model: The model that was patched. Within the block, call it or what wraps it; parts
                that were compiled are not seen.

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
        """What `liger-multi verify` keeps operators of this report from, where that is in force."""
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
    """What ran in a block of :meth:`PatchReport.watch`; ``str`` gives a compact table.

    Attributes:
        entries: The patched modules.
        seen: Paths of all modules that ran, and calls of operators by the module that called them.
    """

    entries: list[Entry]
    seen: Executed

    @property
    def served(self) -> list[Entry]:
        """Modules that called their operator."""
        return self._that("called it")

    @property
    def stock(self) -> list[Entry]:
        """Modules that ran without: their own forward, or one that had nothing to do for it."""
        return self._that("ran without")

    @property
    def idle(self) -> list[Entry]:
        """Modules that did not run, nor another one for them."""
        return self._that("did not run")

    def _that(self, state: str) -> list[Entry]:
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
            (*where, str(n.total()), *(str(n[state]) for state in _WATCHED[3:]))
            for where, n in groups.items()
        ]

    def __str__(self) -> str:
        """Plain text, aligned, no colors."""
        return "\n".join(_aligned([_WATCHED, *self.rows()]))


_HEADER = ("op", "modules", "now runs", "where", "status")
_SKIPPED = ("op", "where", "reason")
_WATCHED = ("op", "where", "modules", "called it", "ran without", "did not run")


def _pattern(path: str) -> str:
    """The path with layer numbers starred, so that equal layers fall together."""
    return ".".join("*" if part.isdigit() else part for part in path.split(".")) or "(model)"


def _aligned(rows: Iterable[tuple[str, ...]]) -> list[str]:
    table = list(rows)
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        "  " + "  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)).rstrip() for r in table
    ]


def promised(model_type: str, enabled: Mapping[str, Any]) -> PatchReport:
    """What models of a type are going to run, by operator with its options."""
    report = PatchReport(f"models of type {model_type} built from now on", of_type=True)
    for op, options in enabled.items():
        report.entries.append(Entry("", op, model_type, op, options.shown()))
    return report


def caller_level() -> tuple[int, str]:
    """Stack level and place of the first frame outside of torch and of this package."""
    own = str(Path(os.path.abspath(__file__)).parents[1])
    inside = (own + os.sep, os.path.dirname(torch.__file__) + os.sep)
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(inside):
        frame, level = frame.f_back, level + 1
    return level, f"{frame.f_code.co_filename}:{frame.f_lineno}"


_warned: set[str] = set()


def warn_once(message: str, key: str | None = None) -> None:
    """Warn at the caller's line, once for a key (the line itself by default)."""
    level, place = caller_level()
    if (key or place) not in _warned:
        _warned.add(key or place)
        warnings.warn(message.replace("{place}", place), stacklevel=level, category=UserWarning)
