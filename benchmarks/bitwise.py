"""Check equal bits on a device and measure their cost: ``python -m benchmarks.bitwise``.

Under each setting of ``deterministic`` (none, ``True``, ``"rows"``), in one run:

| part | what |
|---|---|
| check | every operator: do calls repeat, are rows independent, as its backend promises |
| training | small models trained twice, 100 steps: equal digests of losses and parameters |
| step | a whole step of Llama-3.2-1B; unpatched, under PyTorch's switch, with a peer's GEMM, too |
| gemm | our GEMM with independent rows beside the library's and a peer's |
| time | every operator at its first bench sample |

Every part runs in processes of its own, so that a fault of one operator ends no other. Checks run
several at a time, which also compiles the kernels that are timed alone afterwards. A broken promise
is listed; the run goes on and exits with 1.

The peer is the package ``sgemm-bi``; without it, its rows say so. ``CUBLAS_WORKSPACE_CONFIG`` is
``:4096:8`` for all, which on Hopper is what PyTorch takes anyway.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import store

ROOT = Path(__file__).parent.parent
PARTS = ("check", "training", "step", "gemm", "time")
CHECKS = 0.45  # of the budget, until which checks begin
MARK = "row: "  # before a row on a child's standard output
Row = dict[str, Any]


# --- in a process of its own ---


def work(part: str, names: Sequence[str], options: argparse.Namespace) -> Iterator[Row]:
    """The rows of a part, name by name."""
    import torch

    from benchmarks import bitwise_models, bitwise_operators
    from liger_multi.bench.measure import Clock

    device = torch.device(options.device)
    place = bitwise_operators.Place(device, torch.bfloat16, options.tiny, options.seconds)
    clock = Clock(device) if part in ("time", "gemm") else None
    parts: dict[str, Callable[[str], Iterator[Row]]] = {
        "check": lambda name: bitwise_operators.check(name, place),
        "training": lambda name: bitwise_models.training(name, place),
        "step": lambda name: bitwise_models.step(place),
        "gemm": lambda name: bitwise_operators.gemms(place, clock),  # type: ignore[arg-type]
        "time": lambda name: bitwise_operators.timed(name, place, clock),  # type: ignore[arg-type]
    }
    for name in names:
        if time.time() > options.until:
            yield {"part": part, "name": name, "failure": "no time was left"}
            continue
        try:
            yield from parts[part](name)
        except Exception as failure:
            text = bitwise_operators.first_line(failure)
            yield {"part": part, "name": name, "failure": text}
            if "CUDA error" in text:  # nothing more can run in this process
                raise
        if place.device.type == "cuda":
            torch.cuda.empty_cache()


def child(options: argparse.Namespace) -> int:
    """Print the rows of a part, and a line when a name is done."""
    for name in options.names:
        for row in work(options.child, [name], options):
            sys.stdout.write(MARK + json.dumps(row) + "\n")
        sys.stdout.write(f"done: {name}\n")
        sys.stdout.flush()
    return 0


# --- the processes ---


class Jobs:
    """Starts children, and collects what they print.

    Attributes:
        options: The command line.
        say: Told a part, a name and its rows as they come.
    """

    def __init__(
        self, options: argparse.Namespace, say: Callable[[str, str, list[Row]], None]
    ) -> None:
        self.options, self.say, self.lock = options, say, threading.Lock()

    def several(self, jobs: Sequence[tuple[str, str]], workers: int) -> None:
        """Run every part and name in several processes at a time; each process takes many names."""
        waiting: queue.SimpleQueue[tuple[str, list[str]]] = queue.SimpleQueue()
        for part in PARTS:
            names = [name for of, name in jobs if of == part]
            size = max(1, -(-len(names) // (workers * 2)))
            for start in range(0, len(names), size):
                waiting.put((part, names[start : start + size]))

        def take() -> None:
            while True:
                try:
                    part, names = waiting.get_nowait()
                except queue.Empty:
                    return
                self.run(part, names)

        threads = [threading.Thread(target=take) for _ in range(workers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def run(self, part: str, names: Sequence[str]) -> None:
        """One process for all names, and another one for the rest where it ended early."""
        left = list(names)
        while left:
            before, last = len(left), self._once(part, left)
            if len(left) == before and left:
                failure = {"part": part, "name": left[0], "failure": f"the process ended: {last}"}
                self._tell(part, left.pop(0), [failure])

    def _once(self, part: str, left: list[str]) -> str:
        """Run until the process ends; takes what is done from the list."""
        options, rows = self.options, list[Row]()
        command = [sys.executable, "-m", "benchmarks.bitwise", "--child", part, *left]
        command += ["--device", options.device, "--seconds", str(options.seconds)]
        command += ["--until", str(options.until)] + (["--tiny"] if options.tiny else [])
        with subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            tail: list[str] = []
            reader = threading.Thread(target=_keep_last, args=(process.stderr, tail))
            reader.start()
            for line in process.stdout:
                if line.startswith(MARK):
                    rows.append(json.loads(line.removeprefix(MARK)))
                elif line.startswith("done: "):
                    self._tell(part, left.pop(0), rows)
                    rows = []
            reader.join()
        if rows and left:  # it failed in the middle of a name, and said why
            self._tell(part, left.pop(0), rows)
        return tail[-1] if tail else f"exit code {process.returncode}"

    def _tell(self, part: str, name: str, rows: list[Row]) -> None:
        with self.lock:
            self.say(part, name, rows)


def _keep_last(stream: Any, tail: list[str]) -> None:
    for line in stream:
        if line.strip():
            tail[:] = [line.strip()[:200]]


# --- what is shown ---


def line(part: str, name: str, rows: Sequence[Row]) -> str:
    """One name in one line, compact."""
    failures = sorted({row["failure"] for row in rows if "failure" in row})
    if part == "check":
        text = _checked(rows)
    elif part == "training":
        text = " ".join(f"equal={row.get('repeat')} loss {row.get('last_loss')}" for row in rows)
    elif part == "time":
        text = _ratios(rows)
    else:
        text = "\n" + "\n".join(f"    {_plain(row)}" for row in rows)
        failures = []
    return f"{part:8} {name:28} {text}" + "".join(f"\n    {said}" for said in failures)


def _checked(rows: Sequence[Row]) -> str:
    """Letters for each direction and setting: R repeats, I independent rows; ``-`` has none."""
    parts = []
    for row in rows:
        if "backend" not in row:
            what = "refused" if "refused" in row else "failed"
            parts.append(f"{row.get('direction', '?')[:1]}:{row.get('variant', '?')[:3]}={what}")
            continue
        marks = ""
        for name, letter in (("repeat", "R"), ("rows", "I")):
            held = row.get(name)
            broken = name in row.get("broken", ())
            marks += "-" if held is None else letter if held else f"({letter} broken)" * broken
        parts.append(f"{row['direction'][:1]}:{row['variant'][:3]}={marks or 'none'}")
    backends = sorted({row["backend"] for row in rows if "backend" in row})
    return f"{' '.join(parts)} by {', '.join(backends) or 'nobody'}"


def _ratios(rows: Sequence[Row]) -> str:
    by = {row.get("variant"): row for row in rows if "both_ms" in row}
    base = by.get("default")
    if base is None:
        return ""
    parts = [f"{base['both_ms']:.3f} ms"]
    for name in ("deterministic", "rows"):
        if name in by:
            ratios = [by[name][key] / base[key] for key in ("forward_ms", "both_ms")]
            parts.append(f"{name} x {ratios[1]:.3f} (forward {ratios[0]:.3f})")
    return ", ".join(parts)


def _plain(row: Row) -> str:
    shown = [f"{row['name']} {row.get('shape', '')} {row.get('variant', '')}:"]
    if "failure" in row:
        return f"{shown[0]} {row['failure']}"
    for key, form in (
        ("both_ms", "{:.3f} ms"),
        ("both_spread_ms", "+-{:.3f}"),
        ("tflops", "{:.0f} TFLOP/s"),
        ("tokens_per_second", "{:.0f} tokens/s"),
        ("loss", "loss {:.4f}"),
        ("repeat", "repeat {}"),
        ("rows", "rows {}"),
        ("note", "({})"),
    ):
        if row.get(key) is not None:
            shown.append(form.format(row[key]))
    if row.get("extra_bytes"):
        shown.append(f"{row['extra_bytes'] / 2**30:.2f} GiB more")
    return " ".join(shown)


def broken(rows: Sequence[Row]) -> list[str]:
    """Every promise that did not hold, by operator, direction, property and setting."""
    broken_rows = [
        f"{row['name']} {row['direction']} {name} under {row['variant']} by {row['backend']}"
        for row in rows
        if row["part"] == "check"
        for name in row.get("broken", ())
    ]
    return broken_rows + [
        f"training {row['name']}: two runs differ"
        for row in rows
        if row["part"] == "training" and row.get("repeat") is False
    ]


# --- the command ---


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bitwise", description=__doc__)
    parser.add_argument("--device", default="", help="by default the accelerator, or the CPU")
    parser.add_argument("--tiny", action="store_true", help="small samples and models, for a trial")
    parser.add_argument("--ops", default="*", help="operators, by patterns")
    parser.add_argument("--parts", default=",".join(PARTS), help="by default all")
    parser.add_argument("--seconds", type=float, default=0.5, help="for timing one operator")
    parser.add_argument(
        "--budget", type=float, default=330, help="seconds; what is left is skipped"
    )
    parser.add_argument("--workers", type=int, default=0, help="processes that check at a time")
    parser.add_argument("--until", type=float, default=0.0, help=argparse.SUPPRESS)
    parser.add_argument("--child", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("names", nargs="*", help=argparse.SUPPRESS)
    store.add_options(parser)
    options = parser.parse_args(arguments)
    wrong = sorted(set(options.parts.split(",")) - set(PARTS))
    if wrong:
        parser.error(f"unknown part {wrong[0]!r}; known: {', '.join(PARTS)}")
    return options


def head(options: argparse.Namespace) -> Row:
    """Where this was measured."""
    import torch

    from benchmarks import bitwise_operators

    data = store.head("bitwise", options, torch.device(options.device)) | {"tiny": options.tiny}
    data["versions"] |= bitwise_operators.versions()
    return data


def jobs_of(options: argparse.Namespace) -> list[tuple[str, str]]:
    """Every part that was asked for, with its names."""
    from benchmarks.bitwise_models import RUNS
    from liger_multi.bench.cases import select
    from liger_multi.dispatch.registry import operators

    ops = select("operator", options.ops, operators())
    names = {"check": ops, "time": ops, "training": RUNS, "step": ["step"], "gemm": ["gemm"]}
    return [(part, name) for part in options.parts.split(",") for name in names[part]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Check, train, time, print and keep; 1 where a promise was broken."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    options = parse(arguments)
    if options.child:
        return child(options)
    import torch
    from rich.console import Console
    from rich.progress import Progress

    if not options.device:
        accelerator = torch.accelerator.current_accelerator()
        options.device = accelerator.type if accelerator is not None else "cpu"
    start = time.time()
    options.until = start + CHECKS * options.budget
    jobs, run = jobs_of(options), head(options)
    rows: list[Row] = []
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("bits", total=len(jobs))

        def say(part: str, name: str, new_rows: list[Row]) -> None:
            rows.extend(new_rows)
            progress.console.print(line(part, name, new_rows), markup=False, highlight=False)
            progress.advance(task)

        work = Jobs(options, say)
        workers = options.workers or (6 if options.device == "cuda" else 1)
        work.several([job for job in jobs if job[0] in ("check", "training")], workers)
        again = [r["name"] for r in rows if "out of memory" in r.get("failure", "").lower()]
        names = list(dict.fromkeys(n for part, n in jobs if part == "check" and n in again))
        rows[:] = [r for r in rows if not (r["part"] == "check" and r["name"] in names)]
        work.run("check", names)
        options.until = start + options.budget
        for part in ("step", "gemm", "time"):
            work.run(part, [name for of, name in jobs if of == part])
            store.keep({**run, "rows": rows}, options)
    for said in broken(rows):
        console.print(f"broken: {said}", markup=False)
    for path in store.keep({**run, "rows": rows}, options):
        console.print(f"wrote {path}", markup=False, soft_wrap=True)
    return int(bool(broken(rows)))


if __name__ == "__main__":
    sys.exit(main())
