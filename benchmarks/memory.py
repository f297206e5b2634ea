"""Measured and estimated memory of training steps: ``python -m benchmarks.memory``.

A :class:`Case` is a training step: small ones for a CPU, real ones for an accelerator. On an
accelerator every case trains some steps in its process and the allocator's peak is taken.
``--store`` keeps one row a case with the estimate beside it, and timelines of a step. ``--cpu``
does the small cases by tracking storages, and ``--explain`` writes the estimates that
``docs/memory.md`` quotes; both need no accelerator.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import store
from benchmarks.harness import (
    adamw,
    causal,
    child,
    device_of,
    limit_memory,
    timed_steps,
    tracked_peak,
)
from liger_multi.memory import Estimate, compare, estimate, measure, profile
from liger_multi.memory.setup import DTYPES
from liger_multi.memory.sizes import config_of

# --- cases ---

_BASE: dict[str, Any] = {
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "vocab_size": 1999,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}
_HEADS = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
}
SMALL: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("Llama", {}),
    "gqa": ("Mistral", {"num_key_value_heads": 2, "sliding_window": None}),
    "moe": ("Mixtral", _EXPERTS),
    "tied": ("Qwen2", {"tie_word_embeddings": True}),
    "delta": ("Qwen3_5Text", {**_HEADS, "num_hidden_layers": 4, "head_dim": 16}),
    "scan": ("Mamba", {"state_size": 16, "hidden_size": 96, "num_hidden_layers": 3}),
    "heads_scan": (
        "Mamba2",
        {
            "hidden_size": 96,
            "num_heads": 12,
            "head_dim": 16,
            "state_size": 32,
            "n_groups": 1,
            "num_hidden_layers": 3,
            "chunk_size": 64,
        },
    ),
}
LARGE_MOE = {
    **_EXPERTS,
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
    "num_local_experts": 8,
    "max_position_embeddings": 4096,
}


def configuration(name: str, sequence: int) -> Any:
    """The configuration of a model by name, without a network."""
    import transformers

    if name in SMALL:
        family, extra = SMALL[name]
        config = getattr(transformers, f"{family}Config")(**{**_BASE, **extra})
    elif name == "moe-1b":
        config = transformers.MixtralConfig(**LARGE_MOE)
    else:
        config = config_of(name, sequence)
    config.use_cache = False
    if not name.endswith("scan"):
        config._attn_implementation = "sdpa"
    return config


@dataclass(frozen=True)
class Case:
    """One step. ``model`` is one of :data:`SMALL`, ``"moe-1b"`` or a published size."""

    model: str
    batch: int
    sequence: int
    dtype: str = "bfloat16"
    patched: bool = False
    checkpointing: bool = False
    lora: bool = False
    limit_gb: float | None = None

    def __str__(self) -> str:
        parts = [f"{self.model} {self.batch} x {self.sequence}", self.dtype]
        parts += ["LoRA"] * self.lora + ["checkpointing"] * self.checkpointing
        return ", ".join([*parts, "patched" if self.patched else "stock"])

    def as_data(self) -> dict[str, Any]:
        """The case as plain data."""
        return asdict(self)

    def config(self) -> Any:
        """The configuration of its model."""
        return configuration(self.model, self.sequence)

    def build(self, device: torch.device | str) -> Any:
        """The model with random weights, adapted, patched and checkpointed as the case says."""
        model = causal(self.config(), device, DTYPES[self.dtype][0])
        if self.lora:
            import peft

            settings = peft.LoraConfig(
                r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"
            )
            model = peft.get_peft_model(model, settings)
        if self.checkpointing:
            enable = getattr(model, "activation_checkpointing_enable", None)
            (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})
            if self.lora:
                model.enable_input_require_grads()
        if self.patched:
            from liger_multi import patch

            patch(model)
        return model.train()

    def estimated(self, device_type: str) -> Estimate:
        """What is predicted for it."""
        capacity = None if self.limit_gb is None else int(self.limit_gb * 1e9)
        optimizer = "adamw_loop" if device_type == "cpu" else "adamw"
        model = self.build("meta")
        return estimate(
            model,
            self.batch,
            self.sequence,
            dtype=self.dtype,
            optimizer=optimizer,
            device=device_type,
            capacity=capacity,
        )

    def step(self, model: Any) -> tuple[torch.optim.Optimizer, Callable[[], torch.Tensor]]:
        """An optimizer and a function that trains one step and returns the loss."""
        device = next(model.parameters()).device
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = adamw(trained, device)
        generator = torch.Generator(device).manual_seed(1)
        shape = (self.batch, self.sequence)
        count = model.config.vocab_size
        ids = torch.randint(count, shape, generator=generator, device=device)
        autocast = DTYPES[self.dtype][1]
        scaler = torch.amp.GradScaler(device.type, enabled=autocast is torch.float16)

        def run() -> torch.Tensor:
            with contextlib.ExitStack() as stack:
                if autocast is not None:
                    stack.enter_context(torch.autocast(device.type, dtype=autocast))
                loss: torch.Tensor = model(input_ids=ids, labels=ids).loss
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
            return loss.detach()

        return optimizer, run


CPU = [
    Case(model_type, 4, 128, "float32", patched, checkpointing, lora)
    for model_type, checkpointing, lora in (
        ("dense", False, False),
        ("gqa", False, False),
        ("moe", False, False),
        ("tied", False, False),
        ("dense", False, True),
        ("dense", True, False),
        ("delta", False, False),
        ("scan", False, False),
        ("heads_scan", False, False),
    )
    for patched in (False, True)
]
T4 = 15.36
_SMALL_CARD = [
    Case("qwen2-0.5b", batch, sequence, dtype, patched, limit_gb=T4)
    for dtype in ("bfloat16", "float16-autocast", "float32")
    for batch, sequence in ((2, 128), (8, 256), (8, 512))
    for patched in (False, True)
]
_LARGE = [
    Case(model, batch, sequence, "bfloat16", patched, checkpointing, lora)
    for model, batch, sequence, checkpointing, lora in (
        ("qwen2-0.5b", 16, 2048, False, False),
        ("llama-3.2-1b", 8, 4096, False, False),
        ("qwen2.5-7b", 2, 2048, False, False),
        ("qwen2.5-7b", 2, 4096, True, False),
        ("llama-3-8b", 2, 4096, True, False),
        ("llama-3-8b", 2, 4096, False, True),
        ("moe-1b", 4, 2048, False, False),
    )
    for patched in (False, True)
]
ACCELERATOR = [*_SMALL_CARD, *_LARGE]


# --- measuring ---

# model, batch, sequence, and how the training is spread
STORIES: list[tuple[str, int, int, dict[str, Any]]] = [
    ("qwen2-0.5b", 2, 128, {}),
    ("qwen2-0.5b", 8, 256, {}),
    ("qwen2-0.5b", 8, 512, {}),
    ("qwen2-0.5b", 8, 512, {"dtype": "float16-autocast"}),
    ("qwen2-0.5b", 8, 512, {"dtype": "float32"}),
    ("llama-3.2-1b", 8, 2048, {}),
    ("qwen2.5-7b", 4, 2048, {"dtype": "bfloat16-mixed", "fsdp": True, "world": 8}),
    ("qwen2.5-14b", 1, 4096, {"dtype": "bfloat16-mixed", "zero_stage": 3, "world": 8}),
    (
        "qwen2.5-14b",
        1,
        4096,
        {"dtype": "bfloat16-mixed", "zero_stage": 3, "world": 8, "checkpointing": True},
    ),
    (
        "qwen2.5-14b",
        1,
        32768,
        {"dtype": "bfloat16-mixed", "zero_stage": 3, "world": 8, "checkpointing": True},
    ),
]


def explained() -> list[dict[str, Any]]:
    """The stories' estimates, unpatched and patched."""
    rows = []
    for model, batch, sequence, options in STORIES:
        row: dict[str, Any] = {"model": model, "batch": batch, "sequence": sequence, **options}
        for name, patched in (("stock", False), ("patched", True)):
            estimated = estimate(
                config_of(model, sequence), batch, sequence, patched=patched, **options
            ).as_data()
            del estimated["profile"]
            row[name] = estimated
        rows.append(row)
    return rows


