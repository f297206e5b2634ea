"""A training loop in plain PyTorch.

On a CPU, with a tiny model:

    python examples/plain_loop.py

On a GPU, with a real one:

    python examples/plain_loop.py --model Qwen/Qwen2.5-0.5B --device cuda --steps 200
"""

import argparse

import _common
import torch

import liger_multi


def main(arguments=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="", help="a model of the hub; a tiny one by default")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--batch", type=int, default=4)
    options = parser.parse_args(arguments)

    words, model = _common.loaded(options.model)
    model.to(options.device).train()
    print(liger_multi.patch(model))  # the one line that is not in an ordinary loop

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(options.steps):
        text = _common.sentences(options.batch, seed=step)
        inputs = words(text, return_tensors="pt", padding=True).to(options.device)
        labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
        loss = model(
            input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], labels=labels
        ).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        print(f"step {step}: loss {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    main()
