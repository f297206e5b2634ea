"""Host time of operators, and of steps of small models: ``python -m benchmarks.host_time``.

On an accelerator calls are enqueued without a wait. With TRITON_INTERPRET=1, which lets Triton's
operators take tensors of a CPU, they run there with launches that do nothing, so that what is left
is our Python, PyTorch's bookkeeping and allocations.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import liger_multi
from benchmarks.configs import Run, build
from benchmarks.harness import Call, adamw, device_of
from liger_multi import ops

BATCHES, CALLS = 200, 10


def stub_launches() -> None:
    """Let every launch of a Triton kernel find a compiled kernel that does nothing."""
    import triton
    from triton.backends.compiler import GPUTarget

    from liger_multi.backends.triton.common import launching, specialization

    class Compiled(dict[Any, Any]):
        def get(self, key: Any, default: Any = None) -> Any:
            return (_nothing, None, None, _nothing, None)

    card = GPUTarget("cuda", 90, 32)
    triton.runtime.driver._active = SimpleNamespace(get_current_target=lambda: card)
    launching._classes = specialization.ArgumentClasses(specialization.specialize_for_target())
    launching._compiled = Compiled()


def _nothing(*_: Any) -> None:
    return None


def timed(call: Call, wait: Call) -> float:
    """Microseconds of one call: the least of many batches, which others on the host disturb."""
    best = float("inf")
    # a device has a thread of its own for backward; without one, other processes do not count
    clock = time.thread_time if wait is _nothing else time.perf_counter
    for _ in range(BATCHES):
        wait()
        start = clock()
        for _ in range(CALLS):
            call()
        best = min(best, clock() - start)
    return 1e6 * best / CALLS


def both_ways(name: str, forward: Call, leaves: list[Tensor], wait: Call) -> str:
    """Time of a forward with gradient, and of its backward."""
    out = forward()
    outs = [y for y in (out if isinstance(out, tuple) else (out,)) if y.requires_grad]
    upstream = [torch.ones_like(y) for y in outs]

    def backward() -> None:
        torch.autograd.grad(outs, leaves, upstream, retain_graph=True)

    return f"{name:28} forward {timed(forward, wait):7.1f} backward {timed(backward, wait):7.1f} us"


class _Bare(torch.autograd.Function):
    """What an operator with one launch each way cannot do without."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x.new_empty(x.shape)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return x.new_empty(x.shape), weight.new_empty(weight.shape)


def time_operators(device: torch.device, wait: Call) -> None:
    """One line an operator, in the sizes of a layer of Qwen2-0.5B with a sequence of 512."""

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=torch.bfloat16).requires_grad_()

    small = device.type == "cpu"  # GEMMs are no part of what a stub leaves out
    rows, hidden, inner = (16, 32, 64) if small else (512, 896, 4864)
    x, weight = draw(1, rows, hidden), draw(hidden)
    gate, up = draw(1, rows, inner), draw(1, rows, inner)
    layers = [draw(inner, hidden), draw(inner, hidden), draw(hidden, inner)]
    q, k = (draw(1, rows, n, 64).detach().transpose(1, 2).requires_grad_() for n in (14, 2))
    cos, sin = (draw(1, rows, 64).detach() for _ in range(2))
    bare: Any = _Bare.apply
    silu, linear = torch.nn.functional.silu, torch.nn.functional.linear

    def stock_mlp() -> Tensor:
        return linear(silu(linear(x, layers[0])) * linear(x, layers[1]), layers[2])

    def mlp_in_steps() -> Tensor:
        return linear(ops.swiglu(linear(x, layers[0]), linear(x, layers[1])), layers[2])

    cases: tuple[tuple[str, Call, list[Tensor]], ...] = (
        ("bare Function", lambda: bare(x, weight), [x, weight]),
        ("F.rms_norm", lambda: torch.rms_norm(x, (hidden,), weight, 1e-6), [x, weight]),
        ("rms_norm", lambda: ops.rms_norm(x, weight, 1e-6), [x, weight]),
        ("fused_add_rms_norm", lambda: ops.fused_add_rms_norm(x, x, weight), [x, weight]),
        ("layer_norm", lambda: ops.layer_norm(x, weight, weight), [x, weight]),
        ("swiglu", lambda: ops.swiglu(gate, up), [gate, up]),
        ("rope", lambda: ops.rope(q, k, cos, sin), [q, k]),
        ("MLP of PyTorch", stock_mlp, [x, *layers]),
        ("MLP around swiglu", mlp_in_steps, [x, *layers]),
        ("gated_mlp", lambda: ops.gated_mlp(x, *layers), [x, *layers]),
    )
    for name, call, leaves in cases:
        print(both_ways(name, call, leaves, wait), flush=True)


