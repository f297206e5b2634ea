"""Find launch numbers on this machine: ``python -m benchmarks.tune kernel`` and ``... tune table``.

``kernel KERNEL SAMPLE 'rows=1,2;stages=3'`` times one direction of an operator under every
combination of the given launch configuration beside the formula's, checks that the results agree,
and prints an entry for ``backends/<backend>/launch/<arch>.yaml``. People review the entry, widen
its bounds and write it down.

``table`` (``make tune``) measures a whole launch table. For every operator's bench samples, each
direction is timed with the launch numbers in force and with their neighbors (those of
:mod:`ci.static.launch`). A neighbor that is right and at least 3 % faster becomes an entry, which
says the device, the versions and both times, and stands before the entries of the static model.
``git diff`` shows what was found; send that file in.

Nothing is tuned at run time.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.store import run_command
from ci.static.launch import Asked, bounds, neighbors, write
from liger_multi.bench.cases import draw
from liger_multi.dispatch import launch
from liger_multi.dispatch.op import OPS
from liger_multi.dispatch.registry import operators
from liger_multi.dispatch.torch_ops import Primitive
from liger_multi.errors import unknown
from liger_multi.testing import samples
from liger_multi.testing.tolerance import excess

REPEATS = 9
FLUSH_BYTES = 2**28


def grid(text: str) -> Iterator[dict[str, int]]:
    """Combinations of ``name=value,value;name=value``, and of more such grids after a ``|``."""
    for each in filter(str.strip, text.split("|")):
        axes: dict[str, list[int]] = {}
        for part in each.split(";"):
            name, _, values = part.partition("=")
            axes[name.strip()] = [int(v) for v in values.split(",")]
        for combination in itertools.product(*axes.values()):
            yield dict(zip(axes, combination, strict=True))


def call_arguments(
    op: str, direction: str, sample: samples.Sample, device: torch.device
) -> tuple[Any, ...]:
    """What a real call hands to one direction."""
    prim = getattr(OPS[op], {"forward": "fwd", "backward": "bwd"}[direction])
    calls: list[tuple[Any, ...]] = []
    original = Primitive.call

    def spy(self: Primitive, *args: Any) -> Any:
        if self is prim:
            calls.append(args)
        return original(self, *args)

    Primitive.call = spy  # type: ignore[method-assign]  # written-out calls look at the class
    try:
        tensors = draw(sample, device, torch.bfloat16)
        for name, spec in sample.tensors.items():
            tensors[name].requires_grad_(spec.grad and tensors[name].is_floating_point())
        if sample.options.get("inplace"):  # no leaf may be overwritten
            tensors = {n: t * 1 if t.requires_grad else t for n, t in tensors.items()}
        result = samples.call(op, **tensors, **sample.options)
        outs = [result] if isinstance(result, Tensor) else list(result)
        outs = [t for t in outs if isinstance(t, Tensor) and t.requires_grad]
        torch.autograd.backward(outs, [torch.randn_like(t) for t in outs])
    finally:
        Primitive.call = original  # type: ignore[method-assign]
    return tuple(a.detach() if isinstance(a, Tensor) else a for a in calls[0])


class Forced:
    """A context in which launch tables give one configuration for one kernel."""

    def __init__(self, kernel: str, fields: Mapping[str, int] | None) -> None:
        self.entries = {kernel: ({"when": {}, "config": dict(fields)},)} if fields else {}
        self.real = launch.table

    def __enter__(self) -> None:
        launch._configs.clear()
        if self.entries:
            launch.table = lambda backend, arch: self.entries  # type: ignore[assignment]

    def __exit__(self, *_: object) -> None:
        launch.table = self.real
        launch._configs.clear()


def time_us(prim: Any, args: tuple[Any, ...], device: torch.device) -> tuple[float, Any]:
    """Median device time of a direction with a cold cache, and what it returned."""
    module = torch.get_device_module(device)
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)
    times: list[float] = []
    own = [
        a.clone() if name in prim.mutates else a for name, a in zip(prim.params, args, strict=True)
    ]
    result = prim.call(*own)  # of inputs that no call before has overwritten
    for _ in range(REPEATS):
        begin, end = module.Event(enable_timing=True), module.Event(enable_timing=True)
        flush.zero_()
        flush.zero_()
        begin.record()
        prim.call(*args)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times), result


def agrees(actual: Any, expected: Any) -> bool:
    """Whether every tensor is that of the formula's launch, within the suite's table."""
    pairs = zip(*((x,) if isinstance(x, Tensor) else x for x in (actual, expected)), strict=True)
    return all(excess(a, b, a.dtype) <= 1 for a, b in pairs if a.is_floating_point() and a.numel())


def tune(kernel: str, name: str, combinations: str, show: int) -> list[str]:
    """Lines about one kernel and sample, the fastest combinations first."""
    key, _, where = kernel.partition("@")
    op, _, direction = (where or key).partition(".")
    directions = [f"{o}.{h}" for o in OPS for h in ("forward", "backward")]
    if f"{op}.{direction}" not in directions:
        raise ValueError(unknown("direction of an operator", where or key, directions))
    known = {s.name.replace(" ", "_"): s for s in samples.of(op) if s.size == "bench"}
    if name not in known:
        raise ValueError(unknown("sample", name, known))
    device = torch.accelerator.current_accelerator()
    if device is None:
        raise ValueError("launch numbers are found on an accelerator; this machine has none")
    device = torch.device(device.type, 0)
    prim = getattr(OPS[op], {"forward": "fwd", "backward": "bwd"}[direction])
    args = call_arguments(op, direction, known[name], device)
    with Forced(key, None):
        base, expected = time_us(prim, args, device)
    rows: list[tuple[float, dict[str, int]]] = []
    failed = []
    for fields in grid(combinations):
        with Forced(key, fields):
            try:
                spent, microseconds = time_us(prim, args, device)
            except Exception as wrong:  # a launch that does not fit is an answer
                failed.append(f"    {fields}: {type(wrong).__name__} {str(wrong)[:80]}")
                continue
        rows.append((spent if agrees(microseconds, expected) else float("inf"), fields))
    rows.sort(key=lambda row: row[0])
    lines = [f"{kernel} {name}: now {base:.1f} us"]
    return lines + [f"    {us:8.1f} us  {fields}" for us, fields in rows[:show]] + failed[:3]


def kernel_command(arguments: Sequence[str]) -> int:
    """Tune one kernel, or each line ``KERNEL SAMPLE GRID`` of a file; print table entries."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tune kernel", description=kernel_command.__doc__
    )
    parser.add_argument(
        "kernel",
        help="key of a launch table, such as rms_norm.backward; KEY@OP.HALF where another operator "
        "launches it; or @FILE with a line for each",
    )
    parser.add_argument("sample", nargs="?", default="", help="bench sample, such as 8192x4096")
    parser.add_argument(
        "grid", nargs="?", default="", help="launch configuration and values: 'rows=1,2;stages=3'"
    )
    parser.add_argument("--show", type=int, default=6, help="combinations to print")
    options = parser.parse_args(arguments)
    jobs = [(options.kernel, options.sample, options.grid)]
    try:
        if options.kernel.startswith("@"):
            with open(options.kernel[1:], encoding="utf-8") as file:
                jobs = [tuple(line.split(None, 2)) for line in file if line.strip()]  # type: ignore[misc]
        for job in jobs:
            print(*tune(*job, options.show), sep="\n", flush=True)
    except (ValueError, OSError) as wrong:
        parser.error(str(wrong))
    return 0


