"""The longest sequence that trains: ``python -m benchmarks.longest --model llama-3-8b``.

Batch 1, bf16, fused AdamW, checkpointing on; ``stock``, ``liger`` (its own patch), ``ours`` (patch,
tiled loss and tiled MLP, each layer's input kept only). Every provider runs in a process of its
own. The search starts at the length that the estimate says fits, and halves the interval between
the longest that trained and the shortest that did not, each try one whole step. ``--limit-gb`` sets
a smaller card, ``--draw`` makes a picture of result files.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks import store
from benchmarks.models import MODELS, ROOT, Run, build
from liger_multi.bench import report
from liger_multi.memory import apply_recompute, decoder_layers, estimate

STEP = 256  # lengths are multiples of it
SHARE = 0.985  # of the memory that estimates may fill: fragmentation, scratch of libraries


def _stock(model: Any) -> None:
    model.gradient_checkpointing_enable({"use_reentrant": False})


def _liger(model: Any) -> None:
    import importlib

    peer = importlib.import_module("liger_kernel.transformers")
    peer._apply_liger_kernel_to_instance(model=model)
    _stock(model)


def _ours(model: Any) -> None:
    import liger_multi
    from liger_multi.nn import TiledMLP

    liger_multi.patch(model)
    for _, layer in decoder_layers(model):
        found = getattr(layer, "mlp", None)
        if isinstance(found, nn.Module):
            layer.mlp = TiledMLP(found, preserve_rng_state=False)
    apply_recompute(model, "full", preserve_rng_state=False)


PROVIDERS: dict[str, Callable[[Any], None]] = {"stock": _stock, "liger": _liger, "ours": _ours}


def foretold(model: str, provider: str, room: int) -> int:
    """The length at which the estimated peak fills the room; Liger's as ours."""

    def peak(tokens: int) -> int:
        made = build(Run(model, 1, tokens, False), torch.device("meta"))
        PROVIDERS["stock" if provider == "stock" else "ours"](made)
        return estimate(made, 1, tokens, capacity=room).peak_bytes

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
        end = max(STEP, int(lengths[-1] + (room - peaks[-1]) / max(slope, 1.0)))
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
    tokens = max(STEP, start // STEP * STEP)
    while clock() > 0:
        good = fits(tokens)
        yield tokens, good
        low, high = (tokens, high) if good else (low, tokens)
        if high and high - low <= max(STEP, resolution * high):
            return
        if not high:
            tokens, factor = max(low + STEP, int(low * factor)), factor * 1.2
        elif not low:
            tokens, factor = max(STEP, min(high - STEP, int(high / factor))), factor * 1.2
        else:
            tokens = (low + high) // 2
        tokens = tokens // STEP * STEP
        if tokens in (low, high):
            return


def measure(model_name: str, provider: str, given: argparse.Namespace) -> dict[str, Any]:
    """Search in this process."""
    began = time.monotonic()
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    module = torch.get_device_module(device)
    room = int((given.limit_gb or 0) * 1e9)
    if device.type != "cpu":
        total = module.get_device_properties(0).total_memory
        if room:
            module.set_per_process_memory_fraction(min(1.0, room / total))
        room = min(room or total, module.mem_get_info()[0])
    guess = given.start or foretold(model_name, provider, room)
    model = build(Run(model_name, 1, given.most, False), device)
    PROVIDERS[provider](model)
    fused = {"fused": True} if device.type == "cuda" else {"foreach": False}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, **fused)  # type: ignore[arg-type]
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

    step(STEP)  # optimizer states are there, libraries have their handles
    optimizer.zero_grad(set_to_none=True)
    ready = time.monotonic()
    left = lambda: given.seconds - (time.monotonic() - ready)  # noqa: E731
    found = list(search(fits, guess, given.resolution, left))
    return {
        "predicted": guess,
        "longest": max((n for n, good in found if good), default=0),
        "shortest_failed": min((n for n, good in found if not good), default=None),
        "tries": tries,
        "seconds": time.monotonic() - began,
    }


