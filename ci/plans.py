"""Plans that are executed: ``python -m ci.plans --out F --commit X [--only NAME]``.

For each of some models a plan is made for a part of this device's memory, and three of its
candidates train some steps, each in a process of its own that gets no more than that part: the
best one, one of the middle and the slowest that fits. Peaks are compared with the allocator's, and
the order of times with the measured one. ``--explain`` makes the plan that ``docs/planning.md``
shows, which needs no device.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ci.memory_cases import LARGE_MOE
from liger_multi.bench import report
from liger_multi.memory import Candidate, Plan, Settings, Space, apply, plan
from liger_multi.memory.planning.cards import CARDS
from liger_multi.memory.sizes import config_of

ROOT = Path(__file__).parent.parent
EXPLAINED = ROOT / "benchmarks" / "plan-example.json"
PICTURE = ROOT / "docs" / "plan-example.png"
LAYOUTS = ((1, 1), (2, 1), (1, 4))  # of the page's plan
TIE = 0.04  # times nearer than this have no order


@dataclass(frozen=True)
class Case:
    """A model, what it is trained on, and what it gets."""

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

    def plan(self, card: str) -> Plan:
        """What is planned for a card of so little memory; only what one process can do."""
        space = Space(
            (self.precision,),
            policies=("none", "norms_and_mlp", "keep_attention", "full"),
            offload_states=(None,),
            layouts=((1, 1),),
            tiled=self.model != "moe-1b",
        )
        where = f"{card}:{self.memory}"
        return plan(self.config(), where, 1, self.batch, self.sequence, space=space, limits=False)


CASES = (
    Case("qwen2-0.5b", 2048, 16, "15GiB"),
    Case("qwen2-0.5b", 2048, 16, "24GiB", "amp"),
    Case("llama-3.2-1b", 4096, 8, "24GiB"),
    Case("llama-3.2-1b", 16384, 2, "24GiB"),
    Case("qwen2.5-7b", 4096, 4, "72GiB"),
    Case("moe-1b", 2048, 16, "16GiB"),
)


def chosen(made: Plan) -> list[Candidate]:
    """The best, one of the middle and the slowest of those that fit."""
    fitting = made.fitting
    places = sorted({0, len(fitting) // 2, len(fitting) - 1})
    return [fitting[i] for i in places]


def executed(case: Case, settings: Settings, steps: int) -> dict[str, Any]:
    """Train some steps in this process, with no more memory than planned for."""
    from transformers import AutoModelForCausalLM

    from liger_multi.config_file import parse_bytes

    device = torch.accelerator.current_accelerator()
    assert device is not None
    module = torch.get_device_module(device)
    total = module.get_device_properties(0).total_memory
    module.set_per_process_memory_fraction(min(1.0, parse_bytes(case.memory, "memory") / total))
    dtype = torch.bfloat16 if settings.precision == "bf16" else torch.float32
    with device:
        model: Any = AutoModelForCausalLM.from_config(case.config(), dtype=dtype)
    model.tie_weights()
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    shape = (settings.micro_batch, settings.sequence)
    ids = torch.randint(model.config.vocab_size, shape, device=device)
    loss = torch.zeros(())

    def step() -> None:
        nonlocal loss
        for _ in range(settings.accumulation):
            with contextlib.ExitStack() as stack:
                if settings.precision == "amp":
                    stack.enter_context(torch.autocast(device.type, dtype=torch.bfloat16))
                loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            loss = loss.detach()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    with apply(settings, model):
        for _ in range(2):
            step()
        module.synchronize()
        module.reset_peak_memory_stats()
        times = []
        for _ in range(steps):
            begin = time.perf_counter()
            step()
            module.synchronize()
            times.append(time.perf_counter() - begin)
    return {
        "measured_bytes": module.max_memory_allocated(),
        "reserved_bytes": module.max_memory_reserved(),
        "measured_seconds": statistics.median(times),
        "loss": loss.item(),
    }


def child(case: Case, settings: Settings, steps: int) -> dict[str, Any]:
    """One candidate in a process of its own; a failure is a row too."""
    given = json.dumps([vars(case), settings.as_data()])
    command = [sys.executable, "-m", "ci.plans", "--run", given, "--steps", str(steps)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode == 0 and lines:
        return json.loads(lines[-1])  # type: ignore[no-any-return]
    memory = "OutOfMemoryError" in done.stderr
    last = (done.stderr.strip().splitlines() or ["no output"])[-1]
    return {"failure": "out of memory" if memory else last[:300]}


def in_order(rows: Sequence[dict[str, Any]]) -> bool:
    """Whether no pair that was told to differ is measured the other way round."""
    timed = [r for r in rows if "measured_seconds" in r]
    for i, a in enumerate(timed):
        for b in timed[i + 1 :]:
            told = b["predicted_seconds"] / a["predicted_seconds"] - 1
            seen = b["measured_seconds"] / a["measured_seconds"] - 1
            if abs(told) > TIE and abs(seen) > TIE and (told > 0) != (seen > 0):
                return False
    return True


def row_of(case: Case, card: str, steps: int) -> dict[str, Any]:
    """A case's plan and what came of three of its candidates."""
    begin = time.perf_counter()
    made = case.plan(card)
    row: dict[str, Any] = {
        "case": vars(case),
        "plan_seconds": time.perf_counter() - begin,
        "ways": len(made.candidates),
        "fit": len(made.fitting),
        "runs": [],
    }
    print(
        f"{case}: {row['fit']} of {row['ways']} ways fit, {row['plan_seconds']:.0f} s", flush=True
    )
    for one in chosen(made):
        run = {
            "settings": one.settings.as_data(),
            "name": str(one.settings),
            "predicted_bytes": one.peak_bytes,
            "predicted_seconds": one.seconds,
            **child(case, one.settings, steps),
        }
        got = run.get("measured_bytes")
        said = run.get("failure", "")
        if got:
            run["error_percent"] = 100 * (one.peak_bytes / got - 1)
            said = f"{got / 2**30:.2f} GiB ({run['error_percent']:+.1f} %), "
            said += f"{run['measured_seconds']:.3f} s (told {one.seconds:.3f})"
        size = f"{one.settings.micro_batch} x {one.settings.accumulation}"
        print(f"  {one.settings}, {size}: {one.peak_bytes / 2**30:.2f} GiB; {said}", flush=True)
        row["runs"].append(run)
    row["order_agrees"] = in_order(row["runs"])
    print(f"  order of speeds {'agrees' if row['order_agrees'] else 'differs'}", flush=True)
    return row


