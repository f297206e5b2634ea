"""The pages of verification and of coverage: what ran where, which models equal the unpatched.

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

What ran where, from the newest results of the test suite (`benchmarks/results/suite-*.json`). See
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
    return ["", "## What failed", "", *lines, ""] if lines else []


def _records() -> dict[str, Any]:
    names = sorted(p.parent.name for p in (ROOT / "backends").glob("*/__init__.py"))
    found = {n: importlib.import_module(f"liger_multi.backends.{n}").BACKEND for n in names}
    first = {"reference": importlib.import_module("liger_multi.reference").BACKEND}
    return {**first, **dict(sorted(found.items(), key=lambda item: item[1].device_type or ""))}


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


def _native(name: str, record: Any, found: Sequence[Result]) -> list[tuple[str, ...]]:
    """Rows of the newest run on a device of the backend's, and of the newest green one.

    The reference runs on a CPU, and so does a layer that no backend inherits: tests pin it.
    """
    shared = record.device_type is None and name != "reference"
    heirs = _heirs(name) if shared else []
    on_cpu = record.device_type == "cpu" or not (record.device_type or heirs)
    names = {name, *heirs, *(["native"] if on_cpu else [])}
    runs = [
        one
        for one in found
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


def _beside(name: str, found: Sequence[Result]) -> list[tuple[str, ...]]:
    """Rows of the newest runs that need no device of the backend's."""
    rows = []
    for part in SIMULATED if name != "reference" else ():
        newest = next((o for o in found if o.part == part and name in o.backends), None)
        rows += [(part, name, *_counted(newest))] if newest is not None else []
    compiled = next(
        (o for o in found if o.part == "cross-compiled" and o.green and judged(o)), None
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
    found = []
    for node in ast.walk(
        ast.parse((ROOT / "ci" / "static" / "__init__.py").read_text(encoding="utf-8"))
    ):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == CODE_GENERATORS[backend]:
            first = ast.literal_eval(node.args[0])
            found.append(first if isinstance(first, str) else f"sm{first}")
    return found


# how entries of launch tables begin whose numbers nobody measured, and what they are
UNMEASURED = {"static model": "static model", "finished search": "compiled, not timed"}


def _numbers_of(table: Path) -> str:
    """Where the numbers of a launch table come from: "measured" where some of them are."""
    entries = (yaml.safe_load(table.read_text(encoding="utf-8")) or {}).get("entries") or {}
    sources = [str(e.get("source")) for several in entries.values() for e in several]
    kinds = {
        next((kind for start, kind in UNMEASURED.items() if source.startswith(start)), "measured")
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
    said = "; ".join(f"{', '.join(names)} ({kind})" for kind, names in tables.items())
    record = _records()[name]
    floor = ["reference"] if record.device_type else []
    xfails = ROOT / "tests" / "xfails" / f"{name}.txt"
    lines = xfails.read_text(encoding="utf-8").splitlines() if xfails.exists() else []
    known = sum(bool(line.partition("#")[0].strip()) for line in lines)
    return str(len(own)), said or "-", ", ".join([*record.parents, *floor]) or "-", str(known)


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
ROTATED = "rms_norm_rope"
NOT_MEASURED = "not measured"
COVERAGE_HEAD = """\
# Models that were compared

Which models train with the same results after `liger_multi.patch`. To compare one yourself, in a
checkout:

    python -m tests.sweep llama/LlamaForCausalLM

{summary}

## Method

A tiny random model of every registered pair of model type and class with a language-model head runs
one training step with labels, unpatched and patched. Norm weights are random. This page shows the
kept result of `python -m tests.sweep --write`.

| | |
|---|---|
| torch | {torch} |
| transformers | {transformers} |
| backend | {backend} |
| loss may differ by | {loss:g} |
| a gradient may differ by, of its own largest entry | {gradient:g} |
| and additionally by, of the largest gradient of all | {floor:g} |

`python -m tests.sweep NAME... --backend cuda --every 12` runs a sample on a device.

| in the tables below | meaning |
|---|---|
| a number of modules | modules that ran in the compared step and called an operator of ours |
| "2 of 8" | 8 modules were patched, and 2 of them called an operator |
| **text only** | the model also takes images, video or sound, and the step had none |
| with image, video, audio | the step had these beside text |
| gradients | parameters whose gradient is not all zero, of all parameters |
| **in part** | a tower did not run for another reason |
| **fused**, real | the step computed its loss without logits; with logits |
| not run, or no call | outermost parts that did not run; modules that ran and called no operator |

Layers without positions call no rotary function. Modules that a patch leaves alone are listed
[below](#skipped-modules).

"""
TEXT_ONLY: dict[str, str] = {}
"""Why types ran without the other inputs that they take."""
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
            (
                "| type | class | step | gradients | norms | MLP | rotary | loss "
                "| not run, or no call |"
            ),
            "|---|---|---|---|---|---|---|---|---|",
        ]
        rows += [_row(o) for o in sorted(some, key=lambda o: (o["type"], o["cls"]))]
        text += f"## {kind.capitalize()}\n\n" + "\n".join(rows) + "\n\n"
    text += "## Packed rows\n\n" + "\n".join(_packed()) + "\n\n"
    text += "## Norms of queries and keys\n\n" + "\n".join(_rotated(pairs)) + "\n\n"
    text += "## Skipped modules\n\n" + "\n".join(_reasons(pairs)) + "\n\n"
    text += "## On devices\n\n" + "\n".join(_devices()) + "\n\n"
    return text + "## Other versions of transformers\n\n" + "\n".join(_generations()) + "\n"


PACKED = {
    "apart": "equal to the samples alone",
    "other": "raises, and names arguments that keep samples apart: {why}",
    "refused": "raises: nothing that was tried keeps samples apart",
    "unpatched": "raises unpatched too",
    "not taken": "no such argument",
    "no positions": "the model takes no `position_ids`",
    "wrong": "**not equal to the samples alone, and no error**: {why}",
    "not built": "no step of text alone",
}
BESIDE = {"seq_idx": "and `seq_idx`", "cu_seq_lens": "and `cu_seq_lens_*`, `max_length_*`"}
"""What rows are given beside positions, and how the page calls it."""


def _packed() -> list[str]:
    """Types of the sweep by what becomes of a row of two samples, with each set of arguments."""
    found = json.loads(RESULTS.with_name("packing.json").read_text(encoding="utf-8"))
    groups: dict[tuple[str, ...], set[str]] = {}
    for one in sorted(found["pairs"], key=lambda o: (list(PACKED).index(o["status"]), o["why"])):
        first = one["status"], one["why"]
        cells = [first, *(one["beside"].get(name, ("", "")) for name in BESIDE)]
        said = [PACKED[status].format(why=why) if status else "" for status, why in cells]
        same = [said[0], *("the same" if cell == said[0] else cell for cell in said[1:])]
        groups.setdefault(tuple(same), set()).add(one["type"])
    return [
        (
            f"Two samples of text in a row, logits and every gradient, `use_cache=False`, "
            f"transformers {found['transformers']}; `python -m tests.sweep --packing`. See "
            "[packed rows](patching.md#packed-rows).\n"
        ),
        f"| with `position_ids` | {' | '.join(BESIDE.values())} | types | |",
        "|---|---|---|---|---|",
        *(
            f"| {' | '.join(said)} | {len(types)} | {', '.join(sorted(types))} |"
            for said, types in groups.items()
        ),
    ]


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
        "The whole sweep with other versions; `python -m tests.sweep --generation`, and with",
        f"`--packing` for packed rows. Which modules ran was {NOT_MEASURED}.\n",
        "| transformers | torch | date | pairs | equal | different | without a step |",
        "|---|---|---|---|---|---|---|",
    ]
    packing = [
        "\nPairs of packed rows, by what becomes of them:\n",
        f"| transformers | rows have | {' | '.join(PACKED)} |",
        "|---|---|" + "---|" * len(PACKED),
    ]
    lines = [""]
    every = json.loads(ELSEWHERE.read_text(encoding="utf-8"))["generations"]
    for found in every:
        counts = [found[s] for s in ("equal", "different", "not built")]
        cells = (*(found[k] for k in ("transformers", "torch", "date")), sum(counts), *counts)
        rows.append("| " + " | ".join(map(str, cells)) + " |")
        for given, count in found.get("packing", {}).items():
            cells = (found["transformers"], given, *(count.get(status, 0) for status in PACKED))
            packing.append("| " + " | ".join(map(str, cells)) + " |")
        lines.append(f"Not equal with transformers {found['transformers']}:\n")
        lines += [f"* {o['type']}/{o['cls']}, {o['status']}: {o['why']}" for o in found["others"]]
        lines.append("")
    return [*rows, *packing, *lines[:-1]]


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
            f"* {len(pairs)} pairs: **{states['equal']} equal to the unpatched model**, "
            f"{states['different']} different, {states['not built']} without a training step."
        ),
        *_executed([o for o in pairs if equal(o)]),
        (
            f"* **{len(together)} model types** with norms, gated MLP and fused head together, "
            f"{len(rotary)} of them also with the rotary function."
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
    beside = sum(bool({*o.get("inputs", ())} - {"text"}) for o in pairs)
    counted = [o["gradients"] for o in pairs if "gradients" in o]
    alive, every = (sum(one[at] for one in counted) for at in (0, 1))
    bare = sorted({o["type"] for o in pairs if o["text_only"]})
    return [
        f"* {_totals(pairs)}",
        (
            f"* {beside} equal pairs ran with images, video or sound. In the {len(counted)} pairs "
            f"where gradients were counted, {alive:,} of {every:,} parameters had one that is not "
            "zero."
        ),
        (
            f"* Of the equal pairs, {text} ran on text only, {towers} have an idle tower. "
            f"In {whole}, every patched module called its operator and every tower ran."
        ),
        *(f"* {name} ran on text only: {TEXT_ONLY[name]}." for name in bare),
    ]


def _totals(pairs: list[dict[str, Any]]) -> str:
    """Totals of patched modules, of those that ran, and of those that called an operator."""
    patched, ran, served = (
        sum(n for o in pairs for op, n in o[which].items() if op != ROTATED)  # they rotate, too
        for which in ("modules", "ran", "served")
    )
    return (
        f"{patched:,} modules were patched in the equal pairs, {ran:,} ran, **{served:,} called an "
        "operator of ours**."
    )


def _row(outcome: dict[str, Any]) -> str:
    if outcome["status"] != "equal":
        why = outcome["why"].replace("|", "\\|")
        return (
            f"| {outcome['type']} | {outcome['cls']} | **{outcome['status']}**: {why} | | | | | | |"
        )
    cells = [NOT_MEASURED] * 6
    step = "equal"
    if measured(outcome):
        if outcome["text_only"]:
            step = "equal on **text only**"
        elif idle_towers(outcome):
            step = "equal **in part**"
        mlps = (*GATED, "relu_squared")
        counts = [_of(outcome, ops) for ops in (NORMS, mlps, FAMILIES["rotary"])]
        beside = [kind for kind in outcome.get("inputs", ()) if kind != "text"]
        step += f" with {_listed(beside)}" if beside else ""
        alive = "{} of {}".format(*outcome["gradients"]) if "gradients" in outcome else NOT_MEASURED
        head = "**fused**" if "head" in covers(outcome) else "real"
        cells = [alive, *counts, head, "; ".join([*map(_idle, outcome["idle"]), *_stock(outcome)])]
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


def _rotated(pairs: list[dict[str, Any]]) -> list[str]:
    """Types whose queries and keys are normalized and rotated by one operator, and others."""
    served = sorted({o["type"] for o in pairs if equal(o) and o["served"].get(ROTATED)})
    types: dict[str, set[str]] = {}
    for outcome in pairs:
        for reason in outcome["skipped"].get(ROTATED, ()):
            types.setdefault(reason, set()).add(outcome["type"])
    return [
        f"`{ROTATED}` serves layers of {len(served)} types: {', '.join(served)}.\n",
        "| norms and rotation apart, why | layers of model types |",
        "|---|---|",
        *(f"| {reason} | {', '.join(sorted(names))} |" for reason, names in sorted(types.items())),
    ]


def _reasons(pairs: list[dict[str, Any]]) -> list[str]:
    """Reasons by operator, with the types; a model that has no such module needs none."""
    types: dict[tuple[str, str], list[str]] = {}
    for outcome in pairs:
        for op, reasons in outcome["skipped"].items():
            for reason in reasons if op != ROTATED else ():  # it has a table of its own
                if not reason.startswith("the model has no module of this kind"):
                    where = types.setdefault((NOTE.get(op, op), reason), [])
                    if outcome["type"] not in where:
                        where.append(outcome["type"])
    rows = ["| part | reason | model types |", "|---|---|---|"]
    for (op, reason), names in sorted(types.items()):
        shown = reason.replace("|", "\\|").replace("\n", " ")
        rows.append(f"| {op} | {shown} | {', '.join(names)} |")
    return rows
