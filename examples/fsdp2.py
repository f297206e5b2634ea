"""FSDP2: parameters of a patched model sharded over ranks.

    python examples/fsdp2.py --tiny

On GPUs:

    torchrun --nproc-per-node 8 examples/fsdp2.py --model Qwen/Qwen2.5-7B \
        --dataset roneneldan/TinyStories --rows 1 --length 8192 --rate 1e-5 --output trained
"""

import os
from collections.abc import Sequence

import _common
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import liger_multi


def main(arguments: Sequence[str] | None = None) -> list[float]:
    options = _common.parsed(_common.parser(__doc__), arguments)
    if not _common.started(options):
        return []
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = _common.device_of(options)
    if options.gpu:
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    mesh = init_device_mesh(device.type, (ranks,))  # starts the process group: gloo or NCCL

    tokenizer, model = _common.load(options)
    data = _common.sequences(options, tokenizer)
    report = liger_multi.patch(model, strict=True)  # before sharding, which swaps classes as well
    half = torch.bfloat16 if options.gpu else None
    policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)  # the head too: the loss gathers it once
    if rank == 0:
        print(report)

    optimizer = torch.optim.AdamW(model.parameters(), lr=options.rate)
    losses: list[float] = []
    for batch in _common.batches(options, data, rank, ranks):
        ids, labels = batch["input_ids"].to(device), batch["labels"].to(device)
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach()
        dist.all_reduce(mean)
        losses.append(float(mean) / ranks)
        if rank == 0:
            print(f"step {len(losses)}: loss {losses[-1]:.3f}")

    if options.output:
        whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_model_state_dict(model, options=whole)
        if rank == 0:
            model.save_pretrained(options.output, state_dict=state)
            tokenizer.save_pretrained(options.output)
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main()
