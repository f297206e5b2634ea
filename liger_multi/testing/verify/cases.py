"""What `liger-multi verify` checks: operators, samples and dtypes of a device, by level."""

from __future__ import annotations

import fnmatch
import functools
import importlib.util
import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from liger_multi.dispatch.bitwise import RowAxes
from liger_multi.dispatch.launch import device_info, table_of
from liger_multi.dispatch.op import OPS
from liger_multi.dispatch.registry import REFERENCE, operators, serving
from liger_multi.grouping import grouped
from liger_multi.testing import checks, samples
from liger_multi.testing.samples import Sample

IS_SIMULATED = False
"""Whether devices are simulated, and as slow as an interpreter; a simulation sets it."""
LEVELS = ("quick", "default", "full")
BY_TABLE = ("selective_scan.team",)
"""Keys of kernels that nothing but a launch table starts."""
HEAD = "fused_linear_cross_entropy"
"""The operator whose GEMMs are also checked in 8 bits; other heads share its kernels."""


@dataclass(frozen=True)
class Case:
    """One check of one operator; a child process gets it as JSON.

    Attributes:
        op: The operator.
        backend: Who runs it.
        sample: Name of its inputs.
        dtype: Of inputs whose dtype the sample leaves open, such as ``bfloat16``.
        check: ``result``: outputs and gradients against fp64. ``promises``: what contract and
            backend promise of bits. ``entry``: the result with one entry of a launch table.
            ``mixed``: forward or backward by the reference. ``float8 head``: GEMMs in 8 bits,
            of numbers that 8 bits hold.
        entry: Key of the launch table and number of its entry; a second run has the same bits.
    """

    op: str
    backend: str
    sample: str
    dtype: str
    check: str = "result"
    entry: tuple[str, int] | None = None

    @property
    def name(self) -> str:
        """As tables and messages have it."""
        entry = f", {self.entry[0]} entry {self.entry[1]}" if self.entry else ""
        return f"{self.op} {self.sample} {self.dtype} {self.check}{entry}"

    def as_data(self) -> dict[str, Any]:
        """For a child process and a report."""
        return asdict(self)


@dataclass(frozen=True)
class Target:
    """A backend on a device, and the environment that a child needs for it."""

    backend: str
    device: str
    interpreted: bool = False

    @property
    def environment(self) -> dict[str, str]:
        """Of the child."""
        return {**os.environ, **({"TRITON_INTERPRET": "1"} if self.interpreted else {})}

    @property
    def label(self) -> str:
        """As tables name it."""
        return f"{self.backend}, interpreted" if self.interpreted else self.backend


def targets(device: torch.device, backend: str | None = None) -> list[Target]:
    """The backends of a device, or one of them."""
    return [target for target in _targets(device) if backend in (None, target.backend)]


def _targets(device: torch.device) -> Iterator[Target]:
    """The backends that serve a device; on a CPU, also Triton's interpreter where it is installed.

    Installed backends come from folders and entry points. The reference is checked on a CPU: on
    other devices it is what wrong kernels are sent to, and is checked when one is found.
    """
    for record in serving(device.type):
        yield Target(record.name, str(device))
    if device.type == "cpu":
        yield Target(REFERENCE, "cpu")
        if importlib.util.find_spec("triton") is not None:
            yield Target("triton", "cpu", interpreted=True)


def cases(target: Target, pattern: str, level: str) -> dict[str, list[Case]]:
    """The cases of a target by operator."""
    return {
        op: list(_of_operator(target, op, level))
        for op in matching_operators(pattern)
        if checks.implemented(target.backend, op)
    }


def groups(cases: list[Case]) -> list[list[Case]]:
    """The cases of an operator that one process runs in turn: they share what is compiled."""
    return list(grouped(((c.check == "promises", c.dtype), c) for c in cases).values())


def weight(group: list[Case]) -> tuple[bool, int]:
    """Where a group stands in the order: the longest first, so that none runs alone at the end.

    An operator with many arguments has many kernels. Promises come behind results, which compile
    most of what they start.
    """
    first = group[0]
    arguments = sum(len(prim.params) for prim in OPS[first.op].primitives)
    return first.check == "promises", -len(group) * arguments


