"""Models that tell mixers which sample a token belongs to, refuse packed rows, or are tried."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import nn

from liger_multi.patching.changes import Change, Replace, Restore
from liger_multi.patching.options import MIXER_OPS, PACKING, Request
from liger_multi.patching.packing.checked import CheckedModel, CheckSettings, checked, forget
from liger_multi.patching.packing.hybrids import PackedModel, SeparateModel, TellingModel, packing
from liger_multi.patching.swap import Patched, Swap, conflict_of, unpatched_class


def find_packed(model: nn.Module, request: Request) -> Iterator[Change]:
    """Models that tell mixers which sample a token belongs to, refuse packed rows, or are tried."""
    packed = packing(model) if any(request.get(op) is not None for op in MIXER_OPS) else {}
    refuses = any(swap.behavior is SeparateModel for swap in packed.values())
    if request.get(PACKING) is None:
        packed = {} if refuses else packed
    elif not refuses:
        packed |= {p: _tried(m, packed.get(p)) for p, m in checked(model).items() if _free(m)}
    for path, module in model.named_modules():
        swap = packed.get(path)
        if swap is not None and not conflict_of(module):
            forget(module)
            yield Replace(path, module, swap, _PACKED[swap.behavior], {})
        elif _is_packed(module):
            yield Restore(path, module)


_PACKED: dict[type[Patched], str] = {
    PackedModel: "ids of samples",
    TellingModel: "hands ids of samples on",
    SeparateModel: "one sample a row only",
    CheckedModel: "a check that samples of a row are apart",
}


def _is_packed(module: nn.Module) -> bool:
    return any(isinstance(module, behavior) for behavior in _PACKED)


def _free(module: nn.Module) -> bool:
    return not isinstance(module, Patched) or _is_packed(module)


def _tried(module: nn.Module, swap: Swap | None) -> Swap:
    if swap is not None:
        return replace(swap, around=CheckedModel)
    return Swap(PACKING, unpatched_class(module), CheckedModel, CheckSettings())
