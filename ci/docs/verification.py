"""What ran where: the page of verification, and tables of the reports of `liger-multi verify`.

The page is made of the results of the suite that the repository keeps.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from benchmarks.tables import table
from ci import results
from ci.docs import ROOT
from ci.docs.api import backends
from ci.results import Result
from liger_multi.dispatch import registry
from liger_multi.grouping import grouped
from liger_multi.testing.verify.run import FINDINGS

# --- the page ---

NOT_RUN = "**not run on hardware**"
HEAD = """\
# Verification

What ran where, from the newest results of the test suite (`benchmarks/results/suites.json`). See
[runners](runners.md) to run the suite on your device and add the result. Parts named `interpreted`
execute kernels on a CPU, against fp64; those named `cross-compiled` hold code against the limits of
cards; [Ascend](ascend.md) is simulated.

"""
PARTS = """
## Backends

A call that a backend lacks or refuses goes to the next backend of its chain.

"""
COLUMNS = ("backend", "on its device", "operators", "launch tables", "next in its chain")


def page() -> str:
    """The page."""
    kept = results.kept()
    lines = [(name, ran(name, record, kept), *_own(name)) for name, record in backends().items()]
    notes = [f"- {o.part}, {o.date[:10]}: {o.note.rstrip('.')}." for o in kept if o.note]
    for one in kept:
        notes += [f"- {one.part}, {one.date[:10]}, {k}: {v}." for k, v in one.settings.items()]
    text = HEAD + results.table(kept) + "\n" + "\n".join([*failed(kept), "", *notes])
    return "\n".join([text, PARTS, *table((*COLUMNS, "known failures"), lines), ""])


def ran(name: str, record: Any, kept: Iterable[Result]) -> str:
    """The device of the newest run of a backend, or that there is none; "-" without a device."""
    devices = [one.device.get("name", "") for one in kept if one.ran and one.part == name]
    return next(iter(devices), NOT_RUN) if record.device_type not in (None, "cpu") else "-"


def failed(results: Sequence[Result]) -> list[str]:
    """What failed in the newest run of every part, where it is red.

    Raises:
        ValueError: A red run does not say it.
    """
    newest: dict[str, Result] = {}
    for one in results:
        newest.setdefault(one.part, one)
    lines = []
    for one in newest.values():
        if one.ran and not one.green:
            said = one.note or ", ".join(f"`{name}`" for name in one.failures)
            if not said:
                raise ValueError(f"the run of {one.part} on {one.date} does not say what failed")
            lines.append(f"- {one.part}, {one.date[:10]}, {one.commit[:7]}: {said.rstrip('.')}.")
    return ["", "## What failed", "", *lines, ""] if lines else []


# how entries of launch tables begin whose numbers nobody measured, and what they are
UNMEASURED = {"static model": "static model", "finished search": "compiled, not timed"}


def _numbers_of(table: Path) -> str:
    """Where the numbers of a launch table come from: "measured" where some of them are."""
    entries = (yaml.safe_load(table.read_text(encoding="utf-8")) or {}).get("entries") or {}
    sources = [str(e.get("source")) for several in entries.values() for e in several]
    origins = {
        next(
            (origin for start, origin in UNMEASURED.items() if source.startswith(start)), "measured"
        )
        for source in sources
    }
    return "measured" if "measured" in origins else ", ".join(sorted(origins))


def _own(name: str) -> tuple[str, ...]:
    """Operators that a backend implements, launch tables, its chain, and known failures."""
    folder = ROOT / ("reference" if name == "reference" else f"backends/{name}")
    own = [op for op in registry.operators() if registry.module(name, op) is not None]
    files = sorted((folder / "launch").glob("*.yaml"))
    tables = grouped((_numbers_of(path), path.stem) for path in files)
    said = "; ".join(f"{', '.join(names)} ({origin})" for origin, names in tables.items())
    record = backends()[name]
    floor = [registry.REFERENCE] if record.device_type else []
    xfails = ROOT / "tests" / "xfails" / f"{name}.txt"
    lines = xfails.read_text(encoding="utf-8").splitlines() if xfails.exists() else []
    known = sum(bool(line.partition("#")[0].strip()) for line in lines)
    return str(len(own)), said or "-", ", ".join([*record.parents, *floor]) or "-", str(known)


# --- reports of `liger-multi verify` ---

REPORTS = ROOT / "benchmarks" / "results" / "verify"
COMPILED = "compiled and statically checked for {}"
HEADS = [
    "Device",
    "Backend",
    "torch",
    "Triton",
    "ptxas",
    "Driver",
    "Right",
    "Findings",
    "Level",
    "Date",
    "By",
]
ABSENT = {"rocm": "not run on AMD hardware", "npu": "not run on an NPU"}
"""Backends that nobody has run on a device: drop one when a report of its device comes."""
VENDORS = (
    ("NVIDIA", "cuda", "sm", "", "the whole suite ran on an H100 and an H200"),
    ("AMD", "rocm", "gfx", "[ROCm](docs/rocm.md)", ""),
    (
        "Ascend",
        "npu",
        "-",
        "[Ascend](docs/ascend.md)",
        "compiled by the vendor's compiler, run on a simulated device",
    ),
    ("CPU", "cpu", "-", "", "the reference runs natively, Triton kernels in their interpreter"),
)
"""Of README's table: name, backend, prefix of compiled architectures, page, what else ran."""


