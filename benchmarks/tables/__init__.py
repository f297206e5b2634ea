"""Tables of pages, made of ``benchmarks/results``; :mod:`ci.docs` puts them between markers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks import store
from liger_multi.grouping import grouped

OPERATOR_FAMILIES = {
    "cross_entropy": "LM head and cross entropy",
    "divergences": "divergences",
    "norms": "norms",
    "activations": "MLPs and activations",
    "rope": "rotary embeddings",
    "attention": "attention",
    "linear_attention": "linear attention and state spaces",
    "experts": "mixtures of experts",
    "adapters": "LoRA",
    "float8": "FP8",
    "quantized": "weights in 4 bits",
    "residuals": "residual streams",
    "embedding": "embedding",
}
"""Families of operators as people call them, in the order of the first page's table."""
GIB = 2**30


def table(heads: Sequence[str], lines: Iterable[Iterable[str]]) -> list[str]:
    """Rows in Markdown."""
    every = [list(heads), ["---"] * len(heads), *map(list, lines)]
    return [f"| {' | '.join(cells)} |" for cells in every]


def gib(count: float) -> str:
    """Bytes in GiB."""
    return f"{count / GIB:,.2f}"


class Row(NamedTuple):
    """A row of a result, with its run.

    Attributes:
        data: The run.
        row: This row.
        ours: Our row of the same run, if it has one.
    """

    data: Mapping[str, Any]
    row: Mapping[str, Any]
    ours: Mapping[str, Any]


def newest(
    runs: Iterable[Mapping[str, Any]], group: Callable[[Any, Any], Any], who: str
) -> dict[Any, dict[str, Row]]:
    """The newest row of every implementation, by group.

    Args:
        runs: Results, the oldest first.
        group: From a result and its row to what rows are compared within.
        who: The column that names an implementation.
    """
    newest_rows: dict[Any, dict[str, Row]] = {}
    for data in runs:
        ours = {group(data, row): row for row in data["rows"] if row[who] == "ours"}
        for row in data["rows"]:
            key = group(data, row)
            newest_rows.setdefault(key, {})[row[who]] = Row(data, row, ours.get(key, {}))
    return newest_rows


PACKAGES = {
    "torch": "torch",
    "triton": "triton",
    "transformers": "transformers",
    "liger-kernel": "Liger-Kernel",
    "fla-core": "fla-core",
    "trl": "TRL",
}


def provenance(runs: Iterable[Mapping[str, Any]]) -> str:
    """Card, dates and versions of some runs, a line per card."""
    lines = []
    for card, some in grouped((store.device(run), run) for run in runs).items():
        days = sorted({run["date"][:10] for run in some})
        when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
        versions = []
        for package, shown in PACKAGES.items():
            every = {run["versions"].get(package, "").partition("+")[0] for run in some}
            known = sorted(every - {""})
            versions += [f"{shown} {' and '.join(known)}"] * bool(known)
        commits = sorted({run["commit"][:7] for run in some})
        lines.append(f"{card}, {when}, commit {', '.join(commits)}; {', '.join(versions)}")
    return f"Measured on {'. On '.join(lines)}."


def measured(run: Mapping[str, Any]) -> str:
    """Where and when a run was."""
    versions = ", ".join(f"{name} {run['versions'][name]}" for name in ("torch",))
    return f"{store.device(run)}, {versions}, {run['date'][:10]}, commit {run['commit']}:"
