"""Where a device's time goes, in traces of PyTorch's profiler: ``python -m benchmarks.traces``.

``heads``: kernels of losses on hidden states and an LM head, beside those of the bare GEMMs. Both
run in turns, because the clock of a busy card falls.

``operators``: time of every kernel of an operator, beside the bytes that it cannot do without.

Every command prints lines; ``benchmarks.store --notes`` keeps them.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks import store
from benchmarks.harness import Call, device_of, wait
from liger_multi.bench.measure import release


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
    on_device = lambda e: e.device_type.name != "CPU" and not e.is_user_annotation  # noqa: E731
    kept = [e for e in events if (e.cpu_parent is None if cpu else on_device(e))]
    times = [Span(e.name, e.time_range.start, e.time_range.end) for e in kept]
    return sorted(times, key=lambda span: span.start)


def idle(trace: Iterable[Span]) -> float:
    """Microseconds between the first start and the last end in which nothing ran."""
    total, until = 0.0, None
    for span in sorted(trace, key=lambda span: span.start):
        if until is not None:
            total += max(0.0, span.start - until)
        until = span.end if until is None else max(until, span.end)
    return total


def say(text: str) -> None:
    """A line, at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


# --- heads ---

GEMM = re.compile(r"gemm|nvjet|xmma|cutlass|aten::(addmm|mm)\b", re.IGNORECASE)
SHAPES = ("8192x4096x128256", "32768x4096x32000", "4096x8192x128256", "16384x2048x151936")


def bare(hidden: Tensor, weight: Tensor, other: tuple[Tensor, Tensor] | None) -> Call:
    """The GEMMs of a head, and that of a teacher; results have their dtype."""

    def call() -> None:
        if other is not None:
            torch.mm(other[0], other[1].mT)
        logits = torch.mm(hidden, weight.mT)
        torch.mm(logits, weight)
        torch.mm(logits.mT, hidden)

    return torch.no_grad()(call)


def passes(hidden: Tensor, weight: Tensor) -> dict[str, Call]:
    """What a head must do beside its GEMMs if no GEMM does it: each tensor is moved once."""
    logits = torch.randn(hidden.shape[0], weight.shape[0], device=hidden.device, dtype=hidden.dtype)
    total = torch.randn(weight.shape, device=weight.device)
    return {
        "one pass over the logits": lambda: logits.mul_(1.0),
        "weight gradient rounded": lambda: total.to(weight.dtype),
    }


def cross_entropy_of(tensors: dict[str, Tensor], chunk: str) -> Call:
    """The loss without ignored targets, forward and backward."""
    from liger_multi import ops

    hidden, weight = tensors["hidden"].flatten(0, 1), tensors["weight"]
    target = tensors["target"].flatten().clamp(min=0)

    def call() -> None:
        loss: Any = ops.fused_linear_cross_entropy(hidden, weight, target, chunk=chunk)
        torch.autograd.grad(loss, (hidden, weight))

    return call


def loss_of(name: str, tensors: dict[str, Tensor]) -> Call:
    """A loss of :mod:`benchmarks.losses`."""
    from benchmarks.losses import CASES

    case = CASES[name]
    kwargs = {n: x for n, x in tensors.items() if n in {"hidden", "weight", *case.beside}}

    def call() -> None:
        torch.autograd.grad(case.ours(**kwargs), (tensors["hidden"], tensors["weight"]))

    return call


def in_turns(
    calls: dict[str, Call], device: torch.device, rounds: int
) -> dict[str, list[list[Span]]]:
    """Traces of every call, one call each, round by round."""
    for call in calls.values():
        for _ in range(3):
            call()
    traces: dict[str, list[list[Span]]] = defaultdict(list)
    for number in range(rounds):
        for name in list(calls)[:: 1 if number % 2 == 0 else -1]:
            traces[name].append(spans(calls[name], device))
    return traces


def head_line(name: str, traces: list[list[Span]], floor: float) -> str:
    """Medians in milliseconds: kernels by kind, idle time between them, and their sum."""
    gemms = statistics.median(sum(s.length for s in one if GEMM.search(s.name)) for one in traces)
    every = statistics.median(sum(s.length for s in one) for one in traces)
    gaps = statistics.median(idle(one) for one in traces)
    ratio = f"{every / floor:6.3f} x the bare GEMMs" if floor else ""
    return (
        f"{name:44} kernels {every / 1e3:8.3f} ms (GEMMs {gemms / 1e3:8.3f}, others "
        f"{(every - gemms) / 1e3:7.3f}), idle {gaps / 1e3:6.3f} {ratio}"
    )


