"""Time, memory and error of every operator beside its peers: ``python -m ci.bench``.

Operator x sample x provider in one process. A provider whose result is outside of the tolerance of
the tests gets no time. Rounds interleave the providers, medians are reported, and percent of the
roof refers to the copy and the matrix product measured in the same run.
"""

from __future__ import annotations

import argparse
import datetime
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

try:
    from rich.console import Console
    from rich.progress import Progress
except ImportError:
    sys.exit("ci.bench needs rich and matplotlib: pip install 'liger-multi[cli]'")

from ci import bench_providers as providers
from ci import bench_report as report
from ci.bench_cases import CPU_BYTES, CPU_OPERATIONS, Case, Truth, cases, draw, truth, upstream
from ci.bench_measure import (
    Clock,
    Runner,
    ceilings,
    host_us,
    interleave,
    memory_bytes,
    out_of_memory,
    release,
)
from liger_multi.errors import unknown
from liger_multi.memory.measure import resolve_device

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
HOST_CALLS = 20
QUICK_SHRINK = 64


@dataclass(frozen=True)
class Plan:
    """What the command line asked for."""

    cases: list[Case]
    providers: list[str]
    device: torch.device
    dtype: torch.dtype
    seconds: float
    quick: bool
    commit: str


def parse(arguments: Sequence[str] | None) -> tuple[Plan, Path]:
    """Read the command line; unknown names end with the nearest known one."""
    parser = argparse.ArgumentParser(prog="python -m ci.bench", description=__doc__)
    parser.add_argument("--ops", default="*", metavar="GLOB", help="operators (comma-joined)")
    parser.add_argument("--samples", default="*", metavar="GLOB", help="samples (comma-joined)")
    parser.add_argument(
        "--providers", metavar="LIST", help=f"of {', '.join(providers.known())}; default: all"
    )
    parser.add_argument("--device", default="auto", help="auto: the accelerator, or the CPU")
    parser.add_argument("--dtype", default="bf16", metavar="|".join(DTYPES))
    parser.add_argument(
        "--seconds", type=float, metavar="N", help="timing of one sample, all providers; default: 5"
    )
    parser.add_argument("--out", type=Path, default=report.ROOT / "benchmarks", metavar="FOLDER")
    parser.add_argument("--quick", action="store_true", help="few rounds; tiny shapes on a CPU")
    parser.add_argument("--commit", help="what is measured, where the sources came without git")
    given = parser.parse_args(arguments)
    try:
        device = resolve_device(None if given.device == "auto" else given.device)
        if device.type != "cpu" and not torch.get_device_module(device).is_available():
            raise RuntimeError(f"this machine has no {device.type} device")
        if given.dtype not in DTYPES:
            raise ValueError(unknown("dtype", given.dtype, DTYPES))
        if given.seconds is not None and given.seconds <= 0:
            raise ValueError(f"--seconds must be positive, got {given.seconds:g}")
        named = providers.default() if given.providers is None else _names(given.providers)
        shrink = QUICK_SHRINK if given.quick else 1
        limits = (CPU_BYTES / shrink, CPU_OPERATIONS / shrink) if device.type == "cpu" else None
        found = cases(given.ops, given.samples, DTYPES[given.dtype], limits)
        if not found:
            raise ValueError(f"no sample of {given.ops!r} is named {given.samples!r}")
    except (ValueError, RuntimeError, AssertionError) as wrong:
        parser.error(str(wrong))
    seconds = given.seconds or (0.2 if given.quick else 5.0)
    commit = given.commit or report.commit()
    return Plan(found, named, device, DTYPES[given.dtype], seconds, given.quick, commit), given.out


def _names(text: str) -> list[str]:
    names = [n.strip() for n in text.split(",") if n.strip()]
    for name in names:
        if name not in providers.known():
            raise ValueError(unknown("provider", name, providers.known()))
    if not names:
        raise ValueError(f"--providers names nobody; known: {', '.join(providers.known())}")
    return list(dict.fromkeys(names))


# --- one case ---


