"""Trainers, run with the switch that brings in this library's operators and without.

``trainers.yaml`` is the table: what is installed, how the trainer is started, its switch, and the
runs. ``python -m tests.trainers.runs.driver NAME`` builds the trainer's environment and runs each
of them without the switch and, with the import names of Liger-Kernel served, with it. Both have to
log the same numbers, and operators of ours have to have been called. Nothing of a trainer is
changed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[3]
TABLE = Path(__file__).with_name("trainers.yaml")
RESULTS = Path(__file__).with_name("results.json")


@dataclass(frozen=True)
class Run:
    """One way to train.

    Attributes:
        module: What is started, as ``python -m`` does.
        calls: The operators that have to be called with the switch.
        options: Beside those of the trainer; names of folders stand in braces, as in ``{model}``:
            model, words, teacher, data, out, code, package, and before. An empty list leaves the
            flag alone.
        arguments: What stands before the options on the command line.
        switch: Options in place of the trainer's own switch, such as those of a plugin of ours.
        resumes: The run whose checkpoint, made without the switch, is in ``{before}``; this one
            continues it with the switch, and its numbers have to be the same.
        processes: How many ``torchrun`` starts, which talk by gloo; the first one's calls count.
    """

    module: str
    calls: tuple[str, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    switch: Mapping[str, Any] = field(default_factory=dict)
    resumes: str = ""
    processes: int = 1


@dataclass(frozen=True)
class Trainer:
    """A row of the table.

    Attributes:
        install: Requirements, with their versions.
        switch: Options that turn Liger-Kernel on.
        runs: By name.
        options: Of all runs.
        written: How options are handed over: ``flags``, ``assignments``, or a file named ``yaml``.
        without_dependencies: Requirements that are installed by themselves, whatever Python they
            ask for.
        removed: Packages that are uninstalled again: parts for images and sound of another PyTorch.
        empty: Modules that are imported and never used on a CPU; files without content.
        environment: Variables.
        torch: The requirement of PyTorch.
        printed: A regular expression for a line of its log that has the numbers of a step, with
            groups named ``step`` and as in ``trainer_state.json``, which others write.
        not_run: What could not be run, and its message.
    """

    install: tuple[str, ...]
    switch: Mapping[str, Any]
    runs: Mapping[str, Run]
    options: Mapping[str, Any] = field(default_factory=dict)
    written: str = "flags"
    without_dependencies: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    empty: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    torch: str = "torch==2.13.0"
    printed: str = ""
    not_run: Mapping[str, str] = field(default_factory=dict)

    @property
    def contents(self) -> str:
        """What the environment is made of."""
        parts = (self.install, self.without_dependencies, self.removed, self.empty)
        return repr((self.torch, *map(list, parts)))


def trainers() -> dict[str, Trainer]:
    """The table."""
    raw = yaml.safe_load(TABLE.read_text(encoding="utf-8"))
    return {
        name: Trainer(**{**row, "runs": {n: Run(**run) for n, run in row["runs"].items()}})
        for name, row in raw.items()
    }


# --- the table of docs/trainers.md ---


def _row(name: str, row: dict[str, Any]) -> str:
    """What ran of a trainer, with which versions."""
    others = [f"{n} {v}" for n, v in row["versions"].items() if n != name]
    runs = row["runs"].values()
    worst = max(run["difference"] for run in runs)
    calls = sorted({op for run in runs for op in run["calls"]})
    cells = (
        f"{name} {row['versions'][name]}",
        ", ".join(others),
        "; ".join(row["runs"]),
        f"{worst:.0e}",
        ", ".join(f"`{op}`" for op in calls),
        max(run["date"] for run in runs),
    )
    return f"| {' | '.join(cells)} |"


def table() -> str:
    """What ran, with what, and what did not run."""
    kept = json.loads(RESULTS.read_text(encoding="utf-8"))
    known = trainers()
    out = [
        "| Trainer | With | Runs | Difference | Operators called | Date |",
        "|---|---|---|---|---|---|",
    ]
    out += [_row(name, kept[name]) for name in known if name in kept]
    out += ["", "| Not run | What | Why |", "|---|---|---|"]
    out += [
        f"| {name} | {what} | {why} |"
        for name, trainer in known.items()
        for what, why in trainer.not_run.items()
    ]
    return "\n".join(out)
