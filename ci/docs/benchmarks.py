"""The page of measured times, made of ``benchmarks/results``: newest row of each kind."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from benchmarks import store

BAR = 24  # characters of the longest bar
HEAD = """# Benchmarks

Generated from the files in `benchmarks/results` by `make site`; what each column means stands in
`benchmarks/README.md`, targets and what bounds them in [Performance](performance.md). Times are
medians of one run; every row is the newest of its implementation, and the ratio holds it against
ours in the same run. Compare nothing across runs but ratios; `python -m benchmarks.store compare
OLD NEW` does that.
"""


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

    def of_ours(self, field: str) -> str:
        """A number over ours in the same run."""
        own, ours = self.row.get(field), self.ours.get(field)
        return f"{own / ours:.2f}" if own and ours else "-"

    @property
    def source(self) -> str:
        """When it was measured, and at which commit."""
        return f"{self.data['date'][:10]}, {self.data.get('commit', 'unknown')}"


def newest(
    runs: Iterable[Mapping[str, Any]], group: Callable[[Any, Any], Any], who: str
) -> dict[Any, dict[str, Row]]:
    """The newest row of every implementation, by group.

    Args:
        runs: Results, the oldest first.
        group: From a result and its row to what rows are compared within.
        who: The column that names an implementation.
    """
    found: dict[Any, dict[str, Row]] = {}
    for data in runs:
        ours = {group(data, row): row for row in data["rows"] if row[who] == "ours"}
        for row in data["rows"]:
            key = group(data, row)
            found.setdefault(key, {})[row[who]] = Row(data, row, ours.get(key, {}))
    return found


def _place(who: str) -> tuple[int, str]:
    """Where an implementation stands in a table: what others are held against first."""
    first = ("products", "stock", "torch", "liger", "ours")
    return (first.index(who) if who in first else len(first), who)


def _versions(data: Mapping[str, Any]) -> str:
    names = ("torch", "triton", "liger-kernel")
    return ", ".join(f"{n} {data['versions'][n]}" for n in names if n in data["versions"])


def _size(count: float | None) -> str:
    return "-" if count is None else f"{count / 2**20:,.0f}"


def _group(sample: str, rows: Mapping[str, Row]) -> list[str]:
    """Lines of the providers of one sample, ours first, with bars."""
    timed = [r for r in rows.values() if r.row.get("both_ms")]
    longest = max((r.row["both_ms"] for r in timed), default=1.0)
    lines = []
    for one in sorted(timed, key=lambda r: (r.row["provider"] != "ours", r.row["both_ms"])):
        row = one.row
        bar = "█" * max(1, round(BAR * row["both_ms"] / longest))
        peak = (row.get("percent_of_peak") or {}).get("both")
        cells = (
            sample, row["provider"], f"{row['both_ms']:.3g}", one.of_ours("both_ms"), bar,
            "-" if peak is None else f"{peak:.0f} %", _size(row.get("extra_bytes")),
        )  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _operators() -> list[str]:
    runs = store.read("operators")
    found = newest(runs, lambda d, r: (store.device(d), r["op"], r["sample"]), "provider")
    by_op: dict[tuple[str, str], dict[str, Mapping[str, Row]]] = {}
    for (device, op, sample), rows in found.items():
        by_op.setdefault((op, device), {})[sample] = rows
    lines: list[str] = []
    for (op, device), samples in sorted(by_op.items()):
        every = [one for rows in samples.values() for one in rows.values()]
        sources = {f"{r.source} ({_versions(r.data)})" for r in every}
        lines += [f"\n## {op} on {device}\n", f"Measured {'; '.join(sorted(sources))}.\n"]
        lines += [
            "| sample | who | fwd+bwd, ms | of ours | | of peak | extra MiB |",
            "|---|---|---|---|---|---|---|",
        ]
        for sample, providers in samples.items():
            lines += _group(sample, providers)
    return lines


def _models() -> list[str]:
    found = newest(
        store.read("models"),
        lambda d, r: (r["run"], d["limit_gb"] or 0.0, store.device(d)),
        "variant",
    )
    lines = ["\n## Whole models\n", "| model | who | tokens/s | of ours | peak GiB | measured |"]
    lines.append("|---|---|---|---|---|---|")
    for (run, limit, device), rows in sorted(found.items()):
        where = f"{run}, {device}" + (f", {limit} GB" if limit else "")
        for variant, one in sorted(rows.items(), key=lambda item: _place(item[0])):
            speed, peak = one.row.get("tokens_per_second"), one.row.get("peak_bytes")
            cells = (
                where, variant, f"{speed:,.0f}" if speed else one.row.get("failure", "-"),
                one.of_ours("tokens_per_second"), f"{peak / 2**30:.1f}" if peak else "-",
                one.source,
            )  # fmt: skip
            lines.append(f"| {' | '.join(cells)} |")
    return lines if found else []


def _losses() -> list[str]:
    """Whole losses over the products of the head that they cannot do without."""
    found = newest(
        store.read("losses"),
        lambda d, r: (r["case"], store.shape(r), store.device(d)),
        "provider",
    )
    lines = ["\n## Whole losses\n", "| loss | who | fwd+bwd, ms | of the products | extra MiB |"]
    lines[-1] += " error / tolerance | measured |\n|---|---|---|---|---|---|---|"
    for (case, shape, device), rows in sorted(found.items()):
        for provider, one in sorted(rows.items(), key=lambda item: _place(item[0])):
            row, floor = one.row, _products(one)
            time, error = row.get("both_ms"), row.get("error")
            cells = (
                f"{case} {shape}, {device}", provider, f"{time:.1f}" if time else row["status"],
                f"{time / floor:.2f}" if time and floor else "-", _size(row.get("extra_bytes")),
                "-" if error is None else f"{error:.2f}", one.source,
            )  # fmt: skip
            lines.append(f"| {' | '.join(cells)} |")
    return lines if found else []


def _products(one: Row) -> float | None:
    """The time of the bare products in the run of a row."""
    own = (one.row["case"], one.row["shape"])
    rows = [r for r in one.data["rows"] if (r["case"], r["shape"]) == own]
    return next((r.get("both_ms") for r in rows if r["provider"] == "products"), None)


def page() -> str:
    """The whole page."""
    return "\n".join([HEAD.rstrip(), *_models(), *_losses(), *_operators()]) + "\n"
