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


def devices() -> dict[str, Any]:
    """What was kept of runs on devices."""
    kept: dict[str, Any] = json.loads(DEVICES.read_text(encoding="utf-8"))
    return kept


def keep(device: str, made: dict[str, Any]) -> str:
    """Keep a run on a device; returns the device's name."""
    name: str = report.device_facts(resolve_device(device))["name"]
    kept = {**devices(), name: {**provenance(), "versions": report.versions(), **made}}
    DEVICES.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    return name


def main() -> int:
    """Compare, and write the page or check."""
    parser = argparse.ArgumentParser(prog="python -m ci.liger", description=main.__doc__)
    parser.add_argument("folder", type=Path, help="where liger-kernel 0.8.5 is installed")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; 1 if the page is stale"
    )
    parser.add_argument("--device", default="cpu", help=f"another is kept in {DEVICES.name}")
    parser.add_argument("--processes", type=int, default=1, help="that share a package's cases")
    parser.add_argument("--seconds", type=float, help="when they are ended")
    parser.add_argument("--results", type=Path, help="where results stay, to look at tensors")
    asked = parser.parse_args()
    if not (asked.folder / "liger_kernel").is_dir():
        parser.error(
            f"no liger_kernel in {asked.folder}: pip install --target {asked.folder} --no-deps "
            "liger-kernel==0.8.5"
        )
    real, alias, whole = both(
        asked.folder.resolve(), asked.device, asked.processes, asked.seconds, asked.results
    )
    found = differences(real, alias)
    made = {"groups": counts(real, alias, found), "differences": found}
    if not whole:
        print("not all cases ran: a process failed or was ended")
    if asked.device != "cpu":
        print(f"kept what ran on {keep(asked.device, {'whole': whole, **made})}")
    elif not whole:
        return 1
    kept = devices()
    every = {"a CPU": made, **kept} if asked.device == "cpu" else kept
    by = {name: explained(one["differences"]) for name, one in every.items()}
    unknown = [f"{name}: {line}" for name, (_, lines, _) in by.items() for line in lines]
    for line in unknown:
        print("not explained on", line)
    if asked.device != "cpu":
        return int(bool(unknown) or not whole)
    idle = set.intersection(*({*reasons} for _, _, reasons in by.values()))
    for reason in idle:
        print("explains nothing:", reason.cases)
    page = text(real["version"], made, kept)
    if not asked.check and not unknown and not idle:
        PAGE.write_text(page, encoding="utf-8")
        return 0
    stale = not PAGE.exists() or PAGE.read_text(encoding="utf-8") != page
    if stale:
        print(f"{PAGE.name} is stale")
    return int(bool(unknown or idle or stale))


if __name__ == "__main__":
    raise SystemExit(main())
