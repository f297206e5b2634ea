"""``patch``, ``unpatch`` and ``patched``: go through a model and swap what the probes recognize.

The fused head is kept when a model's vocabulary is resized, which puts a new layer in its place.
A callback of a trainer holds a patch on one model and can take it back exactly.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import warnings
from collections import Counter
from collections.abc import Hashable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from liger_multi.errors import PatchError
from liger_multi.patching import modeltypes
from liger_multi.patching.lazy_logits.protocol import warn_once
from liger_multi.patching.options import PACKING, ROTATED, OpChoice, Request, parse_request
from liger_multi.patching.recognize import conflicts, registered
from liger_multi.patching.recognize.heads import (
    behavior,
    find_heads,
    head_refusal,
    inner_heads,
    with_heads,
)
from liger_multi.patching.recognize.kinds import MIXER_OPS, MLP_OPS, NORM_OPS, SPARSE
from liger_multi.patching.recognize.mixers import (
    SERVED,
    gates,
    mixer_calls,
    refusal,
    without_kernels,
)
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
from liger_multi.patching.recognize.rotated_norms import Probed
from liger_multi.patching.recognize.sparse_attention import behavior_of, selects_otherwise
from liger_multi.patching.recognize.sparse_attention import refusal as sparse_refusal
from liger_multi.patching.replace.adapters import (
    FusedLora,
    SharedInput,
    adapters,
    looks_like_lora,
    matrices,
    projections,
    share,
)
from liger_multi.patching.replace.calling import renew
from liger_multi.patching.replace.expert_adapters import (
    ExpertAdaptersSettings,
    FusedExpertAdapters,
    factors,
    outermost_wrappers,
)
from liger_multi.patching.replace.float8 import (
    Float8Linear,
    Float8Settings,
    GatheringFloat8Linear,
    float8_refusal,
)
from liger_multi.patching.replace.float8_shards import unit_of, units
from liger_multi.patching.replace.head import LazyHead
from liger_multi.patching.replace.linear import LinearByRows, linear_refusal, looks_like_linear
from liger_multi.patching.replace.mixers import (
    FusedMixer,
    MixerSettings,
    PackedModel,
    SeparateModel,
    packing,
)
from liger_multi.patching.replace.mlp import ExpertsSettings, FusedExperts, FusedMlp
from liger_multi.patching.replace.norms import FusedNorm
from liger_multi.patching.replace.packing import CheckedModel, CheckSettings, checked, forget
from liger_multi.patching.replace.rotary import FusedRotary, rotary_calls, rotary_kinds
from liger_multi.patching.replace.rotated_norms import (
    APART,
    AROUND,
    RotatedNormsSettings,
    names_of,
)
from liger_multi.patching.replace.sparse_attention import SparseAttention, SparseIndexer
from liger_multi.patching.replace.sparse_attention import register as register_sparse
from liger_multi.patching.replace.swap import (
    Block,
    Patched,
    Swap,
    apply,
    buried,
    lock,
    made_class,
    refuse_buried,
    restore,
    stock_class,
    swapped,
    unpatched_class,
)
from liger_multi.patching.report import Entry, PatchReport, Skipped, promised

__all__ = ["HeldPatch", "patch", "patched", "unpatch"]

_TOLD = ("rms_norm", "swiglu", "geglu", "rope")
"""Operators whose absence is worth a line where nobody named them."""
_LOSSES = ("fused_linear_cross_entropy", "cross_entropy")
_ALONE = (
    ("fused_moe",),
    ("rope",),
    ("lora",),
    ("linear",),
    ("linear_float8",),
    (SPARSE,),
    (ROTATED,),
)
"""Operators that are a family each."""


def patch(model: nn.Module | str, *, strict: bool = False, **ops: OpChoice) -> PatchReport:
    """Let a Hugging Face model run this library's operators, in place.

    Nothing is copied, renamed or written into the modules: the classes of single instances change,
    and :func:`unpatch` gives them back. A call states the whole configuration: an operator that an
    earlier call turned on and this one turns off goes back to the original class.

    Args:
        model: A model, or a model type such as ``"llama"`` for the models of that type built from
            now on.
        strict: Raise when anything that was asked for is skipped; the model is then left as it was.
        **ops: Operator name to True, False, a backend's name, or a mapping of options.
            ``rms_norm``, ``swiglu``, ``geglu``, ``fused_moe``, ``rope``, ``lora``,
            ``causal_conv1d``, ``gated_delta_rule``, ``kimi_delta_attention``, ``ssd_scan``,
            ``selective_scan``, ``sparse_attention`` and ``fused_linear_cross_entropy`` are on by
            default, and so is ``rms_norm_rope`` where ``rms_norm`` and ``rope`` name no backend.
            ``cross_entropy`` is off. With both losses on, ``cross_entropy`` serves the calls that
            cannot be fused. ``linear`` is on where ``deterministic="rows"`` is in force when the
            patch is made, ``linear_float8`` is off.

    Returns:
        What was replaced by what, and what was skipped and why.

    Raises:
        PatchError: An unknown operator, option or model type (with the nearest known one), or a
            skip under ``strict``.
        ConfigurationError: An unknown backend.
        TypeError: ``model`` is neither a module nor a model type.
    """
    request = parse_request(ops, registered.probes(), strict)
    if isinstance(model, str):
        modeltypes.register(model, partial(_patch_built, request=request, strict=strict))
        return promised(model, request.enabled)
    return _patch(_module(model), request, strict)


def unpatch(model: nn.Module | str) -> PatchReport:
    """Give every module of a model the class that it had, or stop patching a model type.

    Models that were built while their type was patched keep the patch until they are unpatched
    themselves.

    Raises:
        PatchError: A class was swapped again on top of ours (FSDP2), or the model type is not
            patched.
        TypeError: ``model`` is neither a module nor a model type.
    """
    if isinstance(model, str):
        modeltypes.unregister(model)
        return PatchReport(f"models of type {model}, no more")
    with lock:
        refuse_buried(_module(model).named_modules(), "unpatch")
        report = PatchReport(type(model).__name__)
        for path, module in model.named_modules():
            _restore(report, path, module)
    return report


@contextlib.contextmanager
def patched(
    model: nn.Module | str, *, strict: bool = False, **ops: OpChoice
) -> Iterator[PatchReport]:
    """Patch within a block; afterwards, also after an exception, everything is as it was.

    Blocks nest, and may end in another order than they began, also in different threads: the
    newest open block states the configuration, and when the last one has ended, the model is as it
    was before the first. What :func:`patch` and :func:`unpatch` did to a model within a block ends
    with it. A forward pass that runs while another thread begins or ends a block calls some modules
    patched and others not, each with right results. What has been computed with activation
    checkpointing is computed again as the model is then: PyTorch raises a CheckpointError where a
    block began or ended between forward and backward.

    For a model type, the newest of the open blocks and of :func:`patch` states the configuration of
    models built in any thread, and a block ends its own request only: a :func:`patch` of the type
    within it stays, and an :func:`unpatch` ends all requests. Models built within the block keep
    their patch.

    Raises:
        PatchError: As :func:`patch` and :func:`unpatch`.
    """
    if isinstance(model, str):
        request = parse_request(ops, registered.probes(), strict)
        end = modeltypes.begin(model, partial(_patch_built, request=request, strict=strict))
        try:
            yield promised(model, request.enabled)
        finally:
            end()
        return
    block = Block(_module(model))
    try:
        yield patch(model, strict=strict, **ops)
    finally:
        block.end()


def _module(model: object) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise TypeError(
            "expected a model (torch.nn.Module) or a model type such as 'llama', got "
            f"{type(model).__name__}: {model!r:.80}"
        )
    return model


def _patch_built(model: nn.Module, request: Request, strict: bool) -> None:
    """Patch what a constructor has built: a whole model, or the part of one that has no head."""
    report = _patch(model, request, strict, head_needed=False)
    refused = [s for s in report.skipped if s.strict]
    if refused:
        few = PatchReport(report.target, [], refused)
        warn_once(f"not everything was patched: {few}", f"skipped {report.target}")


def _patch(
    model: nn.Module, request: Request, strict: bool, head_needed: bool = True
) -> PatchReport:
    report = PatchReport(type(model).__name__)
    with lock:
        before = Block(model)
        try:
            _recognize(report, request, model, head_needed)
            if strict and any(s.strict for s in report.skipped):
                raise PatchError(
                    f"strict=True, and some modules were skipped; the model is unchanged\n{report}"
                )
        except BaseException:
            before.end()
            raise
        before.forget()
    return report


def _recognize(report: PatchReport, request: Request, model: nn.Module, head_needed: bool) -> None:
    _float8(report, request, model)  # whether an MLP is one operator depends on its layers
    for path, module in model.named_modules():
        for find in _FINDERS:
            find(report, request, path, module)
    _expert_adapters(report, request, model)
    _shared(report, request, model)
    _rotated(report, request, model)
    _sparse(report, request, model)
    _packed(report, request, model)
    _head(report, request, model, head_needed)
    _linear(report, request, model)
    _absent(report, request, model)


def _norm(report: PatchReport, request: Request, path: str, module: nn.Module) -> None:
    likely = looks_like_norm(module)
    if likely is None:
        return
    overridden = conflicts.of_module(module)
    found = overridden or norm_settings(module, likely)
    op = likely if isinstance(found, str) else found.kind.op
    options = request.get(op)
    if options is None:
        _restore(report, path, module)
    elif isinstance(found, str):
        if overridden or (found != NO_NORM and worth_a_line(likely)):
            report.skipped.append(Skipped(path, op, found))
    else:
        settings = replace(found, options=options)
        swap = Swap(op, stock_class(module), FusedNorm, settings)
        _apply(report, path, module, swap, settings.shown, options.shown())


def _mlp(report: PatchReport, request: Request, path: str, module: nn.Module) -> None:
    candidates, named = mlp_names(module)
    if not candidates:
        return
    choices = {op: request.enabled[op] for op in MLP_OPS if op in request.enabled}
    if not choices:
        _restore(report, path, module)
        return
    found = conflicts.of_module(module) or mlp_kind(module, candidates)
    if isinstance(found, str):
        told = [op for op in choices if op in _TOLD or op in request.named]
        if named and told:
            report.skipped.append(Skipped(path, told[0], found))
    elif found.kind.op not in choices:
        _restore(report, path, module)
    else:
        lora = request.get("lora") is not None
        settings = replace(found, options=choices[found.kind.op], lora=lora)
        swap = Swap(found.kind.op, stock_class(module), FusedMlp, settings)
        _apply(report, path, module, swap, settings.shown(module), settings.options.shown())


def _experts(report: PatchReport, request: Request, path: str, module: nn.Module) -> None:
    options = request.get("fused_moe")
    if are_other_experts(module) and options is not None:
        own = f"{type(module).__name__} does not use the experts interface of transformers"
        report.skipped.append(Skipped(path, "fused_moe", own))
    if not looks_like_experts(module):
        return
    if options is None:
        _restore(report, path, module)
        return
    found = conflicts.of_module(module) or experts_kind(module)
    if isinstance(found, str):
        report.skipped.append(Skipped(path, "fused_moe", found))
        return
    settings = ExpertsSettings(found, options)
    swap = Swap("fused_moe", stock_class(module), FusedExperts, settings)
    _apply(report, path, module, swap, settings.shown, options.shown())


def _rotary(report: PatchReport, request: Request, path: str, module: nn.Module) -> None:
    stock = type(module)._liger_multi_swap.stock if isinstance(module, Patched) else type(module)
    if request.get("rope") is None or not rotary_calls(stock):
        if isinstance(module, FusedRotary):
            _restore(report, path, module)
        return
    overridden = conflicts.of_module(module)
    kinds, reasons = ([], [overridden]) if overridden else rotary_kinds(stock)
    report.skipped += [Skipped(path, "rope", reason) for reason in reasons]
    if kinds:
        swap = Swap("rope", stock, FusedRotary, request.get("rope"), *_around(module))
        by = f"rope[{'; '.join(kinds)}]"
        _apply(report, path, module, swap, by, request.get("rope").shown())
        renew(type(module))


def _around(module: nn.Module) -> tuple[type[Patched] | None, Hashable]:
    """What stands around the rotary functions of a module; others decide whether it stays."""
    held = swapped(module)
    if held is None:
        return None, None
    if held.behavior is FusedRotary:
        return held.around, held.around_settings
    return held.behavior, held.settings


def _rotated(report: PatchReport, request: Request, model: nn.Module) -> None:
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


def _mixer(report: PatchReport, request: Request, path: str, module: nn.Module) -> None:
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
        _restore(report, path, module)
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
    _apply(report, path, module, swap, by, {k: v for one in shown for k, v in one.items()})
    renew(type(module))


def _sparse(report: PatchReport, request: Request, model: nn.Module) -> None:
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
            _restore(report, path, module)
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


def _packed(report: PatchReport, request: Request, model: nn.Module) -> None:
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
            _apply(report, path, module, swap, _PACKED[swap.behavior], {})
        elif _is_packed(module):
            _restore(report, path, module)


_PACKED: dict[type[Patched], str] = {
    PackedModel: "ids of samples",
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


def _lora(report: PatchReport, request: Request, path: str, module: nn.Module) -> None:
    if not looks_like_lora(module) or isinstance(module, LazyHead):
        return
    options = request.get("lora")
    if options is None:
        _restore(report, path, module)
        return
    found = conflicts.of_module(module) or adapters(module)
    if isinstance(found, str):
        _restore(report, path, module)
        report.skipped.append(Skipped(path, "lora", found))
    else:
        swap = Swap("lora", stock_class(module), FusedLora, options)
        _apply(report, path, module, swap, "lora_update", options.shown())


def _expert_adapters(report: PatchReport, request: Request, model: nn.Module) -> None:
    """Adapters on stacks of experts, after these themselves: PEFT's wrappers stand around them."""
    options = None if request.get("fused_moe") is None else request.get("lora")
    for path, module in outermost_wrappers(model):
        if options is None:
            _restore(report, path, module)
            continue
        found = conflicts.of_module(module) or factors(module)
        if isinstance(found, str):
            _restore(report, path, module)
            report.skipped.append(Skipped(path, "lora", found))
            continue
        settings = ExpertAdaptersSettings(options)
        swap = Swap("lora", stock_class(module), FusedExpertAdapters, settings)
        _apply(report, path, module, swap, found.shown, options.shown())


