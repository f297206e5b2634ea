"""The table of every operator beside its peers on an H100, for ``docs/operators-h100.md``."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from benchmarks import store
from benchmarks.tables import performance
from benchmarks.tables.measured import Row, newest
from liger_multi.dispatch.registry import operators
from liger_multi.testing import samples

CARD = store.DEVICES["h100"]
PEERS = {
    "Liger": ("liger",),
    "Liger CuTe": ("liger-hopper", "liger-cute"),
    "QuACK": ("quack",),
    "PyTorch": ("aten", "torch", "transformers", "reference"),
    "`compile`": ("compile", "flex"),
}
"""Columns of peers, and the providers of each: the first that has a time stands there, or else the
first that was run."""
BESIDE = ("Liger", "PyTorch")
"""Peers whose memory and error stand there too."""
WORDS = {"out of memory": "memory"}


def _time(one: Row | None) -> str:
    if one is None:
        return "-"
    time = one.row.get("both_ms")
    return f"{time:#.3g}".rstrip(".") if time else WORDS.get(one.row["status"], one.row["status"])


def _timeless(one: Row) -> bool:
    return not one.row.get("both_ms")


def _memory(one: Row | None) -> str:
    peak = None if one is None else one.row.get("peak_bytes")
    return "-" if peak is None else f"{peak / 2**30:.2f}"


def _error(one: Row | None) -> str:
    error = None if one is None else (one.row.get("error") or {}).get("tolerances")
    return "-" if error is None else f"{float(error):.2f}"


def line(op: str, sample: str, rows: Mapping[str, Row]) -> list[str]:
    """Ours and the peers of one sample."""
    ours = rows["ours"]
    peers = {
        head: next(iter(sorted(filter(None, map(rows.get, names)), key=_timeless)), None)
        for head, names in PEERS.items()
    }
    ratios = [
        one.ours["both_ms"] / one.row["both_ms"]
        for one in peers.values()
        if one is not None and one.row.get("both_ms") and one.ours.get("both_ms")
    ]
    reached = peak(ours)
    others = [ours, *(peers[head] for head in BESIDE)]
    return [
        f"`{op}`",
        sample,
        _time(ours),
        "-" if reached is None else f"{reached:.0f}",
        *map(_time, peers.values()),
        f"{max(ratios):.2f}" if ratios else "-",
        *map(_memory, others),
        *map(_error, others),
    ]


def measured() -> dict[tuple[str, str], dict[str, Row]]:
    """The newest rows of every operator and sample of which there is one of ours."""
    runs = [run for run in store.read("operators") if store.device(run) == CARD]
    newest_rows = newest(runs, lambda _, row: (row["op"], row["sample"]), "provider")
    return {key: rows for key, rows in sorted(newest_rows.items()) if "ours" in rows}


def peak(ours: Row) -> float | None:
    """Percent of what the least bytes or operations allow, forward and backward."""
    percent: float | None = (ours.row.get("percent_of_peak") or {}).get("both")
    return percent


def every() -> str:
    """The newest rows of every operator."""
    newest_rows = measured()
    heads = ["operator", "shape", "ours, ms", "% of peak", *PEERS, "ours / best"]
    heads += [f"{what}: {who}" for what in ("GiB", "error") for who in ("ours", *BESIDE)]
    lines = [heads, ["---"] * len(heads)]
    lines += [line(op, name, rows) for (op, name), rows in newest_rows.items()]
    if not newest_rows:
        return ""
    used = [one.data for rows in newest_rows.values() for one in rows.values()]
    shown = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    lacking = sorted({samples.public(op) for op in operators()} - {op for op, _ in newest_rows})
    names = ", ".join(f"`{op}`" for op in lacking)
    text = f"{performance.provenance(used)}\n\n{shown}"
    return f"{text}\n\nNot measured: {names}." if names else text


BLOCKS: dict[str, Callable[[], str]] = {"operators-h100": every}
