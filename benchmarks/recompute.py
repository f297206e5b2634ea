"""Recompute policies, and the longest sequence that trains with them.

``python -m benchmarks.recompute``: step time and peak memory. One process per model: it is built
once, and trains some steps, unpatched and then patched, under every policy, under its own
checkpointing and with activations on the host. An out-of-memory is a row. ``--predict`` writes the
estimated peaks of the same rows and needs no accelerator.

``python -m benchmarks.recompute longest --model llama-3-8b``: batch 1, bf16, fused AdamW,
checkpointing on; ``stock``, ``liger`` (its own patch), ``ours`` (patch, tiled loss and tiled MLP,
each layer's input kept only). Every provider runs in a process of its own. The search starts at the
length that the estimate says fits, and halves the interval between the longest that trained and the
shortest that did not, each try one whole step. ``--limit-gb`` sets a smaller card.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

import liger_multi
from benchmarks import harness, store
from benchmarks.configs import MODELS, Run, build
from benchmarks.harness import (
    adamw,
    device_of,
    limit_memory,
    spread_percent,
    timed_steps,
    train_step,
)
from liger_multi.bench.measure import release
from liger_multi.memory import (
    POLICIES,
    apply_recompute,
    choose,
    decoder_layers,
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
    generator = torch.Generator(device).manual_seed(1)
    shape = (run.batch, run.tokens)
    ids = torch.randint(model.config.vocab_size, shape, generator=generator, device=device)
    step = functools.partial(train_step, model, ids, optimizer)
    report = timed_steps(step, device, steps, WARM)
    times = report.pop("seconds")
    spread = spread_percent(times)
    return {"step_seconds": statistics.median(times), "spread_percent": spread, **report}


def rows_of(run: Run, variants: Sequence[str], steps: int | None) -> Iterator[dict[str, Any]]:
    """Every variant, unpatched and patched; estimates only where no steps are asked for."""
    device = torch.device("meta") if steps is None else device_of()
    model = build(run, device)
    optimizer = adamw(model.parameters(), device)
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
                    guess = estimate(model, run.batch, run.tokens, optimizer="adamw")
                    row["estimated_bytes"] = guess.peak_bytes
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
            if device.type != "meta":
                release(device)
            yield row


def line(row: dict[str, Any], first: dict[str, Any]) -> str:
    """A row of the table; times beside those of the first row of the model."""
    name = (
        f"{row['run']:22s} {'patched' if row['patched'] else 'unpatched':9s} {row['variant']:26s}"
    )
    if "failure" in row:
        return f"{name} {row['failure']}"
    if "estimated_bytes" in row:
        return f"{name} {row['estimated_bytes'] / 2**30:8.2f} GiB estimated"
    base = first.get("step_seconds", row["step_seconds"])
    peak = f"{row['peak_bytes'] / 2**30:8.2f} GiB" if row["peak_bytes"] else "-"
    seconds = row["step_seconds"]
    return f"{name} {1e3 * seconds:9.1f} ms {seconds / base:6.3f} {peak} loss {row['loss']:.4f}"


def policies(arguments: Sequence[str]) -> int:
    """Measure or predict every variant of every run, and keep them."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recompute", description=__doc__)
    parser.add_argument("runs", nargs="*", default=list(RUNS), help="MODEL:BATCHxTOKENS")
    parser.add_argument("--variants", default=",".join(VARIANTS).replace(", ", "; "))
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--predict", action="store_true", help="estimated peaks only")
    store.add_options(parser)
    options = parser.parse_args(arguments)
    variants = [name.replace("; ", ", ") for name in options.variants.split(",")]
    wrong = [name for name in variants if name not in VARIANTS]
    if wrong:
        parser.error(f"unknown variant {wrong[0]!r}; known: {', '.join(VARIANTS)}")
    device = device_of()
    head = store.head("recompute", options, device)
    if options.predict:
        head |= {"kind": "recompute-estimates", "device": store.ESTIMATED}
    rows: list[dict[str, Any]] = []
    for text in options.runs:
        first: dict[str, Any] = {}
        for row in rows_of(Run.parse(text), variants, None if options.predict else options.steps):
            first = first or row
            rows.append(row)
            print(line(row, first), flush=True)
            # written after each row, so that a run that is cut off leaves what it measured
            store.keep({**head, "rows": rows}, options)
    return 0


