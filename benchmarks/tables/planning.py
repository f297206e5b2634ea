"""Plans: an example, what executed plans took, and the figures that times are predicted with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from benchmarks import store
from benchmarks.tables import table

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
    "planning-tables": planning,
}