def _shared(report: PatchReport, request: Request, model: nn.Module) -> None:
    """Layers with adapters that share an input: their module has them computed together."""
    for path, module in model.named_modules():
        layers = [] if request.get("lora") is None else projections(module)
        if share(module, bool(layers) and not conflicts.of_module(module)):
            names = {n for n, m in module.named_children() if any(m is one for one in layers)}
            paths = {f"{path}.{name}".strip(".") for name in names}
            report.entries = [
                replace(e, replaced_by="lora_qkv") if e.op == "lora" and e.path in paths else e
                for e in report.entries
            ]


def _registered(report: PatchReport, request: Request, path: str, module: nn.Module) -> None:
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
            _apply(report, path, module, swap, found.shown, options.shown())
            return
        if isinstance(found, str):
            report.skipped.append(Skipped(path, name, found))
    if held is not None:
        _restore(report, path, module)


_FINDERS = (_norm, _mlp, _experts, _rotary, _mixer, _lora, _registered)
"""Asked in this order for every module; each knows its operators' modules and leaves others."""


def _absent(report: PatchReport, request: Request, model: nn.Module) -> None:
    """Name the operators that found nothing; one kind of MLP is enough where none was named."""
    names = {type(m).__name__ for m in model.modules()}
    experts = sorted(name for name in names if name.endswith("Experts"))
    experts = [] if report.count("fused_moe") else experts
    seen = {e.op for e in report.entries if e.status != "restored"}
    seen |= {s.op for s in report.skipped}
    if experts and "fused_moe" in request.enabled and not seen & {"fused_moe", *MLP_OPS}:
        seen.add("fused_moe")
        reason = f"{', '.join(experts)} does not use the experts interface of transformers"
        strict = "fused_moe" in request.named
        report.skipped.append(Skipped("", "fused_moe", reason, strict=strict))
    for family in (NORM_OPS, MLP_OPS, MIXER_OPS, *_ALONE):
        wanted = [op for op in family if op in request.enabled]
        missing = [op for op in wanted if op not in seen]
        for op in missing:
            named = op in request.named
            # most models have no experts, which is nothing to report
            if named or (len(missing) == len(wanted) and op in _TOLD):
                reason = "the model has no module of this kind"
                if family is MLP_OPS and experts:
                    reason += f" (its experts, {', '.join(experts)}, are not patched)"
                report.skipped.append(Skipped("", op, reason, strict=named))


