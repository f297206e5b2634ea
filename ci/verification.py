"""The page of verification: what ran where, of the results that the repository keeps."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml

from ci import results
from ci.results import Result

# --- verification ---

ROOT = Path(__file__).parent.parent
NOT_RUN = "**not run on hardware**"
CODE_GENERATORS = {"cuda": "_nvidia", "rocm": "_amd"}
HEAD = """\
# Verification

What ran where, from the newest results of the test suite (`benchmarks/results/suites.json`). See
[runners](runners.md) to run the suite on your device and add the result.

## On devices

The newest run of each backend on its own device; the reference runs on a CPU. Where the newest run
failed, the newest run that passed follows it.

"""
WITHOUT = """
## Without a device

| check | what it covers |
|---|---|
| interpreted | the kernels' source, executed on a CPU, against fp64 |
| npu-simulated, npu-simulated-ops | kernels, operators: simulated NPU, see [Ascend](ascend.md) |
| compiled | limits on threads, memory and registers, and 16-byte loads; no results, no speed |

"""
PARTS = """
## Content of the backends

A call that a backend lacks or refuses goes to the next backend of its chain.

"""


def page() -> str:
    """The page."""
    found = results.kept()
    records = _records()
    columns = ("backend", "status", *COUNTED)
    devices = [row for name, record in records.items() for row in _native(name, record, found)]
    checks = [row for name in records for row in _beside(name, found)]
    contents = [(name, *_own(name)) for name in records]
    text = HEAD + _table(columns, devices)
    text += "\n".join(failed(found)) + WITHOUT
    text += _table(("check", "backend", *COUNTED), checks) + PARTS
    text += _table(
        ("backend", "operators", "launch tables", "next in its chain", "known failures"), contents
    )
    notes = [f"- {o.part}, {o.date[:10]}: {o.note.rstrip('.')}." for o in found if o.note]
    for one in found:
        notes += [f"- {one.part}, {one.date[:10]}, {k}: {v}." for k, v in one.settings.items()]
    kept = ["", "## All kept runs", "", results.table(found), ""]
    return text + "\n".join([*kept, *notes, *[""] * bool(notes)])


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def failed(results: Sequence[Result]) -> list[str]:
    """What failed in the newest run of every part, where it is red.

    Raises:
        ValueError: A red run does not say it.
    """
    newest: dict[str, Result] = {}
    for one in results:
        newest.setdefault(one.part, one)
    lines = []
    for one in newest.values():
        if one.ran and not one.green:
            said = one.note or ", ".join(f"`{name}`" for name in one.failures)
            if not said:
                raise ValueError(f"the run of {one.part} on {one.date} does not say what failed")
            lines.append(f"- {one.part}, {one.date[:10]}, {one.commit[:7]}: {said.rstrip('.')}.")
    return ["", "## What failed", "", *lines, ""] if lines else []


def _records() -> dict[str, Any]:
    names = sorted(p.parent.name for p in (ROOT / "backends").glob("*/__init__.py"))
    records = {n: importlib.import_module(f"liger_multi.backends.{n}").BACKEND for n in names}
    first = {"reference": importlib.import_module("liger_multi.reference").BACKEND}
    return {**first, **dict(sorted(records.items(), key=lambda item: item[1].device_type or ""))}


COUNTED = ("device", "PyTorch", "passed", "failed", "skipped", "date", "commit")
SIMULATED = ("interpreted", "npu-simulated", "npu-simulated-ops")  # parts without a device
NOTHING = ("-",) * len(COUNTED)


def _counted(one: Result) -> tuple[str, ...]:
    """The cells of a run."""
    device = one.device.get("name", one.device["device"])
    red = sum(one.counts.get(n, 0) for n in ("failed", "error", "xpassed"))
    counts = (one.counts.get("passed", 0), red, one.counts.get("skipped", 0))
    passed, failing, skipped = (f"{count:,}" for count in counts)
    failing = failing if one.green else f"**{failing}**"
    return (device, one.versions["torch"], passed, failing, skipped, one.date[:10], one.commit[:7])


def _native(name: str, record: Any, results: Sequence[Result]) -> list[tuple[str, ...]]:
    """Rows of the newest run on a device of the backend's, and of the newest green one.

    The reference runs on a CPU, and so does a layer that no backend inherits: tests pin it.
    """
    shared = record.device_type is None and name != "reference"
    heirs = _heirs(name) if shared else []
    on_cpu = record.device_type == "cpu" or not (record.device_type or heirs)
    names = {name, *heirs, *(["native"] if on_cpu else [])}
    runs = [
        one
        for one in results
        if one.ran and one.part in names and (one.device["device"] == "cpu") == on_cpu
    ]
    if not runs:
        return [(name, NOT_RUN, *NOTHING)]
    by = f", by {runs[0].part}" if shared else ""
    if runs[0].green:
        return [(name, f"passed{by}", *_counted(runs[0]))]
    rows = [(name, f"**failed**{by}, see [what failed](#what-failed)", *_counted(runs[0]))]
    green = next((one for one in runs if one.green), None)
    return rows if green is None else [*rows, ("", f"passed{by}", *_counted(green))]


def _heirs(name: str) -> list[str]:
    return [n for n, record in _records().items() if name in record.parents]


def _beside(name: str, results: Sequence[Result]) -> list[tuple[str, ...]]:
    """Rows of the newest runs that need no device of the backend's."""
    rows = []
    for part in SIMULATED if name != "reference" else ():
        newest = next((o for o in results if o.part == part and name in o.backends), None)
        rows += [(part, name, *_counted(newest))] if newest is not None else []
    compiled = next(
        (o for o in results if o.part == "cross-compiled" and o.green and judged(o)), None
    )
    if compiled is not None and name in CODE_GENERATORS:
        _, *counts = _counted(compiled)
        rows.append(("compiled", name, ", ".join(architectures(name)), *counts))
    return rows


