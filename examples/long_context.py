"""Long sequences: a plan that fits, or a recompute policy and offload of your choice.

    python examples/long_context.py --tiny

On a GPU:

    python examples/long_context.py --model Qwen/Qwen2.5-0.5B --dataset roneneldan/TinyStories \
        --length 32768 --memory 24GiB --steps 20
"""

import contextlib
from collections.abc import Sequence

import _common
import torch

import liger_multi
from liger_multi import memory


def main(arguments: Sequence[str] | None = None) -> list[float]:
    parser = _common.parser(__doc__)
    parser.set_defaults(length=32768, rows=1)
    parser.add_argument("--memory", default="80GiB", help="a size or a card that it shall fit")
    parser.add_argument("--policy", choices=memory.POLICIES, help="recompute, in place of a plan")
    parser.add_argument("--offload", action="store_true", help="with a policy: to the host")
    options = _common.parsed(parser, arguments)
    device = _common.device_of(options)
    tokenizer, model = _common.load(options)
    data = _common.sequences(options, tokenizer)
    model.to(device).train()

    with contextlib.ExitStack() as stack:  # all is taken back at its end
        if options.policy:
            print(stack.enter_context(liger_multi.patched(model)))
            stack.enter_context(memory.apply_recompute(model, options.policy))
            if options.offload:
                stack.enter_context(memory.offload_activations(model))
        else:
            plan = memory.plan(
                model,
                options.memory,
                batch=options.rows,
                sequence=options.length,
                precision="bf16" if model.dtype == torch.bfloat16 else "fp32",
                space=memory.Space(patched=(True,), offload_states=(None,)),
                limits=False,
            )
            print(plan)  # the ways that were weighed, the fastest that fits first
            print(stack.enter_context(memory.apply(plan, model)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=options.rate, fused=True)
        losses: list[float] = []
        for batch in _common.batches(options, data):
            ids, labels = batch["input_ids"].to(device), batch["labels"].to(device)
            with memory.measure(device) as peak:
                loss = model(input_ids=ids, labels=labels, use_cache=False).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
            size = memory.format_bytes(peak.peak_bytes)
            print(f"step {len(losses)}: loss {losses[-1]:.3f}, peak {size}")
    if options.output:
        model.save_pretrained(options.output)
        tokenizer.save_pretrained(options.output)
    return losses


if __name__ == "__main__":
    main()
