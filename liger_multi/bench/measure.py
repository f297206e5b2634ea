"""How the benchmark measures: ceilings, correctness, time, host time and memory of a provider."""

from __future__ import annotations

import gc
import itertools
import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from liger_multi.bench.cases import Ceilings, Truth, differentiable, error
from liger_multi.bench.providers import Provider
from liger_multi.memory.measure import measure

FLUSH_BYTES = (
    2**28
)  # several times the largest L2 (H200: 60 MB, MI300X: 256 MB with its last level)
LEAST_BUSY_MS, MOST_FLUSHES = 1.0, 40
REPEATS = 5  # calls of one provider in a round
WARM_CALLS, WARM_SECONDS = 3, 0.2


class Identity(torch.autograd.Function):
    """A free operation on a leaf, because autograd does not let leaves be overwritten in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """The same memory."""
        return x.detach()

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> Tensor:
        """The same gradient."""
        return dx


def out_of_memory(failure: BaseException) -> bool:
    """Whether an exception says that memory ran out, on any device."""
    return isinstance(failure, torch.OutOfMemoryError | MemoryError) or (
        isinstance(failure, RuntimeError) and "not enough memory" in str(failure)
    )


@dataclass
class Runner:
    """A provider with its inputs.

    Attributes:
        provider: Who.
        tensors: Inputs of the call.
        douts: A gradient for every result.
        pristine: What inputs and ``douts`` are refilled from where the provider overwrites them.
    """

    provider: Provider
    tensors: Mapping[str, Tensor]
    douts: tuple[Tensor, ...]
    pristine: tuple[Mapping[str, Tensor], tuple[Tensor, ...]] | None = None

    @classmethod
    def make(
        cls, provider: Provider, tensors: Mapping[str, Tensor], douts: tuple[Tensor, ...]
    ) -> Runner:
        """A runner on shared inputs, or on its own copies of them."""
        if not provider.overwrites:
            return cls(provider, tensors, douts)
        copies = {n: t.detach().clone().requires_grad_(t.requires_grad) for n, t in tensors.items()}
        return cls(provider, copies, tuple(d.clone() for d in douts), (tensors, douts))

    @property
    def leaves(self) -> dict[str, Tensor]:
        """Inputs that get a gradient."""
        return {n: t for n, t in self.tensors.items() if t.requires_grad}

    def prepare(self) -> Mapping[str, Tensor]:
        """Arguments of the next call; nothing of this is timed."""
        if self.pristine is None:
            return self.tensors
        with torch.no_grad():
            for name, tensor in self.tensors.items():
                tensor.copy_(self.pristine[0][name])
            for dout, pristine in zip(self.douts, self.pristine[1], strict=True):
                dout.copy_(pristine)
        alias: Any = Identity.apply
        return {n: alias(t) if t.requires_grad else t for n, t in self.tensors.items()}

    def forward(self, arguments: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """One call."""
        return differentiable(self.provider.call(**arguments))

    def backward(self, results: tuple[Tensor, ...]) -> dict[str, Tensor]:
        """Gradients of all leaves, which may be none."""
        leaves = self.leaves
        if not leaves:
            return {}
        if any(d.dtype != r.dtype for d, r in zip(self.douts, results, strict=True)):
            # once, in a call that is not timed
            self.douts = tuple(d.to(r.dtype) for d, r in zip(self.douts, results, strict=True))
        gradients = torch.autograd.grad(results, list(leaves.values()), self.douts)
        return dict(zip(leaves, gradients, strict=True))

    def both(self) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        """One call forward and backward."""
        with self.provider.scope():
            results = self.forward(self.prepare())
            return tuple(r.detach() for r in results), self.backward(results)

    def check(self, right: Truth, dtype: torch.dtype) -> tuple[float, float]:
        """Largest error over results and gradients, in tolerances and in the 2-norm."""
        sums = [_sum(t) for t in self.tensors.values()]
        results, grads = self.both()
        # the gradient of an overwritten input may be stored in the input itself
        if not self.provider.overwrites and sums != [_sum(t) for t in self.tensors.values()]:
            raise AssertionError("overwrote its inputs")
        errors = [error(*pair, dtype) for pair in zip(results, right.results, strict=True)]
        errors += [error(grad, right.grads[name], dtype) for name, grad in grads.items()]
        return max(e[0] for e in errors), max(e[1] for e in errors)


def _sum(tensor: Tensor) -> float:
    return float(tensor.detach().sum(dtype=torch.float32 if tensor.is_floating_point() else None))


# --- clocks ---


class Clock:
    """Times regions on one device, and keeps it from measuring a warm cache or a slow host."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.cpu = device.type == "cpu"
        if not self.cpu:
            self.module: Any = torch.get_device_module(device)
            self.buffer = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device)
            self.flush_ms = statistics.median(self.marks([self.buffer.zero_])[0] for _ in range(20))

    def synchronize(self) -> None:
        """Wait for the device."""
        if not self.cpu:
            self.module.synchronize(self.device)

    def marks(self, steps: list[Callable[[], Any]], flushes: int = 0) -> list[float]:
        """Run the steps in order; milliseconds from the start to the end of each.

        On an accelerator the buffer is written first: it evicts the inputs from the caches and
        keeps the device busy while the host enqueues the steps.
        """
        if self.cpu:
            start, ends = time.perf_counter(), []
            for step in steps:
                step()
                ends.append((time.perf_counter() - start) * 1e3)
            return ends
        events = [self.module.Event(enable_timing=True) for _ in range(len(steps) + 1)]
        for _ in range(flushes):
            self.buffer.zero_()
        events[0].record()
        for event, step in zip(events[1:], steps, strict=True):
            step()
            event.record()
        events[-1].synchronize()
        return [events[0].elapsed_time(event) for event in events[1:]]

    def flushes(self, host_us: float) -> int:
        """How many flushes keep the device busy until the host has enqueued one call.

        A host that wakes autograd's thread takes twice its median often enough: on an H200 machine
        1.3 times the median left rms_norm's backward waiting in half of its calls (2026-11).
        """
        if self.cpu:
            return 0
        busy_ms = max(LEAST_BUSY_MS, 3 * host_us / 1e3)
        return min(MOST_FLUSHES, math.ceil(busy_ms / self.flush_ms))


