"""Memory: predicted, measured, reused, and by policies of recomputation."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from benchmarks import store
from benchmarks.tables import table
from benchmarks.tables.provenance import GIB, gib


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


TABLES: dict[str, Callable[[], list[str]]] = {
    "memory-tables": memory,
    "recompute": recompute,
}
