"""Operators under each setting of ``deterministic``: are their bits as promised, what does it cost?

Parts of :mod:`benchmarks.bitwise`, which runs them in processes of their own.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import importlib.metadata
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import liger_multi
from liger_multi.bench import cases
from liger_multi.bench.cases import Case, draw
from liger_multi.bench.measure import Clock, Runner, Times, call_ms, host_us, memory_bytes, release
from liger_multi.bench.providers import Provider
from liger_multi.dispatch import launch
from liger_multi.dispatch.bitwise import MODES, RowAxes, goes_row_by_row
from liger_multi.dispatch.config import use
from liger_multi.dispatch.op import OPS
from liger_multi.dispatch.registry import REFERENCE
from liger_multi.dispatch.resolve import plan_for
from liger_multi.errors import BackendUnavailableError
from liger_multi.testing import samples
from liger_multi.testing.bitwise import SETTINGS, Call, recorded, same_bits, selected

Row = dict[str, Any]
NAMES = {mode: mode or "default" for mode in MODES}
SIZES = (1, 2, 3, 17, 64)  # of batches that are compared with the whole one; the rest is another
MOST = 96  # rows of an operator that goes row by row
SLOW_MS = 20.0  # a call that takes longer is not repeated within a round
ONCE_MS = 2000.0  # and one that takes longer is called once


@dataclass(frozen=True)
class Place:
    """Where and how large.

    Attributes:
        device: Of the tensors.
        dtype: Of the floating-point inputs.
        tiny: Whether samples and models are small, for a trial.
        seconds: For timing one operator under all settings.
    """

    device: torch.device
    dtype: torch.dtype
    tiny: bool
    seconds: float


def case_of(op: str, place: Place) -> Case:
    """The first bench sample; the first sample of a trial, and of what an accelerator lacks."""
    chosen = liger_multi.explain(op, place.device, place.dtype).chosen(op)
    if place.tiny or (chosen == REFERENCE and place.device.type != "cpu"):
        return Case(op, samples.of(op)[0], {})
    limits = (cases.CPU_BYTES, cases.CPU_OPERATIONS) if place.device.type == "cpu" else None
    return cases.cases(op, "*", place.dtype, limits)[0]


def provider_of(case: Case, mode: str) -> Provider:
    """Our operator under a setting."""
    public = samples.function(case.op, case.sample.options)
    return Provider(
        NAMES[mode],
        lambda **tensors: public(**tensors),
        overwrites=bool(case.sample.options.get("inplace")),
        scope=lambda: use(deterministic=SETTINGS[mode]),
    )


def inputs_of(case: Case, place: Place) -> tuple[dict[str, Tensor], tuple[Tensor, ...]]:
    """Inputs, and a gradient for every result: 1 for a scalar loss."""
    tensors = draw(case.sample, place.device, place.dtype)
    runner = Runner.make(provider_of(case, ""), tensors, ())
    generator = torch.Generator(place.device).manual_seed(1)
    with runner.provider.scope():
        outputs = runner.forward(runner.prepare())
    return tensors, tuple(
        torch.randn(y.shape, generator=generator, device=place.device).to(y.dtype)
        if y.ndim
        else torch.ones_like(y)
        for y in outputs
    )


# --- bits ---


def check(op: str, place: Place) -> Iterator[Row]:
    """Whether calls repeat and rows are independent, for each direction and setting."""
    case = case_of(op, place)
    if "reduction" in OPS[op].fwd.params:  # a mean has no rows
        options = {**case.sample.options, "reduction": "none"}
        case = replace(case, sample=replace(case.sample, options=options))
    tensors, douts = inputs_of(case, place)
    with recorded() as record:
        Runner.make(provider_of(case, ""), tensors, douts).both()
    calls = [Call(prim, args, "auto") for prim, args, _ in record if prim.op.name == op]
    del record, tensors, douts
    for call in calls:
        for mode in MODES:
            row = {"part": "check", "name": op, "shape": case.label, "variant": NAMES[mode]}
            row |= {"direction": call.prim.direction}
            try:
                row |= _properties(call, mode)
            except BackendUnavailableError as refusal:
                row["refused"] = first_line(refusal)
            except Exception as failure:
                row["failure"] = first_line(failure)
            yield row
            release(place.device)


def _properties(call: Call, mode: str) -> Row:
    with use(deterministic=SETTINGS[mode]):
        plan = plan_for(call.prim, call.args[call.prim.anchor])
        backend = plan.chosen(call.args).name
    promised = call.promise(mode)
    properties: dict[str, bool | None] = {"repeat": repeats(call, mode), "rows": None}
    if "rows" in call.promise("rows"):  # under a weaker setting it may hold all the same
        most = MOST if goes_row_by_row(backend, call.prim) else None
        properties["rows"] = rows_hold(call, mode, most)
    broken = [name for name, held in properties.items() if held is False and name in promised]
    return {"backend": backend, **properties, "promised": sorted(promised), "broken": broken}


def repeats(call: Call, mode: str) -> bool:
    """Whether two calls agree, with other memory contents and a busy second stream."""
    device = call.args[call.prim.anchor].device
    first = call.run(mode, _copies(call))
    blocks = [torch.full((size,), float("nan"), device=device) for size in (100, 5000, 2**20)]
    del blocks[::2]
    with busy(device):
        second = call.run(mode, _copies(call))
    return same_bits(first, second)


def _copies(call: Call) -> tuple[Any, ...]:
    return tuple(a.clone() if isinstance(a, Tensor) else a for a in call.args)


@contextlib.contextmanager
def busy(device: torch.device) -> Iterator[None]:
    """A second stream with GEMMs of its own; a CPU has none."""
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        left = torch.ones(4096, 4096, device=device, dtype=torch.bfloat16)
        products = [left @ left for _ in range(8)]
    yield
    stream.synchronize()
    del products


def rows_hold(call: Call, mode: str, most: int | None) -> bool | None:
    """Whether rows in random order and in batches of several sizes have the bits of the full batch.

    Args:
        call: The call.
        mode: The setting.
        most: How many rows are taken; None takes all.

    Returns:
        None where no result has rows.
    """
    prim = call.prim
    named = dict(zip(prim.params, call.args, strict=True))
    if not any(prim.op.bitwise.axis(name) is not None for name in (*prim.returns, *prim.mutates)):
        return None
    rows = RowAxes(prim.op.bitwise, named)
    order = torch.randperm(rows.count, generator=torch.Generator().manual_seed(2))
    whole_args = call.args
    if most is not None and rows.count > most:
        whole_args = selected(rows, call, order[:most])
        order = torch.randperm(most, generator=torch.Generator().manual_seed(2))
        rows = RowAxes(prim.op.bitwise, dict(zip(prim.params, whole_args, strict=True)))
    whole = _named(call, call.run(mode, whole_args))
    parts = Call(prim, whole_args, call.order)
    compared, start = 0, 0
    for size in (*SIZES, rows.count):
        index = order[start : start + size]
        start += size
        if not index.numel():
            break
        outputs = _named(call, call.run(mode, selected(rows, parts, index)))
        for name, out in whole.items():
            flat, axis = rows.flat(name, out)
            if flat is None:
                continue
            compared += 1
            if not same_bits(flat.index_select(axis, index.to(flat.device)), outputs[name]):
                return False
    return True if compared else None


def _named(call: Call, outputs: tuple[Any, ...]) -> dict[str, Any]:
    names = (*call.prim.returns, *call.prim.mutates)
    return dict(zip(names, outputs, strict=True))


def first_line(failure: BaseException) -> str:
    """What happened, in one line."""
    lines = str(failure).strip().splitlines() or ["no message"]
    return f"{type(failure).__name__}: {lines[0]}"[:200]


# --- times ---


def timed(op: str, place: Place, clock: Clock) -> Iterator[Row]:
    """Time and memory of an operator under each setting, in turns."""
    case = case_of(op, place)
    launch._found.clear()
    tensors, douts = inputs_of(case, place)
    rows: dict[str, Row] = {}
    runners: dict[str, tuple[Runner, int]] = {}
    for mode in MODES:
        name = NAMES[mode]
        row = {"part": "time", "name": op, "shape": case.label, "variant": name}
        rows[name] = row | {"family": OPS[op].family}
        try:
            runner = Runner.make(provider_of(case, mode), tensors, douts)
            runner.both()  # compiles, and makes the workspaces of libraries
            (ms,) = clock.marks([runner.both])
            if ms > ONCE_MS:
                rows[name] |= {"both_ms": ms, "both_spread_ms": 0.0, "calls": 1}
                continue
            rows[name]["extra_bytes"], rows[name]["peak_bytes"] = memory_bytes(
                runner, 0, place.device
            )
            runners[name] = (runner, clock.flushes(host_us(runner, clock, 3)[1]))
        except Exception as failure:
            rows[name]["failure"] = first_line(failure)
    for name, times in in_turns(runners, clock, place.seconds).items():
        rows[name] |= times.summary()
    if "rows" in runners:
        rows["rows"]["launches"] = other_launches()
    yield from rows.values()


def in_turns(
    runners: Mapping[str, tuple[Runner, int]], clock: Clock, seconds: float, least: int = 3
) -> dict[str, Times]:
    """Rounds over all settings until the time is used up; every second round runs backwards."""
    times = {name: Times() for name in runners}
    repeats = {}
    for name, (runner, flushes) in runners.items():
        with runner.provider.scope():
            slow = call_ms(runner, clock, flushes)[1] > SLOW_MS
            repeats[name] = 1 if slow or clock.cpu else 5
            if not slow:
                for _ in range(10):  # clocks and caches of the host
                    call_ms(runner, clock, flushes)
    end, rounds = time.perf_counter() + seconds, 0
    while runners and (rounds < least or time.perf_counter() < end):
        for name in list(runners)[:: 1 if rounds % 2 == 0 else -1]:
            runner, flushes = runners[name]
            with runner.provider.scope():
                for _ in range(repeats[name]):
                    forward, both = call_ms(runner, clock, flushes)
                    times[name].forward_ms.append(forward)
                    times[name].both_ms.append(both)
        rounds += 1
    return times


def other_launches() -> list[str]:
    """Kernels whose launch configuration another one replaces under "rows"."""
    known = launch._found
    return sorted(
        {
            name
            for (name, device, by_rows, *shape), config in known.items()
            if by_rows and known.get((name, device, False, *shape), config) != config
        }
    )


# --- GEMMs ---

Gemm = Callable[[Tensor, Tensor], Tensor]  # (M, K) @ (K, N)
LAYERS = {
    "q, o": (2048, 2048),
    "k, v": (512, 2048),
    "gate, up": (8192, 2048),
    "down": (2048, 8192),
    "head": (128256, 2048),
}
"""Outputs and inputs of the linear layers of Llama-3.2-1B."""


@functools.cache
def sgemm_bi() -> Gemm | str:
    """The GEMM of the package ``sgemm-bi``, or why there is none."""
    for folder in map(Path, torch.__path__):
        # its kernels are compiled by NVRTC, which PyTorch brings outside of the search path
        for file in sorted(folder.parent.glob("nvidia/*/lib/libnvrtc.so.*")):
            with contextlib.suppress(OSError):
                ctypes.CDLL(str(file), ctypes.RTLD_GLOBAL)
    try:
        linear: Any = importlib.import_module("sgemm_bi").deterministic_linear
    except Exception as failure:  # an import may fail in any way: a missing package, a driver
        return first_line(failure)
    return lambda a, b: linear(a, b, None, tensor_cores=True)


def ours() -> Gemm | str:
    """Our GEMM with independent rows, or why there is none."""
    try:
        gemm: Any = importlib.import_module("liger_multi.backends.triton.common.gemm").gemm_by_rows
    except ImportError as failure:
        return first_line(failure)

    def call(a: Tensor, b: Tensor) -> Tensor:
        out = a.new_empty(a.shape[0], b.shape[1])
        gemm(a, b, None, out)
        return out

    return call


GEMMS: dict[str, Callable[[], Gemm | str]] = {
    "library": lambda: torch.mm,
    "ours": ours,
    "sgemm-bi": sgemm_bi,
}


def gemms(place: Place, clock: Clock) -> Iterator[Row]:
    """Forward and gradient of the input of each linear layer, by each GEMM."""
    tokens = 64 if place.tiny else 8192
    for name, (outputs, inputs) in LAYERS.items():
        if place.tiny:
            outputs, inputs = outputs // 64, inputs // 64
        weight = torch.randn(outputs, inputs, device=place.device).to(place.dtype) / inputs**0.5
        for direction, b in (("forward", weight.t()), ("dx", weight)):
            a = torch.randn(tokens, b.shape[0], device=place.device).to(place.dtype)
            shape = f"{tokens}x{b.shape[0]}x{b.shape[1]} {direction}"
            rows = {
                who: {"part": "gemm", "name": name, "shape": shape, "variant": who} for who in GEMMS
            }
            _time_gemms(a, b, rows, clock, 3 if clock.cpu else 15)
            yield from rows.values()
            release(place.device)


def _time_gemms(a: Tensor, b: Tensor, rows: dict[str, Row], clock: Clock, calls: int) -> None:
    usable: dict[str, Gemm] = {}
    for who, find in GEMMS.items():
        gemms = find()
        if isinstance(gemms, str):
            rows[who]["failure"] = gemms
            continue
        # the package wants weights as (inputs, outputs), which is how its own layer has them
        expected = b.contiguous() if who == "sgemm-bi" else b
        try:
            whole = gemms(a, expected)
            parts = [gemms(a[:size].clone(), expected) for size in (*SIZES, 1000)]
            rows[who]["rows"] = all(same_bits(p, whole[: p.shape[0]]) for p in parts)
            rows[who]["repeat"] = same_bits(whole, gemms(a, expected))
            usable[who] = functools.partial(gemms, a, expected)
        except Exception as failure:
            rows[who]["failure"] = first_line(failure)
    times: dict[str, Times] = {who: Times() for who in usable}
    flushes = clock.flushes(50)
    for turn in range(calls + 3):
        for who in list(usable)[:: 1 if turn % 2 == 0 else -1]:
            (ms,) = clock.marks([usable[who]], flushes)  # type: ignore[list-item]
            if turn >= 3:
                times[who].forward_ms.append(ms)
                times[who].both_ms.append(ms)
    operations = 2.0 * a.shape[0] * a.shape[1] * b.shape[1]
    for who, found_times in times.items():
        summary = found_times.summary()
        rows[who] |= {key: summary[key] for key in ("both_ms", "both_spread_ms", "calls")}
        rows[who]["tflops"] = operations / summary["both_ms"] / 1e9


def versions() -> dict[str, str]:
    """The version of the peer, where it is installed."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return {"sgemm-bi": importlib.metadata.version("sgemm-bi")}
    return {}
