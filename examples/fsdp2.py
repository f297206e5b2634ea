"""A patched model whose parameters are sharded over ranks by FSDP2.

Two processes on a CPU, with a tiny model:

    torchrun --nproc-per-node 2 examples/fsdp2.py

Eight GPUs:

    torchrun --nproc-per-node 8 examples/fsdp2.py --model meta-llama/Llama-3.1-8B \
        --text book.txt --rows 1 --length 8192 --steps 200 --rate 1e-5
"""

import argparse
import os

import torch
import torch.distributed as dist
from _common import batches, model_and_ids, on_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import liger_multi


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a name on the hub; without it a tiny model is made")
    parser.add_argument("--text", help="a file to train on; without it this example's own code")
    parser.add_argument("--rows", type=int, default=2, help="on every rank")
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rate", type=float, default=1e-2)
    given = parser.parse_args(arguments)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = on_ranks(rank, ranks)

    model, ids = model_and_ids(given.model, given.text)
    report = liger_multi.patch(model, strict=True)  # before sharding, which swaps classes as well
    mesh = init_device_mesh(device.type, (ranks,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options = {"mesh": mesh, "mp_policy": policy} if given.model else {"mesh": mesh}
    for layer in model.model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)  # the head stays in the root's unit: the loss gathers it once
    if rank == 0:
        print(report)

    optimizer = torch.optim.AdamW(model.parameters(), lr=given.rate)
    losses = []
    for step, rows in enumerate(batches(ids, given.rows, given.length, given.steps, rank, ranks)):
        rows = rows.to(device)
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss = loss.detach()
        dist.all_reduce(loss)
        losses.append(float(loss) / ranks)
        if rank == 0:
            print(f"step {step + 1}: loss {losses[-1]:.3f}")
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main()