def judged(one: Result) -> bool:
    """Whether a run's Triton is one whose code is judged, and not an older one."""
    text = (ROOT / "ci" / "static" / "__init__.py").read_text(encoding="utf-8")
    (floor,) = re.findall(r"^JUDGED = \((\d+), (\d+)\)$", text, re.MULTILINE)
    return results.numbers(one.versions.get("triton", "0")) >= tuple(map(int, floor))


def architectures(backend: str) -> list[str]:
    """What kernels are compiled for, of one vendor; read as text, as Triton may be absent."""
    architectures = []
    for node in ast.walk(
        ast.parse((ROOT / "ci" / "static" / "__init__.py").read_text(encoding="utf-8"))
    ):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == CODE_GENERATORS[backend]:
            first = ast.literal_eval(node.args[0])
            architectures.append(first if isinstance(first, str) else f"sm{first}")
    return architectures


# how entries of launch tables begin whose numbers nobody measured, and what they are
UNMEASURED = {"static model": "static model", "finished search": "compiled, not timed"}


def _numbers_of(table: Path) -> str:
    """Where the numbers of a launch table come from: "measured" where some of them are."""
    entries = (yaml.safe_load(table.read_text(encoding="utf-8")) or {}).get("entries") or {}
    sources = [str(e.get("source")) for several in entries.values() for e in several]
    kinds = {
        next(
            (origin for start, origin in UNMEASURED.items() if source.startswith(start)), "measured"
        )
        for source in sources
    }
    return "measured" if "measured" in kinds else ", ".join(sorted(kinds))


def _own(name: str) -> tuple[str, ...]:
    """Operators that a backend implements, launch tables, its chain, and known failures."""
    folder = ROOT / ("reference" if name == "reference" else f"backends/{name}")
    registry = importlib.import_module("liger_multi.dispatch.registry")
    own = [op for op in registry.operators() if registry.module(name, op) is not None]
    tables: dict[str, list[str]] = {}
    for path in sorted((folder / "launch").glob("*.yaml")):
        tables.setdefault(_numbers_of(path), []).append(path.stem)
    said = "; ".join(f"{', '.join(names)} ({origin})" for origin, names in tables.items())
    record = _records()[name]
    floor = ["reference"] if record.device_type else []
    xfails = ROOT / "tests" / "xfails" / f"{name}.txt"
    lines = xfails.read_text(encoding="utf-8").splitlines() if xfails.exists() else []
    known = sum(bool(line.partition("#")[0].strip()) for line in lines)
    return str(len(own)), said or "-", ", ".join([*record.parents, *floor]) or "-", str(known)
