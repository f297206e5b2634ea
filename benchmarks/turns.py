"""Processes that train one model in turns: ``python -m benchmarks.turns RUN VARIANT [GB]``.

:mod:`benchmarks.models` starts one for every run and variant, since peers patch modules of the
whole process. A process loads its packages at once, then takes a turn for every line of its input.
"""

from __future__ import annotations

import contextlib
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks import configs, harness, store
from benchmarks.configs import MODELS, VARIANTS, WARM_STEPS, Run, build, pictures
from benchmarks.harness import adamw, device_of, limit_memory, medians, timed_steps
from benchmarks.parts import trace_steps
from liger_multi.bench.measure import release

# --- the process that trains ---


class Training:
    """A model under one variant, trained some steps at a time, in turns with other processes.

    Between two turns it leaves the device's memory. A compiled model keeps its weights alone, for
    its graphs hold them; the others are built anew, with the weights that they began with.
    """

    def __init__(self, run: Run, variant: str, limit_gb: float | None) -> None:
        self.run, self.variant, self.limit_gb = run, variant, limit_gb
        self.device = device_of()
        self.model: Any = None

    def turn(self, steps: int, traced: int = 0) -> dict[str, Any]:
        """Times of some steps, the peak of memory and the last loss; or why there are none.

        Without steps it compiles: forward and backward run, and the weights stay as they are.

        Args:
            steps: That are timed.
            traced: Further steps whose parts are read from a trace.
        """
        failure = None
        try:
            return self.train(steps, traced)
        except harness.UnsupportedError as error:
            failure = f"not supported: {error}"
        except Exception as error:
            failure = failure_of(error)
            traceback.print_exc()
        finally:
            self.leave(failure is not None)
        return {"failure": failure}

    def train(self, steps: int, traced: int = 0) -> dict[str, Any]:
        """The same, without what follows a turn."""
        device, spent = self.device, {}
        limit_memory(device, (self.limit_gb or 0) * 1e9)
        start = time.perf_counter()
        if self.model is None:
            self.model = VARIANTS[self.variant](build(self.run, device), self.run)
        spent["build"] = time.perf_counter() - start
        optimizer = adamw(self.model.parameters(), device)
        generator = torch.Generator(device).manual_seed(1)

        def step() -> Tensor:
            loss: Tensor = self.model(**self.batch(generator)).loss
            loss.backward()
            if steps:
                optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return loss.detach()

        report = timed_steps(step, device, steps, WARM_STEPS)
        spent["steps"] = time.perf_counter() - start - spent["build"]
        if traced:
            report["parts"] = self.trace(step, traced)
            spent["trace"] = time.perf_counter() - start - sum(spent.values())
        return {**report, "spent": spent, "fla": "fla.ops" in sys.modules}

    def trace(self, step: Any, count: int) -> dict[str, Any]:
        """Parts of a step; what was timed stays where the trace fails."""
        try:
            return trace_steps(step, self.device, count)
        except Exception as error:
            traceback.print_exc()
            return {"failure": failure_of(error)}

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


def failure_of(error: Exception) -> str:
    """An exception as a row says it."""
    memory = "out of memory" in str(error)
    return "out of memory" if memory else f"{type(error).__name__}: {error}"[:200]


def compiled(variant: str) -> bool:
    """Whether the variant passes through ``torch.compile``."""
    return variant.endswith("+compile")


# --- the process that asks ---


class Turns:
    """What the turns of a run under one variant found."""

    def __init__(self, run: Run, variant: str, cards: int = 1) -> None:
        self.run, self.variant, self.cards = run, variant, cards
        self.turns: list[dict[str, Any]] = []
        self.failure: str | None = None

    def ask(self, steps: int, traced: int = 0) -> None:
        """Begin a turn, where that can be done ahead of the answer."""

    def answer(self) -> dict[str, Any]:
        """What the turn found, once it has ended."""
        return {}

    def measure(self, steps: int, traced: int) -> dict[str, Any]:
        """One turn."""
        self.ask(steps, traced)
        return self.answer()

    def turn(self, steps: int, traced: int = 0) -> None:
        """Measure some steps, unless an earlier turn failed."""
        if self.failure is None:
            start = time.perf_counter()
            answer = self.measure(steps, traced)
            self.failure = answer.get("failure")
            self.turns.append({**answer, "turn": time.perf_counter() - start})

    @property
    def next_turn(self) -> float:
        """Seconds of a further turn: those of the latest one without what compiling took."""
        turn = self.turns[-1]
        seconds: float = turn["turn"]
        if "spent" in turn:
            steps = (WARM_STEPS + len(turn["seconds"])) * statistics.median(turn["seconds"])
            seconds -= max(0.0, turn["spent"]["steps"] - steps)
        return seconds

    @property
    def spent(self) -> str:
        """Seconds of every turn, and what took them."""
        texts = []
        for turn in self.turns:
            what = [f"{name} {seconds:.1f}" for name, seconds in turn.get("spent", {}).items()]
            texts.append(f"{turn['turn']:.0f} s" + f" ({', '.join(what)})" * bool(what))
        return ", ".join(texts)

    def result(self) -> dict[str, Any]:
        """Medians of all turns; a failure is a row too."""
        if self.failure is not None:
            return {"failure": self.failure}
        row = medians(self.turns, self.cards * self.run.batch * self.run.tokens)
        fla = {"fla": True} if any(turn.get("fla") for turn in self.turns) else {}
        return {**row, "turns": len(self.turns), **fla}

    def parts(self) -> dict[str, Any] | None:
        """Parts of a step, if a turn was traced, beside the time of steps without a trace."""
        traces = [turn["parts"] for turn in self.turns if "parts" in turn]
        if self.failure is not None or not traces:
            return None
        tokens = self.run.batch * self.run.tokens
        return {"step_ms": 1e3 * tokens / self.result()["tokens_per_second"], **traces[-1]}

    def end(self) -> None:
        """Let processes go."""


