"""Mixers of hybrids, and models that know or check which sample a token belongs to."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from liger_multi.patching.finders.changes import apply_swap, restore_class
from liger_multi.patching.options import PACKING, Request
from liger_multi.patching.recognize import conflicts
from liger_multi.patching.recognize.kinds import MIXER_OPS
from liger_multi.patching.recognize.mixers import (
    SERVED,
    gates,
    mixer_calls,
    refusal,
    without_kernels,
)
from liger_multi.patching.replace.calling import renew
from liger_multi.patching.replace.mixers import (
    FusedMixer,
    MixerSettings,
    PackedModel,
    SeparateModel,
    TellingModel,
    packing,
)
from liger_multi.patching.replace.packing import CheckedModel, CheckSettings, checked, forget
from liger_multi.patching.replace.swap import Patched, Swap, unpatched_class
from liger_multi.patching.report import PatchReport, Skipped


def find_mixer(report: PatchReport, request: Request, path: str, module: nn.Module) -> None:
    """Convolutions and recurrences of hybrids."""
    stock = unpatched_class(module)
    calls = mixer_calls(stock)
    if not calls:
        return
    settings = MixerSettings(*(request.get(op) for op in MIXER_OPS))
    overridden = conflicts.of_module(module)
    reasons = {SERVED[rest[1]]: overridden or refusal(*rest) for _, *rest in calls}
    if settings.gated_short_conv is not None and gates(module):
        reasons["gated_short_conv"] = reasons["causal_conv1d"]  # of which it is more
    else:
        settings = replace(settings, gated_short_conv=None)
    on = {op: why for op, why in reasons.items() if getattr(settings, op) is not None}
    report.skipped += [Skipped(path, op, why) for op, why in on.items() if why]
    served = sorted(op for op, why in on.items() if not why)
    if not served:
        restore_class(report, path, module)
        return
    slow = {op: without_kernels(op, module) for op in served}
    report.skipped += [
        Skipped(path, op, f"patched, but runs by the chunked PyTorch reference: {why}", False)
        for op, why in slow.items()
        if why
    ]
    shown = [getattr(settings, op).shown() for op in served]
    swap = Swap(served[-1], stock, FusedMixer, settings)
    by = " + ".join(served)
    apply_swap(report, path, module, swap, by, {k: v for one in shown for k, v in one.items()})
    renew(type(module))


def find_packed(report: PatchReport, request: Request, model: nn.Module) -> None:
    """Models that tell mixers which sample a token belongs to, refuse packed rows, or are tried."""
    found = packing(model) if any(request.get(op) is not None for op in MIXER_OPS) else {}
    refuses = any(swap.behavior is SeparateModel for swap in found.values())
    if request.get(PACKING) is None:
        found = {} if refuses else found
    elif not refuses:
        found |= {p: _tried(m, found.get(p)) for p, m in checked(model).items() if _free(m)}
    for path, module in model.named_modules():
        swap = found.get(path)
        if swap is not None and not conflicts.of_module(module):
            forget(module)
            apply_swap(report, path, module, swap, _PACKED[swap.behavior], {})
        elif _is_packed(module):
            restore_class(report, path, module)


_PACKED: dict[type[Patched], str] = {
    PackedModel: "ids of samples",
    TellingModel: "hands ids of samples on",
    SeparateModel: "one sample a row only",
    CheckedModel: "a check that samples of a row are apart",
}


def _is_packed(module: nn.Module) -> bool:
    return any(isinstance(module, kind) for kind in _PACKED)


def _free(module: nn.Module) -> bool:
    return not isinstance(module, Patched) or _is_packed(module)


def _tried(module: nn.Module, swap: Swap | None) -> Swap:
    if swap is not None:
        return replace(swap, around=CheckedModel)
    return Swap(PACKING, unpatched_class(module), CheckedModel, CheckSettings())
