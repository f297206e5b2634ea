"""The launches that :mod:`ci.static` compiles: what the samples of every contract start.

Samples of real sizes run on the meta device, where sizes cost nothing. The calls of forward and
backward that a public function makes are recorded, and each is given to the launchers of
``backends/triton``. A meta-test demands that every kernel is launched.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.fx.experimental import _config as fx_config
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ci.static import TARGETS, StaticCase, kernels, static_cases
from liger_multi.backends.triton.common.gemm import gemm_by_rows
from liger_multi.dispatch import launch
from liger_multi.dispatch.config import Configuration, parse, using_configuration
from liger_multi.dispatch.registry import OPS, module, operators
from liger_multi.reference.adapters import low_rank
from liger_multi.reference.common import strict
from liger_multi.testing import samples
from liger_multi.testing.samples import Sample

DTYPES = (torch.bfloat16, torch.float32)


@contextlib.contextmanager
def _by_rows() -> Iterator[None]:
    token = launch.any_rows.set(True)
    try:
        with strict.in_mode("rows", gemm_by_rows):
            yield
    finally:
        launch.any_rows.reset(token)


class Setting(NamedTuple):
    """What makes operators start other kernels.

    Attributes:
        op: The operator that reaches them; empty for all.
        within: The setting, as a context.
    """

    op: str
    within: Callable[[], contextlib.AbstractContextManager[Any]]


FLOAT8_HEAD = Configuration((parse({"head_gemms": "float8"}, __name__),))
SETTINGS = {
    "": Setting("", contextlib.nullcontext),
    "by rows": Setting("linear", _by_rows),
    "float8 head": Setting("fused_linear_cross_entropy", lambda: using_configuration(FLOAT8_HEAD)),
}
"""Settings by what a label says of them."""

Directions = list[tuple[Any, tuple[Any, ...]]]
"""Primitives with the arguments of their calls."""


class _Recorder(TorchDispatchMode):
    """Collects forward and backward of operators as PyTorch dispatches them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.directions: Directions = []
        self.primitives = {p.overload.name(): p for op in OPS.values() for p in op.primitives}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Record an operator of this package, and run its shape rule."""
        if func.name() in self.primitives:
            self.directions.append((self.primitives[func.name()], args))
        return func(*args, **(kwargs or {}))


def directions(op: str, sample: Sample, dtype: torch.dtype) -> Directions:
    """The calls of forward and backward that a sample leads to, on the meta device."""
    tensors = sample.empty(torch.device("meta"), dtype)
    leaves = [t for t in tensors.values() if t.requires_grad]
    if sample.options.get("inplace"):  # a leaf must not be overwritten
        tensors = {n: t.clone() if t.is_floating_point() else t for n, t in tensors.items()}
    recorder = _Recorder()
    with recorder:
        result = samples.call(op, **tensors, **sample.options)
        outputs = [t for t in tree_leaves(result) if isinstance(t, Tensor) and t.requires_grad]
        upstream = [torch.empty_like(t) for t in outputs]
        if outputs:
            torch.autograd.grad(outputs, leaves, upstream, allow_unused=True)
    return recorder.directions


@functools.cache
def _recorded(op: str, name: str, dtype: torch.dtype, setting: str) -> Directions:
    sample = next(s for s in samples.compiled(op) if s.name == name)
    with SETTINGS[setting].within():
        return directions(op, sample, dtype)


def _refused(served: Any, primitive: Any, args: tuple[Any, ...]) -> bool:
    """Whether the backend refuses a call; of arguments of the other direction it is not asked."""
    supports = getattr(served, "supports", None)
    if supports is None:
        return False
    known = dict(zip(primitive.params, args, strict=True)) | {"direction": primitive.direction}
    asked = inspect.signature(supports).parameters
    return set(asked) <= known.keys() and supports(**{n: known[n] for n in asked}) is not None


def _wide_product(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1], dtype=torch.float32)


def as_on_devices() -> contextlib.ExitStack:
    """What GPUs have and the meta device of an older PyTorch may lack."""
    stack = contextlib.ExitStack()
    # of targets whose values nobody knows, none is ignored
    stack.enter_context(mock.patch.object(fx_config, "meta_nonzero_assume_all_nonzero", True))
    # products of bf16 written in fp32
    stack.enter_context(mock.patch.object(low_rank, "has_out_dtype", return_value=True))
    stack.enter_context(mock.patch.object(low_rank, "_product", _wide_product))
    return stack


def start(op: str, sample: Sample, dtype: torch.dtype) -> None:
    """Start the kernels of a sample, under :func:`ci.static.recorded`."""
    with as_on_devices():
        launch_all(directions(op, sample, dtype))


def _start(op: str, name: str, dtype: torch.dtype, setting: str) -> None:
    with as_on_devices():
        calls = _recorded(op, name, dtype, setting)
        with SETTINGS[setting].within():
            launch_all(calls)


def launch_all(
    calls: Directions, backend: str = "triton", place: Callable[[Tensor], Tensor] = Tensor.detach
) -> None:
    """Start what a backend has for recorded calls and does not refuse, on tensors by ``place``."""
    for primitive, args in calls:
        served = module(backend, primitive.op.name)
        launcher = getattr(served, primitive.direction, None)
        if launcher is not None and not _refused(served, primitive, args):
            launcher(*(place(a) if isinstance(a, Tensor) else a for a in args))


def calls(setting: str = "") -> dict[str, Callable[[], None]]:
    """The samples of operators by label, each as a call that starts its kernels."""
    op = SETTINGS[setting].op
    return {
        " ".join(
            filter(None, (op, sample.name, str(dtype).removeprefix("torch."), setting))
        ): functools.partial(_start, op, sample.name, dtype, setting)
        for op in ((op,) if op else operators())
        if module("triton", op) is not None
        for sample in samples.compiled(op)
        for dtype in DTYPES
    }


@functools.cache
def _own(arch: str) -> tuple[StaticCase, ...]:
    return tuple(
        case for setting in SETTINGS for case in static_cases(TARGETS[arch].info, calls(setting))
    )


@functools.cache
def launched(arch: str) -> tuple[StaticCase, ...]:
    """The launches of all operators on a target.

    A kernel that no sample starts there is compiled as another target launches it: a launch table
    may choose it one day.
    """
    cases = list(_own(arch))
    for other in TARGETS:
        missing = kernels().keys() - {case.name for case in cases}
        if missing:
            cases += [case for case in _own(other) if case.name in missing]
    return tuple(cases)