def _head(report: PatchReport, request: Request, model: nn.Module, needed: bool) -> None:
    settings = request.head
    heads, missing = find_heads(model)
    if settings is None:
        for path, module in heads:
            if not isinstance(module, LinearByRows):
                _restore(report, path, module)
        return
    op = _LOSSES[0] if settings.fused else _LOSSES[1]
    if missing:
        report.skipped.append(Skipped("", op, missing, strict=needed))
    theirs = next((why for m in with_heads(model) if (why := conflicts.of_model(m))), None)
    for path, module in heads:
        if settings.fused and hasattr(module, "base_layer"):
            _unwrapped(report, path, module)
        if isinstance(module, FusedLora) and not head_refusal(module):  # it is more than that
            restore(module)
            report.entries = [e for e in report.entries if (e.path, e.op) != (path, "lora")]
        around = [m for p, m in model.named_modules() if not p or path.startswith(f"{p}.")]
        refusal = theirs or head_refusal(module, around)
        if refusal:
            for name, inner in module.named_modules():  # patched before an adapter came on top
                if not isinstance(inner, (FusedLora, LinearByRows)):
                    _restore(report, f"{path}.{name}".strip("."), inner)
            report.skipped.append(Skipped(path, op, refusal))
            continue
        swap = Swap(op, stock_class(module), behavior(module, around), settings)
        _apply(report, path, module, swap, op, settings.shown)
        follow()
    for path, owner in inner_heads(model, [head for _, head in heads]):
        call = f"liger_multi.patch(model.{owner})"
        reason = f"it is the output embedding of a model within the model: {call} patches it"
        report.skipped.append(Skipped(path, op, reason, strict=False))


