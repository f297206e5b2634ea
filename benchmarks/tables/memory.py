"""Memory: predicted, measured and reused, by policies of recomputation, and of plans."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks import store
from benchmarks.tables import GIB, gib, table

# --- predicted and measured ---


def _how(row: dict[str, Any]) -> str:
    """How a story's training is spread, in words."""
    parts = [row.get("dtype", "bfloat16")]
    if row.get("fsdp") or row.get("zero_stage"):
        spread = "FSDP2" if row.get("fsdp") else f"ZeRO-{row['zero_stage']}"
        parts.append(f"{spread} on {row['world']}")
    return ", ".join(parts + ["checkpointing"] * row.get("checkpointing", False))


def stories() -> list[str]:
    """Static and dynamic bytes, unpatched and patched, and what the patch saves of the peak."""
    peaks = ("logits", "peak")
    heads = ("model, batch x tokens", "how", "static", "unpatched: dynamic", *peaks)
    lines = []
    for _, row in store.rows("memory-estimates"):
        stock, ours = row["stock"], row["patched"]
        cells = [f"{row['model']}, {row['batch']} x {row['sequence']:,}", _how(row)]
        cells.append(gib(stock["static_bytes"]))
        for peak in (stock, ours):
            cells += [gib(peak[f"{n}_bytes"]) for n in ("dynamic", "logits", "peak")]
        lines.append([*cells, f"{100 * (1 - ours['peak_bytes'] / stock['peak_bytes']):.0f} %"])
    return table((*heads, "patched: dynamic", *peaks, "saved"), lines)


def measured_peaks() -> list[str]:
    """Every measured case beside its estimate, newest of each device."""
    newest: dict[tuple[str, str], tuple[Any, Any]] = {}
    for data, row in store.rows("memory"):
        newest[store.device(data), json.dumps(row["case"], sort_keys=True)] = (data, row)
    lines = []
    for (device, _), (_, row) in newest.items():
        case = row["case"]
        name = [f"{case['model']} {case['batch']} x {case['sequence']}", case["dtype"]]
        name += ["LoRA"] * case["lora"] + ["checkpointing"] * case["checkpointing"]
        name.append("patched" if case["patched"] else "baseline")
        got = row.get("measured_bytes")
        shown = f"{got / 2**20:,.1f}" if got else row["failure"]
        error = f"{round(row['error_percent'], 1) + 0.0:+.1f} %" if got else "-"
        guess = f"{row['estimated_bytes'] / 2**20:,.1f}"
        limit = f"{case['limit_gb']:g}" if case["limit_gb"] else "-"
        lines.append((device, ", ".join(name), limit, shown, guess, error))
    heads = ("device", "case", "limit, GB", "measured, MiB", "estimated, MiB", "error")
    return table(heads, lines)


def reused() -> list[str]:
    """What the chunked loss keeps in the allocator, and what it does when memory is short."""
    lines = []
    for data, reuse in store.rows("memory-reuse"):
        if "steps" not in reuse:
            continue
        steps, short = reuse["steps"], reuse["shortage"]
        device, count = store.device(data), len(steps)
        limit, asked = short["limit_bytes"] / GIB, short["logits_bytes"] / GIB
        rows = [
            (
                f"{i + 1}",
                *(f"{steps[i][name] / 2**20:,.1f}" for name in ("allocated", "reserved")),
                *(f"{steps[i][name]}" for name in ("segments", "retries")),
            )
            for i in (0, count - 1)
        ]
        heads = ("after step", "allocated, MiB", "reserved, MiB", "segments", "retries")
        said = f"{device}, `fused_linear_cross_entropy` of 32 768 tokens, {count} steps:"
        lines += [said, "", *table(heads, rows)]
        text = f"With {limit:.2f} GiB free and chunks of {asked:.2f} GiB requested, the operator "
        text += f'warned "{short["said"][0]}". The loss differed by {short["loss_difference"]:g}.'
        lines += ["", text, ""]
    return lines


def recompute() -> list[str]:
    """Step and peak of the newest run, by policy, unpatched and patched."""
    measured = store.rows("recompute")
    data = measured[-1][0]
    by: dict[str, dict[bool, Any]] = {}
    for _, row in measured:
        by.setdefault(row["variant"], {})[row["patched"]] = row
    said = f"{store.device(data)}, torch {data['versions']['torch'].partition('+')[0]}, "
    said += f"{data['date'][:10]}; step and peak:"
    lines = []
    for variant, rows in by.items():
        cells = [variant]
        for patched in (False, True):
            row = rows[patched]
            cells += [f"{1e3 * row['step_seconds']:.0f}", f"{row['peak_bytes'] / 2**30:.2f}"]
        lines.append(cells)
    return [said, "", *table(("", "unpatched, ms", "GiB", "patched, ms", "GiB"), lines)]