def reports() -> list[dict[str, Any]]:
    """The committed reports, the newest of each device and versions."""
    paths = sorted(REPORTS.glob("*.json"))
    loaded = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    return sorted(loaded, key=lambda r: (r["device"]["type"] == "cpu", r["device"]["name"]))


def name_of(report: Mapping[str, Any]) -> str:
    """What a report was made on; a simulated device says so."""
    return str(report["label"] or report["device"]["name"])


def rows() -> list[str]:
    """One row for each device, versions and backend; findings are named."""
    lines = []
    for report in reports():
        known = report["versions"]
        for target, operators in report["operators"].items():
            verdicts = [entry["verdict"] for entry in operators.values()]
            wrong = sorted(op for op, e in operators.items() if e["verdict"] in FINDINGS)
            versions = [known.get(k, "-") for k in ("torch", "triton", "ptxas", "driver")]
            cells = [name_of(report), target, *versions]
            cells += [f"{verdicts.count('right')} of {len(verdicts)}"]
            cells += [", ".join(f"`{op}`" for op in wrong) or "none"]
            lines.append([*cells, report["level"], report["date"], report["by"] or "-"])
    gfx = f"AMD {', '.join(_compiled('gfx'))}"
    amd = [gfx, "rocm", *["-"] * 5, f"compiled, {NOT_RUN}", *["-"] * 3]
    return table(HEADS, [*lines, amd])


def support() -> list[str]:
    """README's table of accelerators."""
    lines = []
    for vendor, backend, prefix, page, also in VENDORS:
        mine = [r for r in reports() if backend in r["operators"]]
        if backend == "cpu":
            mine = [r for r in reports() if r["device"]["type"] == "cpu"]
        verified = dict.fromkeys(
            f"{name_of(r)} (torch {_short(r, 'torch')}, Triton {_short(r, 'triton')})" for r in mine
        )
        archs = _compiled(prefix)
        parts = [also] if also else []
        parts += [f"[verified](docs/verified.md) on {', '.join(verified)}"] if verified else []
        parts += [COMPILED.format(", ".join(archs))] if archs else []
        parts += [f"**{ABSENT[backend]}**"] if backend in ABSENT else []
        lines.append((vendor, "; ".join(parts) + (f" ({page})" if page else "")))
    return table(("Accelerator", "Status"), lines)


def _compiled(prefix: str) -> list[str]:
    """Architectures of the static baseline, in its order."""
    text = (ROOT / "ci" / "baseline.txt").read_text(encoding="utf-8")
    return list(dict.fromkeys(re.findall(rf"^  ({prefix}\w+) ", text, re.MULTILINE)))


def _short(report: Mapping[str, Any], package: str) -> str:
    return ".".join(str(report["versions"].get(package, "-")).split("+")[0].split(".")[:2])
