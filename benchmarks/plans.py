"""Plans that are executed: ``python -m benchmarks.plans [--only NAME]``.

For each of some models a plan is made for a part of this device's memory, and some of its
candidates train a few steps, each in a process of its own that gets no more than that part: the
best one, the slowest that fits, one of the middle, and those between. Peaks are compared with the
allocator's, and the order of times with the measured one. ``--explain`` makes the plan that
``docs/planning.md`` shows, which needs no device.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks import harness, store
from benchmarks.harness import (
    adamw,
    causal,
    device_of,
    limit_memory,
    spread_percent,
    timed_steps,
    tracked_peak,
)
from benchmarks.memory import configuration
from liger_multi.memory import Settings, Space, TrainingPlan, apply, plan
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
        return configuration(self.model, self.sequence)

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
    from liger_multi.dispatch.config import parse_bytes

    limit_memory(device, parse_bytes(case.memory, "memory"))
    dtype = torch.bfloat16 if settings.precision in ("bf16", "fp8") else torch.float32
    model = causal(case.config(), device, dtype)
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
            report["peak_bytes"] = tracked_peak(model, optimizer, step)
    return {
        "measured_bytes": report["peak_bytes"],
        "measured_seconds": statistics.median(report["seconds"]),
        "spread_percent": spread_percent(report["seconds"]),
        "loss": report["loss"],
    }


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


def chosen(fitting: Sequence[Candidate], most: int) -> list[Candidate]:
    """The best, the slowest, one of the middle, then those between, as the host's memory allows."""
    runnable = [one for one in fitting if one.host_bytes <= HOST_BYTES]
    if not runnable:
        return []
    last = len(runnable) - 1
    places = dict.fromkeys([0, last, last // 2, last // 4, (3 * last + 1) // 4])
    return [runnable[i] for i in list(places)[:most]]


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


def execute(case: Case, plan: TrainingPlan, options: argparse.Namespace) -> dict[str, Any]:
    """The row of a case: some of its candidates, each trained in a process of its own."""
    runs: list[dict[str, Any]] = []
    for one in chosen(plan.fitting, options.most):
        request = json.dumps([vars(case), one.settings.as_data(), options.steps])
        command = ["benchmarks.plans", "--child", request, "--device", options.device]
        run: dict[str, Any] = {"settings": one.settings.as_data(), "name": str(one.settings)}
        run |= {"predicted_bytes": one.peak_bytes, "predicted_seconds": one.seconds}
        run |= harness.child(*command, environment=ENVIRONMENT)
        if "measured_bytes" in run:
            run["error_percent"] = 100 * (one.peak_bytes / run["measured_bytes"] - 1)
        runs.append(run)
        print(f"{case}: {shown(one, run)}", flush=True)
    head = {"case": vars(case), "ways": len(plan.candidates), "fit": len(plan.fitting)}
    return {**head, "runs": runs, "order_agrees": in_order(runs)}


def shown(one: Candidate, run: dict[str, Any]) -> str:
    """A finished candidate in a line."""
    said, got = run.get("failure", ""), run.get("measured_bytes")
    if got:
        said = f"{got / 2**30:.2f} GiB ({run['error_percent']:+.1f} %), "
        said += f"{run['measured_seconds']:.3f} s (told {one.seconds:.3f}), loss {run['loss']:.3f}"
    size = f"{one.settings.micro_batch} x {one.settings.accumulation}"
    return f"{one.settings}, {size}: {one.peak_bytes / 2**30:.2f} GiB told; {said}"


def explained() -> TrainingPlan:
    """The plan that the page shows."""
    space = Space(("bf16", "amp"), policies=("none", "norms_and_mlp", "full"), layouts=LAYOUTS)
    config = config_of("llama-3-8b", 8192)
    return plan(config, "h100", 4, 16, 8192, space=space)


def main(arguments: Sequence[str] | None = None) -> int:
    """Plan, execute and write; 1 where a peak is off by more than a tenth, or a run failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plans", description=__doc__)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--card", default="h200", choices=CARDS, help="whose rates are used")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--most", type=int, default=5, help="candidates of a case")
    parser.add_argument("--device", default=str(device_of()), help="cpu tracks storages")
    parser.add_argument("--explain", action="store_true", help="the plan of the page, nothing else")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    store.add_options(parser)
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    if options.child:
        case, settings, steps = json.loads(options.child)
        print(json.dumps(executed(Case(**case), Settings.from_data(settings), steps, device)))
        return 0
    if options.explain:
        example = explained()
        whole = example.as_data()
        run = store.head("plan-example", options, device) | {"device": store.ESTIMATED}
        store.keep({**run, "rows": whole.pop("candidates"), "plan": whole}, options)
        print(example)
        return 0
    head = store.head("plans", options, device) | {"card": options.card}
    rows: list[dict[str, Any]] = []
    for case in CASES:
        if options.only in str(case):
            rows.append(execute(case, case.plan(options.card, device.type), options))
            store.keep({**head, "rows": rows}, options)
    runs = [run for row in rows for run in row["runs"]]
    bad = [run for run in runs if abs(run.get("error_percent", 100)) > 10]
    agreed = sum(row["order_agrees"] for row in rows)
    print(f"{len(runs) - len(bad)} of {len(runs)} peaks within a tenth; order of speeds agrees for")
    print(f"{agreed} of {len(rows)} cases")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
