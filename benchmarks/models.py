"""Whole models: ``python -m benchmarks.models``.

Tokens a second and peak memory: model x size x variant, each in a process of its own (peers patch
modules of the whole process), which train some steps in turns: random weights and tokens, fused
AdamW, SDPA attention, bf16. The loss of every variant stands beside its time, so that a fast wrong
answer is seen.

``--cards 8`` trains over several cards (:mod:`benchmarks.cards`). A row has tokens a second of all
cards together, and the highest peak of one card.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import re
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import harness, store
from benchmarks.configs import MODELS, VARIANTS, WARM_STEPS, Run, build, pictures
from benchmarks.harness import adamw, device_of, limit_memory, medians, timed_steps
from liger_multi.bench.measure import release


class Training:
    """A model under one variant, trained some steps at a time, in turns with other processes.

    Between two turns it leaves the device's memory. A compiled model keeps its weights alone, for
    its graphs hold them; the others are built anew, with the weights that they began with.
    """

    def __init__(self, run: Run, variant: str, limit_gb: float | None) -> None:
        self.run, self.variant, self.limit_gb = run, variant, limit_gb
        self.device = device_of()
        self.model: Any = None

    def turn(self, steps: int) -> dict[str, Any]:
        """Times of some steps, the peak of memory and the last loss; or why there are none.

        Without steps it compiles: forward and backward run, and the weights stay as they are.
        """
        failure = None
        try:
            return self.train(steps)
        except Exception as error:
            memory = "out of memory" in str(error)
            failure = "out of memory" if memory else f"{type(error).__name__}: {error}"[:200]
            traceback.print_exc()
        finally:
            self.leave(failure is not None)
        return {"failure": failure}

    def train(self, steps: int) -> dict[str, Any]:
        """The same, without what follows a turn."""
        device = self.device
        limit_memory(device, (self.limit_gb or 0) * 1e9)
        if self.model is None:
            self.model = VARIANTS[self.variant](build(self.run, device))
        optimizer = adamw(self.model.parameters(), device)
        generator = torch.Generator(device).manual_seed(1)

        def step() -> Tensor:
            loss: Tensor = self.model(**self.batch(generator)).loss
            loss.backward()
            if steps:
                optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return loss.detach()

        return timed_steps(step, device, steps, WARM_STEPS)

    def batch(self, generator: torch.Generator) -> dict[str, Tensor]:
        """Random tokens, and pictures where the model sees them."""
        vocabulary, run = MODELS[self.run.model][1]["vocab_size"], self.run
        ids = torch.randint(
            vocabulary, (run.batch, run.tokens), generator=generator, device=self.device
        )
        return {"input_ids": ids, "labels": ids, **pictures(self.model, ids)}

    def leave(self, failed: bool) -> None:
        """Free what the next process needs."""
        if failed or not compiled(self.variant):
            self.model = None
        release(self.device)


def child(arguments: Sequence[str]) -> int:
    """Take a turn for every line of the input, which says how many steps."""
    run, variant, *limit_gb = arguments
    training = Training(Run.parse(run), variant, float(limit_gb[0]) if limit_gb else None)
    for text in sys.stdin:
        print(json.dumps(training.turn(int(text))), flush=True)
    return 0


class Turns:
    """What the turns of a run under one variant found."""

    def __init__(self, run: Run, variant: str, cards: int = 1) -> None:
        self.run, self.variant, self.cards = run, variant, cards
        self.turns: list[dict[str, Any]] = []
        self.failure: str | None = None

    def ask(self, steps: int) -> None:
        """Begin a turn, where that can be done ahead of the answer."""

    def answer(self) -> dict[str, Any]:
        """What the turn found, once it has ended."""
        return {}

    def measure(self, steps: int) -> dict[str, Any]:
        """One turn."""
        self.ask(steps)
        return self.answer()

    def turn(self, steps: int) -> None:
        """Measure some steps, unless an earlier turn failed."""
        if self.failure is None:
            start = time.perf_counter()
            answer = self.measure(steps)
            self.failure = answer.get("failure")
            self.turns.append({**answer, "turn": time.perf_counter() - start})

    @property
    def spent(self) -> str:
        """Seconds of every turn, building and warming up included."""
        return ", ".join(f"{turn['turn']:.0f}" for turn in self.turns) + " s"

    def result(self) -> dict[str, Any]:
        """Medians of all turns; a failure is a row too."""
        if self.failure is not None:
            return {"failure": self.failure}
        return medians(self.turns, self.cards * self.run.batch * self.run.tokens)

    def end(self) -> None:
        """Let processes go."""


class Worker(Turns):
    """A process of its own for a run under one variant."""

    def __init__(self, run: Run, variant: str, limit_gb: float | None) -> None:
        super().__init__(run, variant)
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed with the process)
        command = [sys.executable, "-m", "benchmarks.models", "child", str(run), variant]
        command += [] if limit_gb is None else [str(limit_gb)]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            command, cwd=store.ROOT, stdin=pipe, stdout=pipe, stderr=self.errors, text=True
        )

    def ask(self, steps: int) -> None:
        """Begin a turn."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(f"{steps}\n")
            self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """What the turn found, once it has ended."""
        assert self.process.stdout is not None
        for text in self.process.stdout:
            if text.startswith("{"):
                return json.loads(text)  # type: ignore[no-any-return]
        self.errors.seek(0)
        lines = self.errors.read().strip().splitlines() or ["the process ended without a word"]
        errors = [text for text in lines if re.match(r"[\w.]*Error\b", text)]
        return {"failure": (errors or lines)[-1][:200]}

    def end(self) -> None:
        """Let the process go."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait()
        self.errors.close()


class Cards(Turns):
    """The same over several cards, every turn in processes of its own, one a card."""

    def measure(self, steps: int) -> dict[str, Any]:
        """One turn; a failure is an answer too."""
        command = ["torch.distributed.run", "--standalone", f"--nproc-per-node={self.cards}"]
        command += ["-m", "benchmarks.cards", str(self.run), self.variant, str(steps)]
        return harness.child(*command)


def compiled(variant: str) -> bool:
    """Whether the variant passes through ``torch.compile``."""
    return variant.endswith("+compile")


def in_turns(workers: Sequence[Turns], rounds: int, steps: int) -> Iterator[int]:
    """Give every process its turns, one after the other; those that compile do so together."""
    compiling = [one for one in workers if compiled(one.variant)]
    for one in compiling:
        one.ask(0)
    for one in compiling:
        one.answer()  # what failed for want of memory is tried again alone
    for number in range(rounds):
        for one in workers[:: 1 if number % 2 == 0 else -1]:
            one.turn(steps)
        yield number


def line(run: Run, variant: str, measured: dict[str, Any], baseline: dict[str, Any]) -> str:
    """A row of the table."""
    if "failure" in measured:
        return f"{run!s:38s} {variant:14s} {measured['failure']}"
    speed, base = measured["tokens_per_second"], baseline.get("tokens_per_second")
    ratio = f"{speed / base:6.3f}" if base else "     -"
    peak = measured["peak_bytes"]
    memory = f"{peak / 2**30:8.2f} GiB" if peak else "-"
    return (
        f"{run!s:38s} {variant:14s} {speed:10.0f} tok/s {ratio} x stock  {memory:>12s}  "
        f"loss {measured['loss']:.4f}  +-{measured['spread_percent'] / 2:.1f} %"
    )


def whole_models(arguments: Sequence[str]) -> int:
    """Measure every run under every variant, print a table and keep the rows."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.models", description=__doc__)
    parser.add_argument(
        "runs",
        nargs="*",
        default=["tiny:2x32"],
        help="MODEL:BATCHxTOKENS[+checkpointing]; readme: those of README's table on one card",
    )
    parser.add_argument("--variants", default="stock,liger,ours")
    parser.add_argument("--steps", type=int, default=4, help="of a turn, beside those to warm up")
    parser.add_argument("--rounds", type=int, default=3, help="turns of every variant")
    parser.add_argument(
        "--limit-gb", type=float, help="memory that a process may take, in 1e9 bytes"
    )
    parser.add_argument("--cards", type=int, help="over which parameters are sharded, also one")
    store.add_options(parser)
    options = parser.parse_args(arguments)
    variants, texts = options.variants.split(","), options.runs
    if texts == ["readme"]:
        from benchmarks.tables.performance import DENSE, MIXTURE

        texts = [*DENSE, MIXTURE]
        if importlib.util.find_spec("liger_kernel") is None:
            variants = [name for name in variants if not name.startswith("liger")]
            print("Liger-Kernel is not installed: its column stays empty", flush=True)
    try:
        runs = [Run.parse(text) for text in texts]
        unknown = [name for name in variants if name not in VARIANTS]
        if unknown:
            raise ValueError(f"unknown variant {unknown[0]!r}; known: {', '.join(VARIANTS)}")
    except ValueError as wrong:
        parser.error(str(wrong))
    return report(runs, variants, options)


