"""The pages of verification and of coverage: what ran where, which models equal the original.

The first is made of the results that the repository keeps, the second of the result of the sweep.
"""

from __future__ import annotations

import ast
import importlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml

from ci import results
from ci.results import Result

# --- verification ---

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


# --- coverage ---

RESULTS = ROOT / "tests" / "sweep" / "results.json"
ELSEWHERE = RESULTS.with_name("elsewhere.json")  # other devices and generations of packages
NORMS = ("rms_norm", "layer_norm", "gated_rms_norm")
GATED = ("swiglu", "geglu", "swiglu_clamped")
FAMILIES = {
    "norms": NORMS,
    "mlp": GATED,
    "rotary": ("rope",),
    "head": ("fused_linear_cross_entropy",),
}
NOT_MEASURED = "not measured"
COVERAGE_HEAD = """\
# Coverage

A tiny random model of every registered pair of model type and class with a language-model head runs
one training step with labels, unpatched and patched. The loss has to agree to {loss:g} and every
gradient to {gradient:g} of its largest entry (plus {floor:g} of the largest of all), with random
norm weights. This page is made of the kept result of

    python -m tests.sweep --write

with torch {torch}, transformers {transformers} and the {backend} backend.
`python -m tests.sweep NAME... --backend cuda --every 12` runs a sample on a device.

{summary}

A module counts where its forward ran in the step that was compared and called an operator of ours;
"2 of 8" means that 8 were patched. **Text only**: the model takes pictures, video, sound or the
like as well, and the step had none, so nothing is said of its towers. **In part**: a tower did not
run for another reason. **fused**: the step computed its loss without its logits, "real" when it
took them. The last column names the outermost parts of which nothing ran with their patched
modules, and modules that ran without a call of an operator (layers without positions call no rotary
function). What a patch leaves alone stands in its report, and below.

"""
NOTE = {
    "fused_linear_cross_entropy": "head",
    "swiglu": "mlp",
    "geglu": "mlp",
    "swiglu_clamped": "mlp",
}


def coverage_page() -> str:
    """The page."""
    found = json.loads(RESULTS.read_text(encoding="utf-8"))
    pairs = found["pairs"]
    text = COVERAGE_HEAD.format(
        **{k: found[k] for k in ("torch", "transformers", "backend")},
        **found["bounds"],
        summary=_summary(pairs),
    )
    for kind in dict.fromkeys(o["kind"] for o in pairs):
        some = [o for o in pairs if o["kind"] == kind]
        rows = [
            "| type | class | step | norms | MLP | rotary | loss | not run, or no call |",
            "|---|---|---|---|---|---|---|---|",
        ]
        rows += [_row(o) for o in sorted(some, key=lambda o: (o["type"], o["cls"]))]
        text += f"## {kind.capitalize()}\n\n" + "\n".join(rows) + "\n\n"
    text += "## Left alone, and why\n\n" + "\n".join(_reasons(pairs)) + "\n\n"
    text += "## On devices\n\n" + "\n".join(_devices()) + "\n\n"
    return text + "## Other generations\n\n" + "\n".join(_generations()) + "\n"


def _devices() -> list[str]:
    """Samples of the sweep whose operators ran on a device: what they called, what is not equal."""
    lines = []
    for found in json.loads(ELSEWHERE.read_text(encoding="utf-8"))["devices"]:
        pairs, where = found["pairs"], [found[k] for k in ("device", "torch", "transformers")]
        equal = [o for o in pairs if o["status"] == "equal"]
        calls: Counter[str] = sum((Counter(o["calls"]) for o in equal), Counter())
        served = ", ".join(f"{op} {n}" for op, n in calls.most_common())
        lines.append(
            f"{where[0]}, backend {found['backend']}, torch {where[1]}, transformers {where[2]}, "
            f"{found['date']}, {found['commit']}: **{len(equal)} of {len(pairs)} pairs equal**. "
            f"Calls of operators: {served}. {_of_modules(equal)}\n"
        )
        lines.append(f"Equal: {', '.join(sorted({o['type'] for o in equal}))}.\n")
        others = [o for o in pairs if o["status"] != "equal"]
        lines += [f"* {o['type']}/{o['cls']}, {o['status']}: {o['why']}" for o in others]
    return lines


def _of_modules(pairs: list[dict[str, Any]]) -> str:
    if not all(map(measured, pairs)):
        return f"Which modules ran: {NOT_MEASURED}."
    return _totals(pairs)


def _generations() -> list[str]:
    """Counts of the whole sweep with older libraries, and the pairs that are not equal there."""
    rows = [
        "The whole sweep of 2026-11-22 without timm and SciPy; pairs that need a newer rule of",
        "`tests/sweep/cases.py` to be built, such as blt, were not run again. Which modules ran:",
        f"{NOT_MEASURED}.\n",
        "| transformers | torch | pairs | equal | different | without a step |",
        "|---|---|---|---|---|---|",
    ]
    lines = [""]
    for found in json.loads(ELSEWHERE.read_text(encoding="utf-8"))["generations"]:
        counts = [found[s] for s in ("equal", "different", "not built")]
        cells = (found["transformers"], found["torch"], sum(counts), *counts)
        rows.append("| " + " | ".join(map(str, cells)) + " |")
        lines.append(f"Not equal with transformers {found['transformers']}:\n")
        lines += [f"* {o['type']}/{o['cls']}, {o['status']}: {o['why']}" for o in found["others"]]
        lines.append("")
    return [*rows, *lines[:-1]]


def measured(outcome: dict[str, Any]) -> bool:
    """Whether somebody counted what ran; older results say only what was patched and called."""
    return "served" in outcome


def equal(outcome: dict[str, Any]) -> bool:
    """Whether the step is equal to the unpatched one, and what ran in it is known."""
    return outcome["status"] == "equal" and measured(outcome)


