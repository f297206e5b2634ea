"""Whole models: a table of speed and memory for each card, and the parts of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from benchmarks.configs import DENSE, EAGER, WHOLE
from benchmarks.parts import BOUND, IDLE, PARTS
from benchmarks.tables import performance
from benchmarks.tables.performance import (
    ABSENT,
    PEOPLE,
    Rows,
    Run,
    block,
    number,
    ratio,
    speed,
    title,
)

NAMES = {
    **PEOPLE,
    "ours+float8": "ours, FP8",
    "ours+keep_attention": "ours, `keep_attention`",
    "ours+choose_within": "ours, `choose_within`",
    "ours+attention": "ours, `register_attention`",
}
"""Variants as heads of columns."""
LEAST_MS = 0.01  # of a part of a step, below which a cell stays empty


def by_card(run_type: str) -> dict[str, dict[str, tuple[Run, Rows]]]:
    """The newest rows of every run, by card; those with a limit of memory are left out."""
    cards: dict[str, dict[str, tuple[Run, Rows]]] = {}
    for (card, run, limit), measured in performance.by_card(run_type).items():
        if limit is None:
            cards.setdefault(card, {})[run] = measured
    order = [*WHOLE, *DENSE]
    return {
        card: {run: measured[run] for run in dict.fromkeys(order) if run in measured}
        for card, measured in cards.items()
    }


def named(run: str, rows: Rows) -> str:
    """A run as people write it, and whether the unpatched model ran kernels of fla-core."""
    return title(run) + ", fla-core" * bool(rows.get("stock", {}).get("fla"))


def of_each_card(
    run_type: str,
    heads: Sequence[str],
    lines: Callable[[str, Rows], Iterable[Sequence[str]]],
    said: Callable[[Sequence[tuple[Run, Rows]]], str] = lambda _: "",
) -> str:
    """A table for each card, without columns that are empty there."""
    tables = []
    for measured in by_card(run_type).values():
        shown = {
            run: (data, rows, [list(cells) for cells in lines(run, rows)])
            for run, (data, rows) in measured.items()
        }
        shown = {run: entry for run, entry in shown.items() if entry[2]}
        cells = [line for _, _, some in shown.values() for line in some]
        kept = [i for i in range(len(heads)) if any(line[i] != ABSENT for line in cells)]
        text = block(
            [data for data, _, _ in shown.values()],
            [heads[i] for i in kept],
            [[line[i] for i in kept] for line in cells],
        )
        how = said([(data, rows) for data, rows, _ in shown.values()])
        tables += [text.replace("\n\n", f" {how}\n\n", 1) if how else text] * bool(text)
    return "\n\n".join(tables)


def rounds(measured: Sequence[tuple[Run, Rows]]) -> str:
    """How many turns of how many steps the medians are of, where rows say so."""
    turns = {row["turns"] for _, rows in measured for row in rows.values() if "turns" in row}
    steps = {data["steps"] for data, _ in measured if "steps" in data}
    if not (turns and steps):
        return ""
    one, several = " or ".join(map(str, sorted(steps))), " or ".join(map(str, sorted(turns)))
    return f"Medians of {one} steps in each of {several} turns."


def whole_models() -> str:
    """Tokens a second and memory of every run, a table for each card."""

    def lines(run: str, rows: Rows) -> Iterable[Sequence[str]]:
        if "stock" in rows:
            yield [
                named(run, rows),
                *[speed(rows.get(who)) for who in EAGER],
                ratio(rows, "tokens_per_second", "liger"),
                *[speed(rows.get(who)) for who in NAMES if who not in EAGER],
                *[number(rows.get(who), "GiB") for who in EAGER],
                ratio(rows, "peak_bytes", "liger"),
                *[number(rows.get(who), "GiB") for who in NAMES if who not in EAGER],
            ]

    heads = ["run"]
    for unit in ("tokens/s", "GiB"):
        shown = {who: f"{name}, {unit}" for who, name in NAMES.items()}
        heads += [shown[who] for who in EAGER] + ["ours / Liger"]
        heads += [head for who, head in shown.items() if who not in EAGER]
    return of_each_card("models", heads, lines, rounds)


GAP = (*(part for part in PARTS if part not in BOUND), IDLE)
"""Parts of what a step takes beyond its GEMMs and attention."""


def part_cells(row: Mapping[str, Any]) -> list[str]:
    """Milliseconds of a step: untraced, traced, of its bound, the gap, and the parts of that."""
    times = {**row["kernels_ms"], IDLE: row["idle_ms"]}
    bound = sum(times.get(part, 0.0) for part in BOUND)
    parts = [times.get(part, 0.0) for part in GAP]
    shown = [f"{time:.2f}" if time >= LEAST_MS else ABSENT for time in parts]
    numbers = [row["step_ms"], row["span_ms"], bound, row["span_ms"] - bound]
    return [*[f"{time:.2f}" for time in numbers], *shown]


def step_parts() -> str:
    """Parts of a step of every run and variant, a table for each card."""

    def lines(run: str, rows: Rows) -> Iterable[Sequence[str]]:
        for who, name in NAMES.items():
            if "kernels_ms" in rows.get(who, {}):
                yield [title(run), name, *part_cells(rows[who])]

    heads = ["run", "variant", "timed step", "traced step", "GEMMs, attention", "gap", *GAP]
    return of_each_card("step-parts", heads, lines)


TABLES: dict[str, Callable[[], str]] = {"models": whole_models, "step-parts": step_parts}
