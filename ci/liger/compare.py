"""What differs between the results of the two packages, and whether a reason covers it."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from ci.liger.reasons import REASONS, Reason

TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}
"""In fp32."""
NO_WORSE = 1.5
"""In 16 bits: the alias's error by that of the real package; one rounding of the dtype is free.

Of one number, such as a loss whose terms cancel, the real package's largest error in the group is
what it is compared with: by chance one of the two is nearer.
"""
ROUNDINGS = {"bf16": torch.finfo(torch.bfloat16).eps, "fp16": torch.finfo(torch.float16).eps}
"""By the end of a group's title."""
HAVE_NO_CPU = ("InterpreterError", "CompilationError")
"""Errors of Triton that say that a kernel does not run here."""

Result = dict[str, Any]
Differences = dict[str, str]
"""By the key of a result, such as ``loss`` or ``gradient 0``."""


def difference(
    real: Result, alias: Result, exact: Result | None = None, rounding: float = 0.0,
    usual: dict[str, float] | None = None,
) -> Differences:  # fmt: skip
    """What differs between two results; nothing where they agree.

    Args:
        real: Of liger-kernel.
        alias: Of this library.
        exact: Of liger-kernel in fp32 on the same inputs, where both have 16 bits.
        rounding: That of their dtype.
        usual: Errors of liger-kernel's numbers, by key.
    """
    if "error" in real or "error" in alias:
        found = _errors(real, alias)
        return {"error": found} if found else {}
    if real.keys() != alias.keys():
        return {"results": f"{[*real]} and {[*alias]}"}
    wide, errors = exact or {}, usual or {}
    pairs = {
        key: _value(real[key], alias[key], wide.get(key), rounding, errors.get(key, 0.0))
        for key in real
    }
    return {key: how for key, how in pairs.items() if how}


def _errors(real: Result, alias: Result) -> str:
    theirs, ours = (x["error"][0] if "error" in x else "a result" for x in (real, alias))
    if "error" in real and "error" in alias and theirs in alias["error"]:
        return ""
    return f"{theirs} there, {ours} here"


def _value(real: Any, alias: Any, exact: Any, rounding: float, usual: float) -> str:
    if not isinstance(real, Tensor) or not isinstance(alias, Tensor):
        return "" if real == alias else f"{real} there, {alias} here"
    if (real.dtype, real.shape) != (alias.dtype, alias.shape):
        return f"{real.dtype} {tuple(real.shape)}, {alias.dtype} {tuple(alias.shape)} here"
    if isinstance(exact, Tensor) and exact.is_floating_point():
        return _no_worse(real, alias, exact, rounding, usual)
    if torch.allclose(real, alias, equal_nan=True, **TOLERANCE):
        return ""
    return f"off by {(real - alias).abs().max().item():.1g}"


def _no_worse(real: Tensor, alias: Tensor, exact: Tensor, rounding: float, usual: float) -> str:
    """Whether the alias is as near to the result in fp32 as the real package."""
    if not exact.numel():
        return ""
    theirs, ours = error(real, exact), error(alias, exact)
    allowed = (
        NO_WORSE * max(theirs, 0.0 if exact.ndim else usual) + rounding * exact.abs().max().item()
    )
    return "" if ours <= allowed else f"off by {ours:.1g} of fp32, there by {theirs:.1g}"


def error(found: Tensor, exact: Tensor) -> float:
    """The largest error."""
    return (found.double() - exact.double()).abs().max().item()


def usual_errors(results: dict[str, Result], exact: dict[str, Result]) -> dict[str, float]:
    """The largest errors of single numbers of a group in 16 bits, by key."""
    found: dict[str, float] = {}
    for name, wide in exact.items():
        for key, value in wide.items() if name in results else ():
            near = results[name].get(key)
            if isinstance(value, Tensor) and not value.ndim and isinstance(near, Tensor):
                found[key] = max(found.get(key, 0.0), error(near, value))
    return found


def differences(real: Result, alias: Result) -> dict[str, Differences]:
    """The cases that differ, by group and name, with how."""
    found = {}
    for group, cases in real["groups"].items():
        exact = real["exact"].get(group, {})
        usual = usual_errors(cases, exact)
        rounding = ROUNDINGS.get(group.rpartition(", ")[2], 0.0)
        others = alias["groups"].get(group, {})  # a run that was cut has fewer
        for name, result in cases.items():
            if name in others and not impossible(result):
                found[f"{group}: {name}"] = difference(
                    result, others[name], exact.get(name), rounding, usual
                )
    return {name: how for name, how in found.items() if how}


def counts(real: Result, alias: Result, found: Collection[str]) -> dict[str, tuple[int, ...]]:
    """Cases of each group: that ran, that agree, that differ, without a result of liger-kernel."""
    made: dict[str, tuple[int, ...]] = {}
    for group, cases in real["groups"].items():
        ran = {n: r for n, r in cases.items() if n in alias["groups"].get(group, {})}
        without = sum(map(impossible, ran.values()))
        differ = sum(f"{group}: {name}" in found for name in ran)
        made[group] = (len(ran), len(ran) - differ - without, differ, without)
    return made


def impossible(real: Result) -> bool:
    """Whether the real package has no result on a CPU."""
    return real.get("error", [""])[0] in HAVE_NO_CPU


def fitting(name: str, how: Differences) -> Reason | None:
    """The first reason whose pattern and keys cover a difference."""
    fits = (r for r in REASONS if re.search(r.cases, name))
    return next((r for r in fits if all(re.search(r.keys, key) for key in how)), None)


def explained(
    found: dict[str, Differences],
) -> tuple[dict[Reason, list[str]], list[str], list[Reason]]:
    """Cases by reason; those without a reason; reasons without a case."""
    by: dict[Reason, list[str]] = {reason: [] for reason in REASONS}
    unknown = []
    for name, how in found.items():
        reason = fitting(name, how)
        if reason is None:
            unknown.append(f"{name}: {how}")
        else:
            by[reason].append(name)
    return by, unknown, [reason for reason, names in by.items() if not names]