def _float8(report: PatchReport, request: Request, model: nn.Module) -> None:
    """Linear layers that multiply in FP8: those of size, but for heads and adapters."""
    options = request.get("linear_float8")
    heads = {id(m) for _, head in find_heads(model)[0] for m in head.modules()}
    holders = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    thin = {id(m) for lora in model.modules() if looks_like_lora(lora) for m in matrices(lora)}
    sharded = units(model)
    for path, module in model.named_modules():
        ours = isinstance(module, Float8Linear)
        free = ours or not isinstance(module, Patched) or isinstance(module, LinearByRows)
        if not looks_like_linear(module) or id(module) in thin or not free:
            continue
        head = id(module) in heads and "it is the output embedding, whose loss has head_gemms"
        alone = options and (options.frozen or options.gather)
        shared = alone and holders[id(getattr(module, "weight", None))] > 1
        tied = shared and "its weight is that of another layer too, which would lose it"
        found = options and (
            head
            or tied
            or conflicts.of_module(module)
            or float8_refusal(module, options, unit_of(path, sharded))
        )
        swap = None
        if options is not None and not found:
            settings = Float8Settings(options, options.frozen)
            kind = GatheringFloat8Linear if options.gather else Float8Linear
            swap = Swap("linear_float8", stock_class(module), kind, settings)
        held = swapped(module) if ours else None
        if held is not None and held != swap and (fixed := held.behavior.fixed(module)):
            report.skipped.append(Skipped(path, "linear_float8", f"{fixed}; options are fixed"))
            continue
        if ours and swap is None:
            _restore(report, path, module)
        if found:
            report.skipped.append(Skipped(path, "linear_float8", found, strict=False))
        elif swap is not None:
            by = f"linear_float8{'[weight in FP8]' * options.frozen}"
            _apply(report, path, module, swap, by, options.shown())