# --- the longest sequence ---

LENGTH_STEP = 256  # lengths are multiples of it
SHARE = 0.985  # of the memory that estimates may fill: fragmentation, scratch of libraries


def _stock(model: Any) -> None:
    model.gradient_checkpointing_enable({"use_reentrant": False})


def _liger(model: Any) -> None:
    _stock(harness.liger(model))


def _ours(model: Any) -> None:
    from liger_multi.nn import TiledMLP

    liger_multi.patch(model)
    for _, layer in decoder_layers(model):
        mlp = getattr(layer, "mlp", None)
        if isinstance(mlp, nn.Module):
            layer.mlp = TiledMLP(mlp, preserve_rng_state=False)
    apply_recompute(model, "full", preserve_rng_state=False)


PROVIDERS: dict[str, Callable[[Any], None]] = {"stock": _stock, "liger": _liger, "ours": _ours}


def foretold(model: str, provider: str, room: int) -> int:
    """The length at which the estimated peak fills the memory; Liger's is taken to be ours."""

    def peak(tokens: int) -> int:
        meta_model = build(Run(model, 1, tokens, False), torch.device("meta"))
        PROVIDERS["stock" if provider == "stock" else "ours"](meta_model)
        return estimate(meta_model, 1, tokens, capacity=room).peak_bytes

    return extrapolated(peak, int(SHARE * room))


def extrapolated(peak: Callable[[int], int], room: int) -> int:
    """Where ``peak`` reaches ``room``.

    It is the highest of moments that each grow with the length on a line of their own, so that a
    line through short lengths has the slope of another moment: the length is quadrupled until the
    end is near, and the last line is drawn through the end itself.
    """
    lengths = [4096, 16384]
    peaks = [peak(tokens) for tokens in lengths]
    while True:
        slope = (peaks[-1] - peaks[-2]) / (lengths[-1] - lengths[-2])
        end = max(LENGTH_STEP, int(lengths[-1] + (room - peaks[-1]) / max(slope, 1.0)))
        if abs(end - lengths[-1]) <= 0.02 * end or end <= lengths[0]:
            return end
        lengths.append(min(end, 4 * lengths[-1]))
        peaks.append(peak(lengths[-1]))


