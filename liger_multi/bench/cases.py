"""Cases of the benchmark: samples scaled to the device, their inputs, and the fp64 results.

Also the peak: the minimal work of every operator, and the rates that the device reaches.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from liger_multi.dispatch.config import use
from liger_multi.dispatch.registry import REFERENCE, operators
from liger_multi.errors import unknown
from liger_multi.ops._work import Estimate, Shapes, Work
from liger_multi.testing import FORMULAS, samples, tolerance
from liger_multi.testing.samples import Sample, call, public

# --- the peak ---


def work_of(op: str, shapes: Shapes, size: int, options: Mapping[str, Any]) -> Work:
    """The work of a call, as the contract of its operator says."""
    estimate: Estimate = samples.declared(op, "work")
    return estimate(shapes, size, options)


@dataclass(frozen=True)
class Ceilings:
    """What the device reaches in this run: a large copy (read + written), a large product."""

    copy_bytes_per_second: float
    matmul_operations_per_second: float

    def floor_ms(self, bytes_: float, operations: float) -> float:
        """Lower bound of the time: the slower of memory traffic and arithmetic."""
        return 1e3 * max(
            bytes_ / self.copy_bytes_per_second, operations / self.matmul_operations_per_second
        )

    def percent(self, work: Work | None, forward_ms: float, both_ms: float) -> dict[str, float]:
        """Percent of peak that measured times reach; empty for unknown work."""
        if work is None:
            return {}
        forward = self.floor_ms(work.forward_bytes, work.forward_operations)
        total = self.floor_ms(work.both_bytes, work.both_operations)
        return {"forward": 100 * forward / forward_ms, "both": 100 * total / both_ms}


CPU_BYTES, CPU_OPERATIONS = 16e6, 2e10
JUMPS = ("fused_linear_tvd", "gated_mlp_float8")
"""Of these, a rounded logit may turn a sign and a rounded product may get the next code of FP8: no
bound holds for every element, so that the relative error in the 2-norm decides."""
JUMPED = 2**-4  # the relative error is half a step of E4M3 codes
ORACLE_BYTES = 2**30  # of the widest tensor of one chunk of rows


# --- cases ---


@dataclass(frozen=True)
class Case:
    """One sample of one operator, perhaps scaled down.

    Attributes:
        op: Operator's name.
        sample: What is run.
        divisors: What the rows and the vocabulary were divided by; empty for the full shape.
    """

    op: str
    sample: Sample
    divisors: Mapping[str, int]

    @property
    def label(self) -> str:
        """The sample's name, and how it was scaled."""
        return " ".join([self.sample.name, *(f"{k}/{v}" for k, v in self.divisors.items())])

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the inputs by name."""
        return {n: t.shape for n, t in self.sample.tensors.items()}

    @property
    def row_tensors(self) -> tuple[str, ...]:
        """Inputs whose first axis is the rows."""
        return _row_tensors(self.sample)

    def work(self, dtype: torch.dtype) -> Work:
        """Minimal work."""
        return work_of(self.op, self.shapes, dtype.itemsize, self.sample.options)


def _row_tensors(sample: Sample) -> tuple[str, ...]:
    first = next(iter(sample.tensors.values())).shape
    return tuple(
        name
        for name, t in sample.tensors.items()
        if t.shape and t.shape[0] == first[0] and (t.classes or len(t.shape) == len(first))
    )


def _vocabulary(sample: Sample) -> int:
    """Classes of the ids; integers of a fixed dtype are codes, which have no axis of classes."""
    return max((t.classes for t in sample.tensors.values() if t.dtype is None), default=0)


def _divide(sample: Sample, divisors: Mapping[str, int]) -> Sample:
    """The sample with fewer rows and a smaller vocabulary."""
    rows, classes = _row_tensors(sample), _vocabulary(sample)
    fewer = max(1, classes // divisors.get("V", 1))
    tensors = {}
    for name, t in sample.tensors.items():
        shape = list(t.shape)
        for axis, length in enumerate(shape):
            if axis == 0 and name in rows:
                shape[0] = max(1, length // divisors.get("rows", 1))
            elif classes and length == classes:
                shape[axis] = fewer
        is_id = t.classes and t.dtype is None
        tensors[name] = replace(t, shape=tuple(shape), classes=fewer if is_id else t.classes)
    return replace(sample, tensors=tensors)


def scaled(op: str, sample: Sample, itemsize: int, limit_bytes: float, operations: float) -> Case:
    """Halve rows and vocabulary in turn until the sample is small enough for a CPU.

    A sample whose shapes only fit each other as they are stays whole.
    """
    divisors: dict[str, int] = {}
    if sample.is_whole:
        return Case(op, sample, divisors)
    while True:
        small = _divide(sample, divisors)
        shapes = {n: t.shape for n, t in small.tensors.items()}
        work = work_of(op, shapes, itemsize, sample.options)
        rows = next(iter(shapes.values()))[0]
        classes = _vocabulary(small)
        fits = small.elements * itemsize <= limit_bytes and work.both_operations <= operations
        if fits or (rows <= 1 and classes <= 1):
            return Case(op, small, divisors)
        key = "V" if classes > rows else "rows"
        divisors = {**divisors, key: divisors.get(key, 1) * 2}


def select(noun: str, pattern: str, names_known: Sequence[str]) -> list[str]:
    """The names that a comma-joined list of globs means; ValueError names the nearest."""
    names: list[str] = []
    for part in filter(None, (p.strip() for p in pattern.split(","))):
        hits = [name for name in names_known if fnmatch.fnmatchcase(name, part)]
        if not hits:
            raise ValueError(unknown(noun, part, names_known))
        names += hits
    if not names:
        raise ValueError(f"no {noun} named by {pattern!r}: '*' means all {len(names_known)}")
    return [name for name in names_known if name in names]


def cases(
    ops: str, names: str, dtype: torch.dtype, limits: tuple[float, float] | None
) -> list[Case]:
    """Bench samples of the operators; ``limits`` (bytes, operations) scales them down."""
    bench = {
        op: [s for s in samples.of(op) if s.size == "bench"]
        for op in select("operator", ops, operators())
    }
    sample_names = list(dict.fromkeys(s.name for op_samples in bench.values() for s in op_samples))
    selected = select("sample", names, sample_names)
    return [
        scaled(op, s, dtype.itemsize, *limits) if limits else Case(op, s, {})
        for op, op_samples in bench.items()
        for s in op_samples
        if s.name in selected
    ]


# --- inputs ---


def draw(sample: Sample, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """The inputs, drawn on the device: a billion fp64 numbers on the host take minutes."""
    generator = torch.Generator(device).manual_seed(0)
    tensors = {}
    for name, spec in sample.tensors.items():
        if spec.classes:
            ids = torch.randint(
                spec.least, spec.classes, spec.shape, generator=generator, device=device
            )
            order = torch.arange(ids.numel(), device=device).reshape(spec.shape)
            drop = order < round(spec.ignored * ids.numel())
            tensors[name] = ids.masked_fill(drop, spec.ignore_index).to(spec.dtype or ids.dtype)
            continue
        shape = (1, *spec.shape[1:]) if spec.layout == "expanded" else spec.shape
        options = {"generator": generator, "device": device, "dtype": torch.float32}
        values = (
            torch.rand(shape, **options).add_(0.5)  # type: ignore[call-overload]
            if spec.positive
            else torch.randn(shape, **options).mul_(spec.scale)  # type: ignore[call-overload]
        )
        values = spec.formed(values).to(spec.dtype or dtype)
        laid = samples._LAYOUTS[spec.layout](values, spec.shape)
        tensors[name] = laid.requires_grad_(spec.grad)
    for name in {"cos", "sin"} & tensors.keys():
        tensors[name] = of_pairs(
            tensors[name], next(iter(tensors.values())), sample.options.get("style")
        )
    return tensors


def of_pairs(angles: Tensor, rotated: Tensor, style: object) -> Tensor:
    """Give both channels of a pair one angle, as in a model: peers read only one half of them."""
    half = angles.shape[-1] // 2
    if angles.shape[-1] < rotated.shape[-1]:
        return angles  # one value per pair
    half_angles = angles[..., :half]
    return (
        half_angles.repeat_interleave(2, -1)
        if style == "interleaved"
        else torch.cat((half_angles, half_angles), -1)
    )


def upstream(case: Case, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """A gradient for every result: random, or 1 for a scalar loss, as a training step has.

    Results of a dtype that the sample asks for have gradients of that one.
    """
    dtype = case.sample.options.get("dtype", dtype)
    none = torch.device("meta")
    meta = {n: t.empty(none, torch.float64) for n, t in case.sample.tensors.items()}
    generator = torch.Generator(device).manual_seed(1)
    return tuple(
        torch.randn(result.shape, generator=generator, device=device).to(dtype)
        if result.ndim
        else torch.ones((), device=device)
        for result in exact(case, meta)
    )


# --- truth ---

LONG = (
    *("fused_moe", "lora_moe"),  # the formula takes every token through every expert
    *("gated_delta_rule", "kimi_delta_attention", "selective_scan", "ssd_scan"),  # token by token
)
"""Operators whose formula would take minutes at the sizes of a model."""


def exact(case: Case, tensors: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    """What an operator should return, differentiable, for inputs of any floating dtype.

    The formula of its contract; of those in :data:`LONG` its own reference, which in fp64 the tests
    hold against the formula.
    """
    if case.op in LONG:
        return reference(case, tensors)
    return differentiable(FORMULAS[case.op](**tensors, **case.sample.options))


def reference(case: Case, tensors: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    """The operator's own reference, which in fp64 follows the equations and rounds nothing."""
    name = public(case.op)
    options = {k: v for k, v in case.sample.options.items() if k != "inplace"}
    with use(**{name: REFERENCE}):
        return differentiable(call(name, **tensors, **options))