def child(model: str, provider: str, given: argparse.Namespace) -> dict[str, Any]:
    """The same in a process of its own; a failure is a row too."""
    command = [sys.executable, "-m", "benchmarks.longest", "--child", "--model", model]
    command += ["--provider", provider, "--seconds", str(given.seconds)]
    command += ["--resolution", str(given.resolution), "--most", str(given.most)]
    for name in ("limit_gb", "start"):
        if getattr(given, name) is not None:
            command += [f"--{name.replace('_', '-')}", str(getattr(given, name))]
    environment = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", **os.environ}
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, env=environment
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode == 0 and lines:
        return json.loads(lines[-1])  # type: ignore[no-any-return]
    return {"failure": (done.stderr.strip().splitlines() or ["no output"])[-1][:300]}


def draw(path: Path) -> None:
    """Bars of the longest sequences in the results, a group a model and card."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from liger_multi.memory.breakdown import COLORS, GRID, INK

    groups: dict[str, dict[str, int]] = {}
    for data, row in store.rows("longest"):
        limit = f", {data['limit_gb']:g} GB" if data["limit_gb"] else ""
        group = groups.setdefault(f"{row['model']}{limit}", {})
        group[row["provider"]] = row.get("longest", 0)
    figure = Figure(figsize=(9, 1.2 + 1.5 * len(groups)), dpi=140, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(groups), 1, squeeze=False)[:, 0]
    colors = dict(zip(PROVIDERS, (COLORS[6], COLORS[2], COLORS[3]), strict=True))
    for axis, (name, group) in zip(axes, groups.items(), strict=True):
        order = [p for p in reversed(PROVIDERS) if p in group]
        axis.barh(order, [group[p] for p in order], color=[colors[p] for p in order])
        for place, provider in enumerate(order):
            axis.annotate(f" {group[provider]:,}", (group[provider], place), va="center")
        axis.set_title(f"{name}: longest sequence, tokens", loc="left", fontsize=11, color=INK)
        axis.set_axisbelow(True)
        axis.grid(axis="x", color=GRID)
        axis.margins(x=0.12)
        for spine in ("top", "right"):
            axis.spines[spine].set_visible(False)
    figure.savefig(path)


def main(arguments: Sequence[str] | None = None) -> int:
    """Search for every provider and keep what was found, or draw."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.longest", description=__doc__)
    parser.add_argument("--model", default="llama-3-8b", choices=sorted(MODELS))
    parser.add_argument("--provider", default="stock,liger,ours", help="some of them, with commas")
    parser.add_argument("--limit-gb", type=float, help="memory of the card, in 1e9 bytes")
    parser.add_argument(
        "--seconds", type=float, default=75.0, help="to begin tries of one provider in"
    )
    parser.add_argument("--resolution", type=float, default=0.02)
    parser.add_argument("--start", type=int, help="first length, instead of the estimate's")
    parser.add_argument("--most", type=int, default=2**20, help="positions of the model")
    parser.add_argument("--draw", type=Path, metavar="PNG", help="draw the kept results alone")
    store.add_options(parser)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    providers = given.provider.split(",")
    wrong = [name for name in providers if name not in PROVIDERS]
    if wrong:
        parser.error(f"unknown provider {wrong[0]!r}; known: {', '.join(PROVIDERS)}")
    if given.child:
        print(json.dumps(measure(given.model, providers[0], given)))
        return 0
    if given.draw:
        draw(given.draw)
        return 0
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    data: dict[str, Any] = {"kind": "longest", "date": store.now(), "commit": given.commit}
    data |= {"device": report.device_facts(device), "versions": report.versions()}
    data |= {"limit_gb": given.limit_gb, "rows": []}
    for provider in providers:
        row = {"model": given.model, "provider": provider, **child(given.model, provider, given)}
        data["rows"].append(row)
        said = row.get("failure") or (
            f"{row['longest']:,} tokens trained, {row['shortest_failed']} did not; "
            f"{row['predicted']:,} predicted; {len(row['tries'])} tries, {row['seconds']:.0f} s"
        )
        print(f"{given.model} {provider:6s} {said}", flush=True)
        store.keep(data, given)
    return int(any("failure" in row for row in data["rows"]))


if __name__ == "__main__":
    sys.exit(main())