def _linear(report: PatchReport, request: Request, model: nn.Module) -> None:
    """Linear layers that nothing else serves, the last of all."""
    options = request.get("linear")
    for path, module in model.named_modules():
        ours = isinstance(module, LinearByRows)
        if not looks_like_linear(module) or (isinstance(module, Patched) and not ours):
            continue
        found = options and (conflicts.of_module(module) or linear_refusal(module))
        if ours and (found or options is None):
            _restore(report, path, module)
        if found:
            report.skipped.append(Skipped(path, "linear", found))
        elif options is not None:
            swap = Swap("linear", stock_class(module), LinearByRows, options)
            _apply(report, path, module, swap, "linear", options.shown())


def _unwrapped(report: PatchReport, path: str, module: nn.Module) -> None:
    """A head that was patched before an adapter came on top of it is its plain base again."""
    for name, inner in module.named_modules():
        if isinstance(inner, LazyHead) and inner is not module:
            _restore(report, f"{path}.{name}", inner)


def _apply(
    report: PatchReport,
    path: str,
    module: nn.Module,
    swap: Swap,
    by: str,
    options: dict[str, object],
) -> None:
    """Swap, or say why not; a module that was wrapped after an equal patch counts as patched."""
    status = "already patched"
    if isinstance(module, Patched) and buried(module):
        below = type(module)._liger_multi_swap
        if (below.op, below.settings) != (swap.op, swap.settings):
            name = type(module).__name__
            reason = f"its class is now {name}, on top of an earlier patch; options are fixed"
            report.skipped.append(Skipped(path, swap.op, reason))
            return
        swap = below
    else:
        status = apply(module, swap)
    report.entries.append(Entry(path, swap.op, swap.stock.__name__, by, dict(options), status))


