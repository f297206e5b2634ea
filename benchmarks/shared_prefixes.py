"""A step with shared prefixes beside one without: ``python -m benchmarks.shared_prefixes``.

Forward and backward of a policy in bf16 with random weights, with log-probabilities of the answers:
G answers of R tokens to a prompt of P. Variants: unpatched transformers with ``sdpa`` and padded
rows ("stock"), patched with the same rows ("unshared"), a packed row of the prompt and the answers
as documents apart ("floor": a tree attends to more, and shares no less), and the tree ("ours").
First, each model is compared in fp32, two layers of it, with its unshared batch. ``--tiny`` tries
all of it on a CPU; ``--seconds`` ends the measurement.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks import store
from liger_multi import patch, trees
from liger_multi.bench.measure import release
from liger_multi.patching import register_attention

SHAPES = ((8, 4096, 1024), (8, 4096, 256), (8, 1024, 1024), (1, 4096, 1024))
"""Answers, tokens of the prompt, tokens of an answer."""
_WIDE: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
    "use_cache": False,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("Qwen3", {**_WIDE, "intermediate_size": 6144, "num_hidden_layers": 14}),
    "hybrid": (
        "Qwen3_5Text",
        {
            **_WIDE,
            "num_key_value_heads": 2,
            "num_attention_heads": 8,
            "head_dim": 256,
            "intermediate_size": 6144,
            "num_hidden_layers": 8,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
        },
    ),
    "experts": (
        "Qwen3Moe",
        {
            **_WIDE,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 6,
        },
    ),
}
"""Like Qwen3-1.7B, Qwen3.5-2B and Qwen3-30B-A3B, with fewer layers."""
VARIANTS = ("ours", "floor", "unshared", "stock")
OTHERS = ("hybrid", "experts")  # of these, the first shape, tree and floor
SMALL = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}


def build(
    name: str, device: torch.device, dtype: torch.dtype, attention: str, **changes: Any
) -> Any:
    """A policy with random weights."""
    import transformers

    prefix, sizes = MODELS[name]
    known = {**sizes, **{n: v for n, v in changes.items() if n in sizes or n.startswith("linear")}}
    if prefix != "Qwen3_5Text":
        known = {n: v for n, v in known.items() if not n.startswith("linear")}
    config = getattr(transformers, f"{prefix}Config")(**known)
    config._attn_implementation = attention
    torch.manual_seed(0)
    model_class = getattr(transformers, f"{prefix.removesuffix('Text')}ForCausalLM")
    with torch.device(device):
        return model_class._from_config(config, dtype=dtype)


def groups(shape: tuple[int, int, int], vocabulary: int) -> list[Any]:
    """A prompt and its answers."""
    generator = torch.Generator().manual_seed(1)
    answers, prompt, length = shape

    def ids(count: int) -> list[int]:
        return torch.randint(vocabulary, (count,), generator=generator).tolist()

    return [(ids(prompt), [ids(length) for _ in range(answers)])]


# --- variants ---


def _padded_log_probs(model: Any, inputs: dict[str, Any], ids: Tensor, kept: slice) -> Tensor:
    logits = model(**inputs, logits_to_keep=ids.shape[1] - kept.start + 1).logits[:, :-1]
    log_p = logits.log_softmax(-1, dtype=torch.float32)
    chosen: Tensor = log_p.gather(-1, ids[:, kept, None])[..., 0]
    return chosen


def run_of(variant: str, model: Any, shape: tuple[int, int, int], device: Any) -> Callable[[], Any]:
    """A forward pass and the sum of the answers' log-probabilities."""
    count, prompt, length = shape
    batch = trees.pack(groups(shape, model.config.vocab_size), device=device)
    ids, _ = batch.unshared()
    if variant == "ours":
        return lambda: trees.scores(model, batch).log_probs.sum()
    if variant == "floor":
        row = batch.inputs["input_ids"]
        lengths = [prompt, *[length] * count]
        place = torch.cat([torch.arange(n, device=device) for n in lengths])[None]
        sources = torch.arange(prompt - 1, row.shape[1] - 1, device=device)

        def packed() -> Tensor:
            logits = model(input_ids=row, position_ids=place, use_cache=False).logits[:, sources]
            log_p = logits.log_softmax(-1, dtype=torch.float32)
            total: Tensor = log_p.gather(-1, row[:, prompt:, None]).sum()
            return total

        return packed
    return lambda: _padded_log_probs(
        model, {"input_ids": ids, "use_cache": False}, ids, slice(prompt, None)
    ).sum()


def measured(
    run: Callable[[], Any], model: Any, device: torch.device, rounds: int
) -> dict[str, Any]:
    """Median time of forward and backward in ms, and the peak above what the model takes."""
    times = []
    release(device)
    on_card = device.type != "cpu"
    before = torch.accelerator.memory_allocated() if on_card else 0
    for number in range(rounds + 1):
        model.zero_grad(set_to_none=True)
        if on_card:
            torch.accelerator.synchronize()
        started = time.perf_counter()
        run().backward()
        if on_card:
            torch.accelerator.synchronize()
        if number:  # the first one compiles kernels and tries the model
            times.append(1e3 * (time.perf_counter() - started))
        elif on_card:
            torch.accelerator.reset_peak_memory_stats()
    peak = torch.accelerator.max_memory_allocated() - before if on_card else 0
    model.zero_grad(set_to_none=True)
    return {"milliseconds": statistics.median(times), "peak_bytes": peak}