class Bench:
    """A run: what stays the same over all cases, and what was found."""

    def __init__(self, plan: Plan, progress: Progress) -> None:
        self.plan, self.progress = plan, progress
        self.task = progress.add_task("ceilings", total=len(plan.cases))
        self.clock = Clock(plan.device)
        self.roof = ceilings(self.clock, plan.dtype, plan.quick)
        self.rows: list[dict[str, Any]] = []
        self.skipped: list[dict[str, str]] = []

    def say(self, case: Case, text: str) -> None:
        """Show what is being done."""
        self.progress.update(self.task, description=f"{case.op} {case.label}: {text}")

    def case(self, case: Case) -> None:
        """Check, then measure, every provider of one case."""
        found = self._providers(case)
        rows: dict[str, dict[str, Any]] = {p.name: self._row(case, p) for p in found}
        self.rows += rows.values()
        try:
            self._run(case, found, rows)
        except Exception as failure:
            # inputs, truth or interleaved calls did not fit: nobody keeps a half-measured row
            for row in rows.values():
                if row["status"] == "ok":
                    _failed(row, failure)
        release(self.plan.device)
        self.progress.advance(self.task)
        if not self.progress.console.is_terminal:
            self.progress.console.print(report.line(list(rows.values())), markup=False)

    def _run(
        self, case: Case, found: list[providers.Provider], rows: dict[str, dict[str, Any]]
    ) -> None:
        self.say(case, "inputs")
        tensors = draw(case.sample, self.plan.device, self.plan.dtype)
        douts = upstream(case, self.plan.device, self.plan.dtype)
        self._check(case, found, rows, tensors, douts)
        release(self.plan.device)
        usable = [p for p in found if rows[p.name]["status"] == "ok"]
        self._measure(case, usable, rows, tensors, douts)

    def _providers(self, case: Case) -> list[providers.Provider]:
        found = []
        for name in self.plan.providers:
            item = providers.find(name, case, self.plan.device, self.plan.dtype)
            if isinstance(item, str):
                entry = {"provider": name, "op": case.op, "reason": item}
                if entry not in self.skipped:
                    self.skipped.append(entry)
            else:
                found.append(item)
        return found

    def _row(self, case: Case, provider: providers.Provider) -> dict[str, Any]:
        shapes = {n: list(s) for n, s in case.shapes.items()}
        row = {"op": case.op, "sample": case.label, "divisors": dict(case.divisors)}
        return {
            **row,
            "shapes": shapes,
            "provider": provider.name,
            "backend": provider.backend,
            "status": "ok",
            "reason": None,
        }

    def _truth(self, case: Case, tensors: Mapping[str, Tensor], douts: tuple[Tensor, ...]) -> Truth:
        self.say(case, "fp64")
        try:
            return truth(case, tensors, douts, torch.float64)
        except Exception as failure:
            if not out_of_memory(failure):
                raise
        release(self.plan.device)
        return truth(case, tensors, douts, torch.float32)

    def _check(
        self,
        case: Case,
        found: list[providers.Provider],
        rows: dict[str, dict[str, Any]],
        tensors: dict[str, Tensor],
        douts: tuple[Tensor, ...],
    ) -> None:
        right = self._truth(case, tensors, douts)
        for provider in found:
            row = rows[provider.name]
            row["oracle"] = right.precision
            self.say(case, f"checking {provider.name}")
            release(self.plan.device)
            try:
                row.update(_checked(provider, tensors, douts, right, self.plan.dtype))
            except Exception as failure:
                _failed(row, failure)
            if row["status"] != "ok":  # whoever failed may have written into the inputs
                again = draw(case.sample, self.plan.device, self.plan.dtype)
                with torch.no_grad():
                    for name, tensor in tensors.items():
                        tensor.copy_(again[name])

    def _measure(
        self,
        case: Case,
        usable: list[providers.Provider],
        rows: dict[str, dict[str, Any]],
        tensors: dict[str, Tensor],
        douts: tuple[Tensor, ...],
    ) -> None:
        runners: dict[str, tuple[Runner, int]] = {}
        for provider in usable:
            self.say(case, f"memory and host time of {provider.name}")
            release(self.plan.device)
            try:
                runners[provider.name] = self._alone(case, provider, rows, tensors, douts)
            except Exception as failure:
                _failed(rows[provider.name], failure)
        release(self.plan.device)
        self.say(case, f"timing {', '.join(runners)}")
        timed = interleave(runners, self.clock, self.plan.seconds, 2 if self.plan.quick else 5)
        work = case.work(self.plan.dtype)
        for name, times in timed.items():
            summary = times.summary()
            roof = self.roof.percent(work, summary["forward_ms"], summary["both_ms"])
            rows[name].update(summary, roof_percent=roof)

    def _alone(
        self,
        case: Case,
        provider: providers.Provider,
        rows: dict[str, dict[str, Any]],
        tensors: dict[str, Tensor],
        douts: tuple[Tensor, ...],
    ) -> tuple[Runner, int]:
        """What is measured of one provider alone: memory, and the time of the host."""
        row, runner = rows[provider.name], Runner.make(provider, tensors, douts)
        row["extra_bytes"], row["peak_bytes"] = self._memory(case, runner)
        forward, both = host_us(runner, self.clock, 3 if self.clock.cpu else HOST_CALLS)
        row["host_us"] = None if self.clock.cpu else {"forward": forward, "both": both}
        return runner, self.clock.flushes(both)

    def _memory(self, case: Case, runner: Runner) -> tuple[int | None, int | None]:
        """Extra and raw peak; what compiled code allocates on a CPU cannot be seen."""
        if self.clock.cpu and runner.provider.name == "compile":
            return None, None
        runner.both()  # workspaces of libraries are made once
        accumulator = 0
        if case.op.startswith("fused_linear"):
            accumulator = 4 * runner.tensors["weight"].numel()
        return memory_bytes(runner, accumulator, self.plan.device)


