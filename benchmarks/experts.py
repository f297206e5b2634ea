"""Experts on one device, every way that a launch table may choose.

First whole calls, forward and with backward: ours as the tables have it, ours with PyTorch's
grouped GEMMs, ours with Triton's alone, PyTorch's composition, Liger's. Then every product by
itself both ways, with the rate that it reaches, which is what decides ``library`` in a table.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from liger_multi import ops
from liger_multi.backends.triton.experts import fused_moe, grouped
from liger_multi.backends.triton.experts.pairs import Groups, RowOperand, sorted_pairs
from liger_multi.bench.cases import cases, draw
from liger_multi.bench.measure import Clock
from liger_multi.bench.providers import find

ROUNDS = 15


def _median(clock: Clock, step: Callable[[], Any]) -> float:
    for _ in range(3):
        step()
    flushes = clock.flushes(2000.0)
    return statistics.median(clock.marks([step], flushes)[0] for _ in range(ROUNDS))


def whole(tensors: dict[str, Tensor], call: Callable[..., Tensor], clock: Clock) -> str:
    """Milliseconds forward, with backward, and the peak beside inputs and gradients."""
    leaves = [t for t in tensors.values() if t.requires_grad]
    dy = torch.randn_like(tensors["x"])
    both = []
    for backward in (False, True):

        def step(backward: bool = backward) -> None:
            y = call(**tensors)
            if backward:
                torch.autograd.grad(y, leaves, dy)

        both.append(_median(clock, step))
    module: Any = torch.get_device_module(tensors["x"].device)
    module.reset_peak_memory_stats()
    before = module.memory_allocated()
    torch.autograd.grad(call(**tensors), leaves, dy)
    extra = module.max_memory_allocated() - before - sum(t.nbytes for t in leaves)
    return f"forward {both[0]:7.3f} ms   both {both[1]:7.3f} ms   extra {extra / 2**20:7.0f} MiB"


def products(tensors: dict[str, Tensor], clock: Clock) -> list[str]:
    """Every product, by the library and by tiles of ours."""
    x, first, second = (tensors[n].detach() for n in ("x", "gate_up_weight", "down_weight"))
    index = tensors["index"]
    order, inverse, offsets = sorted_pairs(index, first.shape[0])
    groups = Groups(offsets, order, index.shape[-1], inverse)
    inner = torch.randn(order.shape[0], second.shape[2], device=x.device).to(x.dtype)
    wide = torch.randn(order.shape[0], first.shape[1], device=x.device).to(x.dtype)
    how = ("silu", (7.0, 1.0, 0.0), False)
    rows, weights = RowOperand, grouped.weight_gradient
    operations = 2.0 * order.shape[0] * second.shape[1] * second.shape[2]
    steps: dict[str, tuple[float, Callable[[], Any]]] = {
        "up": (
            2,
            lambda: fused_moe.activated(rows(x, True), first, None, index, groups, True, how),
        ),
        "down": (1, lambda: grouped.product("fused_moe.down", rows(inner), second, groups)),
        "dproduct": (
            1,
            lambda: grouped.product("fused_moe.dproduct", rows(x, True), second.mT, groups),
        ),
        "dx": (2, lambda: grouped.product("fused_moe.dx", rows(wide), first.mT, groups)),
        "dgate_up_weight": (
            2,
            lambda: weights("fused_moe.dgate_up_weight", rows(wide), rows(x, True), groups, False),
        ),
        "ddown_weight": (
            1,
            lambda: weights("fused_moe.ddown_weight", rows(x, True), rows(inner), groups, False),
        ),
    }
    found = []
    for name, (share, step) in steps.items():
        for library in (True, False):
            with grouped.products_by(library):
                ms = _median(clock, step)
            rate = share * operations / ms / 1e9
            by = "library" if library else "triton"
            found.append(
                f"  {name:<16} {by:<8} {ms:7.3f} ms  {rate:5.0f} TFLOP/s, gathers included"
            )
    sort = _median(clock, lambda: sorted_pairs(index, first.shape[0]))
    return [*found, f"  {'sort':<25} {sort:7.3f} ms"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the comparison for every bench sample that has no bias."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--sample", default="*of 128")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args(arguments)
    device, dtype = torch.device(args.device), torch.bfloat16
    clock = Clock(device)
    for case in cases("fused_moe", args.sample, dtype, None):
        print(f"{case.label}, {torch.get_device_module(device).get_device_name()}")
        tensors = draw(case.sample, device, dtype)
        ways: list[tuple[str, Any, Any]] = [
            ("ours", ops.fused_moe, contextlib.nullcontext()),
            ("ours, library", ops.fused_moe, grouped.products_by(True)),
            ("ours, triton", ops.fused_moe, grouped.products_by(False)),
        ]
        for name in ("torch", "liger"):
            peer = find(name, case, device, dtype)
            if isinstance(peer, str):
                print(f"{name:<16} {peer}")
            else:
                ways.append((name, peer.call, contextlib.nullcontext()))
        for name, call, scope in ways:
            with scope:
                options = case.sample.options if name.startswith("ours") else {}
                try:
                    said = whole(tensors, lambda c=call, o=options, **t: c(**t, **o), clock)
                except RuntimeError as failure:  # a peer may not run here
                    said = f"{type(failure).__name__}: {failure!s:.120}"
            print(f"{name:<16} {said}", flush=True)
        print("\n".join(products(tensors, clock)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