# --- what is checked first ---

RAGGED = [
    ((150, [(40, [(33, []), (5, [(64, []), (1, [])])]), (1, []), (90, [])])),
    ((70, [(20, []), (130, [])])),
]


def check(name: str, device: torch.device, small: dict[str, Any]) -> float:
    """The largest difference of two layers in fp32 from the unshared batch, by the largest number.

    Raises:
        AssertionError: It is more than rounding explains.
    """
    layers = 4 if name == "hybrid" else 2
    changes = {**small, "num_hidden_layers": layers, "vocab_size": 512}
    model = build(name, device, torch.float32, "liger_multi", **changes)
    patch(model)

    def filled(lengths: Sequence[Any], generator: torch.Generator) -> list[Any]:
        return [
            (torch.randint(512, (n,), generator=generator).tolist(), filled(below, generator))
            for n, below in lengths
        ]

    batch = trees.pack(filled(RAGGED, torch.Generator().manual_seed(2)), device=device)
    row, results = batch.inputs["input_ids"], []
    for shared in (True, False):
        if shared:
            with trees.shared(batch):
                logits = model(**batch.inputs).logits[0]
        else:
            parts = []
            for segment, length in enumerate(batch.tree.lengths):
                path = batch.tree.path(segment)
                parts.append(model(input_ids=row[:, path], use_cache=False).logits[0, -length:])
            logits = torch.cat(parts)
        log_p = torch.log_softmax(logits, -1)
        (log_p[:, :7].sin().sum() / 7).backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        results.append([log_p.detach(), *grads])
        model.zero_grad(set_to_none=True)
    scale = max(float(g.abs().max()) for g in results[1][1:])
    worst = 0.0
    for ours, right in zip(*results, strict=True):
        size = max(float(right.abs().max()), 1e-3 * scale)
        worst = max(worst, float((ours - right).abs().max()) / size)
    if worst > 2e-3:  # PyTorch's GEMMs may round to TF32
        raise AssertionError(f"{name}: the tree differs from its unshared batch by {worst:.1e}")
    return worst


# --- the command ---


def cases(tiny: bool) -> list[tuple[str, tuple[int, int, int], str]]:
    """Models, shapes and variants, the most telling first."""
    shapes = ((3, 40, 12), (1, 40, 12)) if tiny else SHAPES
    first = [("dense", shape, variant) for shape in shapes for variant in VARIANTS[:3]]
    others = [(name, shapes[0], variant) for name in OTHERS for variant in VARIANTS[:2]]
    return [*first, *others, *[("dense", shape, "stock") for shape in shapes]]


def line(row: dict[str, Any]) -> str:
    """A row as text."""
    head = f"{row['model']:8} {row['shape']:16} {row['variant']:9}"
    if "failed" in row:
        return f"{head} {row['failed']}"
    gib = row["peak_bytes"] / 2**30
    speed = row["tokens_per_second"]
    return f"{head} {row['milliseconds']:9.1f} ms {gib:7.2f} GiB {speed:9.0f} tokens/s"


def main(arguments: Sequence[str] | None = None) -> None:
    """Check, measure, print and keep; a time limit leaves out what is last."""
    parser = argparse.ArgumentParser(description=__doc__)
    store.add_options(parser)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=600.0, help="start nothing after these")
    parser.add_argument("--tiny", action="store_true", help="shapes for a CPU")
    options = parser.parse_args(arguments)
    started = time.monotonic()
    accelerator = (
        None if options.tiny else torch.accelerator.current_accelerator(check_available=True)
    )
    device = accelerator or torch.device("cpu")
    small = SMALL if options.tiny else {}
    dtype = torch.float32 if options.tiny else torch.bfloat16
    register_attention()
    for name in MODELS:
        print(f"{name}: equal to its unshared batch, {check(name, device, small):.1e}", flush=True)
        release(device)
    rows: list[dict[str, Any]] = []
    built: tuple[str, bool] | None = None
    model: Any = None
    for name, shape, variant in cases(options.tiny):
        if time.monotonic() - started > options.seconds:
            print(f"left out for want of time: {name} {shape} {variant}", flush=True)
            continue
        if built != (name, variant == "stock"):
            model = None
            release(device)
            attention = "sdpa" if variant == "stock" else "liger_multi"
            model, built = (
                build(name, device, dtype, attention, **small),
                (name, variant == "stock"),
            )
            if variant != "stock":
                patch(model)
        row: dict[str, Any] = {
            "model": name,
            "shape": "x".join(map(str, shape)),
            "variant": variant,
        }
        try:
            run = run_of(variant, model, shape, device)
            row |= measured(run, model, device, options.rounds)
            tokens = shape[0] * (shape[1] + shape[2])  # of the batch without sharing, for all
            row["tokens_per_second"] = 1e3 * tokens / row["milliseconds"]
        except torch.OutOfMemoryError as error:
            row["failed"] = str(error).partition(". GPU")[0]
        print(line(row), flush=True)
        rows.append(row)
    run_head = store.head("shared-prefixes", options, device)
    store.keep({**run_head, "rows": rows}, options)


if __name__ == "__main__":
    main()
