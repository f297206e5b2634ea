"""Whom the benchmark times, by name: our operator, its backends, plain formulas and peers."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

import liger_multi
from liger_multi import ops
from liger_multi.bench.cases import Case
from liger_multi.bench.liger import LIGER, LIGER_MODULE
from liger_multi.bench.peers import FLOORS, PACKAGES, TABLE
from liger_multi.dispatch.op import OPS
from liger_multi.dispatch.registry import packages
from liger_multi.dispatch.resolution import candidate
from liger_multi.testing.formulas import Formula


@dataclass(frozen=True)
class Provider:
    """One implementation of one operator.

    Attributes:
        name: As in ``--providers``.
        call: Takes the tensors by name, returns the result.
        overwrites: It may write its inputs or the upstream gradient; they are refilled before
            every call.
        floor: A lower bound to compare with, no implementation: its result is not checked.
        scope: In force around every call.
        backend: What a call of our own operator resolves to.
    """

    name: str
    call: Formula
    overwrites: bool = False
    floor: bool = False
    scope: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    backend: str | None = None


# --- look-up ---


def known() -> list[str]:
    """Every name that ``--providers`` takes, in the order of the tables."""
    formulas = dict.fromkeys(name for each in TABLE.values() for name in each)
    return list(dict.fromkeys(["ours", "reference", *packages(), *formulas, "compile", "liger"]))


def default() -> list[str]:
    """What runs when nothing is named: no vendor twice, ``ours`` stands for it."""
    return [n for n in known() if n in ("ours", "reference", "triton") or n not in packages()]


def find(name: str, case: Case, device: torch.device, dtype: torch.dtype) -> Provider | str:
    """The provider of a case, or why there is none."""
    if name == "ours" or name in packages():
        return _own(name, case, device, dtype)
    if name == "liger":
        return _liger(case, device)
    formula = TABLE.get(case.op, {}).get("torch" if name == "compile" else name)
    if formula is None:
        return "has no such operator"
    if name == "torch-fused" and not hasattr(F, "linear_cross_entropy"):
        return f"torch {torch.__version__} has no linear_cross_entropy"
    if name in PACKAGES and importlib.util.find_spec(PACKAGES[name]) is None:
        return f"{PACKAGES[name]} is not installed"
    if name == "compile":
        torch.compiler.reset()  # what one case compiled must not make the next one dynamic
        formula = _accepting(torch.compile(formula, dynamic=False), formula)
    options = _options(name, case, formula)
    if isinstance(options, str):
        return options
    return Provider(name, _with(formula, options), floor=name in FLOORS)


def _own(name: str, case: Case, device: torch.device, dtype: torch.dtype) -> Provider | str:
    public = getattr(ops, case.op.removesuffix("_inplace"))
    if name != "ours":
        for direction in OPS[case.op].primitives:
            reason = candidate(name, direction, device, dtype).reason
            if reason is not None:
                return reason
    chosen = liger_multi.explain(case.op, device, dtype).chosen(case.op)

    def call(**arguments: Any) -> Any:
        return public(**arguments, **case.sample.options)

    return Provider(
        name,
        call,
        overwrites=bool(case.sample.options.get("inplace")),
        scope=contextlib.nullcontext if name == "ours" else lambda: _using(case.op, name),
        backend=chosen if name == "ours" else name,
    )


def _using(op: str, backend: str) -> contextlib.AbstractContextManager[None]:
    return liger_multi.use(**{op: backend})


def _liger(case: Case, device: torch.device) -> Provider | str:
    if case.op not in LIGER:
        return "has no such operator"
    if device.type == "cpu":
        return "runs on accelerators only"
    name, adapt = LIGER[case.op]
    try:
        module, _, name = name.rpartition(":")
        owner = importlib.import_module(module or LIGER_MODULE)
        function = operator.attrgetter(name)(owner)
    except Exception as failure:  # an import may fail in any way: a missing package, a driver
        return f"{type(failure).__name__}: {failure}"
    formula = adapt(function)
    options = _options("liger", case, formula)
    if isinstance(options, str):
        return options
    return Provider("liger", _with(formula, options), overwrites=True)


def _options(name: str, case: Case, formula: Formula) -> dict[str, Any] | str:
    """The sample's options for a formula, or which argument it does not take."""
    options = {k: v for k, v in case.sample.options.items() if k != "inplace"}
    accepted = inspect.signature(getattr(formula, "accepts", formula)).parameters
    for argument in (*case.sample.tensors, *options):
        if argument not in accepted:
            return f"{name} of {case.op} does not take {argument}"
    return options


def _accepting(formula: Formula, like: Formula) -> Formula:
    formula.accepts = like  # type: ignore[attr-defined]
    return formula


def _with(formula: Formula, options: Mapping[str, Any]) -> Formula:
    return lambda **tensors: formula(**tensors, **options)