class Worker(Turns):
    """A process of its own for a run under one variant."""

    def __init__(self, run: Run, variant: str, limit_gb: float | None) -> None:
        super().__init__(run, variant)
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed with the process)
        command = [sys.executable, "-m", "benchmarks.turns", str(run), variant]
        command += [] if limit_gb is None else [str(limit_gb)]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            command, cwd=store.ROOT, stdin=pipe, stdout=pipe, stderr=self.errors, text=True
        )

    def ask(self, steps: int, traced: int = 0) -> None:
        """Begin a turn."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(f"{steps} {traced}\n")
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

    def measure(self, steps: int, traced: int = 0) -> dict[str, Any]:
        """One turn; a failure is an answer too."""
        command = ["torch.distributed.run", "--standalone", f"--nproc-per-node={self.cards}"]
        command += ["-m", "benchmarks.cards", str(self.run), self.variant, str(steps)]
        return harness.child(*command)


# --- rounds ---


class Pace:
    """Whether there is time for a further round.

    Every run gets the share of the time that its variants are of all variants that are left. The
    first round is always taken.

    Args:
        rounds: Of every run at most.
        seconds: Of all runs together; None: as long as the rounds take.
        variants: Of all runs together.
    """

    def __init__(self, rounds: int, seconds: float | None, variants: int) -> None:
        self.rounds, self.left = rounds, variants
        self.start = time.perf_counter()
        self.end = float("inf") if seconds is None else self.start + seconds
        self.deadline = self.end

    def begin(self, workers: Sequence[Turns]) -> None:
        """Give a run its share of the time."""
        now = time.perf_counter()
        self.deadline = now + (self.end - now) * len(workers) / self.left
        self.left -= len(workers)

    def last(self, number: int, workers: Sequence[Turns], left: int) -> bool:
        """Whether no further round fits after a round.

        Args:
            number: Of the round.
            workers: Of the run; others take as long as those that had a turn.
            left: Workers whose turn of this round has not begun.
        """
        if number + 1 >= self.rounds:
            return True
        own = [worker for worker in workers if worker.turns]
        first = sum(worker.turns[-1]["turn"] for worker in own) / max(1, len(own))
        further = sum(worker.next_turn for worker in own) / max(1, len(own))
        needed: float = left * first + len(workers) * further
        return time.perf_counter() + needed > self.deadline

    @property
    def seconds(self) -> float:
        """Since the beginning."""
        return time.perf_counter() - self.start


def in_turns(workers: Sequence[Turns], steps: int, traced: int, pace: Pace) -> Iterator[Turns]:
    """Give every process its turns, one after the other; those that compile do so together.

    The turns of the last round are traced. That the first one is the last may only be known after
    some of its turns, which are then taken again.

    Args:
        workers: One for each variant.
        steps: That every turn times.
        traced: Further steps of the last turn, which are traced.
        pace: Says which round is the last one.

    Yields:
        Each worker that took a turn.
    """
    compiling = [one for one in workers if compiled(one.variant)]
    for one in compiling:
        one.ask(0)
    for one in compiling:
        one.answer()  # what failed for want of memory is tried again alone
    for number in range(pace.rounds):
        last, again = pace.last(number, workers, len(workers)), list[Turns]()
        for left, one in enumerate(workers[:: 1 if number % 2 == 0 else -1], 1 - len(workers)):
            one.turn(steps, traced if last else 0)
            yield one
            if not last:
                again.append(one)
                last = number == 0 and pace.last(number, workers, -left)
        if last and traced:
            for one in again:
                one.turn(steps, traced)
                yield one
        if last:
            return


def main(arguments: Sequence[str] | None = None) -> int:
    """Take a turn for every line of the input, which says how many steps are timed and traced."""
    name, variant, *limit_gb = sys.argv[1:] if arguments is None else arguments
    run = Run.parse(name)
    configs.load(run, variant)
    training = Training(run, variant, float(limit_gb[0]) if limit_gb else None)
    for text in sys.stdin:
        print(json.dumps(training.turn(*map(int, text.split()))), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