OTHERS_OFF = {"rms_norm": False, "rope": False, "fused_linear_cross_entropy": False}
VARIANTS: dict[str, dict[str, Any] | None] = {
    "stock": None,
    "ours": {},
    "ours, MLPs in steps": {"swiglu": {"whole": False}},
    "only norms": {**OTHERS_OFF, "rms_norm": True, "swiglu": False},
    "only rotary": {**OTHERS_OFF, "rope": True, "swiglu": False},
    "only MLPs whole": {**OTHERS_OFF, "swiglu": {"whole": True}},
    "only MLPs in steps": {**OTHERS_OFF, "swiglu": {"whole": False}},
    "only the loss": {**OTHERS_OFF, "fused_linear_cross_entropy": True, "swiglu": False},
}


class Trained:
    """A model under one variant, with the times of its steps in milliseconds."""

    def __init__(self, name: str, run: Run, device: torch.device) -> None:
        self.name, self.model = name, build(run, device)
        options = VARIANTS[name]
        if options is not None:
            liger_multi.patch(self.model, **options)
        self.optimizer = adamw(self.model.parameters(), device)
        self.times: list[tuple[float, ...]] = []

    def step(self, ids: Tensor, wait: Call) -> None:
        """Enqueue forward, backward and the optimizer's step, and wait for the device."""
        times = [time.perf_counter()]
        loss = self.model(input_ids=ids, labels=ids).loss
        times.append(time.perf_counter())
        loss.backward()
        times.append(time.perf_counter())
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        wait()
        times.append(time.perf_counter())
        self.times.append((*[1e3 * (b - a) for a, b in itertools.pairwise(times)],))

    def line(self, run: Run) -> str:
        """Medians; the time of a step is that of host and device."""
        forward, backward, rest = (statistics.median(part) for part in zip(*self.times))
        whole = statistics.median(sum(times) for times in self.times)
        least = min(sum(times) for times in self.times)
        speed = run.batch * run.tokens / whole * 1e3
        return (
            f"{run!s:20} {self.name:20} forward {forward:6.1f} backward {backward:6.1f} then "
            f"{rest:6.1f} step {whole:6.1f} (least {least:6.1f}) ms {speed:8.0f} tokens/s"
        )


def time_models(
    names: Sequence[str], variants: Sequence[str], steps: int, device: torch.device, wait: Call
) -> None:
    """Every variant of every run, step by step in turns, in one process."""
    runs = [Run.parse(name) for name in names]
    longest = max(runs, key=lambda run: run.tokens)
    trained = [Trained(name, longest, device) for name in variants]
    for run in runs:
        for _, one in itertools.product(range(3 + steps), trained):
            ids = torch.randint(500, (run.batch, run.tokens), device=device)
            wait()
            one.step(ids, wait)
        for one in trained:
            del one.times[:3]
            print(one.line(run), flush=True)
            one.times.clear()


def main() -> int:
    """Print host times of operators, and of steps of small models."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.host_time", description=__doc__)
    parser.add_argument("runs", nargs="*", help="MODEL:BATCHxTOKENS to train some steps of")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--variant", action="append", choices=VARIANTS)
    options = parser.parse_args()
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    device = torch.device("cpu") if interpreted else device_of()
    wait: Call = _nothing if device.type == "cpu" else torch.accelerator.synchronize
    if device.type == "cpu":
        if not interpreted:
            parser.error("on a CPU, set TRITON_INTERPRET=1")
        liger_multi.configure({"default": "triton"})
        stub_launches()
        torch.set_num_threads(1)
    time_operators(device, wait)
    if options.runs:
        time_models(options.runs, options.variant or list(VARIANTS), options.steps, device, wait)
    return 0


if __name__ == "__main__":
    sys.exit(main())
