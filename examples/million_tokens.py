"""Rows longer than one card holds: FSDP2 for weights, sequence parallel for tokens.

    python examples/million_tokens.py --tiny

On GPUs:

    torchrun --nproc-per-node 4 examples/million_tokens.py --model Qwen/Qwen3-8B \
        --dataset roneneldan/TinyStories --rows 1 --length 1048576 --steps 1
"""

import os
from collections.abc import Sequence

import _common
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import liger_multi
from liger_multi import memory
from liger_multi.distributed import shard_sequence
from liger_multi.patching import register_attention


def main(arguments: Sequence[str] | None = None) -> list[float]:
    options = _common.parsed(_common.parser(__doc__), arguments)
    if not _common.started(options):
        return []
    device = _common.device_of(options)
    if options.gpu:
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    mesh = init_device_mesh(device.type, (int(os.environ["WORLD_SIZE"]),), mesh_dim_names=("sp",))

    tokenizer, model = _common.load(options)
    data = _common.sequences(options, tokenizer)
    register_attention()
    model.set_attn_implementation("liger_multi")
    report = liger_multi.patch(model)
    model.train()
    half = torch.bfloat16 if options.gpu else None
    policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh["sp"], mp_policy=policy)
    fully_shard(model, mesh=mesh["sp"], mp_policy=policy)
    memory.apply_recompute(model, "keep_attention")
    memory.offload_activations(model)  # inputs of layers and results of attention
    shard_sequence(model, mesh["sp"])
    if dist.get_rank() == 0:
        print(report)

    optimizer = torch.optim.AdamW(model.parameters(), lr=options.rate)
    losses: list[float] = []
    for batch in _common.batches(options, data):  # every rank has the same whole rows
        ids, labels = batch["input_ids"].to(device), batch["labels"].to(device)
        loss = model(input_ids=ids, labels=labels, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        if dist.get_rank() == 0:
            print(f"step {len(losses)}: loss {losses[-1]:.3f}")
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main()
