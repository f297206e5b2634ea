"""The page of coverage: which models train as without the patch, of the results of the sweep."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).with_name("results.json")
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
HEAD = """\
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


def page() -> str:
    """The page."""
    data = json.loads(RESULTS.read_text(encoding="utf-8"))
    pairs = data["pairs"]
    text = HEAD.format(
        **{k: data[k] for k in ("torch", "transformers", "backend")},
        **data["bounds"],
        summary=_summary(pairs),
    )
    for registry in dict.fromkeys(o["kind"] for o in pairs):
        some = [o for o in pairs if o["kind"] == registry]
        rows = [
            (
                "| type | class | step | gradients | norms | MLP | rotary | loss "
                "| not run, or no call |"
            ),
            "|---|---|---|---|---|---|---|---|---|",
        ]
        rows += [_row(o) for o in sorted(some, key=lambda o: (o["type"], o["cls"]))]
        text += f"## {registry.capitalize()}\n\n" + "\n".join(rows) + "\n\n"
    sections = {
        "Packed rows": _packed(),
        "Norms of queries and keys": _rotated(pairs),
        "Skipped modules": _reasons(pairs),
        "On devices": _devices(),
        "Other versions of transformers": _generations(),
    }
    return text + "\n".join("\n".join([f"## {t}\n", *rows, ""]) for t, rows in sections.items())


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
    data = json.loads(RESULTS.with_name("packing.json").read_text(encoding="utf-8"))
    groups: dict[tuple[str, ...], set[str]] = {}
    for one in sorted(data["pairs"], key=lambda o: (list(PACKED).index(o["status"]), o["why"])):
        first = one["status"], one["why"]
        cells = [first, *(one["beside"].get(name, ("", "")) for name in BESIDE)]
        text = [PACKED[status].format(why=why) if status else "" for status, why in cells]
        same = [text[0], *("the same" if cell == text[0] else cell for cell in text[1:])]
        groups.setdefault(tuple(same), set()).add(one["type"])
    return [
        (
            f"Two samples of text in a row, logits and every gradient, `use_cache=False`, "
            f"transformers {data['transformers']}; `python -m tests.sweep --packing`. See "
            "[packed rows](patching.md#packed-rows).\n"
        ),
        f"| with `position_ids` | {' | '.join(BESIDE.values())} | types | |",
        "|---|---|---|---|---|",
        *(
            f"| {' | '.join(text)} | {len(types)} | {', '.join(sorted(types))} |"
            for text, types in groups.items()
        ),
    ]


TREES, SHARDS = RESULTS.with_name("trees.json"), RESULTS.with_name("shards.json")


def shared_prefixes() -> list[str]:
    """Types of the sweep by what becomes of a row of trees, and why they are refused."""
    return _served(
        TREES,
        "A tree of three levels and a second tree in one row, logits and every gradient in fp32, "
        "equal to those of every path by itself: **{} model types**, transformers {}, on text "
        "(`python -m tests.sweep --trees`).\n",
    )


def sharded_rows() -> list[str]:
    """Types of the sweep by what becomes of a row that two ranks share."""
    return _served(
        SHARDS,
        "A plain row, the same with another token, a packed row and a row of trees on two ranks, "
        "logits and every gradient in fp32, equal to one process: **{} model types**, transformers "
        "{}, causal language models (`python -m tests.sweep --shards`). Models that refuse packed "
        "rows or trees in one process are compared without.\n",
    )


def _served(file: Path, said: str) -> list[str]:
    """Types that are equal, and the reasons of the others."""
    data = json.loads(file.read_text(encoding="utf-8"))
    built = [one for one in data["pairs"] if one["status"] != "not built"]
    types: dict[str, set[str]] = {}
    for one in built:
        status = {"equal": "", "refused": _reason(one["why"])}.get(one["status"])
        text = f"**not equal, no error**: {one['why']}" if status is None else status
        types.setdefault(text, set()).add(one["type"])
    served = sorted(types.pop("", ()))
    others = sorted(types.items(), key=lambda item: (-len(item[1]), item[0]))
    return [
        said.format(len(served), data["transformers"]),
        f"Served: {', '.join(served)}.\n",
        "| refused, why | types | |",
        "|---|---|---|",
        *(f"| {why} | {len(names)} | {', '.join(sorted(names))} |" for why, names in others),
    ]