def on_cpu(case: Case) -> dict[str, Any]:
    """Measure a small case by tracking storages."""
    model = case.build("cpu")
    optimizer, step = case.step(model)
    step()
    return {"measured_bytes": tracked_peak(model, optimizer, step)}


def on_device(case: Case, steps: int) -> dict[str, Any]:
    """Measure a case with the allocator of this process."""
    device = device_of()
    limit_memory(device, (case.limit_gb or 0) * 1e9)
    _, step = case.step(case.build(device))
    report = timed_steps(step, device, steps, 3)
    return {"measured_bytes": report["peak_bytes"], "loss": report["loss"]}


def profiled() -> dict[str, Any]:
    """Timelines of both models from the allocator's history, and how well they were named."""
    device = device_of()
    profiles = []
    for patched in (False, True):
        case = Case("qwen2-0.5b", 8, 512, patched=patched)
        model = case.build(device)
        optimizer, step = case.step(model)
        step()
        with measure(device) as peak:
            step()
        measured = profile(step, model=model, optimizer=optimizer, warm=0, title=str(case))
        measured.allocator["peak without recording"] = peak.peak_bytes
        profiles.append(measured)
        del model, optimizer, step
        gc.collect()  # a model holds itself
        torch.get_device_module(device).empty_cache()
    return {"profiles": [p.as_data() for p in profiles], "text": str(compare(*profiles))}