def covers(outcome: dict[str, Any]) -> set[str]:
    """Which of "norms", "mlp", "rotary" and "head" called operators of ours in an equal step."""
    served = outcome["served"] if equal(outcome) else {}
    return {name for name, ops in FAMILIES.items() if any(served.get(op) for op in ops)}


def idle_towers(outcome: dict[str, Any]) -> list[dict[str, Any]]:
    """Models within the model of which nothing ran."""
    return [part for part in outcome["idle"] if part["tower"]]


def _summary(pairs: list[dict[str, Any]]) -> str:
    states = Counter(o["status"] for o in pairs)
    every = {"norms", "mlp", "head"}
    together = {o["type"] for o in pairs if covers(o) >= every}
    rotary = {o["type"] for o in pairs if covers(o) >= {*every, "rotary"}}
    lines = [
        (
            f"* {len(pairs)} pairs: **{states['equal']} equal to the original**, "
            f"{states['different']} different, {states['not built']} without a step here."
        ),
        *_executed([o for o in pairs if equal(o)]),
        (
            f"* Norms, gated MLP and fused head together in **{len(together)} model types**, with "
            f"the rotary function as well in {len(rotary)}."
        ),
    ]
    for part, name in (("norms", "norms"), ("mlp", "a gated MLP"), ("rotary", "rotary functions")):
        types = {o["type"] for o in pairs if part in covers(o)}
        lines.append(f"* {len(types)} model types with {name}.")
    types = {o["type"] for o in pairs if "head" in covers(o)}
    lines.append(f"* {len(types)} model types with a fused loss.")
    unknown = sum(o["status"] == "equal" and not measured(o) for o in pairs)
    if unknown:
        lines.append(f"* What ran was {NOT_MEASURED} in {unknown} of the equal pairs.")
    return "\n".join(lines)


def _executed(pairs: list[dict[str, Any]]) -> list[str]:
    """How much of the equal models ran."""
    whole = sum(o["modules"] == o["served"] and not idle_towers(o) for o in pairs)
    text = sum(o["text_only"] for o in pairs)
    towers = sum(bool(idle_towers(o)) for o in pairs)
    return [
        f"* {_totals(pairs)}",
        (
            f"* {text} of the equal pairs are text only, {towers} have a tower that never ran; in "
            f"{whole} every patched module called its operator and no tower was idle."
        ),
    ]


def _totals(pairs: list[dict[str, Any]]) -> str:
    """Totals of patched modules, of those that ran, and of those that called an operator."""
    patched, ran, served = (
        sum(sum(o[which].values()) for o in pairs) for which in ("modules", "ran", "served")
    )
    return (
        f"{patched:,} modules were patched in the equal pairs, {ran:,} ran, **{served:,} called an "
        "operator of ours**."
    )


def _row(outcome: dict[str, Any]) -> str:
    if outcome["status"] != "equal":
        why = outcome["why"].replace("|", "\\|")
        return (
            f"| {outcome['type']} | {outcome['cls']} | **{outcome['status']}**: {why} | | | | | |"
        )
    cells = [NOT_MEASURED] * 5
    step = "equal"
    if measured(outcome):
        if outcome["text_only"]:
            step = "equal on **text only**"
        elif idle_towers(outcome):
            step = "equal **in part**"
        mlps = (*GATED, "relu_squared")
        counts = [_of(outcome, ops) for ops in (NORMS, mlps, FAMILIES["rotary"])]
        head = "**fused**" if "head" in covers(outcome) else "real"
        cells = [*counts, head, "; ".join([*map(_idle, outcome["idle"]), *_stock(outcome)])]
    step = f"{step} {outcome['why']}".rstrip()
    return f"| {' | '.join((outcome['type'], outcome['cls'], step, *cells))} |"


def _of(outcome: dict[str, Any], ops: Sequence[str]) -> str:
    """Modules of a family that called an operator, and how many were patched if more."""
    served, patched = (sum(outcome[k].get(op, 0) for op in ops) for k in ("served", "modules"))
    return f"{served} of {patched}" if served != patched else str(patched or "")


def _idle(part: dict[str, Any]) -> str:
    """A part of which nothing ran: what stood in it, and what it had no input of."""
    said = f"`{part['path']}` did not run"
    if part["lacks"]:
        said += f" (no {_listed(part['lacks'], 'or')})"
    modules = ", ".join(f"{n} {op}" for op, n in part["modules"].items())
    return f"{said}: {modules}" if modules else said


def _stock(outcome: dict[str, Any]) -> list[str]:
    """Modules that ran and called no operator, but the head, which has a column."""
    return [
        f"{n} {op} in `{path}` called no operator"
        for op, path, _, n in outcome["stock"]
        if op not in FAMILIES["head"]
    ]


def _listed(names: Iterable[str], word: str = "and") -> str:
    *most, last = sorted(names) or [""]
    return f"{', '.join(most)} {word} {last}" if most else last


def _reasons(pairs: list[dict[str, Any]]) -> list[str]:
    """Reasons by operator, with the types; a model that has no such module needs none."""
    types: dict[tuple[str, str], list[str]] = {}
    for outcome in pairs:
        for op, reasons in outcome["skipped"].items():
            for reason in reasons:
                if not reason.startswith("the model has no module of this kind"):
                    where = types.setdefault((NOTE.get(op, op), reason), [])
                    if outcome["type"] not in where:
                        where.append(outcome["type"])
    rows = ["| operator | reason | model types |", "|---|---|---|"]
    for (op, reason), names in sorted(types.items()):
        shown = reason.replace("|", "\\|").replace("\n", " ")
        rows.append(f"| {op} | {shown} | {', '.join(names)} |")
    return rows
