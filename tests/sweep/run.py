"""One training step, stock and patched, of one pair, each in a process of its own."""

from __future__ import annotations

import copy
import json
import os
import re
import signal
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from liger_multi.patching.options import ROTATED
from liger_multi.patching.report import Executed, executed, serves
from tests import comparing
from tests.sweep import multimodal
from tests.sweep.cases import Pair, Verdict, build, inputs

# --- what a step executed ---


def counts(report: Any, model: nn.Module, calls: Executed, batch: dict[str, Any]) -> dict[str, Any]:
    """What became of the patched modules of a report, as fields of an outcome."""
    report = replace(report, entries=[e for e in report.entries if e.op != "packing"])
    parts = idle(report, model, calls, batch)
    ran, served, stock = Counter[str](), Counter[str](), Counter[tuple[str, str, str]]()
    for entry in report.entries:
        if entry.path in calls.ran:
            ran[entry.op] += 1
            if serves(entry.op, entry.path, calls):
                served[entry.op] += 1
            else:
                stock[entry.op, _starred(entry.path), entry.stock] += 1
    return {
        "modules": dict(Counter(e.op for e in report.entries)),
        "ran": dict(ran),
        "served": dict(served),
        "stock": [[*where, n] for where, n in stock.items()],
        "idle": parts,
        "text_only": text_only(parts, model, batch),
    }


def text_only(parts: list[dict[str, Any]], model: Any, batch: dict[str, Any]) -> bool:
    """Whether a step had text alone, and the model takes more: it has a tower, or is listed so."""
    from transformers.models.auto import modeling_auto

    listed = modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES.values()
    more = type(model).__name__ in listed and lacking(model, batch)
    text = set(multimodal.modalities(batch)) <= {"text"}
    return text and (bool(more) or any(part["tower"] for part in parts))


def idle(
    report: Any, model: nn.Module, calls: Executed, batch: dict[str, Any]
) -> list[dict[str, Any]]:
    """The outermost modules of which nothing ran, if they are models or have patched modules.

    Of each its path, class, patched modules by operator, whether it is or has a model of its own (a
    tower), and the kinds of inputs that it takes and the batch has none of.
    """
    modules = dict(model.named_modules())
    alive = {above for path in calls.ran for above in (path, *_above(path))}
    towers = {path for path, m in modules.items() if hasattr(m, "input_modalities")} - alive
    patched = {e.path: e.op for e in report.entries if e.path not in calls.ran}
    reasons: dict[str, dict[str, Any]] = {}
    for path in modules:
        if path not in towers and path not in patched:
            continue
        top = next((p for p in reversed(_above(path)) if p not in alive), path)
        shown = _starred(top)
        cls = type(modules[top]).__name__
        one = {"path": shown, "class": cls, "modules": {}, "tower": False, "lacks": []}
        one = reasons.setdefault(shown, one)
        if path in towers:
            one["tower"] = True
            one["lacks"] = sorted({*one["lacks"], *lacking(modules[path], batch)})
        if path in patched:
            one["modules"][patched[path]] = one["modules"].get(patched[path], 0) + 1
    return list(reasons.values())


def _above(path: str) -> list[str]:
    """Paths of the modules around one, the nearest first; the model itself is the last."""
    parts = path.split(".") if path else []
    return [".".join(parts[:n]) for n in reversed(range(len(parts)))]


def lacking(model: Any, batch: dict[str, Any]) -> set[str]:
    """The kinds of inputs that a model takes and a batch has none of, text aside."""
    modalities = getattr(model, "input_modalities", "text")
    requested = {modalities} if isinstance(modalities, str) else set(modalities)
    return requested - {"text", *multimodal.modalities(batch)}