def matching_operators(pattern: str) -> list[str]:
    """The operators that globs with commas between them name."""
    globs = pattern.split(",")
    return [op for op in operators() if any(fnmatch.fnmatchcase(op, glob) for glob in globs)]


def _of_operator(target: Target, op: str, level: str) -> Iterator[Case]:
    chosen_samples = [s for s in samples.of(op) if s.size != "bench"]
    small = [s for s in chosen_samples if s.size == "small"]
    filled = [s for s in small if all(math.prod(t.shape) for t in s.tensors.values())] or small
    first = max(filled, key=functools.partial(_rows_needed, op))
    slow = target.interpreted or IS_SIMULATED
    forms = _first_of_each(filled, _form) if level == "default" else []
    if level == "quick":
        limits = (
            []
            if slow or target.device == "cpu"
            else [s for s in chosen_samples if s.size == "thin"]
        )
        chosen_samples = _first_of_each([first, *filled], _path) + [s for s in limits if s.path]
    elif slow and forms:
        chosen_samples = forms
    form_names = {s.name for s in forms}
    for sample in chosen_samples:
        dtypes = _dtypes(target, sample, level)
        if level != "full" and sample.name not in form_names:
            dtypes = dtypes[:2]
        if level == "quick" and sample != first:
            dtypes = dtypes[-1:]
        for dtype in dtypes:
            name = str(dtype).removeprefix("torch.")
            yield Case(op, target.backend, sample.name, name)
    names = ("float32", "bfloat16") if level != "quick" and not slow else ("float32",)
    chosen = small if level == "full" else [] if slow and level == "quick" else [first]
    for sample, name in itertools.product(chosen, names):  # many calls each
        yield Case(op, target.backend, sample.name, name, "promises")
    if op == HEAD:
        yield Case(op, target.backend, "whole-numbers", "bfloat16", "float8 head")
    if level == "full":
        yield from (Case(op, target.backend, s.name, "float32", "mixed") for s in small)


FEWEST = 3  # rows, of which one may be NaN, in another order, or beside others


def _rows_needed(op: str, sample: Sample) -> tuple[int, bool]:
    """How many rows a sample has, up to what checks of promises need, and whether results have."""
    tensors = sample.empty(torch.device("meta"), torch.float32)
    rows = min(FEWEST, RowAxes(OPS[op].bitwise, tensors).count)
    return rows, sample.options.get("reduction") == "none"


def _first_of_each(
    samples_in_order: Iterable[Sample], key: Callable[[Sample], Any]
) -> list[Sample]:
    chosen: dict[Any, Sample] = {}
    for sample in samples_in_order:
        chosen.setdefault(key(sample), sample)
    return list(chosen.values())


def _path(sample: Sample) -> str:
    """What a quick verification takes one sample of.

    Compilers take most of its time. The first samples of all paths, and those that reach a limit
    and have a path, start every kernel: ``tests/kernels/test_static.py``.
    """
    return sample.path


def _form(sample: Sample) -> tuple[Any, ...]:
    """What decides which code runs: the path, tensors, those without gradients, and options."""
    frozen = tuple(n for n, t in sample.tensors.items() if not t.grad)
    return sample.path, tuple(sample.tensors), frozen, repr(sorted(sample.options.items()))


def _dtypes(target: Target, sample: Sample, level: str) -> tuple[torch.dtype, ...]:
    dtypes = checks.dtypes_of(sample, target.backend)
    if target.interpreted or IS_SIMULATED:  # bf16 is fp32 in an interpreter
        return dtypes if level == "full" else dtypes[:1]
    return dtypes


def entries(device: torch.device, level: str) -> list[tuple[str, int]]:
    """The entries of the device's launch table that a level runs, by key and number."""
    table = table_of(device_info(device))
    keys = [key for key in table if level != "quick" or key in BY_TABLE]
    return [(key, index) for key in keys for index in range(len(table[key]))]
