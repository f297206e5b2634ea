"""What the benchmark leaves: a table on the screen, a JSON file, and a chart for every operator."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import math
import platform
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from liger_multi._version import __version__
from liger_multi.dispatch.registry import backends, unavailable
from liger_multi.files.documents import plain, write_whole
from liger_multi.files.pictures import ALARM, INK, OURS, STOCK, figure
from liger_multi.grouping import grouped
from liger_multi.memory.measure import format_bytes

NOISY_PERCENT = 3
PACKAGES = (
    *("triton", "transformers", "liger-kernel", "trl"),
    *("fla-core", "causal-conv1d"),
    *("quack-kernels", "nvidia-cutlass-dsl", "cut-cross-entropy"),
)
Row = Mapping[str, Any]


# --- facts ---


def device_facts(device: torch.device) -> dict[str, Any]:
    """What runs this."""
    if device.type == "cpu":
        return {
            "type": "cpu",
            "name": f"cpu-{platform.machine()}",
            "threads": torch.get_num_threads(),
        }
    properties = torch.get_device_module(device).get_device_properties(device)
    facts = {"type": device.type, "name": str(getattr(properties, "name", device.type))}
    for key in ("total_memory", "multi_processor_count", "L2_cache_size"):
        if hasattr(properties, key):
            facts[key] = getattr(properties, key)
    return facts


def versions() -> dict[str, str]:
    """Versions of every package that was timed."""
    installed = {
        "python": platform.python_version(),
        "liger_multi": __version__,
        "torch": torch.__version__,
    }
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed[name] = importlib.metadata.version(name)
    for name, record in backends().items():
        installed |= record.describe() if unavailable(name) is None else {}
    return installed


# --- table ---


def significant(value: float) -> str:
    """Three significant digits."""
    digits = 3 - 1 - math.floor(math.log10(value)) if value > 0 else 3
    return f"{value:.{min(4, max(0, digits))}f}"


def spread(row: Row) -> str:
    """Half the distance of the quartiles, where it says that a difference may be noise."""
    percent = 100 * row["both_spread_ms"] / row["both_ms"]
    return f" ±{percent:.0f}%" if percent >= NOISY_PERCENT else ""


def base(rows: Sequence[Row]) -> Row | None:
    """The row that others are compared with: ours, or the first that has a time."""
    timed = [r for r in rows if r["status"] == "ok"]
    return next((r for r in timed if r["provider"] == "ours"), timed[0] if timed else None)


def table(op: str, rows: Sequence[Row]) -> Table:
    """All samples and providers of one operator."""
    page = Table(title=op, title_justify="left", title_style="bold", header_style="bold")
    page.add_column("sample", no_wrap=True)
    page.add_column("provider", no_wrap=True)
    for name in ("forward\n[ms]", "fwd+bwd\n[ms]", "time /\nours", "% of\nroof", "extra\nmemory"):
        page.add_column(name, justify="right", no_wrap=True)
    for name in ("peak\nmemory", "relative\nerror", "error /\ntolerance", "host\n[us]"):
        page.add_column(name, justify="right", no_wrap=True)
    for group in groups(rows):
        with_ratio = base(group)
        for row in group:
            page.add_row(*_cells(row, with_ratio, first=row is group[0]))
        page.add_section()
    return page


def groups(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows of one sample each."""
    return list(grouped((row["sample"], row) for row in rows).values())


def _cells(row: Row, compared: Row | None, first: bool) -> list[str]:
    name = row["provider"]
    if name == "ours" and row.get("backend"):
        name = f"ours ({row['backend']})"
    cells = [row["sample"] if first else "", name]
    errors = row.get("error")
    error_cells = (
        [f"{errors['relative']:.1e}", f"{errors['tolerances']:.2g}"] if errors else ["-", "-"]
    )
    if row["status"] != "ok":
        return [*cells, f"[red]{row['status']}[/red]", "", "", "", "", "", *error_cells, ""]
    is_ours = compared is not None and compared["provider"] == "ours"
    ratio = f"{row['both_ms'] / compared['both_ms']:.2f}" if compared and is_ours else "-"
    percent, extra, host = row["percent_of_peak"].get("both"), row["extra_bytes"], row["host_us"]
    return [
        *cells,
        significant(row["forward_ms"]),
        significant(row["both_ms"]) + spread(row),
        ratio,
        "-" if percent is None else f"{percent:.0f}",
        "-" if extra is None else format_bytes(extra),
        "-" if row["peak_bytes"] is None else format_bytes(row["peak_bytes"]),
        *error_cells,
        "-" if host is None else f"{host['forward']:.0f}",
    ]


