"""``python -m ci.liger FOLDER``."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from ci.liger import DEVICES, PAGE, both
from ci.liger.compare import counts, differences, explained
from ci.liger.page import text
from ci.trainers.__main__ import provenance
from liger_multi.bench import report
from liger_multi.memory.measure import resolve_device

Kept = dict[str, Any]


def devices() -> Kept:
    """What was kept of runs on devices."""
    kept: Kept = json.loads(DEVICES.read_text(encoding="utf-8"))
    return kept


def merged(old: Kept, groups: dict[str, Any], found: dict[str, Any]) -> Kept:
    """What is kept of a device after some groups ran again."""
    left = {n: how for n, how in old["differences"].items() if n.partition(": ")[0] not in groups}
    return {"groups": {**old["groups"], **groups}, "differences": {**left, **found}}


def keep(
    device: str, version: str, whole: bool, cases: dict[str, Any], found: dict[str, Any]
) -> None:
    """Keep what ran on a device; groups that did not run now stay as they are."""
    name: str = report.device_facts(resolve_device(device))["name"]
    groups = {t: {**provenance(), "whole": whole, "cases": [*n]} for t, n in cases.items()}
    kept = devices()
    now = merged(kept.get(name, {"groups": {}, "differences": {}}), groups, found)
    kept[name] = {"versions": {**report.versions(), "liger-kernel": version}, **now}
    DEVICES.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    print(f"kept what ran on {name}")


def unexplained(runs: dict[str, dict[str, Any]], whole: bool) -> bool:
    """Print differences without a reason, and of whole runs reasons that none of them has."""
    by = {name: explained(found) for name, found in runs.items()}
    lines = [f"not explained on {name}: {line}" for name in by for line in by[name][1]]
    if whole:
        idle = set.intersection(*({*reasons} for _, _, reasons in by.values()))
        lines += [f"explains nothing: {reason.cases}" for reason in idle]
    for line in lines:
        print(line)
    return bool(lines)


def write(page: str, check: bool) -> bool:
    """Write the page, or say whether it is stale."""
    stale = not PAGE.exists() or PAGE.read_text(encoding="utf-8") != page
    if stale and check:
        print(f"{PAGE.name} is stale")
    elif stale:
        PAGE.write_text(page, encoding="utf-8")
    return stale and check


def main() -> int:
    """Compare, and write the page or check."""
    parser = argparse.ArgumentParser(prog="python -m ci.liger", description=main.__doc__)
    parser.add_argument("folder", type=Path, help="where liger-kernel 0.8.5 is installed")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; 1 if the page is stale"
    )
    parser.add_argument("--device", default="cpu", help=f"another is kept in {DEVICES.name}")
    parser.add_argument("--only", default="", help="a pattern for groups; writes no page")
    parser.add_argument("--processes", type=int, default=1, help="that share a package's cases")
    parser.add_argument("--seconds", type=float, help="when they are ended")
    parser.add_argument("--results", type=Path, help="where results stay, to look at tensors")
    o = parser.parse_args()
    if not (o.folder / "liger_kernel").is_dir():
        parser.error(
            f"no liger_kernel in {o.folder}: pip install --target {o.folder} --no-deps "
            "liger-kernel==0.8.5"
        )
    real, alias, whole = both(
        o.folder.resolve(), o.device, o.processes, o.seconds, o.results, o.only
    )
    found = differences(real, alias)
    cases = counts(real, alias, found)
    if not whole:
        print("not all cases ran: a process failed or was ended")
    if o.device != "cpu":
        keep(o.device, real["version"], whole, cases, found)
    if o.device != "cpu" or o.only:
        return int(unexplained({o.device: found}, whole=False) or not whole)
    kept = devices()
    runs = {"a CPU": found, **{name: run["differences"] for name, run in kept.items()}}
    wrong = unexplained(runs, whole=True) or not whole
    return int(wrong or write(text(real["version"], cases, found, kept), o.check))


if __name__ == "__main__":
    raise SystemExit(main())
