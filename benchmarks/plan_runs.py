"""One candidate of a plan, trained for some steps in a process of its own.

A :class:`Worker` starts ``python -m benchmarks.plan_runs``, which imports everything and then waits
for a candidate on its standard input: while one trains, the next has its imports behind it. Until
the candidate comes no device is touched.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.memory_cases import LARGE_MOE
from liger_multi.memory import Settings, Space, TrainingPlan, apply, measure, plan
from liger_multi.memory.planning.result import ENVIRONMENT
from liger_multi.memory.sizes import config_of

ROOT = Path(__file__).parent.parent
WARM = 2


@dataclass(frozen=True)
class Case:
    """A model (also the place of a ``config.json``), what it is trained on, and what it gets."""

    model: str
    sequence: int
    batch: int
    memory: str
    precision: str = "bf16"

    def __str__(self) -> str:
        return f"{self.model} {self.batch} x {self.sequence} {self.precision} in {self.memory}"

    def config(self) -> Any:
        """Its configuration, without a network."""
        import transformers

        if self.model == "moe-1b":
            config = transformers.MixtralConfig(**LARGE_MOE)
        else:
            config = config_of(self.model, self.sequence)
        config._attn_implementation, config.use_cache = "sdpa", False
        return config

    def plan(self, card: str, device: str = "cuda") -> TrainingPlan:
        """What is planned for a card of so little memory; only what one process can do."""
        space = Space(
            (self.precision,),
            policies=("none", "norms_and_mlp", "keep_attention", "full"),
            offload_states=(None,),
            layouts=((1, 1),),
            tiled=self.model != "moe-1b",
        )
        return plan(
            self.config(), f"{card}:{self.memory}", 1, self.batch, self.sequence,
            space=space, limits=False, device=device,
        )  # fmt: skip


def executed(case: Case, settings: Settings, steps: int, device: torch.device) -> dict[str, Any]:
    """Train some steps in this process, with no more memory than planned for."""
    from transformers import AutoModelForCausalLM

    from liger_multi.dispatch.config import parse_bytes

    module = torch.get_device_module(device)
    if device.type != "cpu":
        total = module.get_device_properties(0).total_memory
        module.set_per_process_memory_fraction(min(1.0, parse_bytes(case.memory, "memory") / total))
    torch.manual_seed(0)
    dtype = torch.bfloat16 if settings.precision == "bf16" else torch.float32
    with device:
        model: Any = AutoModelForCausalLM.from_config(case.config(), dtype=dtype)
    model.tie_weights()
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    shape = (settings.micro_batch, settings.sequence)
    ids = torch.randint(model.config.vocab_size, shape, device=device)
    loss = torch.zeros(())

    def step() -> float:
        nonlocal loss
        begin = time.perf_counter()
        for _ in range(settings.accumulation):
            with contextlib.ExitStack() as stack:
                if settings.precision == "amp":
                    stack.enter_context(torch.autocast(device.type, dtype=torch.bfloat16))
                loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            loss = loss.detach()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        module.synchronize()
        return time.perf_counter() - begin

    with apply(settings, model):
        begin = time.perf_counter()
        for _ in range(WARM):
            step()
        warm = time.perf_counter() - begin
        states = [t for s in optimizer.state.values() for t in s.values()]
        if device.type == "cpu":
            with measure("cpu", known=[*model.parameters(), *model.buffers(), *states]) as peak:
                step()
            found = {"measured_bytes": peak.peak_bytes}
            times = [step() for _ in range(steps)]
        else:
            module.reset_peak_memory_stats()
            times = [step() for _ in range(steps)]
            found = {"measured_bytes": module.max_memory_allocated()}
            found["reserved_bytes"] = module.max_memory_reserved()
    middle = statistics.median(times)
    return {
        **found,
        "measured_seconds": middle,
        "spread_percent": 100 * (max(times) - min(times)) / middle,
        "warm_seconds": warm,
        "loss": loss.item(),
    }


class Worker:
    """A process that waits for one candidate.

    Args:
        device: Device type.
        command: What is started instead, for tests.
    """

    def __init__(self, device: str, command: Sequence[str] | None = None) -> None:
        given = command or (sys.executable, "-m", "benchmarks.plan_runs", device)
        self._process = subprocess.Popen(
            given, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, env={**ENVIRONMENT, **os.environ},
        )  # fmt: skip

    def run(self, case: Case, settings: Settings, steps: int, limit: float) -> dict[str, Any]:
        """What was measured, or ``failure``; after ``limit`` seconds the process is ended."""
        given = json.dumps([vars(case), settings.as_data(), steps])
        begin = time.monotonic()
        try:
            out, errors = self._process.communicate(given + "\n", timeout=max(1.0, limit))
        except subprocess.TimeoutExpired:
            self.end()
            return {"failure": f"no end within {limit:.0f} s"}
        lines = [line for line in out.splitlines() if line.startswith("{")]
        if self._process.returncode == 0 and lines:
            return {**json.loads(lines[-1]), "process_seconds": time.monotonic() - begin}
        if self._process.returncode < 0:
            return {"failure": f"ended by signal {-self._process.returncode}"}
        said = [line for line in errors.strip().splitlines() if line] or ["no output"]
        memory = [line for line in said if "OutOfMemoryError" in line]
        if memory:
            return {"failure": "out of memory", "said": memory[-1][:500]}
        return {"failure": said[-1][:300], "said": "\n".join(said[-12:])[:3000]}

    def end(self) -> None:
        """End the process, whatever it does."""
        self._process.kill()
        self._process.communicate()


def main(arguments: Sequence[str] | None = None) -> int:
    """Import, wait, train, print one line of JSON."""
    import transformers.modeling_utils  # noqa: F401

    import liger_multi.nn
    import liger_multi.patching  # noqa: F401

    given = list(arguments if arguments is not None else sys.argv[1:])
    line = sys.stdin.readline()
    if line.strip():
        case, settings, steps = json.loads(line)
        device = torch.device(given[0])
        found = executed(Case(**case), Settings.from_data(settings), steps, device)
        sys.stdout.write(json.dumps(found) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
