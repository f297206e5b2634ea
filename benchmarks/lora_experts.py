"""LoRA on stacked experts, by PEFT and as one operator: ``python -m benchmarks.lora_experts``.

The experts of a layer of Qwen3-30B-A3B (128 experts, 8 a token, 8192 tokens, r = 16 on both stacks)
in bf16, with adapters in fp32 (PEFT's default) and in bf16. First, gradients of a small layer in
fp32 are compared with PEFT's; then time and peak of forward and backward are measured of

    frozen    the patched layer without adapters, which no adapter can undercut
    stock     PEFT around the unpatched layer
    patched   PEFT around the patched layer, with ``lora=False``
    ours      the patched layer with its adapters

Where bitsandbytes is installed, also with stacks in 4 bits (NF4); PEFT's second forward fails on
those, so ratios are to stock with the same adapters in bf16. Memory is above the peak of the frozen
layer. The target is 0.4 of the time of stock and a tenth of its memory. ``--tiny`` tries it on a
CPU.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import importlib.util
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import store
from benchmarks.lora import measured
from liger_multi import patch

LAYER = {"hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 128}
SMALL = {"hidden_size": 64, "moe_intermediate_size": 32, "num_experts": 8}
STACKS = ("experts.gate_up_proj", "experts.down_proj")
VARIANTS: dict[str, dict[str, Any] | None] = {
    "frozen": {},
    "stock": None,
    "patched": {"lora": False},
    "ours": {},
}
"""Options of the patch."""
FORMS = {
    "fp32 adapters": (torch.float32, False, tuple(VARIANTS)),
    "bf16 adapters": (torch.bfloat16, False, tuple(VARIANTS)),
    "4-bit stacks": (torch.bfloat16, True, ("frozen", "ours")),
}
"""Dtype of adapters, whether stacks are in 4 bits, and variants that run so."""
LIKE = {"4-bit stacks": "bf16 adapters"}
"""Forms whose stock is that of another form."""


class Layer(nn.Module):
    """Experts behind a routing that is given."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, x: Tensor, index: Tensor, routing: Tensor) -> Tensor:
        """What the experts give."""
        return self.experts(x, index, routing)  # type: ignore[no-any-return]


def build(sizes: dict[str, int], device: torch.device, dtype: torch.dtype) -> Layer:
    """Frozen experts of a model of one layer with random weights."""
    import transformers

    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_experts_per_tok=min(8, sizes["num_experts"] // 2),
        **sizes,
    )
    with torch.device(device):
        model = transformers.Qwen3MoeForCausalLM._from_config(config, dtype=dtype)
    return Layer(model.model.layers[0].mlp.experts).requires_grad_(False)


def adapted(layer: Layer, rank: int, thin: torch.dtype) -> Layer:
    """The layer with adapters on both stacks, whose second factors are not zero."""
    import peft

    settings = peft.LoraConfig(
        r=rank, lora_alpha=2 * rank, target_modules=[], target_parameters=list(STACKS)
    )
    wrapped = peft.inject_adapter_in_model(settings, layer)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                parameter.data = parameter.data.to(thin)
                parameter.requires_grad_()
            if "lora_B" in name:
                parameter.normal_(std=0.01)
    return wrapped.train()  # type: ignore[no-any-return]


def quantized(layer: Layer) -> Layer:
    """The layer with stacks in 4 bits."""
    theirs = importlib.import_module("bitsandbytes.nn.parametrize")
    experts: Any = next(m for m in layer.modules() if type(m).__name__.endswith("Experts"))
    for stack in STACKS:
        theirs.replace_parameter_4bit(experts, stack.rpartition(".")[2], quant_type="nf4")
    return layer


