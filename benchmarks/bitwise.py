"""What equal bits cost: ``python -m benchmarks.bitwise``.

Under each setting of ``deterministic`` (none, ``True``, ``"rows"``), in turns:

| part | what |
|---|---|
| step | a whole step of Llama-3.2-1B; unpatched, and under PyTorch's switch, too |
| time | every operator at its first bench sample |

Operators run in processes of some at a time, so that a fault of one ends no other. That promises
hold is what the suite checks (``make test BACKEND=cuda``). ``CUBLAS_WORKSPACE_CONFIG`` is
``:4096:8`` for all, which on Hopper is what PyTorch takes anyway.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import liger_multi
from benchmarks import configs, harness, store
from benchmarks.harness import added_bytes, device_of, milliseconds
from liger_multi.bench import cases
from liger_multi.bench.cases import Case, draw
from liger_multi.bench.measure import Clock, Runner, host_us, interleave, memory_bytes, release
from liger_multi.bench.providers import Provider
from liger_multi.dispatch import launch
from liger_multi.dispatch.bitwise import MODES
from liger_multi.dispatch.config import use
from liger_multi.dispatch.op import OPS
from liger_multi.dispatch.registry import REFERENCE, operators
from liger_multi.errors import summary
from liger_multi.patching import options as patch_options, register_attention
from liger_multi.testing import samples
from liger_multi.testing.bitwise import SETTINGS, same_bits

Row = dict[str, Any]
NAMES = {mode: mode or "default" for mode in MODES}
ONCE_MS = 2000.0  # a call that takes longer is called once
CHUNK = 8  # operators of a process


# --- operators ---


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


def timed(op: str, place: Place, clock: Clock) -> Iterator[Row]:
    """Time and memory of an operator under each setting, in turns."""
    case = case_of(op, place)
    launch._configs.clear()
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
            rows[name]["failure"] = summary(failure)
    for name, times in interleave(runners, clock, place.seconds, 3).items():
        rows[name] |= times.summary()
    if "rows" in runners:
        rows["rows"]["launches"] = other_launches()
    yield from rows.values()


def other_launches() -> list[str]:
    """Kernels whose launch configuration another one replaces under "rows"."""
    known = launch._configs
    return sorted(
        {
            name
            for (name, device, by_rows, *shape), config in known.items()
            if by_rows and known.get((name, device, False, *shape), config) != config
        }
    )


# --- whole steps ---

WHOLE, TINY = configs.Run("llama-3.2-1b", 2, 4096, False), configs.Run("tiny", 2, 32, False)

WARM, STEPS = 2, 6
Scope = Callable[[], AbstractContextManager[Any]]


@dataclass
class Variant:
    """A model under a setting, with the times of its steps.

    Attributes:
        name: As the rows have it.
        model: It may be that of other variants, too; only one of them steps at a time.
        optimizer: Of the model.
        scope: In force around every step.
        note: What a reader has to know of it.
        times: Milliseconds of every step.
        row: What else was found.
    """

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scope: Scope
    note: str = ""
    times: list[float] = field(default_factory=list)
    row: Row = field(default_factory=dict)


def patched(run: configs.Run, device: torch.device) -> tuple[nn.Module, str]:
    """The model with all of our operators, and what it lacks."""
    register_attention()
    model = configs.build(run, device)
    model.set_attn_implementation("liger_multi")
    if "linear" in patch_options.BUILT_IN:
        liger_multi.patch(model, linear=True)
        return model, ""
    liger_multi.patch(model)
    return model, "linear layers are the library's"


@contextlib.contextmanager
def torch_deterministic(fill: bool) -> Iterator[None]:
    """PyTorch's own switch, with or without the filling of uninitialized memory."""
    flags = torch.utils.deterministic
    before = flags.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)
    flags.fill_uninitialized_memory = fill  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        flags.fill_uninitialized_memory = before  # type: ignore[attr-defined]


def variants(run: configs.Run, device: torch.device) -> Iterator[Variant]:
    """Patched under each setting, unpatched, and unpatched under PyTorch's switch."""

    def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-6, fused=device.type == "cuda")

    model, note = patched(run, device)
    optimizer = optimizer_of(model)
    settings: dict[str, bool | str] = {"default": False, "deterministic": True, "rows": "rows"}
    for name, value in settings.items():
        yield Variant(name, model, optimizer, partial(use, deterministic=value), note)
    baseline = configs.build(run, device)
    optimizer = optimizer_of(baseline)
    yield Variant("baseline", baseline, optimizer, contextlib.nullcontext)
    filled, unfilled = (partial(torch_deterministic, fill) for fill in (True, False))
    note = "torch.use_deterministic_algorithms"
    yield Variant("baseline-deterministic", baseline, optimizer, filled, note)
    note += ", fill_uninitialized_memory off"
    yield Variant("baseline-deterministic-unfilled", baseline, optimizer, unfilled, note)