def _starred(path: str) -> str:
    """The path with layer numbers starred, so that equal layers fall together."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", path) or "(model)"


# --- a step, and a process for each ---

SECONDS = 90
"""A pair that computes for longer counts as one that cannot be built."""
LOSS, GRADIENT, FLOOR = 2e-5, 1e-4, comparing.ULPS * torch.finfo(torch.float32).eps
"""Allowed differences: of the loss, of a gradient by its own largest entry, and by that of all."""


@dataclass
class Outcome(Verdict):
    """What became of one pair: "equal", "different" or "not built".

    Attributes:
        modules: Patched modules by operator.
        ran: Those of them whose forward ran in the step.
        served: Those of them whose forward called an operator.
        stock: Those that ran and called none: operator, path, class and number.
        idle: Parts of the model of which nothing ran: see :func:`idle`.
        inputs: Kinds of what the model was given, text among them.
        gradients: Parameters whose gradient is not all zero, and all parameters.
        text_only: Whether the model takes more than text, and the step had none of that.
        calls: Calls of operators in the step.
        skipped: Reasons by operator.
        seconds: For everything.
    """

    modules: dict[str, int] = field(default_factory=dict)
    ran: dict[str, int] = field(default_factory=dict)
    served: dict[str, int] = field(default_factory=dict)
    stock: list[list[Any]] = field(default_factory=list)
    idle: list[dict[str, Any]] = field(default_factory=list)
    inputs: list[str] = field(default_factory=list)
    gradients: list[int] = field(default_factory=list)
    text_only: bool = False
    calls: dict[str, int] = field(default_factory=dict)
    skipped: dict[str, list[str]] = field(default_factory=dict)
    seconds: float = 0.0


def examine(pair: Pair, device: str = "cpu", **ops: Any) -> Outcome:
    """Compare stock and patched, in this process."""
    from liger_multi.patching import patch

    verdict = Outcome(**vars(pair))
    started = time.perf_counter()
    try:
        stock = build(pair)
        liven(stock)
        batch_inputs = inputs(pair, stock)
        batch = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in batch_inputs.items()}
        stock.to(device)
        ours = copy.deepcopy(stock)
        expected = step(stock, batch)
    except Exception as error:
        verdict.why = _said(error)
        return verdict
    verdict.inputs = multimodal.modalities(batch)
    alive = sum(bool(grad.any()) for name, grad in expected.items() if name != "loss")
    verdict.gradients = [alive, len(list(stock.parameters()))]
    report = patch(ours, **{ROTATED: True, **ops})  # named, it says where it is refused
    calls = Executed()
    try:
        with executed(ours) as calls:
            got = step(ours, batch)
        verdict.why = reason = difference(expected, got)
        if reason and not in_doubles(stock, ours, batch):
            reason, verdict.why = "", "in fp64; in fp32 the rounding shows"
    except Exception as error:
        verdict.why = reason = _said(error)
    verdict.status = "different" if reason else "equal"
    verdict.calls = dict(sorted(calls.calls.items()))
    for name, value in counts(report, ours, calls, batch).items():
        setattr(verdict, name, value)
    for skip in report.skipped:
        if skip.op == ROTATED and not skip.path:
            continue  # few models have both
        reasons = verdict.skipped.setdefault(skip.op, [])
        if skip.reason not in reasons:
            reasons.append(skip.reason)
    verdict.seconds = round(time.perf_counter() - started, 2)
    return verdict


def _said(error: BaseException) -> str:
    at = traceback.extract_tb(error.__traceback__)[-1]
    message = str(error).strip().split("\n")[0][:160]
    return f"{type(error).__name__}: {message} ({os.path.basename(at.filename)})"


def liven(model: Any) -> None:
    """Weights that tell: norms are not ones, and products keep the size of their inputs."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.is_floating_point() or parameter.numel() == 0:
                continue
            if parameter.ndim < 2:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
            else:
                bound = 0.7 * parameter.shape[-1] ** -0.5
                size = float(parameter.std()) if parameter.numel() > 1 else bound
                if size == 0:  # born zero, what is in front of it would have no gradient
                    parameter.add_(torch.randn(parameter.shape, generator=generator) * bound)
                elif size < bound:
                    parameter.mul_(bound / size)


