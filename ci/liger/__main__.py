"""``python -m ci.liger FOLDER``."""

from __future__ import annotations

import argparse
from pathlib import Path

from ci.liger import PAGE, run
from ci.liger.compare import differences, explained
from ci.liger.page import text


def main() -> int:
    """Compare, and write the page or check."""
    parser = argparse.ArgumentParser(prog="python -m ci.liger", description=main.__doc__)
    parser.add_argument("folder", type=Path, help="where liger-kernel 0.8.5 is installed")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; 1 if the page is stale"
    )
    parser.add_argument("--device", default="cpu", help="where both run; writes no page if another")
    asked = parser.parse_args()
    if not (asked.folder / "liger_kernel").is_dir():
        parser.error(
            f"no liger_kernel in {asked.folder}: pip install --target {asked.folder} --no-deps "
            "liger-kernel==0.8.5"
        )
    real, alias = (run(folder, asked.device) for folder in (asked.folder.resolve(), None))
    found = differences(real, alias)
    by, unknown, idle = explained(found)
    for line in unknown:
        print("not explained:", line)
    if asked.device != "cpu":
        cases = sum(map(len, real["groups"].values()))
        print(f"{cases} cases on {asked.device}: {len(found)} differ, {len(unknown)} not explained")
        return int(bool(unknown))
    for reason in idle:
        print("explains nothing:", reason.cases)
    made = text(real, found, by)
    if not asked.check and not unknown and not idle:
        PAGE.write_text(made, encoding="utf-8")
        return 0
    stale = not PAGE.exists() or PAGE.read_text(encoding="utf-8") != made
    if stale:
        print(f"{PAGE.name} is stale")
    return int(bool(unknown or idle or stale))


if __name__ == "__main__":
    raise SystemExit(main())
