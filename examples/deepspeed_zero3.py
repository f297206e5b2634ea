"""A patched model under DeepSpeed ZeRO-3, parameters and optimizer offloaded to the CPU if asked.

Two processes on a CPU, with a tiny model:

    DS_ACCELERATOR=cpu torchrun --nproc-per-node 2 examples/deepspeed_zero3.py

Eight GPUs:

    deepspeed --num_gpus 8 examples/deepspeed_zero3.py --model meta-llama/Llama-3.1-8B \
        --text book.txt --rows 1 --length 8192 --steps 200 --rate 1e-5 --offload
"""

import argparse
import os

import deepspeed
import torch
from _common import batches, model_and_ids

import liger_multi


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a name on the hub; without it a tiny model is made")
    parser.add_argument("--text", help="a file to train on; without it this example's own code")
    parser.add_argument("--rows", type=int, default=2, help="on every rank")
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rate", type=float, default=1e-2)
    parser.add_argument("--offload", action="store_true")
    parser.add_argument("--local_rank", type=int, help="given by DeepSpeed's launcher")
    given = parser.parse_args(arguments)
    deepspeed.init_distributed()
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    model, ids = model_and_ids(given.model, given.text)
    report = liger_multi.patch(model, strict=True)
    zero = {"stage": 3}
    if given.offload:
        zero |= {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=given.rate),
        config={
            "train_micro_batch_size_per_gpu": given.rows,
            "bf16": {"enabled": given.model is not None},
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        },
    )
    if rank == 0:
        print(report)
    losses = []
    for step, rows in enumerate(batches(ids, given.rows, given.length, given.steps, rank, ranks)):
        rows = rows.to(engine.device)
        loss = engine(input_ids=rows, labels=rows).loss
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
        if rank == 0:
            print(f"step {step + 1}: loss {losses[-1]:.3f} on rank 0")
    return losses


if __name__ == "__main__":
    main()