def rows_of(cases: Sequence[Case], device_type: str, steps: int) -> list[dict[str, Any]]:
    """Measured beside estimated, with progress on the screen."""
    from rich.console import Console
    from rich.progress import track

    console, rows = Console(), []
    for case in track(cases, "memory", console=console):
        if device_type == "cpu":
            data = on_cpu(case)
        else:
            data = child(
                "benchmarks.memory", "--case", json.dumps(case.as_data()), "--steps", str(steps)
            )
        guess = case.estimated(device_type).peak_bytes
        row = {"case": case.as_data(), **data, "estimated_bytes": guess}
        got = data.get("measured_bytes")
        said = data.get("failure", "")
        if got:
            row["error_percent"] = 100 * (guess / got - 1)
            said = f"{got / 2**30:9.3f} GiB measured, {row['error_percent']:+.2f} %"
        console.print(
            f"{case!s:60s} {guess / 2**30:9.3f} GiB estimated, {said}",
            highlight=False,
            soft_wrap=True,
        )
        rows.append(row)
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, estimate and write; 1 where an estimate is off by more than a tenth."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", description=__doc__)
    parser.add_argument("--cpu", action="store_true", help="the small cases, storages tracked")
    parser.add_argument("--explain", action="store_true", help="only the estimates of the page")
    parser.add_argument("--only", default="", help="cases whose name contains this, nothing else")
    parser.add_argument("--parts", default="cases,profile", help="what to do")
    parser.add_argument("--steps", type=int, default=3)
    store.add_options(parser)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--part", choices=["profile"], help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.case or options.part:
        if options.case:
            data = on_device(Case(**json.loads(options.case)), options.steps)
        else:
            data = profiled()
        sys.stdout.write(json.dumps(data) + "\n")
        return 0
    device = device_of(tiny=options.cpu)
    head = store.head("memory", options, device)
    if options.explain:
        run = {"kind": "memory-estimates", "device": store.ESTIMATED, "rows": explained()}
        said(store.keep(head | run, options))
        return 0
    cases = CPU if device.type == "cpu" else ACCELERATOR
    if device.type == "cpu":  # storages are counted, whatever processor runs
        head["device"] = {"name": "CPU, storages tracked"}
    parts = options.parts.split(",")
    chosen = [c for c in cases if options.only in str(c)] if "cases" in parts else []
    rows = rows_of(chosen, device.type, options.steps)
    runs = [{**head, "rows": rows}]
    if device.type != "cpu" and not options.only and "profile" in parts:
        done = child("benchmarks.memory", "--part", "profile")
        runs.append({**head, "kind": "memory-profile", "rows": done.get("profiles", [done])})
    said(store.keep([run for run in runs if run["rows"]], options))
    return int(any(abs(row.get("error_percent", 0)) > 10 for row in rows))


def said(paths: list[Path]) -> None:
    """Name the files that were written."""
    for path in paths:
        print(f"written to {path}")


if __name__ == "__main__":
    sys.exit(main())