def memory() -> list[str]:
    """Predicted and measured memory."""
    said = "In GiB per device. Logits include the loss and its gradients."
    predicted = ["### Predicted", "", said, "", *stories(), ""]
    return [*predicted, "### Measured", "", *measured_peaks(), "", "### Reused", "", *reused()]


# --- plans ---

ROWS = 14


def cards() -> list[str]:
    """Published figures that times are predicted with."""
    from liger_multi.memory.planning.cost import CARDS

    heads = ("name", "card", "GB", "bf16, TFLOPS", "fp32, TFLOPS", "FP8, TFLOPS", "memory, GB/s")
    lines = []
    for key, card in CARDS.items():
        rates = [card.products16 / 1e12, card.products32 / 1e12, card.products8 / 1e12]
        rates += [rate / 1e9 for rate in (card.bandwidth, card.link, card.host)]
        shown = (f"{rate:,.6g}" if rate else "-" for rate in rates)
        lines.append([f"`{key}`", card.name, f"{card.memory / 1e9:g}", *shown, card.source])
    return table((*heads, "link, GB/s", "host, GB/s", "from"), lines)


def example() -> list[str]:
    """The committed plan's first candidates."""
    runs = store.read("plan-example")
    if not runs:
        return ["Not made yet: `python -m benchmarks.plans --explain`.", ""]
    from liger_multi.memory import TrainingPlan
    from liger_multi.memory.planning.result import HEADER, row_of

    plan = TrainingPlan.from_data({**runs[-1]["plan"], "candidates": runs[-1]["rows"]})
    size = f"{plan.devices} x {plan.memory_bytes / 1e9:g} GB, {plan.batch} sequences a step"
    lines = [f"{plan.model}, {plan.layers} layers, {size}; {plan.simulations} steps simulated:", ""]
    lines += table(HEADER, map(row_of, plan.candidates[:ROWS]))
    limits = [
        ("largest micro-batch", f"{plan.largest_batch}", f"{plan.most_batch}"),
        ("longest sequence, tokens", f"{plan.longest_sequence:,}", f"{plan.most_sequence:,}"),
    ]
    if (store.ROOT / "docs" / "plan-example.png").exists():
        text = "Memory by part for each way to train, the budget as a dashed line"
        lines += ["", f"![{text}](plan-example.png)"]
    return [*lines, "", *table(("limit", "first way", "smallest way"), limits), ""]


EXECUTED = (
    "model, batch x tokens",
    "memory",
    "way to train",
    "micro-batch x accumulation",
    "predicted, GiB",
    "measured, GiB",
    "error",
    "predicted, s",
    "measured, s",
)


def executed() -> list[str]:
    """Executed plans; a plan that was executed again is shown in the later run."""
    lines = []
    for data in store.read("plans"):
        rows = [_executed(row["case"], run) for row in data["rows"] for run in row["runs"]]
        lines += [f"{store.device(data)}, {data['date'][:10]}:", "", *table(EXECUTED, rows)]
        agreed = sum(row["order_agrees"] for row in data["rows"])
        said = f"The predicted order of speeds is the measured one in {agreed} of "
        lines += ["", f"{said}{len(data['rows'])} cases.", ""]
    return lines or ["No device has executed plans yet.", ""]


def _executed(case: Mapping[str, Any], run: Mapping[str, Any]) -> list[str]:
    settings, size = run["settings"], run.get("measured_bytes")
    return [
        f"{case['model']} {case['batch']} x {case['sequence']}",
        case["memory"],
        run["name"].replace("stock", "baseline", 1),
        f"{settings['micro_batch']} x {settings['accumulation']}",
        f"{run['predicted_bytes'] / 2**30:.2f}",
        f"{size / 2**30:.2f}" if size else run["failure"],
        f"{run['error_percent']:+.1f} %" if size else "-",
        f"{run['predicted_seconds']:.3f}",
        f"{run['measured_seconds']:.3f}" if size else "-",
    ]


def planning() -> list[str]:
    """A plan, plans that were executed, and published figures of cards."""
    plans = ["### Example plan", "", *example(), "### Executed plans", "", *executed()]
    said = "Dense GEMMs with fp32 accumulation; links and hosts in one direction."
    return [*plans, "### Cards", "", said, "", *cards()]


TABLES: dict[str, Callable[[], list[str]]] = {
    "memory-tables": memory,
    "recompute": recompute,
    "planning-tables": planning,
}
