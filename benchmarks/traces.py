"""Time of every kernel of an operator: ``python -m benchmarks.traces``.

It is read from traces of PyTorch's profiler. Beside it stand the bytes that the operator cannot do
without. It prints lines; ``benchmarks.store --notes`` keeps them.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.harness import Call, device_of, wait
from liger_multi.bench.measure import Clock, Runner, ceilings, release
from liger_multi.errors import check_name


class Span(NamedTuple):
    """A kernel, a copy or a fill on the device's clock, in microseconds."""

    name: str
    start: float
    end: float

    @property
    def length(self) -> float:
        """Microseconds."""
        return self.end - self.start


def spans(call: Call, device: torch.device) -> list[Span]:
    """Kernels that ran during ``call``, by start; on a CPU, the outermost operators."""
    cpu = device.type == "cpu"
    activities = [ProfilerActivity.CPU if cpu else ProfilerActivity.CUDA]
    wait(device)
    with profile(activities=activities) as profiler:
        call()
        wait(device)
    events: Any = profiler.events()
    if cpu:
        kept = [e for e in events if e.cpu_parent is None]
    else:
        kept = [e for e in events if e.device_type.name != "CPU" and not e.is_user_annotation]
    times = [Span(e.name, e.time_range.start, e.time_range.end) for e in kept]
    return sorted(times, key=lambda span: span.start)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the kernels of operators."""
    from liger_multi.bench import providers
    from liger_multi.bench.cases import cases

    parser = argparse.ArgumentParser(prog="python -m benchmarks.traces")
    parser.add_argument("--ops", default="*")
    parser.add_argument("--samples", default="*")
    parser.add_argument("--calls", type=int, default=5)
    parser.add_argument("--providers", default="ours", help="with commas, as those of bench")
    options = parser.parse_args(arguments)
    names = options.providers.split(",")
    device = device_of()
    cpu = device.type == "cpu"
    dtype = torch.float32 if cpu else torch.bfloat16
    try:
        if options.calls < 1:
            raise ValueError(f"--calls must be positive, got {options.calls}")
        for name in names:
            check_name(ValueError, "provider", name, providers.known_names())
        chosen = cases(options.ops, options.samples, dtype, (2**20, 1e8) if cpu else None)
    except ValueError as wrong:
        parser.error(str(wrong))
    clock = Clock(device)
    peak = ceilings(clock, dtype, quick=cpu)
    print(
        f"a large copy: {peak.copy_bytes_per_second / 1e12:.2f} TB/s, read and written", flush=True
    )
    for case in chosen:
        for name in names:
            for text in provider_lines(case, name, options.calls, dtype, clock, peak):
                print(text, flush=True)
    return 0


def provider_lines(
    case: Any, name: str, count: int, dtype: torch.dtype, clock: Clock, peak: Any
) -> list[str]:
    """Both directions of a provider; or why there are none: a peer may fail."""
    from liger_multi.bench import providers

    provider = providers.find(name, case, clock.device, dtype)
    if isinstance(provider, str):
        return [f"{case.op} {case.label} by {name}: {provider}"]
    try:
        calls = traced_calls(case, provider, count, dtype, clock)
    except Exception as error:
        if name == "ours":
            raise
        return [f"{case.op} {case.label} by {name}: failed: {type(error).__name__}: {error}"]
    return [
        operator_line(case, name, direction, [one[direction] for one in calls], least, peak)
        for direction, least in least_bytes(case.work(dtype)).items()
        if direction in calls[0]
    ]


def traced_calls(
    case: Any, provider: Any, count: int, dtype: torch.dtype, clock: Clock
) -> list[dict[str, list[Span]]]:
    """Kernels of some calls, after two that compile and tune."""
    from liger_multi.bench.cases import draw, upstream

    release(clock.device)
    inputs = draw(case.sample, clock.device, dtype), upstream(case, clock.device, dtype)
    runner = Runner.make(provider, *inputs)
    return [traced(runner, clock) for _ in range(count + 2)][2:]


def least_bytes(work: Any) -> dict[str, float]:
    """By direction; 0 for what the table of the benchmark does not know."""
    if work is None:
        return {"forward": 0.0, "backward": 0.0}
    return {
        "forward": work.forward_bytes,
        "backward": work.both_bytes - work.forward_bytes,
    }


def traced(runner: Any, clock: Any) -> dict[str, list[Span]]:
    """Kernels of one call by direction, each after the caches were emptied."""
    kept: list[Any] = []

    def emptied(call: Call) -> list[Span]:
        if not clock.cpu:
            clock.buffer.zero_()
        return spans(call, clock.device)

    with runner.provider.scope():
        arguments = runner.prepare()
        kernels = {"forward": emptied(lambda: kept.append(runner.forward(arguments)))}
        if runner.leaves:
            kernels["backward"] = emptied(lambda: runner.backward(kept[0]))
        return kernels


def plain(name: str) -> str:
    """A kernel's name without what its template was made for."""
    return name.partition("<")[0].removeprefix("void ").replace(",", "")[:60]


def operator_line(
    case: Any, provider: str, direction: str, traces: list[list[Span]], least: float, peak: Any
) -> str:
    """Time of each kernel in order, the sum, and what the least bytes are of a copy's time."""
    every = statistics.median(sum(s.length for s in one) for one in traces)
    alone = [
        f"{plain(parts[0].name)} {statistics.median(s.length for s in parts):.1f}"
        for parts in (zip(*traces) if len({len(one) for one in traces}) == 1 else ())
    ]
    share = ""
    if least:
        floor = 1e6 * least / peak.copy_bytes_per_second
        share = f", least {least / 2**20:.1f} MiB = {floor:.1f} us: {100 * floor / every:.0f} %"
    return (
        f"{case.op} {case.label} by {provider} {direction}: {len(traces[0])} launches, "
        f"{every:.1f} us{share}; " + ", ".join(alone)
    )


if __name__ == "__main__":
    sys.exit(main())
