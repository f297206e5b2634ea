"""The table of trainers on ``docs/trainers.md``."""

from __future__ import annotations

import json
from typing import Any

from ci.trainers import RESULTS, trainers

START, END = "<!-- trainers:start -->", "<!-- trainers:end -->"


def _versions(found: dict[str, Any], name: str) -> str:
    others = {n: v for n, v in found["versions"].items() if n != name}
    return ", ".join(f"{n} {v}" for n, v in others.items())


def _rows(name: str, found: dict[str, Any]) -> list[str]:
    title = f"{name} {found['versions'][name]}"
    return [
        f"| {title} | {run} | {one['steps']} | {one['first']:.4f} | {one['last']:.4f} | "
        f"{one['difference']:.0e} | {', '.join(f'`{op}` {n}' for op, n in one['calls'].items())} |"
        for run, one in found["runs"].items()
    ]


def table() -> str:
    """What ran, with what, and what did not run."""
    kept = json.loads(RESULTS.read_text(encoding="utf-8"))
    known = trainers()
    out = ["| Trainer | Run | Steps | First loss | Last loss | Difference | Calls of operators |",
           "|---|---|---|---|---|---|---|"]  # fmt: skip
    out += [row for name in known if name in kept for row in _rows(name, kept[name])]
    out += ["", "| Trainer | Run on | With |", "|---|---|---|"]
    out += [
        f"| {name} | {kept[name]['date']} | {_versions(kept[name], name)} |"
        for name in known
        if name in kept
    ]
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
    _, found, after = rest.partition(END)
    if not found:
        raise SystemExit(f"docs/trainers.md needs {START} and {END} after it")
    return f"{before}{START}\n\n{table()}\n\n{END}{after}"
