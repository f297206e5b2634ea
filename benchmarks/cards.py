"""One process of several cards: ``torchrun -m benchmarks.cards RUN VARIANT STEPS``.

:mod:`benchmarks.models` starts it for ``--cards``. FSDP2 shards parameters in fp32, layers compute
in bf16, gradients are reduced in fp32. Batch and tokens are those of each card.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.configs import MODELS, VARIANTS, WARM_STEPS, Run, build
from benchmarks.harness import adamw, device_of, shard, timed_steps, train_step


def train_sharded(run: Run, variant: str, steps: int) -> dict[str, Any]:
    """Seconds of every step, the peak of this card and the last loss; a step ends on all cards."""
    device = device_of()
    if device.type != "cpu":
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        device = torch.device(device.type, int(os.environ["LOCAL_RANK"]))
    mesh = init_device_mesh(device.type, (int(os.environ["WORLD_SIZE"]),))
    model = VARIANTS[variant](build(run, device, torch.float32), run)
    shard(model, mesh, None if device.type == "cpu" else torch.bfloat16)
    optimizer = adamw(model.parameters(), device)
    generator = torch.Generator(device).manual_seed(1 + dist.get_rank())
    vocabulary = MODELS[run.model][1]["vocab_size"]

    def step() -> Tensor:
        ids = torch.randint(vocabulary, (run.batch, run.tokens), generator=generator, device=device)
        return train_step(model, ids, optimizer)

    return timed_steps(step, device, steps, WARM_STEPS, dist.barrier)


def main() -> int:
    """Train, and let the first process print what all measured."""
    name, variant, steps = sys.argv[1:]
    try:
        report = train_sharded(Run.parse(name), variant, int(steps))
    except torch.OutOfMemoryError:
        print(json.dumps({"failure": "out of memory"}), flush=True)
        os._exit(1)  # the other cards wait for this one
    reports: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(reports, report)
    if dist.get_rank() == 0:
        peak = max(one["peak_bytes"] or 0 for one in reports)
        print(json.dumps({**report, "peak_bytes": peak}), flush=True)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
