"""Where a device's time goes, in traces of PyTorch's profiler: ``python -m benchmarks.traces``.

``stalls``: how long the device has nothing to do at the head of a training step, between the last
norm and the kernel of the loss, in ways to train that call the head differently (:data:`FORMS`).

``heads``: kernels of losses on hidden states and an LM head, beside those of the bare GEMMs. Both
run in turns, because the clock of a busy card falls.

``operators``: time of every kernel of an operator, beside the bytes that it cannot do without.

``fusion``: what a fused head could save at most: the row kernel on a second stream beside the GEMM
of the next chunk, and a Triton GEMM, in whose end the statistics would be, beside the vendor's.

``adapters``: of layers with LoRA, PEFT's and ours, the kernels by name and the host's time.

Every command prints lines; ``benchmarks.store --notes`` keeps them.
"""

from __future__ import annotations

import argparse
import itertools
import re
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks import store

Call = Callable[[], Any]


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
    kept = [e for e in events if (e.cpu_parent is None if cpu else e.device_type.name != "CPU")]
    times = [Span(e.name, e.time_range.start, e.time_range.end) for e in kept]
    return sorted(times, key=lambda span: span.start)


def wait(device: torch.device) -> None:
    """Until the device has nothing left to do."""
    if device.type != "cpu":
        torch.accelerator.synchronize()


def idle(trace: Iterable[Span]) -> float:
    """Microseconds between the first start and the last end in which nothing ran."""
    total, until = 0.0, None
    for span in sorted(trace, key=lambda span: span.start):
        if until is not None:
            total += max(0.0, span.start - until)
        until = span.end if until is None else max(until, span.end)
    return total


# --- stalls ---

LOSS, NORM = "_cross_entropy_forward_kernel", "rms_norm"


def heads_of(trace: Sequence[Span]) -> list[list[Span]]:
    """Of every head, what ran from the last norm to the first kernel of the loss."""
    groups, norm, done = [], 0, False
    for place, span in enumerate(trace):
        if NORM in span.name:
            norm, done = place, False
        elif LOSS in span.name and not done:
            groups.append(list(trace[norm : place + 1]))
            done = True  # further chunks of the same head
    return groups


