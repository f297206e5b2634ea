"""Whole models: ``python -m benchmarks.models``.

Tokens a second and peak memory: model x size x variant, each in a process of its own (peers patch
modules of the whole process), which train some steps in turns: random weights and tokens, fused
AdamW, SDPA attention, bf16. The loss of every variant stands beside its time, so that a fast wrong
answer is seen.

``table`` measures the runs of the table of whole models, with parts of a step (``--parts``,
:mod:`benchmarks.parts`), and ``readme`` those of README, each within ``--seconds``.

``--cards 8`` trains over several cards (:mod:`benchmarks.cards`). A row has tokens a second of all
cards together, and the highest peak of one card.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks import store
from benchmarks.configs import EAGER, SECONDS, SETS, VARIANTS, Run, possible
from benchmarks.harness import device_of
from benchmarks.parts import BOUND
from benchmarks.turns import Cards, Pace, Turns, Worker, in_turns

TRACED_STEPS = 2


def line(run: Run, variant: str, measured: dict[str, Any], baseline: dict[str, Any]) -> str:
    """A row of the table."""
    if "failure" in measured:
        return f"{run!s:38s} {variant:19s} {measured['failure']}"
    speed, base = measured["tokens_per_second"], baseline.get("tokens_per_second")
    ratio = f"{speed / base:6.3f}" if base else "     -"
    peak = measured["peak_bytes"]
    memory = f"{peak / 2**30:8.2f} GiB" if peak else "-"
    return (
        f"{run!s:38s} {variant:19s} {speed:10.0f} tok/s {ratio} x stock  {memory:>12s}  "
        f"loss {measured['loss']:.4f}  +-{measured['spread_percent'] / 2:.1f} %"
    )


def parts_line(parts: dict[str, Any]) -> str:
    """The parts of a step, the longest first."""
    if "failure" in parts:
        return f"    no parts: {parts['failure']}"
    times = parts["kernels_ms"]
    gap = parts["span_ms"] - sum(times.get(part, 0.0) for part in BOUND)
    ordered = sorted({**times, "no kernel": parts["idle_ms"]}.items(), key=lambda item: -item[1])
    shown = ", ".join(f"{name} {time:.2f}" for name, time in ordered if time >= 0.01)
    return f"    step {parts['span_ms']:.2f} ms, beyond GEMMs and attention {gap:.2f}: {shown}"


def parse(arguments: Sequence[str]) -> tuple[dict[Run, list[str]], argparse.Namespace]:
    """The variants of every run, and the options of a command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.models", description=__doc__)
    parser.add_argument(
        "runs",
        nargs="*",
        default=["tiny:2x32"],
        help="MODEL:BATCHxTOKENS[+checkpointing]; or table; or readme: those of README's table",
    )
    parser.add_argument(
        "--variants",
        help="by default stock,liger,ours, or those of the table; ours+keep_attention and "
        "ours+choose_within are measured where a run has +checkpointing",
    )
    parser.add_argument("--steps", type=int, default=4, help="of a turn, beside those to warm up")
    parser.add_argument("--rounds", type=int, default=3, help="turns of every variant")
    parser.add_argument(
        "--seconds",
        type=float,
        help="begin no round that would end later, but the first one of every run; "
        f"{SECONDS} for table and readme",
    )
    parser.add_argument(
        "--parts", action="store_true", help="trace two steps after the last turn (one card)"
    )
    parser.add_argument(
        "--limit-gb", type=float, help="memory that a process may take, in 1e9 bytes"
    )
    parser.add_argument("--cards", type=int, help="over which parameters are sharded, also one")
    store.add_options(parser)
    options = parser.parse_args(arguments)
    if options.parts and options.cards is not None:
        parser.error("--parts traces one card, not --cards")
    try:
        planned = planned_by(options)
    except ValueError as wrong:
        parser.error(str(wrong))
    return planned, options