_REASONS = (
    (r"shard_sequence: nothing in .*", "attention that does not use transformers' interface"),
    (r"shard_sequence needs attn_implementation.*", "our attention does not serve it"),
    (r".*shared_kv_states cannot be None.*", "it reads the keys of another model"),
    (r"shard_sequence: .* computes something else .*", "the trial finds another result"),
    (r"shard_sequence: .* cannot run on rows .*?: (.{0,90}).*", r"the trial fails: \1"),
    (r"shard_sequence: .* cannot be tried .*", "it takes no row of tokens alone"),
    (r"shard_sequence needs one model .*", "no single stack of layers with an embedding"),
    (r"nothing keeps branches apart in (.*)", r"nothing keeps branches apart in \1"),
    (r".*reads the attention mask itself.*", "attention of its own reads the mask"),
    (r".*its attention is .*", "attention that does not use transformers' interface"),
    (r".*where a token sees .*", "a token sees later ones"),
    (r".*made of tokens.*", "a mask that is made of tokens"),
    (
        r".*could not be tried with shared prefixes: (?:\w+: )?(.*?)(?:, asked by .*)?$",
        r"its forward raises an error: \1",
    ),
    (r".*the output of a branch differs.*", "its layers mix tokens in a way that no tree reaches"),
)
"""Ends of messages, and how the page calls them; the first that matches."""


def _reason(why: str) -> str:
    for pattern, text in _REASONS:
        match = re.search(pattern, why)
        if match:
            return match.expand(text).replace("|", "\\|")[:160]
    return why[:160]


def _devices() -> list[str]:
    """Samples of the sweep whose operators ran on a device: what they called, what is not equal."""
    lines = []
    for device in json.loads(ELSEWHERE.read_text(encoding="utf-8"))["devices"]:
        pairs, where = device["pairs"], [device[k] for k in ("device", "torch", "transformers")]
        equal = [o for o in pairs if o["status"] == "equal"]
        calls: Counter[str] = sum((Counter(o["calls"]) for o in equal), Counter())
        served = ", ".join(f"{op} {n}" for op, n in calls.most_common())
        lines.append(
            f"{where[0]}, backend {device['backend']}, torch {where[1]}, transformers {where[2]}, "
            f"{device['date']}, {device['commit']}: **{len(equal)} of {len(pairs)} pairs equal**. "
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
    for run in json.loads(ELSEWHERE.read_text(encoding="utf-8"))["generations"]:
        counts = [run[s] for s in ("equal", "different", "not built")]
        cells = (*(run[k] for k in ("transformers", "torch", "date")), sum(counts), *counts)
        rows.append("| " + " | ".join(map(str, cells)) + " |")
        for input_name, count in run.get("packing", {}).items():
            cells = (run["transformers"], input_name, *(count.get(status, 0) for status in PACKED))
            packing.append("| " + " | ".join(map(str, cells)) + " |")
        lines.append(f"Not equal with transformers {run['transformers']}:\n")
        lines += [f"* {o['type']}/{o['cls']}, {o['status']}: {o['why']}" for o in run["others"]]
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
    others = sum(bool({*o.get("inputs", ())} - {"text"}) for o in pairs)
    counted = [o["gradients"] for o in pairs if "gradients" in o]
    alive, every = (sum(one[at] for one in counted) for at in (0, 1))
    bare = sorted({o["type"] for o in pairs if o["text_only"]})
    return [
        f"* {_totals(pairs)}",
        (
            f"* {others} equal pairs ran with images, video or sound. In the {len(counted)} pairs "
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
        modalities = [modality for modality in outcome.get("inputs", ()) if modality != "text"]
        step += f" with {_listed(modalities)}" if modalities else ""
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
    text = f"`{part['path']}` did not run"
    if part["lacks"]:
        text += f" (no {_listed(part['lacks'], 'or')})"
    modules = ", ".join(f"{n} {op}" for op, n in part["modules"].items())
    return f"{text}: {modules}" if modules else text


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
