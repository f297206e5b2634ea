"""Step time and peak memory under recompute policies: ``python -m benchmarks.recompute``.

One process a model: it is built once, stock and then patched, and trains some steps under every
policy, under its own checkpointing and with activations on the host. An out-of-memory is a row.
``--predict`` writes the estimated peaks of the same rows and needs no accelerator.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

import liger_multi
from benchmarks import store
from benchmarks.models import Run, build
from liger_multi.bench import report
from liger_multi.memory import (
    POLICIES,
    apply_recompute,
    choose,
    estimate,
    layer_stats,
    offload_activations,
)

RUNS = ("llama-3.2-1b:8x2048", "qwen2-0.5b:16x2048")
HALF = "half of the bytes"  # that layers keep without a policy, chosen by their statistics
WARM = 2


def _policy(name: str) -> Callable[[Any, Run], list[Any]]:
    return lambda model, run: [apply_recompute(model, name)]


def _checkpointed(model: Any, run: Run) -> list[Any]:
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return []


def _half(model: Any, run: Run) -> list[Any]:
    stats = layer_stats(model, run.batch, run.tokens)
    budget = sum(layer["none"].kept_bytes for layer in stats.layers) // 2
    return [apply_recompute(model, choose(stats, budget).policies)]


def _offloaded(policy: str) -> Callable[[Any, Run], list[Any]]:
    return lambda model, run: [apply_recompute(model, policy), offload_activations(model)]


VARIANTS: dict[str, Callable[[Any, Run], list[Any]]] = {
    **{name: _policy(name) for name in POLICIES},
    "model's own checkpointing": _checkpointed,
    HALF: _half,
    "none, offloaded": _offloaded("none"),
    "full, offloaded": _offloaded("full"),
}


def measured(model: Any, optimizer: Any, run: Run, steps: int) -> dict[str, Any]:
    """Median step, and the allocator's peak."""
    device = next(model.parameters()).device
    module = torch.get_device_module(device)
    generator = torch.Generator(device).manual_seed(1)
    shape = (run.batch, run.tokens)
    ids = torch.randint(model.config.vocab_size, shape, generator=generator, device=device)
    times, loss = [], torch.zeros(())
    for step in range(WARM + steps):
        if device.type != "cpu":
            module.synchronize()
            if step == WARM:
                module.reset_peak_memory_stats()
        start = time.perf_counter()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if device.type != "cpu":
            module.synchronize()
        times.append(time.perf_counter() - start)
    kept = times[WARM:]
    return {
        "step_seconds": statistics.median(kept),
        "spread_percent": 100 * (max(kept) - min(kept)) / statistics.median(kept),
        "peak_bytes": module.max_memory_allocated() if device.type != "cpu" else None,
        "loss": loss.item(),
    }


def predicted(model: Any, run: Run) -> dict[str, Any]:
    """The estimated peak."""
    made = estimate(model, run.batch, run.tokens, optimizer="adamw")
    return {"estimated_bytes": made.peak_bytes}


def rows_of(run: Run, variants: Sequence[str], steps: int | None) -> Iterator[dict[str, Any]]:
    """Every variant, stock and patched; estimates only where no steps are asked for."""
    device = torch.device("meta")
    if steps is not None:
        device = torch.accelerator.current_accelerator() or torch.device("cpu")
    model = build(run, device)
    fused = {"fused": True} if device.type == "cuda" else {"foreach": False}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, **fused)  # type: ignore[arg-type]
    for patched in (False, True):
        if patched:
            liger_multi.patch(model)
        for name in variants:
            row: dict[str, Any] = {"run": str(run), "patched": patched, "variant": name}
            handles: list[Any] = []
            try:
                handles = VARIANTS[name](model, run)
                row["offloaded_bytes"] = 0
                if steps is None:
                    row |= predicted(model, run)
                else:
                    row |= measured(model, optimizer, run, steps)
                offloads = [getattr(one, "offloaded_bytes", 0) for one in handles]
                row["offloaded_bytes"] = sum(offloads)
                row["policies"] = next((str(h) for h in handles if hasattr(h, "policies")), "")
            except torch.OutOfMemoryError:
                row["failure"] = "out of memory"
            for one in handles:
                one.remove()
            model.gradient_checkpointing_disable()
            optimizer.zero_grad(set_to_none=True)
            gc.collect()
            if device.type not in ("cpu", "meta"):
                torch.get_device_module(device).empty_cache()
            yield row


def line(row: dict[str, Any], first: dict[str, Any]) -> str:
    """A row of the table; times beside those of the first row of the model."""
    name = f"{row['run']:22s} {'patched' if row['patched'] else 'stock':8s} {row['variant']:26s}"
    if "failure" in row:
        return f"{name} {row['failure']}"
    if "estimated_bytes" in row:
        return f"{name} {row['estimated_bytes'] / 2**30:8.2f} GiB estimated"
    base = first.get("step_seconds", row["step_seconds"])
    peak = f"{row['peak_bytes'] / 2**30:8.2f} GiB" if row["peak_bytes"] else "-"
    seconds = row["step_seconds"]
    return f"{name} {1e3 * seconds:9.1f} ms {seconds / base:6.3f} {peak} loss {row['loss']:.4f}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure or predict every variant of every run, and keep them."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recompute", description=__doc__)
    parser.add_argument("runs", nargs="*", default=list(RUNS), help="MODEL:BATCHxTOKENS")
    parser.add_argument("--variants", default=",".join(VARIANTS).replace(", ", "; "))
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--predict", action="store_true", help="estimated peaks only")
    store.add_options(parser)
    given = parser.parse_args(arguments)
    variants = [name.replace("; ", ", ") for name in given.variants.split(",")]
    wrong = [name for name in variants if name not in VARIANTS]
    if wrong:
        parser.error(f"unknown variant {wrong[0]!r}; known: {', '.join(VARIANTS)}")
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    head: dict[str, Any] = {"kind": "recompute-estimates" if given.predict else "recompute"}
    head |= {"date": store.now(), "commit": given.commit}
    head["device"] = store.ESTIMATED if given.predict else report.device_facts(device)
    head["versions"] = report.versions()
    rows: list[dict[str, Any]] = []
    for text in given.runs:
        first: dict[str, Any] = {}
        for row in rows_of(Run.parse(text), variants, None if given.predict else given.steps):
            first = first or row
            rows.append(row)
            print(line(row, first), flush=True)
            # written after each row, so that a run that is cut off leaves what it measured
            store.keep({**head, "rows": rows}, given)
    return 0


if __name__ == "__main__":
    sys.exit(main())
