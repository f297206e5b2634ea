"""The tables of ``docs/steps.md``, of what ``benchmarks.traces`` printed on every card."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from benchmarks import store, tables
from benchmarks.traces import plain
from liger_multi.grouping import grouped

NUMBER = r"\s*([\d.]+|nan)"
NEAR = 0.9  # of peak bandwidth
Cells: TypeAlias = "tuple[str, ...]"
KERNEL = r"(\S.*?) (\d+\.\d)(?:, |$)"


class Table(NamedTuple):
    """How the lines of some notes become rows.

    Attributes:
        notes: Name of the notes.
        heads: Of the columns.
        line: A pattern with a group for every cell; lines that it does not take are left out.
        join: Makes the rows of a table of all cells that were found.
    """

    notes: str
    heads: tuple[str, ...]
    line: str
    join: Callable[[Iterable[Cells]], list[list[str]]]


def one_each(lines: Iterable[Cells]) -> list[list[str]]:
    """A row a line."""
    return [[cell or "-" for cell in cells] for cells in lines]


def both_ways(lines: Iterable[Cells]) -> list[list[str]]:
    """Forward and backward of one shape as one row, and of all kernels the two longest.

    Shapes near the peak are left out.
    """
    table_rows = []
    for names, ways in grouped((cells[:2], cells[2:]) for cells in lines).items():
        numbers = zip(*(map(float, (cell or 0 for cell in way[:4])) for way in ways), strict=True)
        launches, time, least, floor = map(sum, numbers)
        if floor > NEAR * time:
            continue
        kernels = re.findall(KERNEL, ", ".join(way[4] for way in ways))
        longest = sorted(kernels, key=lambda kernel: -float(kernel[1]))[:2]
        shown = "; ".join(f"{plain(name)} {length}" for name, length in longest)
        bound = [f"{least:.1f}", f"{floor:.1f}", f"{100 * floor / time:.0f}"]
        table_rows.append(
            [*names, f"{launches:.0f}", f"{time:.1f}", *(bound if floor else "---"), shown]
        )
    return table_rows


TABLES = {
    "stalls": Table(
        "stalls",
        (
            "count",
            "model",
            "form",
            "idle at a head, us: median",
            "least",
            "most",
            "copies",
            "kernels of a step, ms",
            "idle in a step, ms",
        ),
        rf"(\w+) +(\S+) +(\w+) +idle at the head, us: median{NUMBER} least{NUMBER} most{NUMBER} of "
        rf"\d+ heads, (\d+) copies to the host; kernels of a step{NUMBER} ms, idle{NUMBER} ms",
        one_each,
    ),
    "heads": Table(
        "head-kernels",
        ("shape", "what", "kernels, ms", "GEMMs, ms", "others, ms", "idle, ms", "kernels / GEMMs"),
        rf"(\S+) (.+?) +kernels{NUMBER} ms \(GEMMs{NUMBER}, others{NUMBER}\), idle{NUMBER} *"
        rf"(?:{NUMBER} x the bare GEMMs)?",
        one_each,
    ),
    "fusion": Table(
        "head-fusion",
        ("shape", "what", "median, ms", "least, ms"),
        rf"(\S+) (.+?) +{NUMBER} ms, least{NUMBER}",
        one_each,
    ),
    "operators": Table(
        "operator-kernels",
        (
            "operator",
            "shape",
            "launches",
            "kernels, us",
            "least, MiB",
            "at a copy's rate, us",
            "% of peak",
            "longest kernels, us",
        ),
        rf"(\w+) (.+) (?:forward|backward): (\d+) launches,{NUMBER} us"
        rf"(?:, least{NUMBER} MiB ={NUMBER} us:\s*\d+ %)?; (.*)",
        both_ways,
    ),
    "adapters": Table(
        "adapter-kernels",
        ("layers", "precision", "who", "launches", "kernels, ms", "host, ms", "both, ms"),
        rf"([^,]+), ([^:]+): (\w+) +(\d+) launches, kernels{NUMBER} ms, the host enqueues in"
        rf"{NUMBER} ms, both{NUMBER} ms",
        one_each,
    ),
}


def rows(table: Table, lines: Iterable[str]) -> list[list[str]]:
    """Cells of the lines that are rows; others are headings or lists of kernels."""
    matches = [re.fullmatch(table.line, line.strip()) for line in lines]
    return table.join(match.groups() for match in matches if match)


def block(name: str) -> str:
    """The table of the newest notes of every card."""
    known, parts = TABLES[name], []
    newest: dict[str, Mapping[str, Any]] = {
        store.device(run): run for run in store.read("notes") if run["name"] == known.notes
    }
    for card, run in newest.items():
        said = f"{card}, {run['date'][:10]}, commit {run['commit']}:"
        parts.append("\n".join([said, "", *tables.table(known.heads, rows(known, run["rows"]))]))
    return "\n\n".join(parts)


BLOCKS: dict[str, Callable[[], str]] = {f"traces-{name}": partial(block, name) for name in TABLES}
