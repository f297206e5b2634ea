"""A training loop in plain PyTorch: one line patches the model.

    python examples/plain_loop.py --tiny

On a GPU:

    python examples/plain_loop.py --model Qwen/Qwen2.5-0.5B --dataset roneneldan/TinyStories
"""

from collections.abc import Sequence

import _common
import torch

import liger_multi


def main(arguments: Sequence[str] | None = None) -> list[float]:
    options = _common.parsed(_common.parser(__doc__), arguments)
    device = _common.device_of(options)
    tokenizer, model = _common.load(options)
    data = _common.sequences(options, tokenizer)

    model.to(device).train()
    print(liger_multi.patch(model))  # what was replaced, what was skipped and why

    optimizer = torch.optim.AdamW(model.parameters(), lr=options.rate)
    losses: list[float] = []
    for batch in _common.batches(options, data):
        ids, labels = batch["input_ids"].to(device), batch["labels"].to(device)
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        print(f"step {len(losses)}: loss {losses[-1]:.3f}")

    if options.output:
        model.save_pretrained(options.output)  # the file of an unpatched model
        tokenizer.save_pretrained(options.output)
    return losses


if __name__ == "__main__":
    main()
