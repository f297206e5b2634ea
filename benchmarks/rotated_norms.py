"""QK-norm and RoPE in one operator or in two: ``python -m benchmarks.rotated_norms``.

A decoder layer of Qwen3-8B, Gemma 3 4B and OLMo 2 7B in bf16, 2 x 4096 tokens, patched with and
without ``rms_norm_rope``: time of its kernels in a profile of forward and backward, apart for
GEMMs, attention and everything else, which is called element-wise here. The key pays where it saves
5 % of that. First, outputs and gradients of both are compared. ``--tiny`` tries it on a CPU.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from benchmarks import store
from liger_multi import patch

LAYERS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-8b": (
        "Qwen3",
        {
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
        },
    ),
    "gemma-3-4b": (
        "Gemma3Text",
        {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "layer_types": ["full_attention"],
        },
    ),
    "olmo-2-7b": (
        "Olmo2",
        {
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
        },
    ),
}
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
KINDS = {
    "GEMMs": ("gemm", "nvjet", "cutlass", "cublas", "xmma", "aten::mm", "aten::bmm", "aten::addmm"),
    "attention": ("flash", "fmha", "attention", "cudnn"),
}
"""Words in the names of kernels; the first kind that has one counts, and everything else."""
VARIANTS = {"apart": {"rms_norm_rope": False}, "together": {}}


def build(name: str, variant: str, device: torch.device, tiny: bool) -> Any:
    """A model of one layer without a last norm; norms are not ones."""
    import transformers

    family, sizes = LAYERS[name]
    sizes = {**sizes, **{k: v for k, v in SMALL.items() if tiny and k in sizes}}
    config = getattr(transformers, f"{family}Config")(
        vocab_size=64,
        pad_token_id=0,
        num_hidden_layers=1,
        use_cache=False,
        attn_implementation="sdpa",
        **sizes,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = getattr(transformers, f"{family}Model")._from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if "norm" in path:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.norm = nn.Identity()
    patched = patch(model, **VARIANTS[variant])
    assert patched.count("rms_norm_rope") == (variant == "together")
    return model.train()


def step(model: Any, x: Tensor) -> list[Tensor]:
    """Output and gradients."""
    y = model(inputs_embeds=x).last_hidden_state
    trained = [p for n, p in model.named_parameters() if "embed_tokens" not in n]
    return [y, *torch.autograd.grad(y, [x, *trained], torch.ones_like(y))]


def kind_of(kernel: str) -> str:
    """The kind of a kernel by its name."""
    lower = kernel.lower()
    groups = (group for group, words in KINDS.items() if any(word in lower for word in words))
    return next(groups, "element-wise")


def profiled(model: Any, x: Tensor, device: torch.device) -> dict[str, float]:
    """Milliseconds of the kernels of a step by kind."""
    times = dict.fromkeys((*KINDS, "element-wise"), 0.0)
    cpu = device.type == "cpu"
    activities = [ProfilerActivity.CPU if cpu else ProfilerActivity.CUDA]
    with profile(activities=activities) as profiler:
        step(model, x)
        if not cpu:
            torch.accelerator.synchronize()
    for event in profiler.key_averages():
        time = event.self_cpu_time_total if cpu else event.self_device_time_total
        times[kind_of(event.key)] += time / 1e3
    return times


def compare(name: str, device: torch.device, tiny: bool, rounds: int) -> Iterator[dict[str, Any]]:
    """Rows of both variants, measured in turns."""
    models = {variant: build(name, variant, device, tiny) for variant in VARIANTS}
    torch.manual_seed(1)
    shape = (2, 32 if tiny else 4096, models["apart"].config.hidden_size)
    x = torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True)
    apart, together = (step(model, x) for model in models.values())
    worst = max(
        float(((a - b).float().norm() / b.float().norm()).detach())
        for a, b in zip(together, apart, strict=True)
    )
    if worst > 2e-2:  # a few roundings to bf16 in turn
        raise AssertionError(f"{name}: results differ by {worst:.1e}, relative by the norm")
    del apart, together
    times: dict[str, list[dict[str, float]]] = {variant: [] for variant in VARIANTS}
    for _ in range(rounds):
        for variant, model in models.items():
            times[variant].append(profiled(model, x, device))
    for variant, samples in times.items():
        middle = {group: statistics.median(one[group] for one in samples) for group in samples[0]}
        yield {"layer": name, "variant": variant, "difference": worst, "milliseconds": middle}


def shown(rows: Sequence[dict[str, Any]]) -> str:
    """Lines of both variants, with what the key saves."""
    apart, together = rows
    lines = []
    for row in rows:
        parts = " ".join(f"{group} {time:8.3f}" for group, time in row["milliseconds"].items())
        lines.append(f"{row['layer']:12} {row['variant']:9} {parts} ms")
    before, after = (row["milliseconds"]["element-wise"] for row in (apart, together))
    saved = 100 * (before - after) / before
    return "\n".join([*lines, f"{'':12} saved     {saved:.1f} % of element-wise time"])


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare, measure, print and keep."""
    parser = argparse.ArgumentParser(description=__doc__)
    store.add_options(parser)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tiny", action="store_true", help="shapes for a CPU")
    options = parser.parse_args(arguments)
    accelerator = (
        None if options.tiny else torch.accelerator.current_accelerator(check_available=True)
    )
    device, rows = accelerator or torch.device("cpu"), []
    for name in LAYERS:
        pair = list(compare(name, device, options.tiny, options.rounds))
        print(shown(pair), flush=True)
        rows += pair
    run = store.head("rotated-norms", options, device)
    store.keep({**run, "rows": rows}, options)


if __name__ == "__main__":
    main()
