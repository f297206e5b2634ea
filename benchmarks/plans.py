"""Plans that are executed: ``python -m benchmarks.plans [--only NAME]``.

For each of some models a plan is made for a part of this device's memory, and some of its
candidates train a few steps, each in a process of its own that gets no more than that part: the
best one, the slowest that fits, one of the middle, and those between while there is time. Peaks are
compared with the allocator's, and the order of times with the measured one. What is known is
written after every candidate. ``--write-plans F`` plans and stops, which needs no device;
``--explain`` makes the plan that ``docs/planning.md`` shows.

A :class:`Worker` starts a process, which imports everything and then waits for a candidate on its
standard input: while one trains, the next has its imports behind it. Until the candidate comes no
device is touched.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import store
from benchmarks.harness import adamw, limit_memory, spread_percent, timed_steps
from benchmarks.memory import LARGE_MOE
from liger_multi.bench import report
from liger_multi.memory import Settings, Space, TrainingPlan, apply, measure, plan
from liger_multi.memory.planning import Candidate
from liger_multi.memory.planning.cost import CARDS
from liger_multi.memory.planning.result import ENVIRONMENT
from liger_multi.memory.sizes import config_of

# --- one candidate in a process of its own ---

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
            self.config(),
            f"{card}:{self.memory}",
            1,
            self.batch,
            self.sequence,
            space=space,
            limits=False,
            device=device,
        )


def executed(case: Case, settings: Settings, steps: int, device: torch.device) -> dict[str, Any]:
    """Train some steps in this process, with no more memory than planned for."""
    from transformers import AutoModelForCausalLM

    from liger_multi.dispatch.config import parse_bytes

    limit_memory(device, parse_bytes(case.memory, "memory"))
    torch.manual_seed(0)
    dtype = torch.bfloat16 if settings.precision in ("bf16", "fp8") else torch.float32
    with device:
        model: Any = AutoModelForCausalLM.from_config(case.config(), dtype=dtype)
    model.tie_weights()
    model.train()
    optimizer = adamw(model.parameters(), device)
    shape = (settings.micro_batch, settings.sequence)
    ids = torch.randint(model.config.vocab_size, shape, device=device)

    def step() -> Tensor:
        for _ in range(settings.accumulation):
            with torch.autocast(device.type, torch.bfloat16, settings.precision == "amp"):
                loss: Tensor = model(input_ids=ids, labels=ids).loss
            loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    with apply(settings, model):
        report = timed_steps(step, device, steps, WARM)
        if device.type == "cpu":
            states = [t for s in optimizer.state.values() for t in s.values()]
            with measure("cpu", known=[*model.parameters(), *model.buffers(), *states]) as peak:
                step()
            report["peak_bytes"] = peak.peak_bytes
    return {
        "measured_bytes": report["peak_bytes"],
        "measured_seconds": statistics.median(report["seconds"]),
        "spread_percent": spread_percent(report["seconds"]),
        "loss": report["loss"],
    }


class Worker:
    """A process that waits for one candidate.

    Args:
        device: Device type.
        command: What is started instead, for tests.
    """

    def __init__(self, device: str, command: Sequence[str] | None = None) -> None:
        command_line = command or (sys.executable, "-m", "benchmarks.plans", "--worker", device)
        self._process = subprocess.Popen(
            command_line,
            cwd=store.ROOT,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**ENVIRONMENT, **os.environ},
        )

    def run(self, case: Case, settings: Settings, steps: int, limit: float) -> dict[str, Any]:
        """What was measured, or ``failure``; after ``limit`` seconds the process is ended."""
        request = json.dumps([vars(case), settings.as_data(), steps])
        begin = time.monotonic()
        try:
            out, errors = self._process.communicate(request + "\n", timeout=max(1.0, limit))
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


def wait_and_train(device: str) -> int:
    """Import, wait, train, print one line of JSON."""
    import transformers.modeling_utils  # noqa: F401

    import liger_multi.nn
    import liger_multi.patching  # noqa: F401

    line = sys.stdin.readline()
    if line.strip():
        case, settings, steps = json.loads(line)
        parsed_settings = Settings.from_data(settings)
        measured = executed(Case(**case), parsed_settings, steps, torch.device(device))
        sys.stdout.write(json.dumps(measured) + "\n")
    return 0


# --- all candidates of a plan ---

LAYOUTS = ((1, 1), (2, 1), (1, 4))  # of the page's plan
TIE = 0.04  # times nearer than this have no order
HOST_BYTES = 24 * 2**30  # candidates that need more of the host's memory are not executed
CASES = (
    Case("qwen2-0.5b", 2048, 16, "15GiB"),
    Case("qwen2-0.5b", 2048, 16, "24GiB", "amp"),
    Case("llama-3.2-1b", 4096, 8, "24GiB"),
    Case("llama-3.2-1b", 16384, 2, "24GiB"),
    Case("qwen2.5-7b", 4096, 4, "72GiB"),
    Case("moe-1b", 2048, 16, "16GiB"),
)


def planned(case: Case, card: str, device: str = "cuda") -> dict[str, Any]:
    """A case and its candidates that fit, the fastest first, as plain data."""
    begin = time.perf_counter()
    plan = case.plan(card, device)
    return {
        "case": vars(case),
        "plan_seconds": time.perf_counter() - begin,
        "ways": len(plan.candidates),
        "fit": len(plan.fitting),
        "candidates": [one.as_data() for one in plan.fitting],
    }


def chosen(fitting: Sequence[Candidate], most: int) -> list[Candidate]:
    """The best, the slowest, one of the middle, then those between, as the host's memory allows."""
    those = [one for one in fitting if one.host_bytes <= HOST_BYTES]
    if not those:
        return []
    last = len(those) - 1
    places = dict.fromkeys([0, last, last // 2, last // 4, (3 * last + 1) // 4])
    return [those[i] for i in list(places)[:most]]


def in_order(rows: Sequence[dict[str, Any]]) -> bool:
    """Whether measured times order all pairs as predicted; near ties do not count."""
    timed = [r for r in rows if "measured_seconds" in r]
    for i, a in enumerate(timed):
        for b in timed[i + 1 :]:
            predicted = b["predicted_seconds"] / a["predicted_seconds"] - 1
            measured = b["measured_seconds"] / a["measured_seconds"] - 1
            if abs(predicted) > TIE and abs(measured) > TIE and (predicted > 0) != (measured > 0):
                return False
    return True


def execute(
    plans: Sequence[dict[str, Any]],
    worker: Callable[[], Worker],
    options: argparse.Namespace,
    write: Callable[[list[dict[str, Any]]], None],
) -> list[dict[str, Any]]:
    """Run candidates in rounds over the cases, so that little time means fewer of each.

    Args:
        plans: Of :func:`planned`.
        worker: Starts a process; one is always waiting.
        options: ``steps``, ``most``, ``limit`` and ``until`` (of ``time.monotonic``).
        write: Called with the rows after every candidate.
    """
    rows: list[dict[str, Any]] = []
    picks: list[list[Candidate]] = []
    for data in plans:
        row = {name: value for name, value in data.items() if name != "candidates"}
        rows.append({**row, "runs": [], "order_agrees": True})
        fitting = [Candidate.from_data(one) for one in data["candidates"]]
        picks.append(chosen(fitting, options.most))
    queue = [
        (i, own[n]) for n in range(options.most) for i, own in enumerate(picks) if n < len(own)
    ]
    waiting = worker() if queue else None
    for place, (i, one) in enumerate(queue):
        left = options.until - time.monotonic()
        assert waiting is not None
        if left < min(15.0, options.limit):
            print(f"{len(queue) - place} candidates are left: the time is over", flush=True)
            break
        current, waiting = waiting, worker() if place + 1 < len(queue) else None
        run: dict[str, Any] = {
            "settings": one.settings.as_data(),
            "name": str(one.settings),
            "predicted_bytes": one.peak_bytes,
            "predicted_seconds": one.seconds,
        }
        case = Case(**rows[i]["case"])
        run |= current.run(case, one.settings, options.steps, min(options.limit, left))
        if "measured_bytes" in run:
            run["error_percent"] = 100 * (one.peak_bytes / run["measured_bytes"] - 1)
        rows[i]["runs"].append(run)
        rows[i]["order_agrees"] = in_order(rows[i]["runs"])
        write(rows)
        print(f"{case}: {shown(one, run)}", flush=True)
    if waiting is not None:
        waiting.end()
    return rows


def shown(one: Candidate, run: dict[str, Any]) -> str:
    """A finished candidate in a line."""
    said, got = run.get("failure", ""), run.get("measured_bytes")
    if got:
        said = f"{got / 2**30:.2f} GiB ({run['error_percent']:+.1f} %), "
        said += f"{run['measured_seconds']:.3f} s (told {one.seconds:.3f}), "
        said += f"loss {run['loss']:.3f}, process {run['process_seconds']:.0f} s"
    size = f"{one.settings.micro_batch} x {one.settings.accumulation}"
    return f"{one.settings}, {size}: {one.peak_bytes / 2**30:.2f} GiB told; {said}"


def explained() -> TrainingPlan:
    """The plan that the page shows."""
    space = Space(("bf16", "amp"), policies=("none", "norms_and_mlp", "full"), layouts=LAYOUTS)
    config = config_of("llama-3-8b", 8192)
    return plan(config, "h100", 4, 16, 8192, space=space)


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options; ``until`` is when the time is over."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plans", description=__doc__)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--card", default="h200", choices=CARDS, help="whose rates are used")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--most", type=int, default=5, help="candidates of a case")
    parser.add_argument("--limit", type=float, default=100.0, help="seconds of a candidate")
    parser.add_argument("--seconds", type=float, default=500.0, help="of everything")
    parser.add_argument("--device", help="device type; cpu tracks storages and limits nothing")
    parser.add_argument("--plans", type=Path, help="what --write-plans wrote, instead of planning")
    parser.add_argument("--write-plans", type=Path, help="plan into this file, nothing else")
    parser.add_argument("--explain", action="store_true", help="the plan of the page, nothing else")
    store.add_options(parser)
    parser.add_argument("--worker", metavar="DEVICE", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.until = time.monotonic() + options.seconds
    return options


def plans_of(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Read plans, or make them."""
    if options.plans is not None:
        known = json.loads(options.plans.read_text(encoding="utf-8"))["plans"]
        return [one for one in known if options.only in str(Case(**one["case"]))]
    plans = []
    for case in CASES:
        if options.only in str(case):
            plans.append(planned(case, options.card, options.device or "cuda"))
            ways, seconds = (plans[-1][name] for name in ("ways", "plan_seconds"))
            fit = f"{plans[-1]['fit']} of {ways} ways fit"
            print(f"{case}: {fit}, planned in {seconds:.0f} s", flush=True)
    return plans


def main(arguments: Sequence[str] | None = None) -> int:
    """Plan, execute and write; 1 where a peak is off by more than a tenth, or a run failed."""
    options = parsed(arguments)
    if options.worker is not None:
        return wait_and_train(options.worker)
    if options.explain:
        example = explained()
        whole = example.as_data()
        run = store.head("plan-example", options, torch.device("cpu"))
        run["device"] = store.ESTIMATED
        store.keep({**run, "rows": whole.pop("candidates"), "plan": whole}, options)
        print(example)
        return 0
    data = store.head("plans", options, torch.device("cpu")) | {"card": options.card}
    if options.write_plans is not None:
        data["plans"] = plans_of(options)
        options.write_plans.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        return 0
    accelerator = torch.accelerator.current_accelerator() if options.device is None else None
    if accelerator is None and options.device is None:
        raise SystemExit("plans are executed on an accelerator, and there is none")
    device = accelerator or torch.device(options.device)
    data["device"] = report.device_facts(device)

    def write(rows: list[dict[str, Any]]) -> None:
        store.keep({**data, "rows": rows}, options)

    rows = execute(plans_of(options), lambda: Worker(device.type), options, write)
    runs = [run for row in rows for run in row["runs"]]
    bad = [run for run in runs if abs(run.get("error_percent", 100)) > 10]
    agreed = sum(row["order_agrees"] for row in rows)
    print(f"{len(runs) - len(bad)} of {len(runs)} peaks within a tenth; order of speeds agrees for")
    print(f"{agreed} of {len(rows)} cases")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
