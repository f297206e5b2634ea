"""Run cases in child processes: a verdict for each, whatever a kernel does to its process.

A child keeps the cases of one operator after another. One that ends while a case runs has crashed,
one that does not answer within the limit hangs and is killed with all that it started; a new child
goes on behind the case. After :data:`MOST_LOST` such cases of an operator and dtype, the others of
both are not run: a wrong launch would cost the limit again and again.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from liger_multi._version import __version__
from liger_multi.page import Page
from liger_multi.testing.verify.cases import Case, Target

CHILD = ["-m", "liger_multi.testing.verify.child"]
"""Arguments of the interpreter; a simulated device has a child of its own."""
MOST_LOST = 2
START_LIMIT = 300.0  # seconds that a child may take to import PyTorch, on a busy machine
FINDINGS = ("wrong", "crashed", "hung", "out of memory")
VERDICTS = ("right", *FINDINGS, "refused", "not run")


@dataclass
class Result:
    """What came of a case.

    Attributes:
        case: The case.
        target: Who ran it.
        verdict: One of :data:`VERDICTS`.
        worst: The largest error in units of the tolerance.
        text: What is wrong, or the reason of a refusal.
        seconds: How long it took.
        entries: Those of the launch table that the case can run with, by key and number.
    """

    case: Case
    target: Target
    verdict: str
    worst: float = 0.0
    text: str = ""
    seconds: float = 0.0
    entries: tuple[tuple[str, int], ...] = ()


class Child:
    """A process that answers cases."""

    def __init__(self, target: Target, threads: int) -> None:
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115 (close() closes it)
        self.process = subprocess.Popen(
            [sys.executable, *CHILD, target.device, str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            env=target.environment,
            text=True,
            start_new_session=True,
        )
        self.lines: queue.Queue[dict[str, Any] | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        self.is_ready = False

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with contextlib.suppress(ValueError):  # what libraries print as they are imported
                self.lines.put(json.loads(line))
        self.lines.put(None)

    def ask(self, case: Case, limit: float) -> dict[str, Any]:
        """The answer to a case; that of a process that ended or hung is worded here."""
        try:
            if not self.is_ready:
                self.is_ready = self.lines.get(timeout=START_LIMIT) is not None
            assert self.process.stdin is not None
            self.process.stdin.write(json.dumps([0, case.as_data()]) + "\n")
            self.process.stdin.flush()
            for _ in range(2):  # that it begins, and what came of it
                answer = self.lines.get(timeout=limit)
                if answer is None or "verdict" in answer:
                    return answer or self._ended()
        except queue.Empty:
            self.close()
            return {"verdict": "hung", "text": f"no answer within {limit:g} s", "alive": False}
        except OSError:
            pass
        return self._ended()

    def _ended(self) -> dict[str, Any]:
        code = self.process.wait()
        self.errors.seek(0)
        last = self.errors.read().decode(errors="replace").strip().splitlines()[-1:] or [""]
        if code == -signal.SIGKILL:  # Linux ends a process so where memory ran out
            verdict, how = "out of memory", "it was killed"
        elif code < 0:
            verdict, how = "crashed", signal.Signals(-code).name
        else:
            verdict, how = "crashed", f"exit status {code}"
        return {
            "verdict": verdict,
            "text": f"the process ended: {how} {last[0]}".strip(),
            "alive": False,
        }

    def close(self) -> None:
        """End the process and all that it started."""
        with contextlib.suppress(OSError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.errors.close()


@dataclass
class Runner:
    """Cases by operator, several operators at a time.

    Attributes:
        limit: Seconds that a case may take.
        jobs: Children at a time.
        begun: Called with the operator's name when one begins.
        heard: Called with every result.
    """

    limit: float
    jobs: int
    begun: Callable[[str], None] = lambda name: None
    heard: Callable[[Result], None] = lambda result: None
    results: list[Result] = field(default_factory=list)

    def run(self, groups: Iterable[tuple[Target, list[Case]]]) -> list[Result]:
        """The results of groups of cases, one group an operator."""
        waiting: queue.SimpleQueue[tuple[Target, list[Case]]] = queue.SimpleQueue()
        count = 0
        for group in groups:
            waiting.put(group)
            count += 1
        done: list[Result] = []
        stop = threading.Event()
        args = (waiting, done, stop)
        threads = [
            threading.Thread(target=self._work, args=args) for _ in range(min(self.jobs, count))
        ]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        except BaseException:
            stop.set()  # the children end after the case that they are at
            raise
        return done

    def _work(
        self,
        waiting: queue.SimpleQueue[tuple[Target, list[Case]]],
        done: list[Result],
        stop: threading.Event,
    ) -> None:
        children: dict[tuple[str, bool], Child] = {}
        try:
            while not stop.is_set():
                target, cases = waiting.get_nowait()
                self.begun(f"{cases[0].op} ({target.label})" if cases else "")
                lost: collections.Counter[str] = collections.Counter()
                for case in cases:
                    if stop.is_set():
                        break
                    result = self._one(children, target, case, lost)
                    done.append(result)
                    self.heard(result)
        except queue.Empty:
            pass
        finally:
            for child in children.values():
                child.close()

    def _one(
        self,
        children: dict[tuple[str, bool], Child],
        target: Target,
        case: Case,
        lost: collections.Counter[str],
    ) -> Result:
        if lost[case.dtype] >= MOST_LOST:
            text = f"after {MOST_LOST} cases that took their process with them"
            return Result(case, target, "not run", text=text)
        place = (target.device, target.interpreted)
        if place not in children:
            children[place] = Child(target, max(1, (os.cpu_count() or 1) // self.jobs))
        answer = children[place].ask(case, self.limit)
        if not answer.pop("alive"):
            children.pop(place).close()
            lost[case.dtype] += answer["verdict"] != "right"
        fields = {k: v for k, v in answer.items() if k in ("verdict", "worst", "text", "seconds")}
        entries = tuple((key, number) for key, number in answer.get("entries", ()))
        return Result(case, target, **fields, entries=entries)


# --- verdicts by operator, as a page and as a file ---

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


def _private(text: str) -> str:
    """A message without the folders of who ran it."""
    for folder, name in ((str(Path.cwd()), "."), (os.path.expanduser("~"), "~")):
        text = text.replace(folder, name)
    return text[:300]


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
        entry: dict[str, Any] = {
            "verdict": verdict_of(group),
            "worst": round(max((r.worst for r in group), default=0.0), 4),
        }
        entry |= {v: n for v in VERDICTS if (n := sum(r.verdict == v for r in group))}
        wrong = findings(group)
        if wrong:
            entry["findings"] = [
                {
                    "case": r.case.name,
                    "verdict": r.verdict,
                    "worst": r.worst,
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
            table.append(
                [
                    op,
                    target,
                    entry["verdict"],
                    f"{entry['worst']:.3g}" if "right" in entry or entry["worst"] else "-",
                    ", ".join(f"{entry[v]} {v}" for v in VERDICTS if v in entry),
                ]
            )
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
