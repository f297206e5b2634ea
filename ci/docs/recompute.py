"""The measured table of ``docs/recompute.md``, made of what ``benchmarks.recompute`` writes."""

from __future__ import annotations

from typing import Any

from benchmarks import store

START, END = "<!-- recompute:start -->", "<!-- recompute:end -->"


def table() -> list[str]:
    """Step and peak of the newest run, by policy, stock and patched."""
    found = store.rows("recompute")
    data = found[-1][0]
    by: dict[str, dict[bool, Any]] = {}
    for _, row in found:
        by.setdefault(row["variant"], {})[row["patched"]] = row
    said = f"{store.device(data)}, torch {data['versions']['torch'].partition('+')[0]}, "
    said += f"{data['date'][:10]}; step and peak:"
    lines = [said, "", "| | stock, ms | GiB | patched, ms | GiB |", "|---|---|---|---|---|"]
    for variant, rows in by.items():
        cells = [variant]
        for patched in (False, True):
            row = rows[patched]
            cells += [f"{1e3 * row['step_seconds']:.0f}", f"{row['peak_bytes'] / 2**30:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def page(old: str) -> str:
    """The page with the current table between its markers, and its quotes."""
    if old.count(START) != 1 or old.count(END) != 1:
        raise SystemExit(f"docs/recompute.md needs the lines {START} and {END}, once each")
    before, rest = old.split(START)
    made = "\n".join([START, "", *table(), "", END])
    return store.quoted(before + made + rest.split(END)[1])
