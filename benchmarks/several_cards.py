"""Training over several cards by FSDP2: ``python -m benchmarks.several_cards llama-3-8b:1x8192``.

A run has the form of ``benchmarks.models``, its batch and tokens those of each card. Parameters are
fp32 and sharded over the cards, layers compute in bf16, gradients are reduced in fp32, and AdamW is
fused. Variants take turns, each turn in processes of its own, one a card. A row has tokens a second
of all cards together, and the highest peak of one card.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import store
from benchmarks.models import MODELS, VARIANTS, WARM_STEPS, Run, build

CHOICES = ("stock", "liger", "ours")


def sharded(run: Run, variant: str, device: torch.device, mesh: Any) -> Any:
    """The model of a variant in fp32, its layers and the rest sharded over the mesh."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = VARIANTS[variant](build(run, device, torch.float32))
    half = torch.float32 if device.type == "cpu" else torch.bfloat16
    policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32)
    for layer in model.get_decoder().layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def train(run: Run, variant: str, steps: int) -> dict[str, Any]:
    """Seconds of every step, the peak of this card and the last loss; a step ends on all cards."""
    from torch.distributed.device_mesh import init_device_mesh

    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    module = None if device.type == "cpu" else torch.get_device_module(device)
    if module is not None:
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        device = torch.device(device.type, int(os.environ["LOCAL_RANK"]))
    mesh = init_device_mesh(device.type, (int(os.environ["WORLD_SIZE"]),))
    model = sharded(run, variant, device, mesh)
    fused = {"fused": True} if device.type == "cuda" else {"foreach": False}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, **fused)  # type: ignore[arg-type]
    generator = torch.Generator(device).manual_seed(1 + dist.get_rank())
    vocabulary = MODELS[run.model][1]["vocab_size"]
    times, loss = [], torch.zeros(())
    for step in range(WARM_STEPS + steps):
        ids = torch.randint(vocabulary, (run.batch, run.tokens), generator=generator, device=device)
        if step == WARM_STEPS and module is not None:
            module.empty_cache()
            module.reset_peak_memory_stats()
        dist.barrier()
        start = time.perf_counter()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if module is not None:
            torch.accelerator.synchronize()
        dist.barrier()
        times.append(time.perf_counter() - start)
    peak = module.max_memory_allocated() if module is not None else 0
    return {"seconds": times[WARM_STEPS:], "peak_bytes": peak, "loss": loss.item()}


def child(run: Run, variant: str, steps: int) -> None:
    """One process of a turn; the first prints what all found."""
    try:
        report = train(run, variant, steps)
    except torch.OutOfMemoryError:
        sys.stdout.write(json.dumps({"failure": "out of memory"}) + "\n")
        sys.stdout.flush()
        os._exit(1)  # the other cards wait for this one
    reports: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(reports, report)
    if dist.get_rank() == 0:
        peak = max(one["peak_bytes"] for one in reports)
        sys.stdout.write(json.dumps({**report, "peak_bytes": peak}) + "\n")
        sys.stdout.flush()
    dist.destroy_process_group()


def turn(run: Run, variant: str, cards: int, steps: int) -> dict[str, Any]:
    """The same over all cards, in processes of their own; a failure is an answer too."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(cards), "-m", "benchmarks.several_cards", "--child"]
    command += [str(run), "--variants", variant, "--steps", str(steps)]
    done = subprocess.run(command, cwd=store.ROOT, capture_output=True, text=True, check=False)
    answers: list[dict[str, Any]] = [
        json.loads(text) for text in done.stdout.splitlines() if text.startswith("{")
    ]
    failures = [one for one in answers if "failure" in one]
    if failures or not answers:
        lines = done.stderr.strip().splitlines() or ["the processes ended without a word"]
        errors = [text for text in lines if "Error" in text and "ChildFailed" not in text]
        return failures[0] if failures else {"failure": (errors or lines)[0][:200]}
    return answers[0]


def row(run: Run, variant: str, cards: int, turns: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Medians of all turns, as a row of results."""
    head = {"run": str(run), "cards": cards, "variant": variant}
    failures = [one["failure"] for one in turns if "failure" in one]
    if failures or not turns:
        return {**head, "failure": (failures or ["no turn"])[0]}
    times = [seconds for one in turns for seconds in one["seconds"]]
    middle = statistics.median(times)
    return {
        **head,
        "tokens_per_second": cards * run.batch * run.tokens / middle,
        "spread_percent": 100 * (max(times) - min(times)) / middle,
        "peak_bytes": max(one["peak_bytes"] for one in turns) or None,
        "loss": turns[0]["loss"],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure every run under every variant, and keep the rows after each round."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.several_cards", description=__doc__)
    parser.add_argument("runs", nargs="+", help="MODEL:BATCHxTOKENS[+checkpointing] of each card")
    parser.add_argument("--variants", default=",".join(CHOICES))
    parser.add_argument("--cards", type=int, help="all of this machine by default")
    parser.add_argument("--steps", type=int, default=6, help="of a turn, beside those to warm up")
    parser.add_argument("--rounds", type=int, default=2, help="turns of every variant")
    store.add_options(parser)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    variants = options.variants.split(",")
    try:
        runs = [Run.parse(text) for text in options.runs]
    except ValueError as wrong:
        parser.error(str(wrong))
    if unknown := [name for name in variants if name not in CHOICES]:
        parser.error(f"unknown variant {unknown[0]!r}; known: {', '.join(CHOICES)}")
    if options.child:
        child(runs[0], variants[0], options.steps)
        return 0
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    cards = options.cards or max(1, torch.accelerator.device_count())
    data = store.head("several-cards", options, device)
    rows: list[dict[str, Any]] = []
    for run in runs:
        turns: dict[str, list[dict[str, Any]]] = {name: [] for name in variants}
        for number in range(options.rounds):
            for name in variants[:: 1 if number % 2 == 0 else -1]:
                turns[name].append(turn(run, name, cards, options.steps))
            new = [row(run, name, cards, turns[name]) for name in variants]
            store.keep({**data, "rows": rows + new}, options)
        rows += new
        for one in new:
            print(json.dumps(one), flush=True)
    return int(any("failure" in one and one["variant"] != "stock" for one in rows))


if __name__ == "__main__":
    sys.exit(main())
