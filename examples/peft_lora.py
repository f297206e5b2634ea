"""LoRA with PEFT, patched: frozen weights, and adapters on attention, MLP and head.

A CPU, with a tiny model:

    python examples/peft_lora.py

A GPU:

    python examples/peft_lora.py --model meta-llama/Llama-3.2-1B --text book.txt \
        --rows 4 --length 2048 --steps 200 --rate 2e-4 --save adapter
"""

import argparse

import peft
import torch
from _common import batches, model_and_ids

import liger_multi

LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a name on the hub; without it a tiny model is made")
    parser.add_argument("--text", help="a file to train on; without it this example's own code")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rate", type=float, default=1e-2)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--save", help="a folder for the adapter")
    given = parser.parse_args(arguments)
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")

    model, ids = model_and_ids(given.model, given.text, device)
    config = peft.LoraConfig(
        r=given.rank, lora_alpha=2 * given.rank, target_modules=[*LAYERS, "lm_head"]
    )
    model = peft.get_peft_model(model, config)
    print(liger_multi.patch(model, strict=True))  # after wrapping, so that it sees the adapters

    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=given.rate, weight_decay=0.0
    )
    losses = []
    for step, rows in enumerate(batches(ids, given.rows, given.length, given.steps)):
        rows = rows.to(device)
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        print(f"step {step + 1}: loss {losses[-1]:.3f}")
    if given.save:
        model.save_pretrained(given.save)  # PEFT's own format; loads without liger_multi
    return losses


if __name__ == "__main__":
    main()
