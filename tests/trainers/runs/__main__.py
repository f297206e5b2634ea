"""``python -m tests.trainers.runs NAME ...``: run trainers and keep what came out."""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from pathlib import Path
from typing import Any

from ci.results import commit
from tests.trainers.runs import RESULTS, ROOT, Trainer, trainers
from tests.trainers.runs.driver import Bench, RunError, compared, environment, versions


def provenance() -> dict[str, str]:
    """Of a run: its day, and the commit; ``+`` after that stands for other changes than results."""
    now = datetime.datetime.now(datetime.timezone.utc)
    return {"date": now.date().isoformat(), "commit": commit("tests/trainers/runs/results.json")}


def ran(
    name: str, trainer: Trainer, folder: Path, only: list[str], head: dict[str, str]
) -> tuple[dict[str, Any], int]:
    """Run a trainer; what is kept, and how many runs failed."""
    python = environment(folder / "environment", trainer)
    bench = Bench(python, trainer, folder)
    kept, failures = {}, 0
    for title, run in trainer.runs.items():
        if only and title not in only:
            continue
        try:
            kept[title] = {**head, **compared(bench, title, run)}
            print(f"{name}, {title}: {kept[title]}", flush=True)
        except RunError as error:
            failures += 1
            print(f"{name}, {title}: FAILED\n{error}", flush=True)
    return {"versions": versions(python, trainer), "runs": kept}, failures


def store(name: str, trainer: Trainer, kept: dict[str, Any]) -> None:
    """Keep runs; those of the table that did not run now stay as they are."""
    every = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    runs = {**every.get(name, {}).get("runs", {}), **kept["runs"]}
    kept = {**kept, "runs": {title: runs[title] for title in trainer.runs if title in runs}}
    text = json.dumps({**every, name: kept}, indent=1)
    RESULTS.write_text(text + "\n", encoding="utf-8")


def main() -> int:
    """Run, and with ``--store`` keep; 1 where a run failed."""
    table = trainers()
    parser = argparse.ArgumentParser(prog="python -m tests.trainers.runs", description=main.__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(table)}")
    parser.add_argument("--only", action="append", default=[], metavar="RUN")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "trainers")
    parser.add_argument("--store", action="store_true", help=f"keep in {RESULTS.name}")
    options = parser.parse_args()
    unknown = sorted({*options.names} - {*table})
    if unknown:
        parser.error(f"no trainer {', '.join(unknown)}; there are {', '.join(table)}")
    head = provenance()
    if options.store and head["commit"].endswith("+"):
        parser.error(f"--store keeps the commit that ran; there are changes on {head['commit']}")
    failed = 0
    for name in options.names or [n for n, trainer in table.items() if trainer.runs]:
        kept, failures = ran(name, table[name], options.folder.resolve() / name, options.only, head)
        failed += failures
        if options.store and not failures:
            store(name, table[name], kept)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
