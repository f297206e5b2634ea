"""LoRA as PEFT runs it and as a patched model does: ``python -m benchmarks.lora``.

Time of forward and backward, and the peak beside what was there, of the MLP and of the projections
to q, k and v of a decoder layer of Llama-3-8B (8192 tokens, r = 16), layer by layer and as one
operator, and of a training step of a small model, in bf16 with fp32 adapters (PEFT's default) and
under autocast. ``--tiny`` tries it on a CPU.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import store
from benchmarks.harness import Call, added_bytes, device_of, in_turns
from liger_multi import patch
from liger_multi.patching.swap import Patched

QKV = ("q_proj", "k_proj", "v_proj")
TARGETS = (*QKV, "o_proj", "gate_proj", "up_proj", "down_proj")
LAYER = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "num_hidden_layers": 1,
}
SMALL = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "num_hidden_layers": 16,
    "tie_word_embeddings": True,
}
TINY = {
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}
FORMS = ("fp32 adapters", "autocast")


def adapted(config: dict[str, Any], device: torch.device, rank: int) -> Any:
    """A Llama with frozen bf16 weights and fp32 adapters whose second factors are not zero."""
    import peft
    import transformers

    torch.manual_seed(0)
    llama_config = transformers.LlamaConfig(max_position_embeddings=8192, use_cache=False, **config)
    with torch.device(device):
        model = transformers.LlamaForCausalLM._from_config(llama_config, dtype=torch.bfloat16)
    settings = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=list(TARGETS))
    wrapped = peft.get_peft_model(model, settings)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.01)
    return wrapped.train()


class Projections(nn.Module):
    """The projections of an attention module, which a patch has computed together."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        for name, layer in zip(QKV, layers, strict=True):
            self.add_module(name, layer)

    def forward(self, x: Tensor) -> list[Tensor]:
        """What the layers give."""
        return [getattr(self, name)(x) for name in QKV]


def parts(model: Any, tokens: int, device: torch.device) -> dict[str, Callable[[], Tensor]]:
    """What is measured, by name: functions that give a scalar to differentiate."""
    layer = model.base_model.model.model.layers[0]
    shape = (1, tokens, model.config.hidden_size)
    x = torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True)
    layers = [getattr(layer.self_attn, name) for name in QKV]

    def projections() -> Tensor:
        losses = [projection(x).sum(dtype=torch.float32) for projection in layers]
        return torch.stack(losses).sum()

    one = Projections(layers)
    if isinstance(layers[0], Patched):
        patch(one)

    return {
        "mlp": lambda: layer.mlp(x).sum(dtype=torch.float32),
        "qkv": projections,
        "qkv as one": lambda: torch.stack([y.sum(dtype=torch.float32) for y in one(x)]).sum(),
    }


def steps(model: Any, tokens: int, device: torch.device) -> dict[str, Callable[[], Tensor]]:
    """A training step without its optimizer."""
    ids = torch.randint(0, model.config.vocab_size, (1, tokens), device=device)
    return {"step": lambda: model(input_ids=ids, labels=ids).loss}


def compare(
    config: dict[str, Any],
    make: Callable[[Any, int, torch.device], dict[str, Callable[[], Tensor]]],
    tokens: int,
    device: torch.device,
    rank: int,
    rounds: int,
) -> list[dict[str, Any]]:
    """Rows of the baseline and of ours, in both forms of precision."""
    rows = []
    baseline = adapted(config, device, rank)
    for variant in ("stock", "ours"):
        model = baseline if variant == "stock" else copy.deepcopy(baseline)
        if variant == "ours":
            patch(model)
        torch.manual_seed(1)
        for name, run in make(model, tokens, device).items():
            for form in FORMS:

                def once(run: Call = run, form: str = form, model: Any = model) -> Tensor:
                    with torch.autocast(device.type, torch.bfloat16, form == "autocast"):
                        value: Tensor = run()
                    value.backward()
                    for parameter in model.parameters():
                        parameter.grad = None
                    return value.detach()

                row = {"part": name, "form": form, "variant": variant, "value": float(once())}
                row["milliseconds"] = in_turns({"": once}, device, rounds, 0)[""]
                rows.append(row | {"added_bytes": added_bytes(once, device)})
    return rows


def shown(rows: Sequence[dict[str, Any]]) -> str:
    """A line for every part and form, ours beside the baseline."""
    lines = [
        f"{'part':10} {'form':14} {'stock ms':>9} {'ours ms':>9} {'stock MiB':>10} {'ours MiB':>9}"
    ]
    by = {(r["part"], r["form"], r["variant"]): r for r in rows}
    for part, form, variant in by:
        if variant == "stock":
            pair = [by[part, form, v] for v in ("stock", "ours")]
            times, bytes_ = ([r[k] for r in pair] for k in ("milliseconds", "added_bytes"))
            lines.append(
                f"{part:10} {form:14} {times[0]:9.3f} {times[1]:9.3f} "
                f"{bytes_[0] / 2**20:10.1f} {bytes_[1] / 2**20:9.1f}"
            )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and keep."""
    parser = argparse.ArgumentParser(description=__doc__)
    store.add_options(parser)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tiny", action="store_true", help="shapes for a CPU")
    options = parser.parse_args(arguments)
    device = device_of(options.tiny)
    tokens = 256 if options.tiny else options.tokens
    common = (tokens, device, options.rank, options.rounds)
    rows = compare({**LAYER, **(TINY if options.tiny else {})}, parts, *common)
    tiny = {**TINY, "num_hidden_layers": 2} if options.tiny else {}
    rows += compare({**SMALL, **tiny}, steps, *common)
    print(shown(rows))
    run = store.head("lora", options, device)
    store.keep({**run, "tokens": tokens, "rank": options.rank, "rows": rows}, options)


if __name__ == "__main__":
    main()
