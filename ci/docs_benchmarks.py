"""The page of measured times, made of the files in ``benchmarks/``: newest row of each kind."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
BAR = 24  # characters of the longest bar
HEAD = """# Benchmarks

Generated from the files in the folder `benchmarks` by `make docs`; what each column means stands
in `benchmarks/README.md`, what was tried and why in [Performance](performance.md). Times are
medians of one run beside each other; bar and ratio hold an implementation against ours in that
run. Compare nothing across runs but ratios; `python -m ci.compare OLD NEW` does that.
"""


def by_date(path: Path) -> tuple[str, int]:
    """Date of a result file, and its number among those of the day."""
    found = re.search(r"(\d{4}-\d\d-\d\d)(?:-.*?(\d+))?$", path.stem)
    return (found[1], int(found[2] or 1)) if found else ("", 0)


def _files(pattern: str) -> list[tuple[Path, Any]]:
    found = sorted((ROOT / "benchmarks").glob(pattern), key=by_date)
    loaded = [(path, json.loads(path.read_text(encoding="utf-8"))) for path in found]
    return [(path, data) for path, data in loaded if "rows" in data]


def _versions(data: Mapping[str, Any]) -> str:
    names = ("torch", "triton", "liger-kernel")
    return ", ".join(f"{n} {data['versions'][n]}" for n in names if n in data["versions"])


def _file(path: Path, data: Mapping[str, Any]) -> str:
    return f"`{path.name}`" + (f", {data['commit']}" if data.get("commit") else "")


def _size(count: float | None) -> str:
    return "-" if count is None else f"{count / 2**20:,.0f}"


def _group(rows: list[Any]) -> list[str]:
    """Lines of the providers of one sample, ours first, with bars."""
    timed = [r for r in rows if r.get("both_ms")]
    ours = next((r["both_ms"] for r in timed if r["provider"] == "ours"), None)
    longest = max((r["both_ms"] for r in timed), default=1.0)
    lines = []
    for row in sorted(timed, key=lambda r: (r["provider"] != "ours", r["both_ms"])):
        bar = "█" * max(1, round(BAR * row["both_ms"] / longest))
        ratio = f"{row['both_ms'] / ours:.2f}" if ours else "-"
        roof = row.get("roof_percent", {}).get("both")
        cells = (
            row["sample"], row["provider"], f"{row['both_ms']:.3g}", ratio, bar,
            "-" if roof is None else f"{roof:.0f} %", _size(row.get("extra_bytes")),
        )  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _operators() -> list[str]:
    newest: dict[tuple[str, str], dict[str, tuple[Path, Any, list[Any]]]] = {}
    for path, data in _files("*.json"):
        if "ceilings" not in data:
            continue
        samples: dict[tuple[str, str], list[Any]] = {}
        for row in data["rows"]:
            samples.setdefault((row["op"], row["sample"]), []).append(row)
        for (op, sample), rows in samples.items():
            key = (data["device"]["name"], op)
            newest.setdefault(key, {})[sample] = (path, data, rows)
    lines: list[str] = []
    for (device, op), samples_of in sorted(newest.items()):
        sources = {f"`{p.name}` ({d['commit']}, {_versions(d)})" for p, d, _ in samples_of.values()}
        lines += [f"\n## {op} on {device}\n", f"From {'; '.join(sorted(sources))}.\n"]
        lines += [
            "| sample | who | fwd+bwd, ms | of ours | | of the roof | extra MiB |",
            "|---|---|---|---|---|---|---|",
        ]
        for _, _, rows in samples_of.values():
            lines += _group(rows)
    return lines


def _models() -> list[str]:
    newest: dict[tuple[str, float, str], tuple[Path, Any, list[Any]]] = {}
    for path, data in _files("models-*.json"):
        runs: dict[str, list[Any]] = {}
        for row in data["rows"]:
            runs.setdefault(row["run"], []).append(row)
        for run, rows in runs.items():  # ratios hold within one file
            newest[run, data["limit_gb"] or 0.0, data["device"]["name"]] = (path, data, rows)
    lines = ["\n## Whole models\n", "| model | who | tokens/s | of ours | peak GiB | file |"]
    lines.append("|---|---|---|---|---|---|")
    for (run, limit, device), (path, data, rows) in sorted(newest.items()):
        where = f"{run}, {device}" + (f", {limit} GB" if limit else "")
        ours = next((r.get("tokens_per_second") for r in rows if r["variant"] == "ours"), None)
        for row in rows:
            speed = row.get("tokens_per_second")
            cells = (
                where, row["variant"], f"{speed:,.0f}" if speed else row.get("failure", "-"),
                f"{speed / ours:.2f}" if speed and ours else "-",
                f"{row['peak_bytes'] / 2**30:.1f}" if row.get("peak_bytes") else "-",
                f"`{path.name}`, {data['commit']}",
            )  # fmt: skip
            lines.append(f"| {' | '.join(cells)} |")
    return lines if newest else []


def _losses() -> list[str]:
    """Whole losses over the products of the head that they cannot do without."""
    newest: dict[tuple[str, str, str], tuple[str, list[Any]]] = {}
    for path, data in _files("losses-*.json"):
        cases: dict[tuple[str, str, str], list[Any]] = {}
        for row in data["rows"]:
            shape = "x".join(str(n) for n in row["shape"].values())
            cases.setdefault((row["case"], shape, data["device"]["name"]), []).append(row)
        newest |= {key: (_file(path, data), rows) for key, rows in cases.items()}
    lines = ["\n## Whole losses\n", "| loss | who | fwd+bwd, ms | of the products | extra MiB |"]
    lines[-1] += " error / tolerance | file |\n|---|---|---|---|---|---|---|"
    for (case, shape, device), (file, rows) in sorted(newest.items()):
        floor = next((r["both_ms"] for r in rows if r["provider"] == "products"), None)
        for row in rows:
            time, error = row.get("both_ms"), row.get("error")
            cells = (
                f"{case} {shape}, {device}", row["provider"],
                f"{time:.1f}" if time else row["status"],
                f"{time / floor:.2f}" if time and floor else "-", _size(row.get("extra_bytes")),
                "-" if error is None else f"{error:.2f}", file,
            )  # fmt: skip
            lines.append(f"| {' | '.join(cells)} |")
    return lines if newest else []


def page() -> str:
    """The whole page."""
    return "\n".join([HEAD.rstrip(), *_models(), *_losses(), *_operators()]) + "\n"