def differentiable(output: Any) -> tuple[Tensor, ...]:
    """The outputs of a call that have gradients; of a loss with reports, the loss alone."""
    output = getattr(output, "loss", output)
    if isinstance(output, Tensor):
        return (output,)
    return tuple(t for t in output if isinstance(t, Tensor) and t.is_floating_point())


@dataclass(frozen=True)
class Truth:
    """Results and gradients in high precision."""

    results: tuple[Tensor, ...]
    grads: Mapping[str, Tensor]
    precision: str


def truth(
    case: Case,
    tensors: Mapping[str, Tensor],
    douts: tuple[Tensor, ...],
    dtype: torch.dtype,
) -> Truth:
    """:func:`exact` of the rounded inputs in ``dtype``, rows in chunks so that fp64 fits."""
    rows = _row_tensors(case.sample)
    count = tensors[rows[0]].shape[0]
    step = max(1, int(ORACLE_BYTES // (_widest(case) * dtype.itemsize)))
    if any(t.positive and n not in rows for n, t in case.sample.tensors.items()):
        step = count  # class weights: the denominator is not a count of rows
    shared = {n: _widen(t, dtype) for n, t in tensors.items() if n not in rows}
    parts: list[tuple[Tensor, ...]] = []
    grads: dict[str, list[Tensor]] = {n: [] for n, t in tensors.items() if t.requires_grad}
    for start in range(0, count, step):
        part = slice(start, start + step)
        wide = {n: _widen(t[part], dtype) if n in rows else shared[n] for n, t in tensors.items()}
        results = exact(case, wide)
        results = tuple(r if r.ndim else r * _share(case, tensors, part) for r in results)
        ups = [(up[part] if r.ndim else up).to(dtype) for r, up in zip(results, douts, strict=True)]
        pairs = [(r, up) for r, up in zip(results, ups, strict=True) if r.requires_grad]
        smooth, args = ([pair[i] for pair in pairs] for i in (0, 1))
        gradients = torch.autograd.grad(smooth, [wide[n] for n in grads], args) if grads else ()
        for name, grad in zip(grads, gradients, strict=True):
            if name in rows or not grads[name]:
                grads[name].append(grad)
            else:
                grads[name][0] += grad
        parts.append(tuple(r.detach() for r in results))
    joined_grads = {
        n: torch.cat(chunks) if len(chunks) > 1 else chunks[0] for n, chunks in grads.items()
    }
    totals = tuple(
        torch.cat(chunks) if chunks[0].ndim else torch.stack(chunks).sum()
        for chunks in zip(*parts, strict=True)
    )
    return Truth(totals, joined_grads, "fp64" if dtype == torch.float64 else "fp32")


def _widest(case: Case) -> int:
    """The largest number of columns that a formula keeps for one row."""
    shapes = case.shapes
    widths = [shapes[n][-1] for n, t in case.sample.tensors.items() if not t.classes and shapes[n]]
    widths += [t.classes for t in case.sample.tensors.values()]
    experts = shapes.get("gate_up_weight", ())
    if len(experts) == 3:  # a token has a row for each of its experts
        widths.append(shapes["index"][-1] * max(shapes["x"][-1], experts[1]))
    return max(1, *widths)


def _widen(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if not tensor.is_floating_point():
        return tensor
    return tensor.detach().to(dtype).requires_grad_(tensor.requires_grad)


def _share(case: Case, tensors: Mapping[str, Tensor], part: slice) -> float:
    """The weight of a chunk's mean in the mean of all rows; 1 for a sum."""
    if case.sample.options.get("reduction", "mean") != "mean":
        return 1.0
    target = next((n for n, t in case.sample.tensors.items() if t.classes), None)
    if target is None:  # every row counts
        rows = tensors[case.row_tensors[0]]
        return float(rows[part].shape[0]) / max(1, rows.shape[0])
    valid = tensors[target] != case.sample.options.get("ignore_index", -100)
    return float(valid[part].sum()) / max(1.0, float(valid.sum()))


def error(actual: Tensor, exact: Tensor, dtype: torch.dtype) -> tuple[float, float]:
    """Largest error in units of the tolerance (1 passes), and relative error in the 2-norm."""
    if actual.shape != exact.shape:
        return math.inf, math.inf
    acc_dtype = max(dtype, actual.dtype, key=lambda d: torch.finfo(d).eps)
    finite = torch.where(exact.isfinite(), exact.abs(), 0)
    largest = finite.max().reshape(1) if exact.numel() else exact.new_zeros(1)
    del finite
    worst, squares, norms = 0.0, 0.0, 0.0
    for piece, right in _pieces(actual, exact):
        # The tolerance refers to the largest value of the whole tensor: hand it to every piece.
        piece, right = torch.cat([piece.to(right), largest]), torch.cat([right, largest])
        worst = max(worst, tolerance.excess(piece, right, acc_dtype))
        difference = torch.where(
            piece == right, 0, piece - right
        )  # equal infinities differ by nothing
        squares += float(difference.double().square().sum())
        norms += float(right[:-1][right[:-1].isfinite()].double().square().sum())
    relative = math.sqrt(squares / norms) if norms else math.sqrt(squares)
    return worst, relative if math.isfinite(relative) else math.inf


def _pieces(actual: Tensor, exact: Tensor, size: int = 2**26) -> Iterator[tuple[Tensor, Tensor]]:
    """Both tensors flat and in pieces, so that fp64 copies stay small."""
    flat, right = actual.detach().reshape(-1), exact.reshape(-1)
    for start in range(0, right.numel(), size):
        yield flat[start : start + size], right[start : start + size]
