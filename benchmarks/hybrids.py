"""Functions of hybrid models in transformers and in operators: ``python -m benchmarks.hybrids``.

transformers runs a convolution or a recurrence by plain PyTorch where no other package is
installed. Each of these functions is called in turns with the operator that a patch puts in its
place, on one device: time and peak memory of forward and backward, beside the arguments. ``--lines
FILE`` writes what is printed, for ``python -m benchmarks.store --notes``.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from liger_multi.memory import measure
from liger_multi.patching.mixers.fused import serving

Arguments = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One function of a modeling file.

    Attributes:
        model: The folder of the modeling file.
        name: Of the function.
        shape: What is measured, in words.
        make: Its arguments, from a function that draws normal numbers.
    """

    model: str
    name: str
    shape: str
    make: Callable[[Callable[..., Tensor]], Arguments]


def _delta_rule(draw: Callable[..., Tensor]) -> Arguments:
    rows = {name: draw(1, 2048, 8, 128) for name in ("query", "key", "value")}
    gates = {"g": -draw(1, 2048, 8).abs(), "beta": draw(1, 2048, 8).sigmoid()}
    return {**rows, **gates, "use_qk_l2norm_in_kernel": True}


def _kimi(draw: Callable[..., Tensor]) -> Arguments:
    tensors = _delta_rule(lambda *shape: draw(1, 1024, 4, *shape[3:]))
    return {**tensors, "g": -draw(1, 1024, 4, 128).abs()}


def _heads_scan(draw: Callable[..., Tensor]) -> Arguments:
    return {
        "hidden_states": draw(1, 2048, 16, 64),
        "dt": draw(1, 2048, 16),
        "A": -draw(16).abs(),
        "B": draw(1, 2048, 1, 128),
        "C": draw(1, 2048, 1, 128),
        "chunk_size": 256,
        "D": draw(16),
        "dt_bias": draw(16),
        "dt_softplus": True,
    }


def _channels_scan(draw: Callable[..., Tensor]) -> Arguments:
    rows = {name: draw(1, 512, 512) for name in ("hidden_states", "dt", "z")}
    numbers = {name: draw(1, 16, 512) for name in ("B", "C")}
    vectors = {name: draw(512) for name in ("D", "delta_bias")}
    return {**rows, **numbers, **vectors, "A": -draw(512, 16).abs(), "delta_softplus": True}


def _convolution(draw: Callable[..., Tensor]) -> Arguments:
    # channels-first as mixers have it: a view of what a projection made
    x = draw(1, 8192, 2048).mT
    return {"hidden_states": x, "weight": draw(2048, 4), "activation": "silu"}


CASES = (
    Case("qwen3_next", "torch_chunk_gated_delta_rule", "2048 tokens, 8 heads of 128", _delta_rule),
    Case("kimi_linear", "chunk_kimi_delta_attention", "1024 tokens, 4 heads of 128", _kimi),
    Case("mamba2", "mamba2_chunk_scan", "2048 tokens, 16 heads of 64, 128 states", _heads_scan),
    Case("mamba", "mamba_selective_scan", "512 tokens, 512 channels, 16 states", _channels_scan),
    Case("mamba", "causal_conv1d_fn", "8192 tokens, 2048 channels, 4 weights", _convolution),
)


def _step(function: Callable[..., Any], arguments: Arguments, dy: Tensor | None = None) -> Tensor:
    """The result of a function, after its backward where there is a gradient of it."""
    out = function(**arguments)
    y: Tensor = out[0] if isinstance(out, tuple) else out
    if dy is not None:
        leaves = [x for x in arguments.values() if isinstance(x, Tensor)]
        torch.autograd.grad(y, leaves, dy)
    return y.detach()


def measured(case: Case, device: torch.device, rounds: int) -> str:
    """One line: times in ms of the fastest of ``rounds`` calls, peaks in MiB, and the difference.

    Raises:
        ValueError: transformers has no such function, or it computes something else.
    """
    module = f"transformers.models.{case.model}.modeling_{case.model}"
    stock = getattr(importlib.import_module(module), case.name)
    ours = serving(case.name, stock)
    if ours is None:
        raise ValueError(f"{module}.{case.name} computes something else than its operator")
    generator = torch.Generator().manual_seed(0)
    arguments = case.make(lambda *shape: torch.randn(*shape, generator=generator).to(device))
    arguments = {
        n: x.requires_grad_() if isinstance(x, Tensor) else x for n, x in arguments.items()
    }
    sides = {"transformers": stock, "operator": ours}
    results = {name: _step(function, arguments) for name, function in sides.items()}
    dy = torch.ones_like(results["operator"])
    apart = (results["operator"] - results["transformers"]).norm() / results["transformers"].norm()
    times: dict[str, list[float]] = {name: [] for name in sides}
    peaks = {}
    for name, function in sides.items():
        with measure(
            device, known=[*(x for x in arguments.values() if isinstance(x, Tensor)), dy]
        ) as p:
            _step(function, arguments, dy)
        peaks[name] = p.added_bytes / 2**20
    for _ in range(rounds):
        for name, function in sides.items():
            begin = time.perf_counter()
            _step(function, arguments, dy)
            if device.type != "cpu":
                torch.accelerator.synchronize()
            times[name].append((time.perf_counter() - begin) * 1e3)
    parts = [
        f"{name} {min(times[name]):.1f} ms (median {statistics.median(times[name]):.1f}), "
        f"{peaks[name]:.1f} MiB"
        for name in sides
    ]
    return f"{case.name}, {case.shape}: {'; '.join(parts)}; relative difference {apart:.1e}"


def main() -> int:
    """Measure every case."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hybrids", description=__doc__)
    parser.add_argument("--device", default="cpu", type=torch.device)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--lines", type=Path, metavar="FILE")
    options = parser.parse_args()
    head = (
        f"python -m benchmarks.hybrids, fp32, {torch.get_num_threads()} thread(s), forward and "
        f"backward, the fastest of {options.rounds} calls in turns; peak beside the arguments"
    )
    lines = [head]
    print(head, flush=True)
    for case in CASES:
        lines.append(measured(case, options.device, options.rounds))
        print(lines[-1], flush=True)
    if options.lines is not None:
        options.lines.write_text("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