class Steps:
    """Steps of several variants in turns, in one process."""

    def __init__(self, run: configs.Run, device: torch.device) -> None:
        self.device = device
        vocabulary = configs.MODELS[run.model][1]["vocab_size"]
        generator = torch.Generator(device).manual_seed(1)
        shape = (run.batch, run.tokens)
        self.ids = torch.randint(vocabulary, shape, generator=generator, device=device)

    def gradients(self, one: Variant) -> list[Tensor]:
        """The loss and all gradients of one forward and backward."""
        with one.scope():
            loss = one.model(input_ids=self.ids, labels=self.ids).loss
            loss.backward()
        gradients = [p.grad for p in one.model.parameters() if p.grad is not None]
        one.optimizer.zero_grad(set_to_none=True)
        return [loss.detach(), *gradients]

    def bits(self, one: Variant) -> Row:
        """Whether loss and gradients repeat, and whether a sequence depends on the others."""
        repeat = same_bits(self.gradients(one), self.gradients(one))
        base: Any = one.model
        with one.scope(), torch.no_grad():
            whole = base.model(input_ids=self.ids).last_hidden_state
            alone = [base.model(input_ids=ids[None]).last_hidden_state for ids in self.ids]
        rows = all(same_bits(whole[i : i + 1], part) for i, part in enumerate(alone))
        return {"repeat": repeat, "rows": rows}

    def timed(self, one: Variant) -> None:
        """One step, with its time, its loss and what it held beyond what was there."""

        def step() -> None:
            with one.scope():
                loss: Tensor = one.model(input_ids=self.ids, labels=self.ids).loss
                loss.backward()
                one.optimizer.step()
                one.optimizer.zero_grad(set_to_none=True)
            one.row["loss"] = loss.detach().item()

        def metered() -> None:
            one.row["extra_bytes"] = added_bytes(step, self.device)

        if self.device.type == "cpu":
            one.times.append(milliseconds(step, self.device))
        else:
            one.times.append(milliseconds(metered, self.device))


def step(place: Place) -> Iterator[Row]:
    """Rows of the whole step: time, memory and bits of every variant."""
    run = TINY if place.tiny else WHOLE
    steps, every = Steps(run, place.device), list(variants(run, place.device))
    warm, count = (1, 2) if place.tiny else (WARM, STEPS)
    for turn in range(warm + count):
        for one in every[:: 1 if turn % 2 == 0 else -1]:
            steps.timed(one)
    for one in every:
        row: Row = {"part": "step", "name": run.model, "shape": f"{run.batch}x{run.tokens}"}
        row |= {"variant": one.name} | ({"note": one.note} if one.note else {})
        with contextlib.suppress(torch.OutOfMemoryError):
            one.row |= steps.bits(one)
        times = one.times[warm:]
        median, spread = statistics.median(times), (max(times) - min(times)) / 2
        row |= {"both_ms": median, "both_spread_ms": spread, "calls": len(times)}
        yield row | {"tokens_per_second": run.batch * run.tokens / median * 1e3} | one.row


# --- the command ---


def work(ops: Sequence[str], place: Place) -> Iterator[Row]:
    """Times of operators, one after the other; what one raises is a row."""
    clock = Clock(place.device)
    for op in ops:
        try:
            yield from timed(op, place, clock)
        except Exception as failure:
            yield {"part": "time", "name": op, "failure": summary(failure)}
            if "CUDA error" in str(failure):  # nothing more can run in this process
                return
        release(place.device)


def shown(row: Row) -> str:
    """A row in one line: names first, then what was measured."""
    names = ("part", "name", "shape", "variant")
    head = " ".join(str(row[key]) for key in names if key in row)
    facts = {k: v for k, v in row.items() if k not in names and isinstance(v, str | float | bool)}
    rest = (f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in facts.items())
    return f"{head}: {', '.join(rest)}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Time, print and keep."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bitwise", description=__doc__)
    parser.add_argument("--device", default="", help="by default the accelerator, or the CPU")
    parser.add_argument("--tiny", action="store_true", help="small samples and models, for a trial")
    parser.add_argument("--ops", default="*", help="operators, by patterns; none without any")
    parser.add_argument("--no-step", action="store_true", help="operators alone")
    parser.add_argument("--seconds", type=float, default=0.5, help="for timing one operator")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    store.add_options(parser)
    options = parser.parse_args(arguments)
    device = torch.device(options.device or device_of())
    place = Place(device, torch.bfloat16, options.tiny, options.seconds)
    if options.child:
        print(json.dumps({"rows": list(work(options.child.split(","), place))}))
        return 0
    rows = [] if options.no_step else list(step(place))
    ops = cases.select("operator", options.ops, operators()) if options.ops else []
    head = store.head("bitwise", options, device) | {"tiny": options.tiny}
    release(device)
    for at in range(0, len(ops), CHUNK):
        names = ",".join(ops[at : at + CHUNK])
        command = ["--device", str(device), "--seconds", str(options.seconds), "--child", names]
        done = harness.child("benchmarks.bitwise", *command, *["--tiny"] * options.tiny)
        rows += done.get("rows", [{"part": "time", "name": names, **done}])
        store.keep({**head, "rows": rows}, options)
    print("\n".join(map(shown, rows)))
    for path in store.keep({**head, "rows": rows}, options):
        print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
