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
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import harness, store
from benchmarks.harness import adamw, device_of, medians, timed_steps
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

    device = device_of()
    if device.type != "cpu":
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        device = torch.device(device.type, int(os.environ["LOCAL_RANK"]))
    mesh = init_device_mesh(device.type, (int(os.environ["WORLD_SIZE"]),))
    model = sharded(run, variant, device, mesh)
    optimizer = adamw(model.parameters(), device)
    generator = torch.Generator(device).manual_seed(1 + dist.get_rank())
    vocabulary = MODELS[run.model][1]["vocab_size"]

    def step() -> Tensor:
        ids = torch.randint(vocabulary, (run.batch, run.tokens), generator=generator, device=device)
        loss: Tensor = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return timed_steps(step, device, steps, WARM_STEPS, dist.barrier)


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
        peak = max(one["peak_bytes"] or 0 for one in reports)
        sys.stdout.write(json.dumps({**report, "peak_bytes": peak}) + "\n")
        sys.stdout.flush()
    dist.destroy_process_group()


def turn(run: Run, variant: str, cards: int, steps: int) -> dict[str, Any]:
    """The same over all cards, in processes of their own; a failure is an answer too."""
    command = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(cards)]
    command += ["-m", "benchmarks.several_cards", "--child", str(run)]
    return harness.child(*command, "--variants", variant, "--steps", str(steps))


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
    device = device_of()
    cards = options.cards or max(1, torch.accelerator.device_count())
    data = store.head("several-cards", options, device)
    rows: list[dict[str, Any]] = []
    for run in runs:
        tokens = cards * run.batch * run.tokens
        turns: dict[str, list[dict[str, Any]]] = {name: [] for name in variants}
        for number in range(options.rounds):
            for name in variants[:: 1 if number % 2 == 0 else -1]:
                turns[name].append(turn(run, name, cards, options.steps))
            new = [
                {"run": str(run), "cards": cards, "variant": name, **medians(turns[name], tokens)}
                for name in variants
            ]
            store.keep({**data, "rows": rows + new}, options)
        rows += new
        for one in new:
            print(json.dumps(one), flush=True)
    return int(any("failure" in one and one["variant"] != "stock" for one in rows))


if __name__ == "__main__":
    sys.exit(main())