class Trainer:
    """A patched model with batches whose first quarter of every sequence has no label."""

    def __init__(self, name: str, device: torch.device) -> None:
        import liger_multi
        from benchmarks.models import MODELS, Run, build

        run = Run.parse(name)
        self.device, self.run, self.model = device, run, build(run, device)
        liger_multi.patch(self.model)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=1e-5, fused=device.type == "cuda"
        )
        self.ids = torch.randint(
            MODELS[run.model][1]["vocab_size"], (run.batch, run.tokens), device=device
        )
        self.labels = self.ids.clone()
        self.labels[:, : run.tokens // 4] = -100

    def micro(self) -> None:
        """Forward and backward."""
        self.model(input_ids=self.ids, labels=self.labels).loss.backward()

    def update(self) -> None:
        """The optimizer's step."""
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def step(self) -> Call:
        """One batch a step."""

        def call() -> None:
            self.micro()
            self.update()

        return call

    def accumulation(self) -> Call:
        """Four micro-batches a step."""

        def call() -> None:
            for _ in range(4):
                self.micro()
            self.update()

        return call

    def stage(self) -> Call:
        """The last stage of a pipeline: hidden states come in, and their gradient goes out."""
        self.model.model.layers = self.model.model.layers[-2:]
        width = self.model.config.hidden_size
        received = torch.randn(
            *self.ids.shape, width, device=self.device, dtype=torch.bfloat16, requires_grad=True
        )

        def call() -> None:
            for _ in range(4):
                received.grad = None
                self.model(inputs_embeds=received, labels=self.labels).loss.backward()
            self.update()

        return call

    def graph(self) -> Call:
        """Forward and backward, captured once; the loss is compared with that of an eager call."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self.micro()
        torch.cuda.current_stream().wait_stream(side)
        self.optimizer.zero_grad(set_to_none=True)
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            loss = self.model(input_ids=self.ids, labels=self.labels).loss
            loss.backward()
        self.labels[:, : self.run.tokens // 2] = -100
        captured.replay()
        with torch.no_grad():
            eager = self.model(input_ids=self.ids, labels=self.labels).loss
        say(
            f"graph: loss of a replay with other labels {loss.item():.5f}, eager {eager.item():.5f}"
        )
        return captured.replay


FORMS: dict[str, Callable[[Trainer], Call]] = {
    "step": Trainer.step,
    "accumulation": Trainer.accumulation,
    "stage": Trainer.stage,
    "graph": Trainer.graph,
}


def say(text: str) -> None:
    """A line, at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def stalls(arguments: Sequence[str]) -> int:
    """Print the idle time at the head."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.traces stalls")
    parser.add_argument("runs", nargs="+", help="MODEL:BATCHxTOKENS")
    parser.add_argument("--forms", default=",".join(FORMS), help="with commas")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--counts", default="nonzero,event", help="how rows are counted")
    options = parser.parse_args(arguments)
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    for name, form in itertools.product(options.runs, options.forms.split(",")):
        if form == "graph" and device.type != "cuda":
            continue
        call = FORMS[form](Trainer(name, device))
        for count in ("none",) if form == "graph" else options.counts.split(","):
            with counted_by(count):
                for _ in range(4):
                    call()
                trace = spans(repeated(call, options.steps), device)
            say(f"{count:8} {name:22} {form:13} {stall_line(trace, options.steps)}")
        del call
        release()
    return 0


def repeated(call: Call, times: int) -> Call:
    """A function that repeats the call."""
    return lambda: [call() for _ in range(times)]


@contextmanager
def counted_by(way: str) -> Iterator[None]:
    """Count valid rows by ``nonzero``, which waits, or behind an event, where a device can."""
    from liger_multi.reference.cross_entropy import fused_linear

    able = fused_linear.has_static_nonzero
    if way == "nonzero":
        fused_linear.has_static_nonzero = lambda dtype: False  # type: ignore[assignment]
    try:
        yield
    finally:
        fused_linear.has_static_nonzero = able


def stall_line(trace: list[Span], steps: int) -> str:
    """Idle time at the heads of some steps, and of the steps."""
    heads = heads_of(trace)
    at_head = [idle(head) for head in heads] or [float("nan")]
    copies = sum("dtoh" in s.name.lower() for head in heads for s in head)
    whole = sum(s.length for s in trace)
    return (
        f"idle at the head, us: median {statistics.median(at_head):8.1f} least "
        f"{min(at_head):8.1f} most {max(at_head):8.1f} of {len(heads)} heads, {copies} copies to "
        f"the host; kernels of a step {whole / steps / 1e3:8.2f} ms, idle "
        f"{idle(trace) / steps / 1e3:7.2f} ms"
    )


def release() -> None:
    """Give cached memory back."""
    import gc

    gc.collect()
    if torch.accelerator.is_available():
        torch.get_device_module().empty_cache()


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
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
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
        release()
    return 0


def fusion_ways(rows: int, width: int, classes: int) -> dict[str, Call]:
    """The GEMM of the logits and the row kernel, alone and beside each other."""
    from liger_multi.backends.triton.common.gemm import gemm_by_rows
    from liger_multi.backends.triton.cross_entropy.rows import TritonRows
    from liger_multi.reference.cross_entropy.rows import Objective

    device, objective = torch.device("cuda"), Objective(-100, 0.0, 0.0, None)
    second = torch.cuda.Stream()
    hidden, weight = (torch.randn(n, width, device=device).bfloat16() for n in (rows, classes))
    weight.mul_(width**-0.5)
    target = torch.randint(classes, (rows,), device=device)
    logits = torch.empty(rows, classes, device=device, dtype=torch.bfloat16)
    every, halves = slice(0, rows), (slice(0, rows // 2), slice(rows // 2, rows))

    def gemm(part: slice) -> None:
        torch.mm(hidden[part], weight.mT, out=logits[part])

    def row_kernel(part: slice) -> None:
        TritonRows.statistics_and_gradient_(logits[part], target[part], None, objective, None, "")

    def one_stream() -> None:
        for part in halves:
            gemm(part)
            row_kernel(part)

    def two_streams() -> None:
        first = torch.cuda.current_stream()
        for part in halves:
            gemm(part)
            second.wait_stream(first)
            with torch.cuda.stream(second):
                row_kernel(part)
        first.wait_stream(second)

    return {
        "GEMM of the logits": lambda: gemm(every),
        "the same by Triton": lambda: gemm_by_rows(hidden, weight.mT, None, logits),
        "row kernel": lambda: row_kernel(every),
        "both, in halves, one stream": one_stream,
        "both, in halves, two streams": two_streams,
    }


def fusion(arguments: Sequence[str]) -> int:
    """Print what overlap and a GEMM of our own would give a head."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.traces fusion")
    parser.add_argument("--shapes", default="8192x4096x128256,8192x2048x151936")
    options = parser.parse_args(arguments)
    for text in options.shapes.split(","):
        ways = fusion_ways(*map(int, text.split("x")))
        for call in ways.values():
            call()
        times: dict[str, list[float]] = defaultdict(list)
        for _ in range(7):
            for name, call in ways.items():
                times[name].append(by_events(call))
        for name, samples in times.items():
            say(f"{text} {name:30} {fusion_line(samples)}")
    return 0


