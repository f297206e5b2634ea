"""What a head in 8 bits gains and costs: ``python -m benchmarks.float8 --store``.

Forward and backward of ``fused_linear_cross_entropy`` with exact products, with those of logits in
8 bits and with those of the gradient of hidden states as well, side by side: median time, peak
memory, and how far loss and gradients are from those of fp32. ``parts`` are the passes and products
alone, each as large as it is in a step, which tells what the rest of a step takes.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import liger_multi
from benchmarks import store
from liger_multi.bench import report
from liger_multi.memory import measure
from liger_multi.ops import fused_linear_cross_entropy

PRODUCTS = ("exact", "float8_logits", "float8")
SHAPES = ((8192, 4096, 128256), (16384, 2048, 151936), (32768, 4096, 32000), (8192, 896, 151936))


def _step(hidden: Tensor, weight: Tensor, target: Tensor) -> list[Tensor]:
    hidden.grad = weight.grad = None
    loss: Any = fused_linear_cross_entropy(hidden, weight, target)
    loss.backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return [loss.detach(), hidden.grad, weight.grad]


def _timed(run: Any, steps: int, device: torch.device) -> float:
    times = []
    for _ in range(steps):
        if device.type != "cpu":
            torch.accelerator.synchronize()
        start = time.perf_counter()
        run()
        if device.type != "cpu":
            torch.accelerator.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _off(found: Sequence[Tensor], exact: Sequence[Tensor]) -> list[float]:
    """Relative distance of the loss, and of each gradient by its norm."""
    return [((a.float() - b).norm() / b.norm()).item() for a, b in zip(found, exact, strict=True)]


def row(shape: tuple[int, int, int], steps: int) -> dict[str, Any]:
    """One shape: exact and in 8 bits."""
    rows, width, classes = shape
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    generator = torch.Generator(device).manual_seed(0)
    options: dict[str, Any] = {"generator": generator, "device": device}
    hidden = torch.randn(rows, width, **options).bfloat16().requires_grad_()
    weight = (torch.randn(classes, width, **options) / width**0.5).bfloat16().requires_grad_()
    target = torch.randint(classes, (rows,), **options)
    few = min(rows, 1024)  # of which fp32 has the answer
    part = hidden[:few].detach().float().requires_grad_(), weight.detach().float().requires_grad_()
    exact = _step(*part, target[:few])
    made: dict[str, Any] = {"shape": list(shape)}
    for products in PRODUCTS:
        liger_multi.configure({"head_gemms": products})
        small = hidden[:few].detach().requires_grad_()
        errors = _off(_step(small, weight, target[:few]), exact)
        for _ in range(2):
            _step(hidden, weight, target)
        seconds = _timed(lambda: _step(hidden, weight, target), steps, device)
        with measure(device) as peak:
            _step(hidden, weight, target)
        names = ("loss", "hidden_gradient", "weight_gradient")
        made[products] = {"seconds": seconds, "peak_bytes": peak.peak_bytes}
        made[products]["error"] = dict(zip(names, errors, strict=True))
    liger_multi.configure(None)
    hidden.grad = weight.grad = None
    if device.type != "cpu":
        made["parts"] = parts(hidden.detach(), weight.detach(), steps)
    return made


def parts(hidden: Tensor, weight: Tensor, steps: int) -> dict[str, float]:
    """Seconds of rounding and products alone; gradients of logits are those of all rows."""
    from liger_multi.backends.triton.cross_entropy.float8 import TritonRounding
    from liger_multi.reference.cross_entropy.float8 import GRADIENT, multiply

    to, device = TritonRounding(), hidden.device
    raw = torch.empty(hidden.shape[0], weight.shape[0], dtype=hidden.dtype, device=device)
    raw.uniform_(-1e-3, 1e-3)
    h, g, (w, across) = to.rounded(hidden), to.rounded(raw, GRADIENT), to.both_ways(weight)
    out = torch.empty_like(hidden)
    calls: dict[str, Callable[[], Any]] = {
        "round hidden": lambda: to.rounded(hidden),
        "round weight": lambda: to.rounded(weight),
        "round weight both ways": lambda: to.both_ways(weight),
        "round gradient of logits": lambda: to.rounded(raw, GRADIENT),
        "logits exact": lambda: torch.mm(hidden, weight.t(), out=raw),
        "logits in 8 bits, fast sums": lambda: multiply(h, w, raw, fast=True),
        "logits in 8 bits": lambda: multiply(h, w, raw),
        "gradient exact": lambda: torch.mm(raw, weight, out=out),
        "gradient in 8 bits": lambda: multiply(g, across, out),
    }
    found = {}
    for name, call in calls.items():
        for _ in range(2):
            call()
        found[name] = _timed(call, steps, device)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and keep."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.float8", description=__doc__)
    parser.add_argument("--shapes", help="ROWSxWIDTHxCLASSES, with commas")
    parser.add_argument("--steps", type=int, default=10)
    store.add_options(parser)
    given = parser.parse_args(arguments)
    shapes = list(SHAPES)
    if given.shapes:
        shapes = [tuple(map(int, text.split("x"))) for text in given.shapes.split(",")]  # type: ignore[misc]
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    data: dict[str, Any] = {"kind": "float8", "date": store.now(), "commit": given.commit}
    data |= {"device": report.device_facts(device), "versions": report.versions(), "rows": []}
    for shape in shapes:
        found = row(shape, given.steps)
        data["rows"].append(found)
        exact = found["exact"]["seconds"]
        for products in PRODUCTS:
            one = found[products]
            errors = ", ".join(f"{n} {100 * e:.3f} %" for n, e in one["error"].items())
            print(
                f"{shape} {products}: {1e3 * one['seconds']:.2f} ms "
                f"({one['seconds'] / exact:.3f}), {one['peak_bytes'] / 2**30:.2f} GiB; off by "
                f"{errors}",
                flush=True,
            )
        for name, seconds in found.get("parts", {}).items():
            print(f"    {name}: {1e3 * seconds:.2f} ms", flush=True)
        store.keep(data, given)
    return 0


if __name__ == "__main__":
    sys.exit(main())