def planned_by(options: argparse.Namespace) -> dict[Run, list[str]]:
    """The variants of every run; a set decides what the command line leaves open."""
    for name in ("rounds", "steps", "seconds"):
        value = getattr(options, name)
        if value is not None and value <= 0:
            raise ValueError(f"--{name} must be positive, got {value}")
    chosen = SETS.get(options.runs[0]) if len(options.runs) == 1 else None
    variants = list(EAGER) if options.variants is None else options.variants.split(",")
    unknown = [name for name in variants if name not in VARIANTS]
    if unknown:
        raise ValueError(f"unknown variant {unknown[0]!r}; known: {', '.join(VARIANTS)}")
    if chosen is not None:
        options.parts = options.parts or (chosen.parts and options.cards is None)
        options.seconds = SECONDS if options.seconds is None else options.seconds
        if options.variants is None:
            if len(chosen.installed) < len(chosen.variants):
                print("Liger-Kernel is not installed: its column stays empty", flush=True)
            return chosen.planned()
    runs = map(Run.parse, options.runs if chosen is None else chosen.runs)
    planned = {run: possible(run, variants) for run in runs}
    for run, names in planned.items():
        if not names:
            raise ValueError(f"{run} has none of the variants {', '.join(variants)}")
    return planned


def start(run: Run, variants: Sequence[str], options: argparse.Namespace) -> list[Turns]:
    """Processes of a run, which load their packages; a turn takes the device's memory."""
    if options.cards is not None:
        return [Cards(run, name, options.cards) for name in variants]
    return [Worker(run, name, options.limit_gb) for name in variants]


def rows_of(workers: Sequence[Turns], options: argparse.Namespace) -> dict[str, list[Any]]:
    """Rows of a run by the kind of results that they belong to."""
    places = {} if options.cards is None else {"cards": options.cards}
    rows, traces = [], []
    for one in workers:
        if not one.turns:
            continue
        named = {"run": str(one.run), **places, "variant": one.variant}
        rows.append({**named, **one.result()})
        parts = one.parts()
        if parts is not None:
            traces.append({**named, **parts})
    return {"models" if options.cards is None else "several-cards": rows, "step-parts": traces}


def started(
    planned: Mapping[Run, Sequence[str]], options: argparse.Namespace
) -> Iterator[list[Turns]]:
    """Processes of each run; those of the next one load packages while these build and warm up."""
    first, *others = planned
    following = start(first, planned[first], options)
    for run in (*others, None):
        workers = following
        following = [] if run is None else start(run, planned[run], options)
        yield workers


def report(planned: Mapping[Run, Sequence[str]], options: argparse.Namespace) -> int:
    """Run everything, and print how it went; what is done is kept after every turn."""
    head = store.head("models", options, device_of())
    head |= {"limit_gb": options.limit_gb, "steps": options.steps}
    total = sum(map(len, planned.values()))
    pace = Pace(options.rounds, options.seconds, total)
    traced = TRACED_STEPS if options.parts else 0
    done: dict[str, list[Any]] = {}
    paths: list[Path] = []
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(
        *columns, TextColumn("{task.description}"), console=console, transient=True
    ) as progress:
        task = progress.add_task("starting", total=total * options.rounds)
        for workers in started(planned, options):
            pace.begin(workers)
            for one in in_turns(workers, options.steps, traced, pace):
                progress.update(task, advance=1, description=f"{one.run} {one.variant}")
                rows = {
                    kind: [*done.get(kind, []), *new]
                    for kind, new in rows_of(workers, options).items()
                }
                measured = [{**head, "kind": kind, "rows": some} for kind, some in rows.items()]
                paths = store.keep([part for part in measured if part["rows"]], options)
            done = rows
            progress.update(task, completed=options.rounds * (total - pace.left))
            show(workers)
    for file in paths:
        sys.stdout.write(f"written to {file}\n")
    print(f"{total} variants of {len(planned)} runs took {pace.seconds:.0f} s", flush=True)
    return int(any("failure" in row and row["variant"].startswith("ours") for row in rows_in(done)))


def rows_in(done: Mapping[str, list[Any]]) -> Iterator[Any]:
    """Rows of variants; a trace that failed is none."""
    return (row for kind, rows in done.items() if kind != "step-parts" for row in rows)


def show(workers: Sequence[Turns]) -> None:
    """Print the rows of a run, and let its processes go."""
    stock = next((one.result() for one in workers if one.variant == "stock"), {})
    for one in workers:
        text = line(one.run, one.variant, one.result(), stock)
        print(f"{text}  turns of {one.spent}", flush=True)
        parts = one.parts()
        if parts is not None:
            print(parts_line(parts), flush=True)
        one.end()


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure whole models."""
    return report(*parse(sys.argv[1:] if arguments is None else arguments))


if __name__ == "__main__":
    sys.exit(main())
