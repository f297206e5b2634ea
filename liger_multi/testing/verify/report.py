"""What `liger-multi verify` found: verdicts by operator, as a page and as a file."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from liger_multi._version import __version__
from liger_multi.page import Page
from liger_multi.testing.verify.run import FINDINGS, VERDICTS, Result

FORMAT = 1
MOST_FINDINGS = 5  # of an operator, in a table


def made_with(known: Mapping[str, Any]) -> str:
    """The facts in one line."""
    named = ("driver", "torch", "triton", "ptxas")
    versions = [f"{k} {known['versions'][k]}" for k in named if k in known["versions"]]
    return ", ".join([known["device"]["name"], *versions])


def verdict_of(results: Iterable[Result]) -> str:
    """The verdict on an operator: its worst finding, else right where one case was."""
    group = list(results)
    compared = [r for r in group if r.verdict in FINDINGS or r.case.check != "promises"]
    verdicts = {result.verdict for result in compared or group}
    order = (*FINDINGS, "right", "refused", "not run")
    return next((v for v in order if v in verdicts), "not run")


def by_operator(results: Iterable[Result]) -> dict[tuple[str, str], list[Result]]:
    """Results by target and operator, in order."""
    groups: dict[tuple[str, str], list[Result]] = {}
    for result in sorted(results, key=lambda r: (r.target.label, r.case.op)):
        groups.setdefault((result.target.label, result.case.op), []).append(result)
    return groups


def findings(results: Iterable[Result]) -> list[Result]:
    """What is wrong, the worst first."""
    wrong = [r for r in results if r.verdict in FINDINGS]
    return sorted(wrong, key=lambda r: (FINDINGS.index(r.verdict), -r.worst, r.case.name))


def _worst(results: Iterable[Result]) -> float:
    return max((r.worst for r in results), default=0.0)


def _number(worst: float) -> float | None:
    """An error as JSON has it: None where it is not finite."""
    return round(worst, 4) if math.isfinite(worst) else None


_FOLDERS = re.compile(r"(?<![\w.~])(?:[A-Za-z]:)?[\\/](?:[^\s\\/:'\"<>|]+[\\/])+")


def _private(text: str) -> str:
    """A message without the folders of who ran it: of a path, the last name is left."""
    for folder, name in ((str(Path.cwd()), "."), (os.path.expanduser("~"), "~")):
        if folder.strip("/"):
            text = re.sub(rf"{re.escape(folder)}(?!\w)", name, text)
    return _FOLDERS.sub("", text)[:300]


def as_data(
    known: Mapping[str, Any],
    results: Sequence[Result],
    *,
    level: str,
    seconds: float,
    date: str,
    by: str,
    label: str,
    lifted: Sequence[Sequence[str]],
) -> dict[str, Any]:
    """The report as one JSON document."""
    operators: dict[str, dict[str, Any]] = {}
    for (target, op), group in by_operator(results).items():
        entry: dict[str, Any] = {"verdict": verdict_of(group), "worst": _number(_worst(group))}
        entry |= {v: n for v in VERDICTS if (n := sum(r.verdict == v for r in group))}
        wrong = findings(group)
        if wrong:
            entry["findings"] = [
                {
                    "case": r.case.name,
                    "verdict": r.verdict,
                    "worst": _number(r.worst),
                    "text": _private(r.text),
                }
                for r in wrong[:MOST_FINDINGS]
            ]
        operators.setdefault(target, {})[op] = entry
    data = {"format": FORMAT, "date": date, "by": by, "label": label, "level": level, **known}
    return {
        **data,
        "liger_multi": __version__,
        "seconds": round(seconds, 1),
        "quarantine": [list(row) for row in lifted],
        "operators": operators,
    }


def page(data: Mapping[str, Any]) -> Page:
    """Findings first, then a row for each operator, then the machine."""
    result, rows, table = Page(), [], []
    for target, operators in data["operators"].items():
        for op, entry in operators.items():
            table.append([op, target, entry["verdict"], _tolerances(entry), _counts(entry)])
            rows += [
                [one["verdict"], target, one["case"], one["text"]]
                for one in entry.get("findings", ())
            ]
    nothing = [["", "", "", "every operator that was checked is right on this machine"]]
    result.add("Findings", rows or nothing, ("verdict", "backend", "case", "what"))
    result.add("Quarantine in force", data["quarantine"], ("section", "operator", "verdict"))
    header = ("operator", "backend", "verdict", "worst error / tolerance", "cases")
    result.add("Operators", table, header)
    machine = [["device", data["device"]["name"]], ["arch", data["device"].get("arch", "")]]
    machine += [list(pair) for pair in data["versions"].items()]
    result.add("Machine", [*machine, ["level", f"{data['level']}, {data['seconds']} s"]])
    return result


def _tolerances(entry: Mapping[str, Any]) -> str:
    if entry["worst"] is None:
        return "not finite"
    return f"{entry['worst']:.3g}" if "right" in entry or entry["worst"] else "-"


def _counts(entry: Mapping[str, Any]) -> str:
    return ", ".join(f"{entry[v]} {v}" for v in VERDICTS if v in entry)
