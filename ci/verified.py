"""Tables of the reports of `liger-multi verify` that the repository keeps."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from liger_multi.testing.verify.run import FINDINGS

ROOT = Path(__file__).parent.parent
REPORTS = ROOT / "benchmarks" / "results" / "verify"
COMPILED = "compiled and statically checked for {}"
NOT_RUN = "**not run on hardware**"
HEADER = (
    "| Device | Backend | torch | Triton | ptxas | Driver | Right | Findings | Level | Date | By |"
)
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
    lines = [HEADER, "|---" * (HEADER.count("|") - 1) + "|"]
    for report in reports():
        known = report["versions"]
        for target, operators in report["operators"].items():
            verdicts = [entry["verdict"] for entry in operators.values()]
            wrong = sorted(op for op, e in operators.items() if e["verdict"] in FINDINGS)
            versions = [known.get(k, "-") for k in ("torch", "triton", "ptxas", "driver")]
            cells = [name_of(report), target, *versions]
            cells += [f"{verdicts.count('right')} of {len(verdicts)}"]
            cells += [", ".join(f"`{op}`" for op in wrong) or "none"]
            cells += [report["level"], report["date"], report["by"] or "-"]
            lines.append(f"| {' | '.join(cells)} |")
    amd = ", ".join(_compiled("gfx"))
    lines.append(f"| AMD {amd} | rocm | - | - | - | - | - | compiled, {NOT_RUN} | - | - | - |")
    return lines


def support() -> list[str]:
    """README's table of accelerators."""
    lines = ["| Accelerator | Status |", "|---|---|"]
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
        lines.append(f"| {vendor} | {'; '.join(parts)}{f' ({page})' if page else ''} |")
    return lines


def _compiled(prefix: str) -> list[str]:
    """Architectures of the static baseline, in its order."""
    text = (ROOT / "ci" / "baseline.txt").read_text(encoding="utf-8")
    return list(dict.fromkeys(re.findall(rf"^  ({prefix}\w+) ", text, re.MULTILINE)))


def _short(report: Mapping[str, Any], package: str) -> str:
    return ".".join(str(report["versions"].get(package, "-")).split("+")[0].split(".")[:2])