def inputs(
    sizes: dict[str, int], tokens: int, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, and the experts of every token with their weights."""
    torch.manual_seed(1)
    x = torch.randn(tokens, sizes["hidden_size"], device=device, dtype=dtype, requires_grad=True)
    scores = torch.randn(tokens, sizes["num_experts"], device=device).softmax(-1)
    routing, index = scores.topk(min(8, sizes["num_experts"] // 2))
    return x, index, (routing / routing.sum(-1, keepdim=True)).to(dtype).requires_grad_()


def check(device: torch.device, rank: int) -> None:
    """Compare output and gradients of a small layer in fp32 with PEFT's."""
    tensors = inputs(SMALL, 200, device, torch.float32)
    stock = adapted(build(SMALL, device, torch.float32), rank, torch.float32)
    ours = copy.deepcopy(stock)
    assert patch(ours).count("lora") == 1
    results: list[list[Tensor]] = []
    for layer in (stock, ours):
        y = layer(*tensors)
        thin = [p for p in layer.parameters() if p.requires_grad]
        results.append([y, *torch.autograd.grad(y.square().sum(), [tensors[0], tensors[2], *thin])])
    for mine, expected in zip(results[1], results[0], strict=True):
        error = float(((mine - expected).abs().max() / expected.abs().max()).detach())
        if error > 1e-3:  # PyTorch's GEMMs may round to TF32
            raise AssertionError(f"gradients differ from PEFT's by {error:.1e} of the largest")
    print(f"equal to PEFT in fp32, {len(results[0])} tensors")


def compare(
    sizes: dict[str, int], tokens: int, device: torch.device, rank: int, rounds: int
) -> list[dict[str, Any]]:
    """Rows of every variant, with adapters of either dtype."""
    tensors, rows = inputs(sizes, tokens, device, torch.bfloat16), []
    for form, (thin, packed, variants) in FORMS.items():
        if packed and importlib.util.find_spec("bitsandbytes") is None:
            continue
        for variant in variants:
            layer, options = build(sizes, device, torch.bfloat16), VARIANTS[variant]
            if variant != "frozen":
                layer = adapted(layer, rank, thin)
            if packed:
                layer = quantized(layer)
            if options is not None:
                patch(layer, **options)

            def run(layer: Callable[..., Tensor] = layer) -> Tensor:
                return layer(*tensors).sum(dtype=torch.float32)

            result = measured(run, layer, nullcontext, device, rounds)
            rows.append({"part": "experts", "form": form, "variant": variant, **result})
            tensors[0].grad = tensors[2].grad = None
            del layer, run
    return rows


def shown(rows: Sequence[dict[str, Any]]) -> str:
    """A line for every variant, with ratios to stock; memory is above that of the frozen layer."""
    lines = [f"{'adapters':14} {'variant':8} {'ms':>9} {'of stock':>9} {'MiB':>9} {'of stock':>9}"]
    for form in dict.fromkeys(row["form"] for row in rows):
        by, like = (
            {row["variant"]: row for row in rows if row["form"] == name}
            for name in (form, LIKE.get(form, form))
        )
        base = like["stock"]["added_bytes"] - like["frozen"]["added_bytes"]
        for name, row in by.items():
            more = row["added_bytes"] - by["frozen"]["added_bytes"]
            ratio = row["milliseconds"] / like["stock"]["milliseconds"]
            lines.append(
                f"{form:14} {name:8} {row['milliseconds']:9.3f} {ratio:9.3f} "
                f"{more / 2**20:9.1f} {more / base if base else 0.0:9.3f}"
            )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Check, measure, print and keep."""
    parser = argparse.ArgumentParser(description=__doc__)
    store.add_options(parser)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tiny", action="store_true", help="shapes for a CPU")
    options = parser.parse_args(arguments)
    accelerator = (
        None if options.tiny else torch.accelerator.current_accelerator(check_available=True)
    )
    device = accelerator or torch.device("cpu")
    tokens = 64 if options.tiny else options.tokens
    check(device, options.rank)
    rows = compare(SMALL if options.tiny else LAYER, tokens, device, options.rank, options.rounds)
    print(shown(rows))
    run = store.head("lora", options, device)
    store.keep({**run, "tokens": tokens, "rank": options.rank, "rows": rows}, options)


if __name__ == "__main__":
    main()
