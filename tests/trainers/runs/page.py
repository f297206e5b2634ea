"""The table of trainers on ``docs/trainers.md``."""

from __future__ import annotations

import json
from typing import Any

from tests.trainers.runs import RESULTS, trainers

START, END = "<!-- trainers:start -->", "<!-- trainers:end -->"


def _row(name: str, row: dict[str, Any]) -> str:
    """What ran of a trainer, with which versions."""
    others = [f"{n} {v}" for n, v in row["versions"].items() if n != name]
    runs = row["runs"].values()
    worst = max(run["difference"] for run in runs)
    calls = sorted({op for run in runs for op in run["calls"]})
    cells = (
        f"{name} {row['versions'][name]}",
        ", ".join(others),
        "; ".join(row["runs"]),
        f"{worst:.0e}",
        ", ".join(f"`{op}`" for op in calls),
        max(run["date"] for run in runs),
    )
    return f"| {' | '.join(cells)} |"


def table() -> str:
    """What ran, with what, and what did not run."""
    kept = json.loads(RESULTS.read_text(encoding="utf-8"))
    known = trainers()
    out = [
        "| Trainer | With | Runs | Difference | Operators called | Date |",
        "|---|---|---|---|---|---|",
    ]
    out += [_row(name, kept[name]) for name in known if name in kept]
    out += ["", "| Not run | What | Why |", "|---|---|---|"]
    out += [
        f"| {name} | {what} | {why} |"
        for name, trainer in known.items()
        for what, why in trainer.not_run.items()
    ]
    return "\n".join(out)


def page(old: str) -> str:
    """The page with the table of today's results between its markers."""
    before, _, rest = old.partition(START)
    _, row, after = rest.partition(END)
    if not row:
        raise SystemExit(f"docs/trainers.md needs {START} and {END} after it")
    return f"{before}{START}\n\n{table()}\n\n{END}{after}"