def report(runs: list[Run], variants: list[str], options: argparse.Namespace) -> int:
    """Run everything, and print how it went; what is done is kept after every round."""
    # all load their packages at once; the device's memory is taken at the first turn
    several = options.cards is not None
    workers: dict[Run, list[Turns]] = {
        run: [
            Cards(run, name, options.cards) if several else Worker(run, name, options.limit_gb)
            for name in variants
        ]
        for run in runs
    }
    head = store.head("several-cards" if several else "models", options, device_of())
    head |= {"limit_gb": options.limit_gb}
    rows: list[dict[str, Any]] = []
    paths: list[Path] = []
    for run, own in workers.items():
        for _ in in_turns(own, options.rounds, options.steps):
            results = {one.variant: one.result() for one in own}
            places = {"cards": options.cards} if several else {}
            new = [
                {"run": str(run), **places, "variant": name, **row} for name, row in results.items()
            ]
            paths = store.keep({**head, "rows": rows + new}, options)
        rows += new
        for one in own:
            text = line(run, one.variant, results[one.variant], results.get("stock", {}))
            print(f"{text}  turns of {one.spent}", flush=True)
            one.end()
    for file in paths:
        sys.stdout.write(f"written to {file}\n")
    return int(any("failure" in row and row["variant"] != "stock" for row in rows))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure whole models."""
    return store.run_command({"": whole_models, "child": child}, arguments)


if __name__ == "__main__":
    sys.exit(main())
