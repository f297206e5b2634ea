"""Steps of hybrid models, patched and unpatched: ``python -m benchmarks.hybrid_models``.

A step is forward and backward of one row of random tokens, in bf16 and without an optimizer.
Weights are random. Printed are tokens/s of the fastest of the steps after the first, and the peak
of memory. No other package for these layers may be installed: transformers would use it.
``--lines FILE`` writes what is printed, for ``python -m benchmarks.store --notes hybrid-models``.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import liger_multi
from benchmarks.memory import HYBRIDS

_QWEN: dict[str, Any] = HYBRIDS["0.8B"]
QWEN: dict[str, dict[str, Any]] = {
    **HYBRIDS,
    "1B": {**_QWEN, "hidden_size": 1536, "intermediate_size": 4096, "num_hidden_layers": 20},
    "tiny": {
        **_QWEN,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "vocab_size": 500,
    },
}
BAMBA: dict[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "mamba_n_heads": 64,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 256,
    "vocab_size": 128256,
    "attn_layer_indices": [9, 18],
    "max_position_embeddings": 262144,
}
OTHERS = ("fla", "mamba_ssm", "causal_conv1d")


def config_of(name: str) -> Any:
    """The configuration of a model."""
    import transformers

    if name in QWEN:
        return transformers.Qwen3_5TextConfig(**QWEN[name])
    return transformers.BambaConfig(**BAMBA)


def step_of(name: str, tokens: int, patched: bool, device: str) -> Callable[[], float]:
    """A model as a step, which returns the loss."""
    import transformers

    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        config_of(name.split("/")[0]), dtype=torch.bfloat16, attn_implementation="sdpa"
    )
    model = model.to(device).train()
    if name.endswith("/checkpointing"):
        model.gradient_checkpointing_enable()
    if patched:
        liger_multi.patch(model)
    row = torch.randint(0, model.config.vocab_size, (1, tokens), device=device)

    def step() -> float:
        model.zero_grad(set_to_none=True)
        loss = model(input_ids=row, labels=row, use_cache=False).loss
        loss.backward()
        return float(loss.detach())

    return step


def measured(name: str, tokens: int, patched: bool, steps: int, device: str) -> str:
    """One line, or that memory was not enough."""
    head = f"{name} {tokens}, {'patched' if patched else 'unpatched'}"
    gpu = device == "cuda"
    try:
        with torch.device(device):
            step = step_of(name, tokens, patched, device)
        step()
        if gpu:
            torch.cuda.reset_peak_memory_stats()
        times = []
        for _ in range(steps):
            begin = time.perf_counter()
            loss = step()  # waits for the device
            times.append(time.perf_counter() - begin)
    except torch.OutOfMemoryError:
        return f"{head}: out of memory"
    peak = torch.cuda.max_memory_allocated() / 2**30 if gpu else float("nan")
    speed = tokens / min(times)
    return f"{head}, [tokens/s]: {speed:.0f}; peak [GiB]: {peak:.1f}; loss: {loss:.4f}"


def main() -> int:
    """Measure what is named, such as ``1B:8192`` or ``bamba/checkpointing:32768:patched``."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hybrid_models", description=__doc__)
    parser.add_argument("runs", nargs="*", default=["1B:8192"])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--lines", type=Path, metavar="FILE")
    options = parser.parse_args()
    for other in OTHERS:
        if importlib.util.find_spec(other) is not None:
            parser.error(f"{other} is installed: transformers would use it")
    lines = []
    for run in options.runs:
        name, tokens, *only = run.split(":")
        for which in only or ("patched", "unpatched"):
            line = measured(name, int(tokens), which == "patched", options.steps, options.device)
            print(line, flush=True)
            lines.append(line)
            if options.lines is not None:
                options.lines.write_text("\n".join(lines) + "\n")
            gc.collect()
            if options.device == "cuda":
                torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