# --- a whole table ---

FASTER = 0.97


def questions(prim: Any, args: tuple[Any, ...], label: str) -> list[Asked]:
    """What launch numbers a call asks for, with those in force."""
    asked: list[Asked] = []
    real = launch._config

    def spy(name: str, formula: Any, info: Any, shape: dict[str, int]) -> Any:
        config = real(name, formula, info, shape)
        asked.append(Asked(label, name, dict(shape), config))
        return config

    launch._configs.clear()
    launch._config = spy
    try:
        prim.call(*[a.clone() if n in prim.mutates else a for n, a in zip(prim.params, args)])
    finally:
        launch._config = real
    return list({a.key: a for a in asked}.values())


def measure(prim: Any, args: tuple[Any, ...], label: str, device: torch.device) -> dict[str, Any]:
    """Entries by key, for one direction and sample."""
    info = launch.device_info(device)
    measured = {}
    for question in questions(prim, args, label):
        with Forced(question.key, None):
            base, expected = time_us(prim, args, device)
        best, chosen = base, None
        for config in neighbors(info, question.formula):
            with Forced(question.key, config):
                try:
                    spent, microseconds = time_us(prim, args, device)
                except Exception as wrong:  # a launch that does not fit is an answer
                    print(f"    {question.key} {config}: {type(wrong).__name__}")
                    continue
            if spent < best and agrees(microseconds, expected):
                best, chosen = spent, config
        print(f"{question.key} {label}: {base:.1f} us, best {best:.1f} us {chosen or ''}")
        if chosen is not None and best <= FASTER * base:
            source = f"{where(device)}: {label}, {base:.1f} -> {best:.1f} us"
            measured[question.key] = {"when": bounds(question), "config": chosen, "source": source}
    return measured


def where(device: torch.device) -> str:
    """The device, the versions and the day, as an entry says it."""
    name = torch.get_device_module(device).get_device_name(device)
    triton = __import__("triton").__version__
    day = datetime.date.today().isoformat()
    return f"measured on {name}, torch {torch.__version__}, triton {triton}, {day}"


def table_command(arguments: Sequence[str]) -> int:
    """Measure every operator, or some, and write this device's launch table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tune table", description=table_command.__doc__
    )
    parser.add_argument("--op", action="append", choices=operators(), help="default: all")
    parser.add_argument("--sample", default="", help="only samples whose name contains this")
    options = parser.parse_args(arguments)
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or not torch.accelerator.is_available():
        parser.error("launch numbers are measured on an accelerator; this machine has none")
    device = torch.device(accelerator.type, 0)
    info = launch.device_info(device)
    tables: dict[str, list[dict[str, Any]]] = {}
    for op in options.op or operators():
        for sample in samples.of(op):
            if sample.size != "bench" or options.sample not in sample.name:
                continue
            for direction, prim in (("forward", OPS[op].fwd), ("backward", OPS[op].bwd)):
                args = call_arguments(op, direction, sample, device)
                for key, entry in measure(prim, args, f"{op} {sample.name}", device).items():
                    known = tables.setdefault(key, [])
                    if entry["when"] not in [e["when"] for e in known]:
                        known.append(entry)
    if not tables:
        print("nothing is faster than the numbers in force: no table was written")
        return 0
    print(f"wrote {write(info, tables)}; see git diff")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Tune a kernel, or measure a table."""
    return run_command({"kernel": kernel_command, "table": table_command}, arguments)


if __name__ == "__main__":
    sys.exit(main())
