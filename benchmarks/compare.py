"""Hold one benchmark against another: ``python -m benchmarks.compare OLD.json NEW.json``.

A file is what ``--out`` of :mod:`benchmarks.operators` or ``liger-multi bench --output`` wrote,
or a card's results, such as ``benchmarks/results/nvidia-h200.json``.

Times are compared as shares of what the device reached in the same run (its copy bandwidth and its
matrix product), because two runs see different clocks. Fails where one of our rows is slower,
takes more memory or is less exact than before, beyond the noise that both runs saw in themselves.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import store

MARGIN = 0.05  # of a time, beside the spreads of both runs: clocks differ from run to run
MEMORY_MARGIN = 2**20
Row = Mapping[str, Any]
Key = tuple[str, str, str, str]


def rows(file: Path, provider: str) -> tuple[Mapping[str, Any], dict[Key, Row]]:
    """The head of the newest run of a file, and one provider's newest rows that have a time."""
    runs = [run for run in store.taken(file) if run["kind"] == "operators"]
    if not runs:
        raise ValueError(f"{file} has no run of benchmarks.operators")
    found = {}
    for run in runs:
        for row in run["rows"]:
            # rows of old tables have a time alone
            if row["provider"] == provider and row.get("both_ms") and "error" in row:
                divisors = json.dumps(row.get("divisors") or {}, sort_keys=True)
                found[row["op"], row["sample"], run["dtype"], divisors] = row
    return runs[-1], found


def spread(row: Row) -> float:
    """Half the distance of the quartiles as a share of the time."""
    return float(row.get("both_spread_ms") or 0.0) / float(row["both_ms"])


def slowdown(old: Row, new: Row) -> float:
    """How much longer the new one takes, by the peak of its own run where that is known."""
    before, after = (row.get("percent_of_peak", {}).get("both") for row in (old, new))
    if before and after:
        return float(before) / float(after)
    return float(new["both_ms"]) / float(old["both_ms"])


def findings(old: Mapping[Key, Row], new: Mapping[Key, Row]) -> Iterator[tuple[bool, str]]:
    """Whether it fails and what is to be said, for each row that both have."""
    for key in old.keys() & new.keys():
        before, after = old[key], new[key]
        name = f"{key[0]} {key[1]}"
        ratio, limit = slowdown(before, after), 1 + MARGIN + 2 * (spread(before) + spread(after))
        text = f"{name}: time x {ratio:.3f} (limit {limit:.3f})"
        yield ratio > limit, text
        grown = after["extra_bytes"] - before["extra_bytes"]
        yield (
            grown > MEMORY_MARGIN + 0.01 * abs(before["extra_bytes"]),
            f"{name}: extra memory {grown / 2**20:+.1f} MiB",
        )
        worse = after["error"]["tolerances"]
        yield worse > 1, f"{name}: error {worse:.2f} of the tolerance"


def compare(old_file: Path, new_file: Path, provider: str, across: bool) -> tuple[bool, list[str]]:
    """Whether anything regressed, and the lines to show."""
    (old_head, old), (new_head, new) = rows(old_file, provider), rows(new_file, provider)
    names = [head["device"]["name"] for head in (old_head, new_head)]
    if names[0] != names[1] and not across:
        raise ValueError(f"devices differ: {names[0]!r} and {names[1]!r}; --across compares anyway")
    if not old.keys() & new.keys():
        raise ValueError(f"the files share no row of {provider!r}")
    found = sorted(findings(old, new), key=lambda pair: (not pair[0], pair[1]))
    lines = [f"{'WORSE' if bad else 'ok   '}  {text}" for bad, text in found]
    lines += [f"gone   {k[0]} {k[1]}" for k in sorted(old.keys() - new.keys())]
    lines += [f"new    {k[0]} {k[1]}" for k in sorted(new.keys() - old.keys())]
    return any(bad for bad, _ in found), lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what changed; 1 where something got worse."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare", description=__doc__)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--provider", default="ours")
    parser.add_argument("--across", action="store_true", help="compare different devices, too")
    given = parser.parse_args(arguments)
    try:
        worse, lines = compare(given.old, given.new, given.provider, given.across)
    except (OSError, ValueError, KeyError) as wrong:
        parser.error(f"{type(wrong).__name__}: {wrong}")
    sys.stdout.write("\n".join(lines) + "\n")
    return int(worse)


if __name__ == "__main__":
    sys.exit(main())
