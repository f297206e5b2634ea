"""Convolutions and recurrences of hybrid models that operators serve."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import nn

from liger_multi.patching.calling import renew
from liger_multi.patching.changes import Change, Replace, Restore
from liger_multi.patching.mixers.calls import SERVED, gates, mixer_calls, refusal, without_kernels
from liger_multi.patching.mixers.fused import FusedMixer, MixerSettings
from liger_multi.patching.options import MIXER_OPS, Request
from liger_multi.patching.report import Skipped
from liger_multi.patching.swap import Swap, conflict_of, unpatched_class


def find_mixers(model: nn.Module, request: Request) -> Iterator[Change]:
    """Convolutions and recurrences of hybrids."""
    for path, module in model.named_modules():
        stock = unpatched_class(module)
        calls = mixer_calls(stock)
        if not calls:
            continue
        settings = MixerSettings(*(request.get(op) for op in MIXER_OPS))
        overridden = conflict_of(module)
        reasons = {SERVED[rest[1]]: overridden or refusal(*rest) for _, *rest in calls}
        if settings.gated_short_conv is not None and gates(module):
            reasons["gated_short_conv"] = reasons["causal_conv1d"]  # of which it is more
        else:
            settings = replace(settings, gated_short_conv=None)
        on = {op: why for op, why in reasons.items() if getattr(settings, op) is not None}
        yield from (Skipped(path, op, why) for op, why in on.items() if why)
        served = sorted(op for op, why in on.items() if not why)
        if not served:
            yield Restore(path, module)
            continue
        slow = {op: without_kernels(op, module) for op in served}
        slower = "patched, but runs by the chunked PyTorch reference: "
        yield from (Skipped(path, op, slower + why, False) for op, why in slow.items() if why)
        shown = [getattr(settings, op).shown() for op in served]
        swap = Swap(served[-1], stock, FusedMixer, settings)
        by = " + ".join(served)
        yield Replace(path, module, swap, by, {k: v for one in shown for k, v in one.items()})
        renew(type(module))
