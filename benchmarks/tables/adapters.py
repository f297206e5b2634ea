"""LoRA layers beside PEFT, and steps over a base in 4 bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks import store
from benchmarks.tables import table
from benchmarks.tables.provenance import gib, measured

LORA_PARTS = {
    "mlp": "MLP of Llama-3-8B",
    "qkv": "q, k and v, three updates",
    "qkv as one": "q, k and v, one operator",
    "step": "a step of a small model",
}


def lora_layers() -> list[str]:
    """Time and memory of LoRA layers beside PEFT's, forward and backward."""
    layers: dict[tuple[str, str], dict[str, Any]] = {}
    runs = [r for r in store.read("lora") if store.device(r) == store.DEVICES["h100"]]
    for run in runs:
        for row in run["rows"]:
            layers.setdefault((row["part"], row["form"]), {})[row["variant"]] = row
    lines = []
    for (part, form), rows in sorted(
        layers.items(), key=lambda item: [*LORA_PARTS, item[0][0]].index(item[0][0])
    ):
        if part not in LORA_PARTS or not {"stock", "ours"} <= set(rows):
            continue
        cells = [f"{LORA_PARTS[part]}, {form.removesuffix(' adapters')}"]
        for who in ("stock", "ours"):
            cells += [f"{rows[who]['milliseconds']:#.3g}".rstrip(".")]
            cells += [f"{rows[who]['added_bytes'] / 2**20:,.0f}"]
        ratio = rows["ours"]["milliseconds"] / rows["stock"]["milliseconds"]
        lines.append([*cells, f"{ratio:.2f}"])
    heads = ["Part, adapters", "PEFT, ms", "added, MiB", "ours, ms", "added, MiB", "ours / PEFT"]
    return [measured(runs[-1]), "", *table(heads, lines)]


def four_bits() -> list[str]:
    """Steps and layers over a base in 4 bits beside others, then ``dequantize``, by card."""
    parts: list[str] = []
    by_card = {store.device(run): run for run in store.read("four-bits")}
    for run in by_card.values():
        steps, rates = [], []
        ours = {
            row["work"]: row for row in run["rows"][::-1] if row["side"].startswith("liger_multi, ")
        }
        places = list(dict.fromkeys(row["work"] for row in run["rows"]))
        for row in sorted(run["rows"], key=lambda row: places.index(row["work"])):
            name, copied = row["work"], row.get("of_copy")
            if copied is not None:
                rate = f"{row['gb_per_s']:,.0f}"
                rates.append([name.removeprefix("dequantize "), f"{row['ms']:.3f}", rate])
                rates[-1].append(f"{100 * copied:.0f} %")
            elif row["peak_bytes"]:
                pair = [ours[name][key] / row[key] for key in ("ms", "peak_bytes")]
                ratio = "" if row is ours[name] else ", ".join(f"{r:.2f}" for r in pair)
                cells = [f"{row['ms']:#.4g}".rstrip("."), gib(row["peak_bytes"])]
                steps.append([name, row["side"], *cells, ratio])
        heads = ["Work", "Implementation", "ms", "peak, GiB", "first of ours / it: time, memory"]
        parts += [measured(run), "", *table(heads, steps), ""]
        if rates:
            parts += [*table(["dequantize", "ms", "GB/s", "of a copy's"], rates), ""]
    return parts[:-1]


TABLES: dict[str, Callable[[], list[str]]] = {
    "lora-layers": lora_layers,
    "four-bits": four_bits,
}
