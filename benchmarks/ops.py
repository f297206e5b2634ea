"""The project's benchmark: ``python -m benchmarks.ops``.

``liger-multi bench`` against all peers, held against the formulas of the tests; ``--store`` keeps
the rows in ``benchmarks/results``. Nothing is timed while the suite of the operators in question is
red: their tests run first on the same device, and a number that comes without them says so
(``--unchecked``).
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

try:
    from rich.console import Console
except ImportError:
    sys.exit("benchmarks.ops needs rich and matplotlib: pip install 'liger-multi[cli]'")

from benchmarks import store
from ci import results
from liger_multi.bench import command, report
from liger_multi.bench.runner import BenchConfig, run_plan
from liger_multi.dispatch.registry import backends, unavailable
from liger_multi.files.documents import plain

ROOT = Path(__file__).parent.parent
RED = 3  # exit code of a refusal


def parse(arguments: Sequence[str] | None) -> tuple[BenchConfig, argparse.Namespace]:
    """Read the command line; unknown names end with the nearest known one."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ops", description=__doc__)
    command.add_arguments(parser)
    store.add_options(parser)
    parser.add_argument(
        "--output", type=Path, metavar="FOLDER", help="charts, and a file to compare"
    )
    parser.add_argument("--unchecked", action="store_true", help="time whatever the suite says")
    options = parser.parse_args(arguments)
    try:
        plan = command.plan(options, dtype="bf16")
    except ValueError as wrong:
        parser.error(str(wrong))
    facts = {"commit": options.commit}
    return replace(plan, facts=facts), options


def suite(plan: BenchConfig) -> results.Result:
    """Run the tests of the operators on the device of the plan.

    Raises:
        RuntimeError: The tests could not run.
    """
    ops = sorted({case.op for case in plan.cases})
    serving = [n for n, r in backends().items() if r.device_type == plan.device.type]
    native = [n for n in serving if unavailable(n) is None][:1] or ["reference"]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "bench.json"
        chosen = ["-k", " or ".join(f"[{op}-" for op in ops), "--backend", native[0]]
        tests = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "tests/ops/test_ops.py",
            "-p",
            "no:cacheprovider",
        ]
        done = subprocess.run(
            [*tests, *chosen, "--results", str(file)], cwd=ROOT, capture_output=True, text=True
        )
        if not file.exists():
            raise RuntimeError(f"the suite could not run:\n{done.stdout}{done.stderr}")
        return results.read(Path(folder))[0]


def main(
    arguments: Sequence[str] | None = None, tests: Callable[[BenchConfig], results.Result] = suite
) -> int:
    """Check, run, print and save; 1 when a result was wrong or a provider failed, 3 on red."""
    plan, options = parse(arguments)
    console = Console()
    if not console.is_terminal:
        console = Console(width=150)
    checked: dict[str, Any] | None = None
    if not options.unchecked:
        with console.status("the suite of these operators, on this device"):
            failures = tests(plan)
        checked = {"counts": dict(failures.counts), "seconds": failures.seconds}
        if not failures.green:
            console.print(f"refused: the suite is red here: {checked['counts']}", markup=False)
            return RED
    plan = replace(plan, facts={**plan.facts, "suite": checked})

    def keep(run: Mapping[str, Any]) -> list[Path]:
        return store.keep({"kind": "operators", **plain(run)}, options)

    result = run_plan(plan, console, keep)
    report.show(console, result)
    if checked is None:
        console.print("the suite was not asked: --unchecked")
    written = keep(result)
    written += report.save(result, options.output) if options.output else []
    for path in written:
        console.print(f"wrote {path}", markup=False, soft_wrap=True)
    return command.failed(result["rows"])


if __name__ == "__main__":
    sys.exit(main())