def call_ms(runner: Runner, clock: Clock, flushes: int) -> tuple[float, float]:
    """One call: milliseconds forward, and forward with backward."""
    arguments = runner.prepare()
    output: list[Any] = []
    forward, total = clock.marks(
        [
            lambda: output.append(runner.forward(arguments)),
            lambda: output.append(runner.backward(output[0])),
        ],
        flushes,
    )
    return forward, total


def host_us(runner: Runner, clock: Clock, calls: int) -> tuple[float, float]:
    """Microseconds the host needs to enqueue forward, and forward with backward."""
    seconds = []
    for _ in range(calls):
        with runner.provider.scope():
            arguments = runner.prepare()
            clock.synchronize()
            start = time.perf_counter()
            result = runner.forward(arguments)
            middle = time.perf_counter()
            grads = runner.backward(result)
            seconds.append((middle - start, time.perf_counter() - start))
            del result, grads
    return (
        statistics.median(f for f, _ in seconds) * 1e6,
        statistics.median(b for _, b in seconds) * 1e6,
    )


def memory_bytes(runner: Runner, accumulator: int, device: torch.device) -> tuple[int, int]:
    """Extra and raw peak of forward with backward.

    The raw peak is the inputs and all that was held beside them. Extra is without inputs, without
    gradients in the dtypes of the inputs, and without ``accumulator``.
    """
    with runner.provider.scope():
        arguments = runner.prepare()
        existing = [*runner.tensors.values(), *runner.douts]
        with measure(device, known=existing) as peak:
            output = runner.forward(arguments)
            grads = runner.backward(output)
        del output, grads
    inputs = sum(t.numel() * t.element_size() for t in runner.tensors.values())
    gradients = sum(t.numel() * t.element_size() for t in runner.leaves.values())
    return peak.added_bytes - gradients - accumulator, peak.added_bytes + inputs


# --- times ---


@dataclass
class Times:
    """All calls of one provider."""

    forward_ms: list[float] = field(default_factory=list)
    both_ms: list[float] = field(default_factory=list)

    def summary(self) -> dict[str, float]:
        """Medians, and half the distance of the quartiles."""
        return {
            "forward_ms": statistics.median(self.forward_ms),
            "forward_spread_ms": _spread(self.forward_ms),
            "both_ms": statistics.median(self.both_ms),
            "both_spread_ms": _spread(self.both_ms),
            "calls": len(self.both_ms),
        }


def _spread(values: list[float]) -> float:
    lower, _, upper = statistics.quantiles(values, n=4) if len(values) > 1 else (0.0, 0.0, 0.0)
    return (upper - lower) / 2


def interleave(
    runners: Mapping[str, tuple[Runner, int]], clock: Clock, seconds: float, least_rounds: int
) -> dict[str, Times]:
    """Rounds over all providers until the time is used up; every second round runs backwards."""
    times = {name: Times() for name in runners}
    end, rounds = time.perf_counter() + seconds, 0
    repeats = 1 if clock.cpu else REPEATS
    for runner, flushes in runners.values():
        warm = time.perf_counter() + (0 if clock.cpu else WARM_SECONDS)
        with runner.provider.scope():
            for calls in itertools.count():
                if calls >= WARM_CALLS and time.perf_counter() >= warm:
                    break
                call_ms(runner, clock, flushes)
    while rounds < least_rounds or time.perf_counter() < end:
        order = list(runners)[:: 1 if rounds % 2 == 0 else -1]
        for name in order:
            runner, flushes = runners[name]
            with runner.provider.scope():
                for _ in range(repeats):
                    forward, total = call_ms(runner, clock, flushes)
                    times[name].forward_ms.append(forward)
                    times[name].both_ms.append(total)
        rounds += 1
    return times


# --- ceilings ---


def ceilings(clock: Clock, dtype: torch.dtype, quick: bool) -> Ceilings:
    """Measure both; the first calls warm the clocks."""
    size, width = (2**30, 8192) if not clock.cpu else (2**24, 512)
    if quick:
        size, width = size // 16, width // 4
    source = torch.empty(size, dtype=torch.int8, device=clock.device).random_()
    target = torch.empty_like(source)
    copy = _median_ms(clock, lambda: target.copy_(source))
    # random data: a product of zeros draws less power and runs faster
    left = torch.randn(width, width, device=clock.device).to(dtype)
    right = torch.randn(width, width, device=clock.device).to(dtype)
    product = _median_ms(clock, lambda: left @ right)
    return Ceilings(2 * size / copy * 1e3, 2 * width**3 / product * 1e3)


def _median_ms(clock: Clock, step: Callable[[], Any]) -> float:
    for _ in range(5):
        step()
    flushes = clock.flushes(0)
    return statistics.median(clock.marks([step], flushes)[0] for _ in range(15))


def release(device: torch.device) -> None:
    """Give cached memory back: the next provider meets an empty device."""
    gc.collect()
    if device.type != "cpu":
        torch.get_device_module(device).empty_cache()
