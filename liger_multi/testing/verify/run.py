"""Run cases in child processes: a verdict for each, whatever a kernel does to its process.

A child takes one group of cases after another. One that ends while a case runs has crashed, one
that does not answer within the limit hangs and is killed with all that it started; a new child goes
on behind the case. After :data:`MOST_LOST` such cases of an operator and dtype, the others of both
are not run: a wrong launch would cost the limit again and again.
"""

from __future__ import annotations

import collections
import contextlib
import json
import math
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from liger_multi._version import __version__
from liger_multi.files.page import Page
from liger_multi.grouping import grouped
from liger_multi.testing.verify.cases import Case, Target

CHILD = ["-m", "liger_multi.testing.verify.child"]
"""Arguments of the interpreter; a simulated device has a child of its own."""
ANSWERS = frozenset({"ready", "begin", "end"})
"""What a line of a child has, any of them; others are not its own."""
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
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
        compiling: Seconds of them in a compiler.
        compiled: Kernels that were compiled, and not in the compiler's cache.
        entries: Those of the launch table that the case can run with, by key and number.
        began: When it began, on the clock of :func:`time.monotonic`.
        child: Who ran it.
    """

    case: Case
    target: Target
    verdict: str
    worst: float = 0.0
    text: str = ""
    seconds: float = 0.0
    compiling: float = 0.0
    compiled: int = 0
    entries: tuple[tuple[str, int], ...] = ()
    began: float = 0.0
    child: Child | None = None


class Child:
    """A process that answers cases.

    Attributes:
        began: When it was started, on the clock of :func:`time.monotonic`.
        ready: When it had imported PyTorch, and the device had answered.
    """

    def __init__(self, target: Target, threads: int) -> None:
        self.began = self.ready = time.monotonic()
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
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()
        self.is_ready = False

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with contextlib.suppress(ValueError):  # what libraries print as they are imported
                answer = json.loads(line)
                if isinstance(answer, dict) and not ANSWERS.isdisjoint(answer):
                    self.lines.put(answer)
        self.lines.put(None)

    def ask(self, case: Case, limit: float) -> dict[str, Any]:
        """The answer to a case; that of a process that ended or hung is worded here."""
        try:
            if not self.is_ready:
                self.is_ready = self.lines.get(timeout=START_LIMIT) is not None
                self.ready = time.monotonic()
            assert self.process.stdin is not None
            self.process.stdin.write(json.dumps([0, case.as_data()]) + "\n")
            self.process.stdin.flush()
            for _ in range(2):  # that it begins, and what came of it
                answer = self.lines.get(timeout=limit)
                if answer is None or "verdict" in answer:
                    return answer or self._end_result()
        except queue.Empty:
            self.close()
            return {"verdict": "hung", "text": f"no answer within {limit:g} s", "alive": False}
        except OSError:
            pass
        return self._end_result()

    def _end_result(self) -> dict[str, Any]:
        code = self.process.wait()
        self.errors.seek(0)
        last = self.errors.read().decode(errors="replace").strip().splitlines()[-1:] or [""]
        if code == -signal.SIGKILL:  # Linux ends a process so where memory ran out
            verdict, cause = "out of memory", "it was killed"
        elif code < 0:
            verdict, cause = "crashed", signal.Signals(-code).name
        else:
            verdict, cause = "crashed", f"exit status {code}"
        return {
            "verdict": verdict,
            "text": f"the process ended: {cause} {last[0]}".strip(),
            "alive": False,
        }

    def close(self) -> None:
        """End the process and all that it started, once: its number may then be another's."""
        if self.errors.closed:
            return
        with contextlib.suppress(OSError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.reader.join(1.0)  # what holds the other end beyond that is not waited for
        for pipe in (self.process.stdin, self.process.stdout, self.errors):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


Groups = Iterable[tuple[Target, list[Case]]]


def _drained(pending: collections.deque[tuple[Target, list[Case]]]) -> Iterator[Any]:
    """What waits, one by one, however many threads take of it."""
    with contextlib.suppress(IndexError):
        while True:
            yield pending.popleft()


@dataclass
class Runner:
    """Groups of cases, several at a time; a context that ends its children.

    Attributes:
        limit: Seconds that a case may take.
        jobs: Children at a time.
        begun: Called with the operator's name when a group of it begins.
        heard: Called with every result.
        started: All children.
        idle: Those that wait for cases, by what they need.
        lost: Cases that took their process with them, by target, operator and dtype.
        errors: What ended a thread that asks children.
    """

    limit: float
    jobs: int
    begun: Callable[[str], None] = lambda name: None
    heard: Callable[[Result], None] = lambda result: None
    started: list[Child] = field(default_factory=list)
    idle: dict[tuple[str, bool], list[Child]] = field(default_factory=dict)
    lost: collections.Counter[tuple[Target, str, str]] = field(default_factory=collections.Counter)
    errors: list[BaseException] = field(default_factory=list)

    def __enter__(self) -> Runner:
        """Start no child yet."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the children."""
        self.idle.clear()
        for child in self.started:
            child.close()

    def start(self, target: Target, limit: int) -> None:
        """Start children of a target, which import while their cases are looked up."""
        idle = self.idle.setdefault((target.device, target.interpreted), [])
        for _ in range(min(self.jobs, limit)):
            idle.append(self._new(target))  # one by one: those that were started are ended

    def run(self, groups: Groups) -> list[Result]:
        """The results of groups of cases, each in one child, in the order in which they end.

        Raises:
            OSError: No child can be started: nothing is known of what it would have run.
        """
        pending = collections.deque(groups)
        results: list[Result] = []
        stop = threading.Event()
        count = min(self.jobs, len(pending))
        args = (pending, results, stop)
        threads = [threading.Thread(target=self._work, args=args) for _ in range(count)]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        except BaseException:
            stop.set()
            self.__exit__()  # what waits for a case that hangs goes on
            raise
        if self.errors:
            raise self.errors[0]
        return results

    def _work(
        self,
        pending: collections.deque[tuple[Target, list[Case]]],
        results: list[Result],
        stop: threading.Event,
    ) -> None:
        children: dict[tuple[str, bool], Child] = {}
        try:
            for target, cases in _drained(pending):
                self.begun(f"{cases[0].op} ({target.label})")
                for case in cases:
                    if stop.is_set():
                        return
                    result = self._run_case(children, target, case)
                    results.append(result)
                    self.heard(result)
        except BaseException as error:
            self.errors.append(error)
            stop.set()
        finally:
            for pool_key, child in children.items():
                self.idle.setdefault(pool_key, []).append(child)

    def _child(self, target: Target, pool_key: tuple[str, bool]) -> Child:
        """One that waits, or a new one."""
        with contextlib.suppress(KeyError, IndexError):
            return self.idle[pool_key].pop()
        return self._new(target)

    def _new(self, target: Target) -> Child:
        """One more; beside a device, each has one core."""
        child = Child(target, max(1, CORES // self.jobs) if target.device == "cpu" else 1)
        self.started.append(child)
        return child

    def _run_case(
        self, children: dict[tuple[str, bool], Child], target: Target, case: Case
    ) -> Result:
        key = (target, case.op, case.dtype)
        if self.lost[key] >= MOST_LOST:
            text = f"after {MOST_LOST} cases that took their process with them"
            return Result(case, target, "not run", text=text)
        pool_key = (target.device, target.interpreted)
        if pool_key not in children:
            children[pool_key] = self._child(target, pool_key)
        child, began = children[pool_key], time.monotonic()
        answer = child.ask(case, self.limit)
        if not answer.pop("alive"):
            children.pop(pool_key).close()
            self.lost[key] += answer["verdict"] != "right"
        entries = tuple((key, index) for key, index in answer.pop("entries", ()))
        fields = {k: v for k, v in answer.items() if k in Result.__dataclass_fields__}
        fields.setdefault("seconds", time.monotonic() - began)
        began = max(began, child.ready)
        return Result(case, target, **fields, entries=entries, began=began, child=child)


# --- verdicts by operator, as a page and as a file ---

FORMAT = 1
MOST_FINDINGS = 5  # of an operator, in a table


def made_with(details: Mapping[str, Any]) -> str:
    """The facts in one line."""
    names = ("driver", "torch", "triton", "ptxas")
    versions = [f"{k} {details['versions'][k]}" for k in names if k in details["versions"]]
    return ", ".join([details["device"]["name"], *versions])


def verdict_of(results: Iterable[Result]) -> str:
    """The verdict on an operator: its worst finding, else right where one case was."""
    group = list(results)
    compared = [r for r in group if r.verdict in FINDINGS or r.case.check != "promises"]
    verdicts = {result.verdict for result in compared or group}
    order = (*FINDINGS, "right", "refused", "not run")
    return next((v for v in order if v in verdicts), "not run")


def by_operator(results: Iterable[Result]) -> dict[tuple[str, str], list[Result]]:
    """Results by target and operator, in order."""
    keyed = (((result.target.label, result.case.op), result) for result in results)
    return grouped(sorted(keyed, key=lambda pair: pair[0]))


def findings(results: Iterable[Result]) -> list[Result]:
    """What is wrong, the worst first."""
    failures = [r for r in results if r.verdict in FINDINGS]
    return sorted(failures, key=lambda r: (FINDINGS.index(r.verdict), -r.worst, r.case.name))


def _finite(worst: float) -> float | None:
    """An error as JSON has it: None where it is not finite."""
    return round(worst, 4) if math.isfinite(worst) else None


_FOLDERS = re.compile(r"(?<![\w.~])(?:[A-Za-z]:)?[\\/](?:[^\s\\/:'\"<>|]+[\\/])+")


def _private(text: str) -> str:
    """A message without the folders of who ran it: of a path, the last name is left."""
    for folder, name in ((str(Path.cwd()), "."), (os.path.expanduser("~"), "~")):
        if folder.strip("/"):
            text = re.sub(rf"{re.escape(folder)}(?!\w)", name, text)
    return _FOLDERS.sub("", text)[:300]


MOST_SLOW = 20  # cases, in a report


def timing(results: Iterable[Result]) -> dict[str, Any]:
    """Where the time of a run went, in seconds since the first child was started.

    Of every child: when it was started, ready and done, its cases, and what it compiled. Then the
    slowest operators with the child and span of their last case, and the slowest cases.
    """
    by_child = grouped((r.child, r) for r in results if r.child is not None)
    children = sorted(by_child, key=lambda child: child.began)
    start = children[0].began if children else 0.0

    def spent(group: Sequence[Result]) -> dict[str, Any]:
        first, last = min(r.began for r in group), max(r.began + r.seconds for r in group)
        return {
            "child": children.index(group[0].child),  # type: ignore[arg-type]
            "began": round(first - start, 2),
            "ended": round(last - start, 2),
            "cases": len(group),
            "seconds": round(sum(r.seconds for r in group), 2),
            "compiling": round(sum(r.compiling for r in group), 2),
            "compiled": sum(r.compiled for r in group),
        }

    groups = {
        "operators": by_operator(r for group in by_child.values() for r in group),
        "cases": {(r.target.label, r.case.name): [r] for c in children for r in by_child[c]},
    }
    slow = {
        name: sorted(
            ({"what": " ".join(key), **spent(group)} for key, group in by_key.items()),
            key=lambda row: -row["seconds"],
        )[:MOST_SLOW]
        for name, by_key in groups.items()
    }
    started = [
        {"started": round(c.began - start, 2), "ready": round(c.ready - start, 2), **spent(group)}
        for c, group in ((child, by_child[child]) for child in children)
    ]
    return {"children": started, **slow}


def as_data(
    details: Mapping[str, Any],
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
            "worst": _finite(max((r.worst for r in group), default=0.0)),
        }
        entry |= {v: n for v in VERDICTS if (n := sum(r.verdict == v for r in group))}
        failures = findings(group)
        if failures:
            entry["findings"] = [
                {
                    "case": r.case.name,
                    "verdict": r.verdict,
                    "worst": _finite(r.worst),
                    "text": _private(r.text),
                }
                for r in failures[:MOST_FINDINGS]
            ]
        operators.setdefault(target, {})[op] = entry
    data = {"format": FORMAT, "date": date, "by": by, "label": label, "level": level, **details}
    return {
        **data,
        "liger_multi": __version__,
        "seconds": round(seconds, 1),
        "quarantine": [list(row) for row in lifted],
        "timing": timing(results),
        "operators": operators,
    }


def _tolerances(entry: Mapping[str, Any]) -> str:
    if entry["worst"] is None:
        return "not finite"
    return f"{entry['worst']:.3g}" if "right" in entry or entry["worst"] else "-"


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
                    _tolerances(entry),
                    ", ".join(f"{entry[v]} {v}" for v in VERDICTS if v in entry),
                ]
            )
            rows += [
                [finding["verdict"], target, finding["case"], finding["text"]]
                for finding in entry.get("findings", ())
            ]
    nothing = [["", "", "", "every operator that was checked is right on this machine"]]
    result.add("Findings", rows or nothing, ("verdict", "backend", "case", "what"))
    result.add("Quarantine in force", data["quarantine"], ("section", "operator", "verdict"))
    header = ("operator", "backend", "verdict", "worst error / tolerance", "cases")
    result.add("Operators", table, header)
    machine = [["device", data["device"]["name"]], ["arch", data["device"].get("arch", "")]]
    machine += [list(pair) for pair in data["versions"].items()]
    machine += [
        ["level", f"{data['level']}, {data['seconds']} s"],
        ["time", _spent(data["timing"])],
    ]
    result.add("Machine", machine)
    return result


def _spent(times: Mapping[str, Any]) -> str:
    """What the processes did, in one line."""
    children = times["children"]
    if not children:
        return "no case was run"
    started = max(child["ready"] - child["started"] for child in children)
    compiling, compiled = (sum(c[key] for c in children) for key in ("compiling", "compiled"))
    slowest = times["operators"][0]
    return (
        f"{len(children)} processes, ready after up to {started:.1f} s; {compiled} compilations, "
        f"{compiling:.1f} s; longest: {slowest['what']}, {slowest['seconds']:.1f} s"
    )