def _checked(
    provider: providers.Provider,
    tensors: Mapping[str, Tensor],
    douts: tuple[Tensor, ...],
    right: Truth,
    dtype: torch.dtype,
) -> dict[str, Any]:
    """Status and errors of one provider."""
    runner = Runner.make(provider, tensors, douts)
    if provider.floor:
        runner.both()
        return {"error": None}
    worst, relative = runner.check(right, dtype)
    return {
        "status": "ok" if worst <= 1 else "wrong",
        "error": {"tolerances": worst, "relative": relative},
    }


def _failed(row: dict[str, Any], failure: BaseException) -> None:
    """No time for this row: what happened stands in its place."""
    if out_of_memory(failure):
        row["status"] = "out of memory"
    elif isinstance(failure, AssertionError):
        row.update(status="wrong", reason=str(failure))
    else:
        lines = str(failure).strip().splitlines() or ["no message"]
        row.update(status="failed", reason=f"{type(failure).__name__}: {lines[0]}")


def run(plan: Plan, console: Console) -> dict[str, Any]:
    """Run all cases; the result as plain data."""
    with Progress(console=console, transient=True) as progress:
        bench = Bench(plan, progress)
        for case in plan.cases:
            bench.case(case)
    return {
        "schema": 1,
        "device": report.device_facts(plan.device),
        "versions": report.versions(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": plan.commit,
        "dtype": str(plan.dtype).removeprefix("torch."),
        "seconds": plan.seconds,
        "quick": plan.quick,
        "ceilings": asdict(bench.roof),
        "rows": bench.rows,
        "skipped": bench.skipped,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print and save; 1 when a result was wrong or a provider failed."""
    plan, folder = parse(arguments)
    console = Console()
    if not console.is_terminal:
        console = Console(width=150)
    result = run(plan, console)
    report.show(console, result)
    for path in report.save(result, folder):
        console.print(f"wrote {path}", markup=False, soft_wrap=True)
    ours = [r for r in result["rows"] if r["provider"] == "ours"]
    return 1 if any(r["status"] in ("wrong", "failed") for r in ours) else 0


if __name__ == "__main__":
    sys.exit(main())
