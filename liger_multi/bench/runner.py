"""Time, memory and error of every operator and of its peers: what a run of the benchmark does.

Operator x sample x provider in one process. A provider whose result is outside of the tolerance of
the tests gets no time. Rounds interleave the providers, medians are reported, and percent of the
peak refers to the copy and the matrix product measured in the same run.
"""

from __future__ import annotations

import datetime
import gc
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from liger_multi.bench import providers, report
from liger_multi.bench.cases import (
    JUMPED,
    JUMPS,
    Case,
    Truth,
    draw,
    truth,
    upstream,
)
from liger_multi.bench.measure import (
    Clock,
    Runner,
    ceilings,
    host_us,
    interleave,
    memory_bytes,
    out_of_memory,
    release,
)

HOST_CALLS = 20


@dataclass(frozen=True)
class BenchConfig:
    """What a command line asked for.

    Attributes:
        cases: What is run.
        providers: Names of those who are timed.
        device: Where.
        dtype: Of the floating-point inputs.
        seconds: For timing one case, all providers.
        quick: Few rounds, and small copies and products for the peak.
        facts: What else the result says of itself.
    """

    cases: list[Case]
    providers: list[str]
    device: torch.device
    dtype: torch.dtype
    seconds: float
    quick: bool
    facts: Mapping[str, Any] = field(default_factory=dict)


# --- one case ---


class Bench:
    """A run: what stays the same over all cases, and the rows measured so far."""

    def __init__(self, plan: BenchConfig, progress: Progress) -> None:
        self.plan, self.progress = plan, progress
        self.task = progress.add_task("ceilings", total=len(plan.cases))
        self.clock = Clock(plan.device)
        self.peak = ceilings(self.clock, plan.dtype, plan.quick)
        self.rows: list[dict[str, Any]] = []
        self.skipped: list[dict[str, str]] = []

    def say(self, case: Case, text: str) -> None:
        """Show what is being done."""
        self.progress.update(self.task, description=f"{case.op} {case.label}: {text}")

    def case(self, case: Case) -> None:
        """Check, then measure, every provider of one case."""
        # garbage is collected for every provider; objects that exist now are excluded
        gc.collect()
        gc.freeze()
        available = self._providers(case)
        rows: dict[str, dict[str, Any]] = {p.name: self._row(case, p) for p in available}
        self.rows += rows.values()
        try:
            self._run(case, available, rows)
        except Exception as failure:
            # inputs, the fp64 result or the calls did not fit: drop half-measured rows
            for row in rows.values():
                if row["status"] == "ok":
                    _failed(row, failure)
        release(self.plan.device)
        self.progress.advance(self.task)
        if not self.progress.console.is_terminal:
            self.progress.console.print(report.line(list(rows.values())), markup=False)

    def _run(
        self, case: Case, available: list[providers.Provider], rows: dict[str, dict[str, Any]]
    ) -> None:
        self.say(case, "inputs")
        tensors = draw(case.sample, self.plan.device, self.plan.dtype)
        douts = upstream(case, self.plan.device, self.plan.dtype)
        self._check(case, available, rows, tensors, douts)
        release(self.plan.device)
        usable = [p for p in available if rows[p.name]["status"] == "ok"]
        self._measure(case, usable, rows, tensors, douts)

    def _providers(self, case: Case) -> list[providers.Provider]:
        available = []
        for name in self.plan.providers:
            item = providers.find(name, case, self.plan.device, self.plan.dtype)
            if isinstance(item, str):
                entry = {"provider": name, "op": case.op, "reason": item}
                if entry not in self.skipped:
                    self.skipped.append(entry)
            else:
                available.append(item)
        return available

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
        available: list[providers.Provider],
        rows: dict[str, dict[str, Any]],
        tensors: dict[str, Tensor],
        douts: tuple[Tensor, ...],
    ) -> None:
        right = self._truth(case, tensors, douts)
        for provider in available:
            row = rows[provider.name]
            row["reference"] = right.precision
            self.say(case, f"checking {provider.name}")
            release(self.plan.device)
            try:
                row.update(_checked(case, provider, tensors, douts, right, self.plan.dtype))
            except Exception as failure:
                _failed(row, failure)
            if row["status"] != "ok":  # a provider that failed may have written into the inputs
                redrawn = draw(case.sample, self.plan.device, self.plan.dtype)
                with torch.no_grad():
                    for name, tensor in tensors.items():
                        tensor.copy_(redrawn[name])

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
            peak = self.peak.percent(work, summary["forward_ms"], summary["both_ms"])
            rows[name].update(summary, percent_of_peak=peak)

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
        forward, total = host_us(runner, self.clock, 3 if self.clock.cpu else HOST_CALLS)
        row["host_us"] = None if self.clock.cpu else {"forward": forward, "both": total}
        return runner, self.clock.flushes(total)

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
    case: Case,
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
    right_enough = relative <= JUMPED if case.op in JUMPS else worst <= 1
    return {
        "status": "ok" if right_enough else "wrong",
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


def run_plan(
    plan: BenchConfig, console: Console, keep: Callable[[dict[str, Any]], object] | None = None
) -> dict[str, Any]:
    """Run all cases; the result as plain data.

    Args:
        plan: What to run.
        console: Where progress is shown.
        keep: Takes the result after every case but the last, with the rows so far: a run that is
            stopped has these.
    """
    date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    with Progress(console=console, transient=True) as progress:
        bench = Bench(plan, progress)
        for case in plan.cases:
            bench.case(case)
            if keep is not None and case is not plan.cases[-1]:
                keep(_result(bench, date))
    return _result(bench, date)


def _result(bench: Bench, date: str) -> dict[str, Any]:
    """The result of a run so far; its date is that of its start."""
    plan = bench.plan
    return {
        "schema": 1,
        "device": report.device_facts(plan.device),
        "versions": report.versions(),
        "date": date,
        **plan.facts,
        "dtype": str(plan.dtype).removeprefix("torch."),
        "seconds": plan.seconds,
        "quick": plan.quick,
        "ceilings": asdict(bench.peak),
        "rows": bench.rows,
        "skipped": bench.skipped,
    }
