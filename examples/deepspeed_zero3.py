"""DeepSpeed ZeRO-3: a patched model, parameters and optimizer on the host if asked.

    python examples/deepspeed_zero3.py --tiny

On GPUs:

    torchrun --nproc-per-node 8 examples/deepspeed_zero3.py --model Qwen/Qwen2.5-7B \
        --dataset roneneldan/TinyStories --rows 1 --length 8192 --rate 1e-5 --offload
"""

import os
import sys
from collections.abc import Sequence
from typing import Any

import _common
import torch

import liger_multi

if "--tiny" in sys.argv:
    os.environ["DS_ACCELERATOR"] = "cpu"  # read when DeepSpeed is imported
with _common.needs("deepspeed"):
    import deepspeed


def main(arguments: Sequence[str] | None = None) -> list[float]:
    parser = _common.parser(__doc__)
    parser.add_argument("--offload", action="store_true", help="states and parameters to the host")
    options = _common.parsed(parser, arguments)
    if not _common.started(options):
        return []
    deepspeed.init_distributed()
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    tokenizer, model = _common.load(options)
    data = _common.sequences(options, tokenizer)
    report = liger_multi.patch(model, strict=True)  # before DeepSpeed puts its hooks on
    zero: dict[str, Any] = {"stage": 3}
    if options.offload:
        zero |= {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=options.rate),
        config={
            "train_micro_batch_size_per_gpu": options.rows,
            "bf16": {"enabled": options.gpu},
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        },
    )
    if rank == 0:
        print(report)

    losses: list[float] = []
    for batch in _common.batches(options, data, rank, ranks):
        ids, labels = batch["input_ids"].to(engine.device), batch["labels"].to(engine.device)
        loss = engine(input_ids=ids, labels=labels).loss
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
        if rank == 0:
            print(f"step {len(losses)}: loss {losses[-1]:.3f} on rank 0")

    if options.output:
        engine.save_checkpoint(options.output)
    return losses


if __name__ == "__main__":
    main()