def step(model: Any, batch: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The loss and all gradients by name."""
    torch.manual_seed(7)
    numpy.random.seed(7)  # SpecAugment
    loss = model(**batch).loss
    if loss is None:
        raise ValueError("the model gives no loss")
    loss.backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **grads}


def difference(expected: dict[str, torch.Tensor], got: dict[str, torch.Tensor]) -> str:
    """What is not equal within rounding, or nothing."""
    if expected.keys() != got.keys():
        return f"gradients of other parameters: {sorted(expected.keys() ^ got.keys())[:3]}"
    loss, our_loss = float(expected["loss"]), float(got["loss"])
    if not abs(our_loss - loss) <= LOSS * abs(loss):
        return f"the loss is {our_loss:.7g}, stock {loss:.7g}"
    ours, theirs = {}, {}
    for name in expected.keys() - {"loss"}:
        # where stock has no number, ours has to have none either
        neither = got[name].isnan() & expected[name].isnan()
        ours[name], theirs[name] = (x[name].masked_fill(neither, 0.0) for x in (got, expected))
    # models in fp64 compute their norms in fp32
    reason = comparing.difference(ours, theirs, GRADIENT, torch.float32)
    return f"the gradient of {reason}" if reason else ""


def in_doubles(stock: Any, ours: Any, batch: dict[str, Any]) -> str:
    """The difference in fp64, where a gradient that all but cancels is still exact."""
    results = []
    for model in (stock, ours):
        model.double().zero_grad()
        results.append(step(model, {k: _wide(v) for k, v in batch.items()}))
    return difference(results[0], results[1])


def _wide(value: Any) -> Any:
    """A value of a batch, in fp64 if it is a tensor of other numbers than integers."""
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def sweep(pairs: list[Pair], jobs: int = 1, device: str = "cpu", **ops: Any) -> Iterator[Outcome]:
    """Examine every pair in a fork: what one does to the libraries, no other one sees."""

    def work(pair: Pair) -> dict[str, Any]:
        return asdict(examine(pair, device, **ops))

    for pair, seconds, outcome in forked(pairs, work, jobs):
        why = f"the process ended after {seconds:.0f} s without a result"
        yield Outcome(**outcome or {**asdict(pair), "status": "not built", "why": why})


def forked(
    pairs: list[Pair], work: Callable[[Pair], dict[str, Any]], jobs: int = 1
) -> Iterator[tuple[Pair, float, dict[str, Any] | None]]:
    """Pairs, seconds and results of ``work``, each in a fork; None for a fork that gave none."""
    _import()
    waiting, running = list(pairs), dict[int, tuple[Pair, int, float]]()
    while waiting or running:
        while waiting and len(running) < jobs:
            pair = waiting.pop(0)
            reading, writing = os.pipe()
            pid = os.fork()
            if pid == 0:
                _child(pair, writing, work)
            os.close(writing)
            running[pid] = (pair, reading, time.perf_counter())
        for pid, (pair, reading, started) in list(running.items()):
            with os.fdopen(reading, "rb", closefd=True) as pipe:
                text = pipe.read().decode()
            os.waitpid(pid, 0)
            del running[pid]
            yield pair, time.perf_counter() - started, json.loads(text) if text else None


def _import() -> None:
    """What nearly every child needs, once."""
    import importlib

    from liger_multi.dispatch import registry

    for model_type in ("llama", "bert", "t5", "mixtral", "gemma2"):
        importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}")
    for op in registry.operators():
        registry.module("reference", op)
    importlib.import_module("liger_multi.patching")
    importlib.import_module("torch._dynamo")


def _child(pair: Pair, writing: int, work: Callable[[Pair], dict[str, Any]]) -> None:
    # of its own time: beside other work a pair takes many times as long
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    signal.alarm(20 * SECONDS)
    torch.set_num_threads(1)  # those of OpenMP do not outlive a fork
    try:
        warnings.simplefilter("ignore")
        text = json.dumps(work(pair))
        with os.fdopen(writing, "w") as pipe:
            pipe.write(text)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)
