"""``docs/coverage.md``: which models were compared with stock, from the result of the sweep."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "tests" / "sweep" / "results.json"
GENERATIONS = RESULTS.with_name("generations.json")
DEVICES = RESULTS.with_name("devices.json")
NORMS = ("rms_norm", "layer_norm", "gated_rms_norm")
GATED = ("gated_mlp", "swiglu", "geglu", "swiglu_clamped")
HEAD = """\
# Coverage

A tiny random model of every registered pair of model type and class with a language-model head runs
one training step with labels, stock and patched. The loss has to agree to {loss:g} and every
gradient to {gradient:g} of its largest entry (plus {floor:g} of the largest of all), with random
norm weights. This page is made of the kept result of

    python tests/sweep --write

with torch {torch}, transformers {transformers} and the {backend} backend.
`python tests/sweep NAME... --backend cuda --every 12` runs a sample on a device.

{summary}

Columns: modules that run our operator, by family; **fused** when the step computed its loss without
its logits, "real" when it took them. What a patch leaves alone stands in its report, and below.

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
            "| type | class | step | norms | MLP | rotary | loss |",
            "|---|---|---|---|---|---|---|",
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
            f"Calls of operators: {served}.\n"
        )
        lines.append(f"Equal: {', '.join(sorted({o['type'] for o in equal}))}.\n")
        others = [o for o in pairs if o["status"] != "equal"]
        lines += [f"* {o['type']}/{o['cls']}, {o['status']}: {o['why']}" for o in others]
    return lines


def _generations() -> list[str]:
    """Counts of the whole sweep with older libraries, and the pairs that are not equal there."""
    rows = [
        "The whole sweep of 2026-11-22 without timm and SciPy; pairs that need a newer rule of",
        "`tests/sweep/cases.py` to be built, such as blt, were not run again.\n",
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


def covers(outcome: dict[str, Any]) -> set[str]:
    """Which of "norms", "mlp", "rotary" and "head" our operators served in an equal step."""
    calls = outcome["calls"] if outcome["status"] == "equal" else {}
    found = {"norms": NORMS, "rotary": ("rope",), "head": ("fused_linear_cross_entropy",)}
    made = {name for name, ops in found.items() if any(c.startswith(ops) for c in calls)}
    return made | ({"mlp"} if any(c.startswith(GATED) for c in calls) else set())


def _summary(pairs: list[dict[str, Any]]) -> str:
    counts = Counter(o["status"] for o in pairs)
    every = {"norms", "mlp", "head"}
    together = {o["type"] for o in pairs if covers(o) >= every}
    rotary = {o["type"] for o in pairs if covers(o) >= {*every, "rotary"}}
    equal, different, none = (counts[s] for s in ("equal", "different", "not built"))
    lines = [
        (
            f"* {len(pairs)} pairs: **{equal} equal to stock**, {different} different, {none} "
            "without a step on this machine."
        ),
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
    return "\n".join(lines)


def _row(outcome: dict[str, Any]) -> str:
    modules, calls = outcome["modules"], outcome["calls"]
    if outcome["status"] != "equal":
        why = outcome["why"].replace("|", "\\|")
        return f"| {outcome['type']} | {outcome['cls']} | **{outcome['status']}**: {why} | | | | |"
    norms = sum(modules.get(op, 0) for op in NORMS)
    mlps = sum(modules.get(op, 0) for op in ("swiglu", "geglu", "swiglu_clamped", "relu_squared"))
    head = "**fused**" if "fused_linear_cross_entropy" in calls else "real"
    step = "equal" if not outcome["why"] else f"equal {outcome['why']}"
    cells = (outcome["type"], outcome["cls"], step, norms, mlps, modules.get("rope", 0), head)
    return f"| {' | '.join(str(c or '') for c in cells)} |"


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
