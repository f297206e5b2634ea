"""Attention modules: rotations, norms of queries and keys with them, selected keys."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import Any

from torch import nn

from liger_multi.patching.finders.changes import apply_swap, restore_class
from liger_multi.patching.options import ROTATED, Request
from liger_multi.patching.recognize import conflicts
from liger_multi.patching.recognize.kinds import SPARSE
from liger_multi.patching.recognize.rotated_norms import Probed
from liger_multi.patching.recognize.sparse_attention import behavior_of, selects_otherwise
from liger_multi.patching.recognize.sparse_attention import refusal as sparse_refusal
from liger_multi.patching.replace.calling import renew
from liger_multi.patching.replace.rotary import FusedRotary, rotary_calls, rotary_kinds
from liger_multi.patching.replace.rotated_norms import APART, AROUND, RotatedNormsSettings, names_of
from liger_multi.patching.replace.sparse_attention import SparseAttention, SparseIndexer
from liger_multi.patching.replace.sparse_attention import register as register_sparse
from liger_multi.patching.replace.swap import (
    Patched,
    Swap,
    apply,
    made_class,
    swapped,
    unpatched_class,
)
from liger_multi.patching.report import Entry, PatchReport, Skipped


def find_rotary(report: PatchReport, request: Request, path: str, module: nn.Module) -> None:
    """Modules that call a rotary function."""
    stock = type(module)._liger_multi_swap.stock if isinstance(module, Patched) else type(module)
    if request.get("rope") is None or not rotary_calls(stock):
        if isinstance(module, FusedRotary):
            restore_class(report, path, module)
        return
    overridden = conflicts.of_module(module)
    kinds, reasons = ([], [overridden]) if overridden else rotary_kinds(stock)
    report.skipped += [Skipped(path, "rope", reason) for reason in reasons]
    if kinds:
        swap = Swap("rope", stock, FusedRotary, request.get("rope"), *_around(module))
        by = f"rope[{'; '.join(kinds)}]"
        apply_swap(report, path, module, swap, by, request.get("rope").shown())
        renew(type(module))


def _around(module: nn.Module) -> tuple[type[Patched] | None, Hashable]:
    """What stands around the rotary functions of a module; others decide whether it stays."""
    held = swapped(module)
    if held is None:
        return None, None
    if held.behavior is FusedRotary:
        return held.around, held.around_settings
    return held.behavior, held.settings


def find_rotated(report: PatchReport, request: Request, model: nn.Module) -> None:
    """Norms of queries and keys that are computed with their rotation, where both are served."""
    options, probed = _rotated_options(request), Probed()
    for path, module in model.named_modules():
        held = swapped(module)
        if held is None or held.behavior is not FusedRotary:
            continue
        names = names_of(module)
        found = None if options is None or names is None else "something stands around its forward"
        if options is not None and names is not None and held.around in AROUND:
            settings = RotatedNormsSettings(options, names)
            swap = replace(held, around=AROUND[held.around], around_settings=settings)
            found = probed.refusal(module, made_class(swap), names)
            if found is None:
                status, name = apply(module, swap), swap.stock.__name__
                entry = Entry(path, ROTATED, name, ROTATED, options.shown(), status)
                report.entries.append(entry)
                continue
        if held.around in APART:
            apply(module, replace(held, around=APART[held.around], around_settings=None))
        if found is not None and ROTATED in request.named:  # else both run, one after the other
            report.skipped.append(Skipped(path, ROTATED, found))


def _rotated_options(request: Request) -> Any:
    """The options; None also by default, where a backend is named for one of both operators."""
    named = (options.backend for op in ("rms_norm", "rope") if (options := request.get(op)))
    apart = any(named) and ROTATED not in request.named
    return None if apart else request.get(ROTATED)


def find_sparse(report: PatchReport, request: Request, model: nn.Module) -> None:
    """Layers whose indexer selects keys; their rotations and adapters are served beneath."""
    options, served = request.get(SPARSE), set()
    for path, module in model.named_modules():
        behavior = behavior_of(module)
        if behavior is None:
            found = None if options is None else selects_otherwise(module)
            report.skipped += [] if found is None else [Skipped(path, SPARSE, found)]
            continue
        # an indexer comes after its attention module, without which it has nothing to select for
        wanted = options is not None and (behavior is SparseAttention or id(module) in served)
        found = _sparse_refusal(module, behavior) if wanted else None
        if found is not None:
            report.skipped.append(Skipped(path, SPARSE, found))
        if not wanted or found is not None:
            _without_sparse(report, path, module)
            continue
        served.add(id(getattr(module, "indexer", None)))
        beneath = _beneath(module)
        swap = Swap(SPARSE, unpatched_class(module), behavior, options)
        if beneath is not None:
            swap = replace(beneath, around=behavior, around_settings=options)
        status, name = apply(module, swap), swap.stock.__name__
        entry = Entry(path, SPARSE, name, _SPARSE[behavior], options.shown(), status)
        report.entries.append(entry)


def _sparse_refusal(module: nn.Module, behavior: type[Patched]) -> str | None:
    """Why a layer is left as it is, or None; an attention module speaks for its indexer."""
    register_sparse()
    found = conflicts.of_module(module) or sparse_refusal(module, behavior)
    indexer = getattr(module, "indexer", None)
    if found is None and isinstance(indexer, nn.Module):
        found = conflicts.of_module(indexer) or sparse_refusal(indexer, SparseIndexer)
    return found


def _without_sparse(report: PatchReport, path: str, module: nn.Module) -> None:
    beneath = _beneath(module)
    if isinstance(module, (SparseAttention, SparseIndexer)):
        if beneath is None:
            restore_class(report, path, module)
        else:
            apply(module, beneath)


_SPARSE: dict[type[Patched], str] = {
    SparseAttention: "sparse_attention",
    SparseIndexer: "indexer_topk",
}


def _beneath(module: nn.Module) -> Swap | None:
    """The swap of a module without that of sparse attention."""
    held = swapped(module)
    if held is None or held.behavior in _SPARSE:
        return None
    return replace(held, around=None, around_settings=None) if held.around in _SPARSE else held
