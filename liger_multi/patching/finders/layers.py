"""Norms, MLPs, experts, and what the probes of users recognize."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from liger_multi.patching.finders.changes import apply_swap, restore_class
from liger_multi.patching.options import Request
from liger_multi.patching.recognize import conflicts, registered
from liger_multi.patching.recognize.kinds import MLP_OPS
from liger_multi.patching.recognize.mlp import (
    are_other_experts,
    experts_kind,
    looks_like_experts,
    mlp_kind,
    mlp_names,
)
from liger_multi.patching.recognize.norms import (
    NO_NORM,
    looks_like_norm,
    norm_settings,
    worth_a_line,
)
from liger_multi.patching.replace.experts_choice import selected
from liger_multi.patching.replace.linear import LinearByRows
from liger_multi.patching.replace.mlp import ExpertsSettings, FusedExperts, FusedMlp
from liger_multi.patching.replace.norms import FusedNorm
from liger_multi.patching.replace.swap import Swap, stock_class, swapped
from liger_multi.patching.report import PatchReport, Skipped

TOLD = ("rms_norm", "swiglu", "geglu", "rope")
"""Operators whose absence is worth a line where nobody named them."""


def find_norm(report: PatchReport, request: Request, path: str, module: nn.Module) -> None:
    """Norms, and activations that are one operator."""
    likely = looks_like_norm(module)
    if likely is None:
        return
    overridden = conflicts.of_module(module)
    found = overridden or norm_settings(module, likely)
    op = likely if isinstance(found, str) else found.kind.op
    options = request.get(op)
    if options is None:
        restore_class(report, path, module)
    elif isinstance(found, str):
        if overridden or (found != NO_NORM and worth_a_line(likely)):
            report.skipped.append(Skipped(path, op, found))
    else:
        settings = replace(found, options=options)
        swap = Swap(op, stock_class(module), FusedNorm, settings)
        apply_swap(report, path, module, swap, settings.shown, options.shown())


def find_mlp(report: PatchReport, request: Request, path: str, module: nn.Module) -> None:
    """Gated MLPs."""
    candidates, named = mlp_names(module)
    if not candidates:
        return
    choices = {op: request.enabled[op] for op in MLP_OPS if op in request.enabled}
    if not choices:
        restore_class(report, path, module)
        return
    found = conflicts.of_module(module) or mlp_kind(module, candidates)
    if isinstance(found, str):
        told = [op for op in choices if op in TOLD or op in request.named]
        if named and told:
            report.skipped.append(Skipped(path, told[0], found))
    elif found.kind.op not in choices:
        restore_class(report, path, module)
    else:
        lora = request.get("lora") is not None
        settings = replace(found, options=choices[found.kind.op], lora=lora)
        swap = Swap(found.kind.op, stock_class(module), FusedMlp, settings)
        apply_swap(report, path, module, swap, settings.shown(module), settings.options.shown())


def find_experts(report: PatchReport, request: Request, path: str, module: nn.Module) -> None:
    """Stacks of experts."""
    options = request.get("fused_moe")
    if are_other_experts(module) and options is not None:
        own = f"{type(module).__name__} does not use the experts interface of transformers"
        report.skipped.append(Skipped(path, "fused_moe", own))
    if not looks_like_experts(module):
        return
    if options is None:
        restore_class(report, path, module)
        return
    found = conflicts.of_module(module) or experts_kind(module)
    if isinstance(found, str):
        report.skipped.append(Skipped(path, "fused_moe", found))
        return
    if selected(module) is None:
        name = getattr(module.config, "_experts_implementation", None)
        why = f"patched, but experts_implementation={name!r} runs itself while it is selected"
        report.skipped.append(Skipped(path, "fused_moe", why, False))
    settings = ExpertsSettings(found, options)
    swap = Swap("fused_moe", stock_class(module), FusedExperts, settings)
    apply_swap(report, path, module, swap, settings.shown, options.shown())


def find_registered(report: PatchReport, request: Request, path: str, module: nn.Module) -> None:
    """What users' probes say; modules that an operator serves are not asked."""
    held = swapped(module)
    if held is not None and held.behavior is LinearByRows:
        held = None  # which serves what is left in the end
    if held is not None and held.behavior is not registered.Replaced:
        return
    for name, probe in registered.probes().items():
        options = request.get(name)
        found = None if options is None or conflicts.of_module(module) else probe(module)
        if isinstance(found, registered.Replacement):
            settings = replace(found, options=options)
            swap = Swap(name, stock_class(module), registered.Replaced, settings)
            apply_swap(report, path, module, swap, found.shown, options.shown())
            return
        if isinstance(found, str):
            report.skipped.append(Skipped(path, name, found))
    if held is not None:
        restore_class(report, path, module)
