"""The page of coverage: which models were compared with stock, from the result of the sweep."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "tests" / "sweep" / "results.json"
GENERATIONS = RESULTS.with_name("generations.json")
DEVICES = RESULTS.with_name("devices.json")
NORMS = ("rms_norm", "layer_norm", "gated_rms_norm")
GATED = ("swiglu", "geglu", "swiglu_clamped")
FAMILIES = {
    "norms": NORMS,
    "mlp": GATED,
    "rotary": ("rope",),
    "head": ("fused_linear_cross_entropy",),
}
NOT_MEASURED = "not measured"
HEAD = """\
# Coverage

A tiny random model of every registered pair of model type and class with a language-model head runs
one training step with labels, stock and patched. The loss has to agree to {loss:g} and every
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


def page() -> str:
    """The page."""
    found = json.loads(RESULTS.read_text(encoding="utf-8"))
    pairs = found["pairs"]
    text = HEAD.format(
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
    for found in json.loads(DEVICES.read_text(encoding="utf-8")):
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
    for found in json.loads(GENERATIONS.read_text(encoding="utf-8")):
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
    """Whether the step is equal to stock, and what ran in it is known."""
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
            f"* {len(pairs)} pairs: **{states['equal']} equal to stock**, {states['different']} "
            f"different, {states['not built']} without a step on this machine."
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