def fusion_line(samples: list[float]) -> str:
    """Milliseconds of one way."""
    return f"{statistics.median(samples):8.3f} ms, least {min(samples):8.3f}"


def by_events(call: Call) -> float:
    """Milliseconds of the device for one call, behind enough work that the host is ahead."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(2_000_000)
    start.record()
    call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


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
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
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
        release()
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


# --- adapters ---


def adapters(arguments: Sequence[str]) -> int:
    """Print kernels and host time of layers with adapters."""
    import copy
    from contextlib import nullcontext

    from benchmarks.lora import FORMS as PRECISIONS
    from benchmarks.lora import LAYER, TINY, adapted, parts
    from liger_multi import patch

    parser = argparse.ArgumentParser(prog="python -m benchmarks.traces adapters")
    parser.add_argument("--parts", default="qkv as one,mlp")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--names", type=int, default=0, help="how many kernels to list")
    options = parser.parse_args(arguments)
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    cpu = device.type == "cpu"
    stock = adapted({**LAYER, **(TINY if cpu else {})}, device, 16)
    models = {"PEFT": stock, "ours": copy.deepcopy(stock)}
    patch(models["ours"])
    runners = {name: parts(model, 64 if cpu else 8192, device) for name, model in models.items()}
    for part, form in itertools.product(options.parts.split(","), PRECISIONS):
        calls: dict[str, Call] = {}
        for name, runs in runners.items():

            def call(run: Call = runs[part], model: Any = models[name], form: str = form) -> None:
                on = form == "autocast"
                with torch.autocast(device.type, torch.bfloat16) if on else nullcontext():
                    value = run()
                value.backward()
                model.zero_grad(set_to_none=True)

            calls[name] = call
        traces = in_turns(calls, device, options.rounds)
        for name, found in traces.items():
            times = enqueued(calls[name], device), waited(calls[name], device)
            say(f"{part}, {form}: {name:5} {adapter_line(found, *times)}")
            for line in by_name(found[-1])[: options.names]:
                say("    " + line)
    return 0


def adapter_line(traces: list[list[Span]], host: float, both: float) -> str:
    """Launches and medians, in milliseconds."""
    kernels = statistics.median(sum(s.length for s in one) for one in traces)
    return (
        f"{len(traces[-1])} launches, kernels {kernels / 1e3:.3f} ms, the host enqueues in "
        f"{host:.3f} ms, both {both:.3f} ms"
    )


def by_name(trace: Sequence[Span]) -> list[str]:
    """Kernels of one name together, the longest first."""
    lengths: dict[str, list[float]] = defaultdict(list)
    for span in trace:
        lengths[span.name[:90]].append(span.length)
    order = sorted(lengths.items(), key=lambda item: -sum(item[1]))
    return [f"{sum(each):8.1f} us in {len(each)}: {name}" for name, each in order]


def timed(call: Call, device: torch.device, until: Call) -> float:
    """Median milliseconds of a call, which begins at an idle device."""
    samples = []
    for _ in range(9):
        wait(device)
        start = time.perf_counter()
        call()
        until()
        samples.append(1e3 * (time.perf_counter() - start))
    return statistics.median(samples)


def enqueued(call: Call, device: torch.device) -> float:
    """Milliseconds until the host has enqueued a call."""
    return timed(call, device, lambda: None)


def waited(call: Call, device: torch.device) -> float:
    """Milliseconds until the device has done a call."""
    return timed(call, device, lambda: wait(device))


def main(arguments: Sequence[str] | None = None) -> int:
    """Read traces of heads in training steps, of losses, of operators or of adapters."""
    commands: dict[str, Callable[[Sequence[str]], int]] = {
        "stalls": stalls,
        "heads": heads,
        "fusion": fusion,
        "operators": operators,
        "adapters": adapters,
    }
    return store.run_command(commands, arguments)


if __name__ == "__main__":
    sys.exit(main())