def _restore(report: PatchReport, path: str, module: nn.Module) -> None:
    found = restore(module)
    if found and found.behavior is not SharedInput:  # its layers have entries
        report.entries.append(
            Entry(path, found.op, found.stock.__name__, found.stock.__name__, {}, "restored")
        )


# --- a resized vocabulary ---

_MARK = "_liger_multi_resizes"


def follow() -> None:
    """Wrap ``PreTrainedModel.resize_token_embeddings``, once; models without a patch see no change.

    A method of the class, since nothing is written into models: copies would hold the original's.
    """
    library = sys.modules.get("transformers.modeling_utils")
    kind = getattr(library, "PreTrainedModel", None)
    if kind is None or hasattr(kind.resize_token_embeddings, _MARK):
        return
    stock = kind.resize_token_embeddings

    @functools.wraps(stock)
    def resize_token_embeddings(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        before = [swapped(head) for _, head in find_heads(self)[0] if isinstance(head, LazyHead)]
        result = stock(self, *args, **kwargs)
        for _, head in find_heads(self)[0] if any(before) else ():
            swap = before[0]
            if swap is None or stock_class(head) is not swap.stock or head_refusal(head):
                continue
            if behavior(head) is swap.behavior:
                apply(head, swap)
        return result

    setattr(resize_token_embeddings, _MARK, True)
    kind.resize_token_embeddings = resize_token_embeddings


# --- held by a callback ---

logger = logging.getLogger("liger_multi")


class HeldPatch:
    """Patches the models that a trainer brings, one at a time.

    Args:
        strict: As for :func:`liger_multi.patch`.
        ops: As for :func:`liger_multi.patch`; checked here, not when training starts.
    """

    def __init__(self, strict: bool, ops: dict[str, OpChoice]) -> None:
        parse_request(ops, registered.probes(), strict)
        self.strict, self.ops = strict, ops
        self.report: PatchReport | None = None
        self._model: nn.Module | None = None
        self._block: Block | None = None

    def hold(self, model: nn.Module) -> None:
        """Patch ``model``, unless it is the patched one or a wrapper around that.

        An earlier model keeps its patch: a trainer that brings another one is done with it.
        """
        if self._model is not None and any(m is self._model for m in model.modules()):
            return
        block = Block(model)
        self.report = patch(model, strict=self.strict, **self.ops)
        self._model, self._block = model, block
        logger.info("%s", self.report)

    def release(self) -> None:
        """Give every module the class that it had before; warn where that cannot be done."""
        block, self._block, self._model = self._block, None, None
        try:
            if block is not None:
                block.end()
        except PatchError as error:  # the end of a training run is no place for an exception
            warnings.warn(f"the model stays patched: {error}", stacklevel=3)

    def __getstate__(self) -> dict[str, Any]:
        """Options only: a copy of a callback has patched nothing."""
        return {"strict": self.strict, "ops": self.ops}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Start over with the options."""
        HeldPatch.__init__(self, **state)
