"""The alias against the real liger-kernel: ``python -m ci.liger FOLDER``.

FOLDER is where the real package is installed by itself::

    pip install --target FOLDER --no-deps liger-kernel==0.8.5

Both packages run :mod:`ci.liger.cases`, each in a process of its own on the CPU, and what they
return is compared. ``docs/liger-differences.md`` is written with the result; with ``--check`` an
unexplained difference, or an explanation of none, is an error and nothing is written.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

PAGE = Path(__file__).parents[2] / "docs" / "liger-differences.md"
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}
REASONS: dict[str, str] = {
    r"^grpo loss_type=luspo": "LUSPO of Liger-Kernel sums over padding too, and padding gets a "
    "gradient of the KL term. Here padding is masked.",
    r"^grpo loss_type=vespo .*given=ratios": "Liger-Kernel multiplies the sampler's ratios of "
    "padding into the weight of an answer. Here padding is masked.",
    r"^grpo delta=": "The share of clipped tokens counts ratios after `delta` has bounded them. "
    "Liger-Kernel counts them before. The loss is the same.",
    r"teacher classes=": "Of two vocabularies the common classes are compared. Liger-Kernel pads "
    "the student's logits with zeros, which takes part in the softmax, and raises where the "
    "teacher has fewer classes.",
    r"^cosinesimilarity temperature=\S+ beta=0.0 weight_hard_loss=0.0": "A loss whose factors "
    "are all 0 is refused.",
    r"^(jsd|cosinesimilarity|functional (jsd|cosine)|base of distillation)": "The soft and the "
    "hard term that are returned beside the loss have no gradient. Values and the loss's gradients "
    "agree.",
}
"""Pattern of names of cases to why the alias stays different there; the first that fits counts."""

Run = dict[str, Any]


def run(folder: Path | None) -> Run:
    """What the cases return with the package in a folder, or with the alias."""
    places = [str(folder)] if folder else []
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*places, os.getcwd()])}
    with tempfile.TemporaryDirectory() as made:
        file = Path(made) / "result.pt"
        command = [sys.executable, "-W", "ignore", "-m", "ci.liger.cases", str(file)]
        command += [] if folder else ["--alias"]
        subprocess.run(command, check=True, env=environment)
        found: Run = torch.load(file, weights_only=True)
        return found


def difference(real: dict[str, Any], alias: dict[str, Any]) -> str:
    """What differs between two results; empty where nothing does."""
    if "error" in real or "error" in alias:
        return _errors(real, alias)
    if real.keys() != alias.keys():
        return f"results {[*real]} and {[*alias]}"
    return "; ".join(filter(None, (_value(key, real[key], alias[key]) for key in real)))


def _errors(real: dict[str, Any], alias: dict[str, Any]) -> str:
    theirs, ours = (x["error"][0] if "error" in x else "a result" for x in (real, alias))
    if "error" in real and "error" in alias and theirs in alias["error"]:
        return ""
    return f"{theirs} there, {ours} here"


def _value(key: str, real: Any, alias: Any) -> str:
    if not isinstance(real, Tensor) or not isinstance(alias, Tensor):
        return "" if real == alias else f"{key}: {real} there, {alias} here"
    if (real.dtype, real.shape) != (alias.dtype, alias.shape):
        return f"{key}: {real.dtype} {tuple(real.shape)}, {alias.dtype} {tuple(alias.shape)} here"
    if torch.allclose(real, alias, equal_nan=True, **TOLERANCE):
        return ""
    return f"{key}: off by {(real - alias).abs().max().item():.1g}"


def differences(real: Run, alias: Run) -> dict[str, str]:
    """The cases that differ, with how."""
    pairs = [
        (name, difference(found, alias["groups"][group][name]))
        for group, cases in real["groups"].items()
        for name, found in cases.items()
    ]
    return {name: how for name, how in pairs if how}


def explained(found: dict[str, str]) -> tuple[dict[str, list[str]], list[str], list[str]]:
    """Cases by pattern; those without a reason; patterns without a case."""
    by: dict[str, list[str]] = {pattern: [] for pattern in REASONS}
    unknown = []
    for name in found:
        fits = next((p for p in REASONS if re.search(p, name)), None)
        if fits is None:
            unknown.append(f"{name}: {found[name]}")
        else:
            by[fits].append(name)
    return by, unknown, [pattern for pattern, names in by.items() if not names]
