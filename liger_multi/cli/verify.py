"""``liger-multi verify``: which operators are right on this machine, and a quarantine."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from liger_multi.cli import checking, doctor
from liger_multi.dispatch.config import Quarantine
from liger_multi.dispatch.launch import device_info
from liger_multi.dispatch.registry import backends, operators, serving
from liger_multi.errors import ConfigurationError, LigerMultiError, unknown
from liger_multi.files.documents import write_whole
from liger_multi.grouping import grouped
from liger_multi.testing import samples
from liger_multi.testing.verify import cases, quarantine, run as verdicts
from liger_multi.testing.verify.cases import Case, Target
from liger_multi.testing.verify.run import CORES, Result, Runner

MOST_JOBS = 16
GROUPS = 3  # of an operator and backend, usually: results in two dtypes, and promises
LIMITS = {"cpu": 120.0}  # seconds of a case; a device compiles, but is fast
LIMIT = 60.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options."""
    parser.add_argument("--ops", default="*", metavar="GLOB", help="names or globs, with commas")
    level = parser.add_mutually_exclusive_group()
    level.add_argument("--quick", action="store_true", help="every kernel once (about a minute)")
    level.add_argument(
        "--full", action="store_true", help="every sample, promise and pair of backends (long)"
    )
    parser.add_argument(
        "--backend", metavar="NAME", help="one backend (default: all of the device)"
    )
    parser.add_argument("--device", help="a device (default: the accelerator, or the CPU)")
    parser.add_argument(
        "--quarantine",
        type=checking.path,
        metavar="FILE",
        help="write what failed into this configuration file, as overrides with reasons "
        "(default: none)",
    )
    parser.add_argument(
        "--report",
        type=checking.path,
        metavar="FILE",
        help="write the result as JSON (default: none)",
    )
    parser.add_argument(
        "--by",
        type=checking.name,
        metavar="NAME",
        help="who ran it, for the report (default: nobody named)",
    )
    parser.add_argument(
        "--label",
        type=checking.name,
        help="what a simulated device is, for the report (default: none)",
    )
    parser.add_argument(
        "--jobs", type=checking.processes, help="processes (default: by the machine)"
    )
    parser.add_argument(
        "--limit",
        type=checking.seconds,
        help="seconds that a case may take (default: by the level)",
    )
    checking.add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run ``liger-multi verify``; 1 on a finding."""
    device = checking.device("verify", arguments.device)
    level = "quick" if arguments.quick else "full" if arguments.full else "default"
    arguments.ops = ",".join(glob.strip() for glob in arguments.ops.split(","))
    for glob in arguments.ops.split(","):
        if not cases.matching_operators(glob):
            raise LigerMultiError(unknown("operator", glob, operators(), "liger-multi explain"))
    if arguments.report:
        checking.file("--report", arguments.report, ".json", overwrite=True)
    if arguments.quarantine:
        suffix = ".yml" if arguments.quarantine.suffix == ".yml" else ".yaml"
        checking.file("--quarantine", arguments.quarantine, suffix, overwrite=True)
    old = quarantine.quarantine_of(arguments.quarantine) if arguments.quarantine else None
    began = time.monotonic()
    chosen = list(cases.targets(device, arguments.backend))
    if not chosen:
        names = [target.backend for target in cases.targets(device)]
        raise LigerMultiError(unknown(f"backend of {device.type}", arguments.backend, names))
    results = verify(device, chosen, arguments.ops, level, arguments.limit, arguments.jobs)
    details = facts(device)
    data = verdicts.as_data(
        details,
        results,
        level=level,
        seconds=time.monotonic() - began,
        date=datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        by=arguments.by or "",
        label=arguments.label or "",
        lifted=quarantine.lifted(results, device),
    )
    with contextlib.ExitStack() as stack:  # what was found is shown even if the disk is full
        if arguments.report:
            text = json.dumps(data, indent=1, allow_nan=False) + "\n"
            stack.callback(write_whole, arguments.report, text.encode())
        if arguments.json:
            checking.write_json(data)
        else:
            verdicts.page(data).show()
    has_findings = bool(verdicts.findings(results))
    if arguments.quarantine:
        _quarantine(arguments, device, results, data, old)
    elif has_findings:
        sys.stderr.write("to train without what failed: --quarantine liger-multi.yaml\n")
    return int(has_findings)


def verify(
    device: torch.device,
    chosen: list[Target],
    pattern: str,
    level: str,
    limit: float | None = None,
    jobs: int | None = None,
) -> list[Result]:
    """Run the cases of a level, then those of launch entries that the first ones can reach."""
    with _runner(device, limit, jobs) as runner:
        runner.start(chosen[0], GROUPS * len(cases.matching_operators(pattern)))
        groups = [
            (target, group)
            for target in chosen
            for cases_of_op in cases.cases(target, pattern, level).values()
            for group in cases.groups(cases_of_op)
        ]
        groups.sort(key=lambda group: cases.weight(group[1]))
        with _progress(sum(len(group) for _, group in groups)) as (runner.begun, runner.heard):
            results = runner.run(groups)
            return results + runner.run(_entries(device, results, level))


def _runner(device: torch.device, limit: float | None, jobs: int | None) -> Runner:
    """Cases of a device, with a process for every core."""
    limit_of_jobs = MOST_JOBS if device.type != "cpu" else CORES
    return Runner(limit or LIMITS.get(device.type, LIMIT), jobs or min(limit_of_jobs, CORES))


def _entries(
    device: torch.device, results: list[Result], level: str
) -> list[tuple[Target, list[Case]]]:
    """A case for every entry of the launch table that a level runs and a right case can take."""
    chosen = []
    for entry in cases.entries(device, level):
        able = [r for r in results if entry in r.entries and r.verdict == "right"]
        able.sort(key=lambda r: (r.case.check != "result", r.case.dtype != "bfloat16", -_size(r)))
        chosen += [(r.target, dataclasses.replace(r.case, entry=entry)) for r in able[:1]]
    by_target = grouped(((target, case.op), case) for target, case in chosen)
    return [(target, entry_cases) for (target, _), entry_cases in by_target.items()]


def _size(result: Result) -> int:
    """Elements of a case: one without rows starts no kernel."""
    matching = (s for s in samples.of(result.case.op) if s.name == result.case.sample)
    return next(matching).elements


def facts(device: torch.device) -> dict[str, Any]:
    """The device, its driver and the versions that decide results; nothing of the user."""
    all_versions = doctor.versions()
    versions = {k: all_versions[k].split()[0] for k in ("torch", "triton", "python")}
    for record in (*serving(device.type), backends()["triton"]):
        with contextlib.suppress(Exception):  # a driver that gives no answer is not a finding
            versions |= {k: v for k, v in record.describe().items() if k in ("driver", "ptxas")}
    entries = [d for d in doctor.devices(doctor.Probes()) if d["device"].startswith(device.type)]
    entry = entries[device.index or 0] if entries else {}
    about = {"type": device.type, "name": entry.get("name", device.type)}
    with contextlib.suppress(ConfigurationError):
        about["arch"] = entry.get("arch") or device_info(device).arch
    return {"device": about, "versions": versions}


@contextlib.contextmanager
def _progress(count: int) -> Iterator[tuple[Any, Any]]:
    """A bar on a terminal, by rich where it is installed; else nothing."""
    if not sys.stderr.isatty():
        yield (lambda name: None), (lambda result: None)
        return
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    except ImportError:
        yield (lambda name: None), (lambda result: None)
        return
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=count)
        yield (
            lambda name: bar.update(task, description=name),
            lambda result: bar.advance(task),
        )


def _quarantine(
    arguments: argparse.Namespace,
    device: torch.device,
    results: list[Result],
    data: dict[str, Any],
    old: Quarantine | None,
) -> None:
    """Write overrides for what failed, each to the first backend that is right."""
    path: Path = arguments.quarantine
    sections = quarantine.unchecked(path, {r.case.op for r in results}, device)
    with _runner(device, arguments.limit, arguments.jobs) as runner:
        replaced = quarantine.replaced(results, device, runner.run)
    for section, replacements in replaced.items():
        sections[section] = {**sections.get(section, {}), **replacements}
    since = old.since if old and sections else data["date"]
    text = quarantine.block(sections, since or data["date"], verdicts.made_with(data))
    changed = quarantine.write(path, text)
    count = sum(map(len, sections.values()))
    summary = f"{count} overrides" if count else "nothing to keep away"
    note = f"{path}: {summary}{'' if changed else ' (unchanged)'}"
    use = f"; put it in force with LIGER_MULTI_CONFIG={path}" if count else ""
    sys.stderr.write(f"quarantine {note}{use}\n")
