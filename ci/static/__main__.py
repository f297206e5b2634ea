"""The command: ``python -m ci.static``."""

from __future__ import annotations

import argparse
from pathlib import Path

from ci.static import TARGETS, missing
from ci.static.baseline import line, write_baseline
from ci.static.judge import verdicts
from ci.static.launch import write_model
from ci.static.rows import pool, rows_of


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m ci.static", description=main.__doc__)
    parser.add_argument(
        "--full",
        action="store_true",
        help="every launch in every variant (hours of a core; stopped, it goes on where it was)",
    )
    parser.add_argument("--write", action="store_true", help="rewrite ci/baseline.txt")
    parser.add_argument("--target", action="append", choices=TARGETS, help="default: all")
    parser.add_argument("--kernel", default="", help="only kernels whose name has this pattern")
    parser.add_argument(
        "--store", type=Path, help="write the table to this file; with --full, print failures alone"
    )
    parser.add_argument(
        "--tables",
        action="store_true",
        help="write the launch tables of AMD's targets, by a static model (minutes)",
    )
    options = parser.parse_args()
    if options.write and (options.full or options.target):
        parser.error(
            "ci/baseline.txt has what the suite compiles, for all targets: without --full and "
            "--target"
        )
    return options


def main() -> int:
    """Compile every Triton kernel for every target; print, judge and keep what it costs."""
    options = _options()
    reasons = {arch: missing(TARGETS[arch]) for arch in options.target or TARGETS}
    archs = [arch for arch, reason in reasons.items() if reason is None]
    absent = [f"{arch}: {reason}\n" for arch, reason in reasons.items() if reason is not None]
    print("".join(absent), end="")
    if options.tables:
        with pool() as workers:
            amd = [arch for arch in archs if TARGETS[arch].gpu.backend == "hip"]
            for path in workers.map(write_model, amd):
                print(f"wrote {path}")
        return 0
    rows = rows_of(archs, "full" if options.full else "suite", options.kernel)
    wrong = verdicts(rows)
    if options.write:
        if absent or any(row.refused for row in rows):
            print("\n".join([*wrong, "wrote nothing: some rows are missing"]))
            return 1
        write_baseline(rows)
    table = [
        f"{r.case.name:<44}{r.case.label:<40}{r.variant.name:<17}{r.arch:<8}{line(r)}\n"
        for r in rows
    ]
    if options.store:
        options.store.parent.mkdir(parents=True, exist_ok=True)
        options.store.write_text("".join(table), encoding="utf-8")
    if not options.write and not (options.full and options.store):
        print("".join(table))
    print("\n".join(wrong))
    print(
        f"{len(rows)} compiled launches of {len({r.case.name for r in rows})} kernels for "
        f"{len(archs)} targets, {len(wrong)} failures"
    )
    return 1 if wrong or absent else 0


if __name__ == "__main__":
    raise SystemExit(main())