def heads(arguments: Sequence[str]) -> int:
    """Print kernels of losses beside the GEMMs."""
    from benchmarks.losses import Shape, draw

    parser = argparse.ArgumentParser(prog="python -m benchmarks.traces heads")
    parser.add_argument("--shapes", default=",".join(SHAPES), help="ROWSxWIDTHxCLASSES, commas")
    parser.add_argument("--chunks", default="auto,1280MiB,512MiB")
    parser.add_argument("--losses", default="grpo,dpo,dpo-reference,jsd", help="of the first shape")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(arguments)
    device = device_of()
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    for place, text in enumerate(options.shapes.split(",")):
        tensors = draw(Shape(*map(int, text.split("x"))), device, dtype)
        flat = tensors["hidden"].flatten(0, 1), tensors["weight"]
        teacher = tensors["other"].flatten(0, 1), tensors["other_weight"]
        calls = {"three GEMMs": bare(*flat, None)}
        calls |= {f"chunk={c}": cross_entropy_of(tensors, c) for c in options.chunks.split(",")}
        calls |= passes(*flat)
        show(text, "three GEMMs", in_turns(calls, device, options.rounds))
        names = [n for n in options.losses.split(",") if n and place == 0]
        kept = tensors["target"].flatten() >= 0  # a tenth is padding, which no loss computes
        rows = flat[0][kept].detach(), flat[1].detach()
        for name in names:
            other = (teacher[0][kept], teacher[1]) if name in ("dpo-reference", "jsd") else None
            calls = {"GEMMs": bare(*rows, other), name: loss_of(name, tensors)}
            show(text, "GEMMs", in_turns(calls, device, options.rounds))
        del tensors, flat, teacher, rows, calls
        release(device)
    return 0


def show(shape: str, floor: str, by_name: dict[str, list[list[Span]]]) -> None:
    """A line a call."""
    base = statistics.median(sum(s.length for s in one) for one in by_name[floor])
    for name, traces in by_name.items():
        say(head_line(f"{shape} {name}", traces, 0 if name == floor else base))


# --- operators ---

UNDER_80 = (
    "attention_residuals,hyper_connections,cross_entropy_inplace,cross_entropy,"
    "multi_token_attention,jsd,tvd,layer_norm,rms_norm,sparsemax"
)


def operators(arguments: Sequence[str]) -> int:
    """Print the kernels of operators."""
    from liger_multi.bench import providers
    from liger_multi.bench.cases import cases, draw, reference, upstream
    from liger_multi.bench.measure import Clock, Runner, ceilings

    parser = argparse.ArgumentParser(prog="python -m benchmarks.traces operators")
    parser.add_argument("--ops", default=UNDER_80)
    parser.add_argument("--samples", default="*")
    parser.add_argument("--calls", type=int, default=5)
    options = parser.parse_args(arguments)
    device = device_of()
    cpu = device.type == "cpu"
    dtype, clock = (torch.float32 if cpu else torch.bfloat16), Clock(device)
    peak = ceilings(clock, dtype, quick=cpu)
    say(f"a large copy: {peak.copy_bytes_per_second / 1e12:.2f} TB/s, read and written")
    for case in cases(options.ops, options.samples, dtype, (2**20, 1e8) if cpu else None):
        provider = providers.find("ours", case, device, dtype)
        if isinstance(provider, str):
            say(f"{case.op} {case.label}: {provider}")
            continue
        runner = Runner.make(
            provider, draw(case.sample, device, dtype), upstream(case, device, dtype, reference)
        )
        calls = [traced(runner, clock) for _ in range(options.calls + 2)][2:]
        for direction, least in least_bytes(case.work(dtype)).items():
            traces = [one[direction] for one in calls]
            say(operator_line(case, direction, traces, least, peak))
        del runner
        release(device)
    return 0


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
        return {
            "forward": emptied(lambda: kept.append(runner.forward(arguments))),
            "backward": emptied(lambda: runner.backward(kept[0])),
        }


def plain(name: str) -> str:
    """A kernel's name without what its template was made for."""
    return name.partition("<")[0].removeprefix("void ").replace(",", "")[:60]


def operator_line(
    case: Any, direction: str, traces: list[list[Span]], least: float, peak: Any
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
        f"{case.op} {case.label} {direction}: {len(traces[0])} launches, {every:.1f} us{share}; "
        + ", ".join(alone)
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Read traces of losses or of operators."""
    return store.run_command({"heads": heads, "operators": operators}, arguments)


if __name__ == "__main__":
    sys.exit(main())