def show(console: Console, result: Mapping[str, Any]) -> None:
    """Print the result as people read it."""
    device, peak = result["device"], result["ceilings"]
    console.print(
        f"{device['name']}, torch {result['versions']['torch']}, {result['dtype']}; "
        f"copy {peak['copy_bytes_per_second'] / 1e9:,.0f} GB/s, "
        f"matmul {significant(peak['matmul_operations_per_second'] / 1e12)} TFLOP/s"
    )
    if any(r["divisors"] for r in result["rows"]):
        console.print("shapes are scaled down for this device: rows and vocabulary (V) as stated")
    for op in dict.fromkeys(r["op"] for r in result["rows"]):
        console.print(table(op, [r for r in result["rows"] if r["op"] == op]))
    for row in result["rows"]:
        if row.get("reason"):
            console.print(
                f"{row['op']} {row['sample']}, {row['provider']}: {row['status']}: {row['reason']}",
                markup=False,
            )
    skipped = (((item["provider"], item["reason"]), item["op"]) for item in result["skipped"])
    for (provider, reason), ops in grouped(skipped).items():
        console.print(f"skipped {provider} ({', '.join(ops)}): {reason}", markup=False)


def line(rows: Sequence[Row]) -> str:
    """One finished sample in a line, for logs."""
    if not rows:
        return ""
    entries = [
        f"{r['provider']} " + (significant(r["both_ms"]) if r["status"] == "ok" else r["status"])
        for r in rows
    ]
    return f"{rows[0]['op']} {rows[0]['sample']}, fwd+bwd [ms]: {', '.join(entries)}"


# --- files ---


def save(result: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write the charts, then the result file; returns what was written."""
    folder.mkdir(parents=True, exist_ok=True)
    device = re.sub(r"[^a-z0-9]+", "-", result["device"]["name"].lower()).strip("-")
    stem = f"{device}-{result['date'][:10]}"
    ops = list(dict.fromkeys(r["op"] for r in result["rows"]))
    suffix, unique = 1, stem
    while any(
        (folder / f"{unique}{end}").exists() for end in (".json", *(f"-{o}.png" for o in ops))
    ):
        suffix += 1
        unique = f"{stem}-{suffix}"
    charts = []
    for op in ops:
        rows = [r for r in result["rows"] if r["op"] == op]
        if base(rows) is None:
            continue
        path = folder / f"{unique}-{op}.png"
        chart(f"{op}, {result['device']['name']}, {result['dtype']}", rows, path)
        charts.append(path)
    path = folder / f"{unique}.json"
    text = json.dumps(plain(result), indent=1, allow_nan=False)
    write_whole(path, f"{text}\n".encode())
    return [path, *charts]


def chart(title: str, rows: Sequence[Row], path: Path) -> None:
    """Bars of forward + backward time over ours, one panel a sample; shorter is faster."""
    panels = [(g, base(g)) for g in groups(rows)]
    heights = [len(g) + 1.2 for g, _ in panels]
    with figure(path, 8.5, 0.9 + 0.3 * sum(heights)) as canvas:
        axes = canvas.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
        for axis, (group, compared) in zip(axes, panels, strict=True):
            _panel(axis, group, compared)
        canvas.suptitle(title, x=0.012, ha="left", fontsize=12, fontweight="bold")


def _panel(axis: Any, group: list[Row], compared: Row | None) -> None:
    reference = compared["both_ms"] if compared else 1.0
    ratios = [r["both_ms"] / reference if r["status"] == "ok" else 0.0 for r in group]
    colors = [OURS if r["provider"] == "ours" else STOCK for r in group]
    axis.barh(range(len(group)), ratios, color=colors, height=0.7)
    axis.set_yticks(range(len(group)), [r["provider"] for r in group])
    axis.invert_yaxis()
    for i, (row, ratio) in enumerate(zip(group, ratios, strict=True)):
        ok = row["status"] == "ok"
        text = f" {ratio:.2f}  ({significant(row['both_ms'])} ms)" if ok else f" {row['status']}"
        axis.text(ratio, i, text, va="center", fontsize=8, color=INK if ok else ALARM)
    axis.set_xlim(0, max(*ratios, 1.0) * 1.22)
    axis.axvline(1, color=INK, lw=0.8, ls=(0, (3, 3)))
    whom = compared["provider"] if compared else "nothing that was timed"
    axis.set_title(f"{group[0]['sample']}: forward + backward time / {whom}", fontsize=9)
    axis.grid(axis="y", visible=False)
    axis.tick_params(labelsize=8)