def search(
    fits: Callable[[int], bool], start: int, resolution: float, clock: Callable[[], float]
) -> Iterator[tuple[int, bool]]:
    """Lengths to try and whether they fit, until the interval is small or the time is over.

    Args:
        fits: One try.
        start: Where to begin.
        resolution: Length of the interval, as a part of it.
        clock: Seconds that are left.
    """
    low, high, factor = 0, 0, 1.06
    tokens = max(LENGTH_STEP, start // LENGTH_STEP * LENGTH_STEP)
    while clock() > 0:
        good = fits(tokens)
        yield tokens, good
        low, high = (tokens, high) if good else (low, tokens)
        if high and high - low <= max(LENGTH_STEP, resolution * high):
            return
        if not high:
            tokens, factor = max(low + LENGTH_STEP, int(low * factor)), factor * 1.2
        elif not low:
            tokens, factor = (
                max(LENGTH_STEP, min(high - LENGTH_STEP, int(high / factor))),
                factor * 1.2,
            )
        else:
            tokens = (low + high) // 2
        tokens = tokens // LENGTH_STEP * LENGTH_STEP
        if tokens in (low, high):
            return


def measure_longest(model_name: str, provider: str, options: argparse.Namespace) -> dict[str, Any]:
    """Search in this process."""
    began = time.monotonic()
    device = device_of()
    module = torch.get_device_module(device)
    room = int((options.limit_gb or 0) * 1e9)
    limit_memory(device, room)
    if device.type != "cpu":
        free, total = module.mem_get_info()
        room = min(room or total, free)
    guess = options.start or foretold(model_name, provider, room)
    model = build(Run(model_name, 1, options.most, False), device)
    PROVIDERS[provider](model)
    optimizer = adamw(model.parameters(), device)
    tries: list[dict[str, Any]] = []

    def step(tokens: int) -> float:
        ids = torch.randint(model.config.vocab_size, (1, tokens), device=device)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        return float(loss.item())

    def fits(tokens: int) -> bool:
        start, row = time.monotonic(), {"tokens": tokens}
        if device.type != "cpu":
            module.reset_peak_memory_stats()
        with contextlib.suppress(torch.OutOfMemoryError):
            row["loss"] = step(tokens)  # type: ignore[assignment]
        optimizer.zero_grad(set_to_none=True)
        gc.collect()
        if device.type != "cpu":
            row["peak_bytes"] = module.max_memory_allocated()
            module.empty_cache()
        row["seconds"] = time.monotonic() - start  # type: ignore[assignment]
        tries.append(row)
        return "loss" in row

    step(LENGTH_STEP)  # optimizer states are there, libraries have their handles
    optimizer.zero_grad(set_to_none=True)
    ready = time.monotonic()
    left = lambda: options.seconds - (time.monotonic() - ready)  # noqa: E731
    probes = list(search(fits, guess, options.resolution, left))
    return {
        "predicted": guess,
        "longest": max((n for n, good in probes if good), default=0),
        "shortest_failed": min((n for n, good in probes if not good), default=None),
        "tries": tries,
        "seconds": time.monotonic() - began,
    }


def child(model: str, provider: str, options: argparse.Namespace) -> dict[str, Any]:
    """The same in a process of its own; a failure is a row too."""
    command = ["benchmarks.recompute", "longest", "--child", "--model", model]
    command += ["--provider", provider, "--seconds", str(options.seconds)]
    command += ["--resolution", str(options.resolution), "--most", str(options.most)]
    for name in ("limit_gb", "start"):
        if getattr(options, name) is not None:
            command += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    environment = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    return harness.child(*command, environment=environment)


def longest(arguments: Sequence[str]) -> int:
    """Search for the longest sequence of every provider and keep what was found."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.recompute longest", description=longest.__doc__
    )
    parser.add_argument("--model", default="llama-3-8b", choices=sorted(MODELS))
    parser.add_argument("--provider", default="stock,liger,ours", help="some of them, with commas")
    parser.add_argument("--limit-gb", type=float, help="memory of the card, in 1e9 bytes")
    parser.add_argument(
        "--seconds", type=float, default=75.0, help="to begin tries of one provider in"
    )
    parser.add_argument("--resolution", type=float, default=0.02)
    parser.add_argument("--start", type=int, help="first length, instead of the estimate's")
    parser.add_argument("--most", type=int, default=2**20, help="positions of the model")
    store.add_options(parser)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    providers = options.provider.split(",")
    wrong = [name for name in providers if name not in PROVIDERS]
    if wrong:
        parser.error(f"unknown provider {wrong[0]!r}; known: {', '.join(PROVIDERS)}")
    if options.child:
        print(json.dumps(measure_longest(options.model, providers[0], options)))
        return 0
    device = device_of()
    data = store.head("longest", options, device)
    data |= {"limit_gb": options.limit_gb, "rows": []}
    for provider in providers:
        row = {
            "model": options.model,
            "provider": provider,
            **child(options.model, provider, options),
        }
        data["rows"].append(row)
        said = row.get("failure") or (
            f"{row['longest']:,} tokens trained, {row['shortest_failed']} did not; "
            f"{row['predicted']:,} predicted; {len(row['tries'])} tries, {row['seconds']:.0f} s"
        )
        print(f"{options.model} {provider:6s} {said}", flush=True)
        store.keep(data, options)
    return int(any("failure" in row for row in data["rows"]))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure policies, or search for the longest sequence."""
    return store.run_command({"": policies, "longest": longest}, arguments)


if __name__ == "__main__":
    sys.exit(main())