def explained() -> Plan:
    """The plan that the page shows."""
    space = Space(("bf16", "amp"), policies=("none", "norms_and_mlp", "full"), layouts=LAYOUTS)
    config = config_of("llama-3-8b", 8192)
    return plan(config, "h100", 4, 16, 8192, space=space)


def main(arguments: Sequence[str] | None = None) -> int:
    """Plan, execute and write; 1 where a peak is off by more than a tenth, or a run failed."""
    parser = argparse.ArgumentParser(prog="python -m ci.plans", description=__doc__)
    parser.add_argument("--out", type=Path, help="file of the results")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--card", default="h200", choices=CARDS, help="whose rates are used")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--explain", action="store_true", help="the plan of the page, nothing else")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.run:
        case, settings = json.loads(given.run)
        found = executed(Case(**case), Settings.from_data(settings), given.steps)
        sys.stdout.write(json.dumps(found) + "\n")
        return 0
    if given.explain:
        made = explained()
        EXPLAINED.write_text(json.dumps(made.as_data(), indent=1) + "\n", encoding="utf-8")
        made.draw(PICTURE)
        print(made)
        return 0
    if given.out is None:
        parser.error("--out is needed")
    device = torch.accelerator.current_accelerator()
    if device is None:
        raise SystemExit("plans are executed on an accelerator, and there is none")
    rows = [row_of(case, given.card, given.steps) for case in CASES if given.only in str(case)]
    data = {
        "device": report.device_facts(device),
        "versions": report.versions(),
        "commit": given.commit,
        "date": datetime.date.today().isoformat(),
        "rows": rows,
    }
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    runs = [run for row in rows for run in row["runs"]]
    bad = [run for run in runs if abs(run.get("error_percent", 100)) > 10]
    print(f"{len(runs) - len(bad)} of {len(runs)} peaks within a tenth; written to {given.out}")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
