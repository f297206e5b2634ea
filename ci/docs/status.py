"""The page of verification: what ran where, from the results that the repository keeps."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from ci import results
from ci.results import Result

ROOT = Path(__file__).parent.parent.parent
NOT_RUN = "**not run on hardware**"
CODE_GENERATORS = {"cuda": "_nvidia", "rocm": "_amd"}
HEAD = """\
# Verification

What follows is made of the newest results of the suite, `benchmarks/results/suite-*.json`, and of
what stands in `backends/`. A backend whose suite nobody ran on a device says so;
[Runners](runners.md) says how to add a run.

"Compiled" means that every kernel went through the code generator of that architecture, keeps to
its threads and on-chip memory, spills nothing and loads 16 bytes at a time; it says nothing of
results or speed. "Interpreted" means the kernels' own source, executed on a CPU, against fp64.

"""


def page() -> str:
    """The page."""
    found = results.kept()
    rows = ["| backend | on its own device | without one | what it has |", "|---|---|---|---|"]
    for name, record in _records().items():
        cells = (name, _native(name, record, found), _beside(name, found), _own(name))
        rows.append(f"| {' | '.join(cells)} |")
    kept = [*failed(found), "", "## Runs", "", results.table(found), ""]
    notes = [f"- {o.part}, {o.date[:10]}: {o.note.rstrip('.')}." for o in found if o.note]
    for one in found:
        notes += [f"- {one.part}, {one.date[:10]}, {k}: {v}." for k, v in one.settings.items()]
    return HEAD + "\n".join([*rows, *kept, *notes, *[""] * bool(notes)])


def failed(found: Sequence[Result]) -> list[str]:
    """What failed in the newest run of every part, where it is red.

    Raises:
        ValueError: A red run does not say it.
    """
    newest: dict[str, Result] = {}
    for one in found:
        newest.setdefault(one.part, one)
    lines = []
    for one in newest.values():
        if one.ran and not one.green:
            said = one.note or ", ".join(f"`{name}`" for name in one.failures)
            if not said:
                raise ValueError(f"the run of {one.part} on {one.date} does not say what failed")
            lines.append(f"- {one.part}, {one.date[:10]}, {one.commit[:7]}: {said.rstrip('.')}.")
    return ["", "## What failed", "", *lines] if lines else []


def _records() -> dict[str, Any]:
    names = sorted(p.parent.name for p in (ROOT / "backends").glob("*/__init__.py"))
    found = {n: importlib.import_module(f"liger_multi.backends.{n}").BACKEND for n in names}
    first = {"reference": importlib.import_module("liger_multi.reference").BACKEND}
    return {**first, **dict(sorted(found.items(), key=lambda item: item[1].device_type or ""))}


def _said(one: Result) -> str:
    counts = ", ".join(f"{n} {outcome}" for outcome, n in one.counts.items())
    device = one.device.get("name", one.device["device"])
    return f"{device}, PyTorch {one.versions['torch']}: {counts} ({one.date[:10]})"


def _native(name: str, record: Any, found: Sequence[Result]) -> str:
    """The newest run on a device of the backend's; on a CPU for the reference."""
    on_cpu = record.device_type == "cpu" or name == "reference"
    shared = record.device_type is None and not on_cpu
    names = {name} | (set(_heirs(name)) if shared else set())
    runs = [
        one
        for one in found
        if one.ran
        and names & {one.part, *(["reference"] if one.part == "native" and on_cpu else [])}
        and (one.device["device"] == "cpu") == on_cpu
    ]
    if not runs:
        return NOT_RUN
    said = (f"by {runs[0].part}: " if shared else "") + _said(runs[0])
    if runs[0].green:
        return said
    said += " **failing**, see [what failed](#what-failed)"
    green = next((one for one in runs if one.green), None)
    return said if green is None else f"{said}; before it, at {green.commit[:7]}, {_said(green)}"


def _heirs(name: str) -> list[str]:
    return [n for n, record in _records().items() if name in record.parents]


def _beside(name: str, found: Sequence[Result]) -> str:
    said = []
    for one in found:
        if one.part == "interpreted" and name in one.backends and name != "reference":
            said.append(f"interpreted: {_said(one)}")
            break
    compiled = next(
        (o for o in found if o.part == "cross-compiled" and o.green and judged(o)), None
    )
    if compiled is not None and name in CODE_GENERATORS:
        said.append(f"compiled for {', '.join(architectures(name))} ({compiled.date[:10]})")
    return "; ".join(said)


def judged(one: Result) -> bool:
    """Whether a run's Triton is one whose code is judged, and not an older one."""
    text = (ROOT / "ci" / "static" / "__init__.py").read_text(encoding="utf-8")
    (floor,) = re.findall(r"^JUDGED = \((\d+), (\d+)\)$", text, re.MULTILINE)
    return results.numbers(one.versions.get("triton", "0")) >= tuple(map(int, floor))


def architectures(backend: str) -> list[str]:
    """What kernels are compiled for, of one vendor; read as text, as Triton may be absent."""
    found = []
    for node in ast.walk(
        ast.parse((ROOT / "ci" / "static" / "__init__.py").read_text(encoding="utf-8"))
    ):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == CODE_GENERATORS[backend]:
            first = ast.literal_eval(node.args[0])
            found.append(first if isinstance(first, str) else f"sm{first}")
    return found


def _measured(table: Path) -> bool:
    """Whether a launch table has entries that somebody measured."""
    entries = (yaml.safe_load(table.read_text(encoding="utf-8")) or {}).get("entries") or {}
    sources = [str(e.get("source")) for several in entries.values() for e in several]
    return any(not source.startswith("static model") for source in sources)


def _own(name: str) -> str:
    folder = ROOT / ("reference" if name == "reference" else f"backends/{name}")
    registry = importlib.import_module("liger_multi.dispatch.registry")
    own = [op for op in registry.operators() if registry.module(name, op) is not None]
    tables = sorted(p.stem for p in (folder / "launch").glob("*.yaml"))
    said = [f"{len(own)} operators"] if own else ["a record, no operator of its own"]
    measured = [t for t in tables if _measured(folder / "launch" / f"{t}.yaml")]
    said += [f"launch numbers for {', '.join(measured)}"] if measured else []
    modeled = [t for t in tables if t not in measured]
    said += [f"launch numbers of a static model for {', '.join(modeled)}"] if modeled else []
    xfails = ROOT / "tests" / "xfails" / f"{name}.txt"
    said += ["expected failures"] if xfails.exists() and xfails.read_text().strip() else []
    parents = _records()[name].parents
    floor = "" if name == "reference" or not _records()[name].device_type else "reference"
    behind = [*parents, floor] if floor else list(parents)
    return "; ".join([*said, *([f"behind it {', '.join(behind)}"] if behind else [])])
