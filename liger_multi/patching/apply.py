"""``patch``, ``unpatch`` and ``patched``.

A patch call reads the facts of a model once, runs the parts of :data:`PARTS` in order, carries out
the changes that they yield, and returns a report. This module also patches models of a type when
they are built (:func:`register_type`), and the models of trainers (:class:`TrainerPatch`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial, wraps
from typing import Any, TypeAlias

from torch import nn

from liger_multi.errors import PatchError, unknown
from liger_multi.patching import registered
from liger_multi.patching.attention.sparse import find_sparse_attention
from liger_multi.patching.evidence.facts import ModelFacts
from liger_multi.patching.experts.find import find_experts
from liger_multi.patching.experts.lora import find_expert_adapters
from liger_multi.patching.float8.find import find_float8
from liger_multi.patching.four_bits import find_four_bits
from liger_multi.patching.head.module import find_loss_head
from liger_multi.patching.kinds import MLP_OPS, NORM_OPS
from liger_multi.patching.linear import find_linear
from liger_multi.patching.lora import find_lora, find_shared_inputs
from liger_multi.patching.mixers import find_mixers
from liger_multi.patching.mlp import find_mlps
from liger_multi.patching.norms import find_norms
from liger_multi.patching.options import (
    MIXER_OPS,
    REPORTED,
    ROTATED,
    SPARSE,
    OpChoice,
    Request,
    parse_request,
)
from liger_multi.patching.packing.checked import find_packed
from liger_multi.patching.registered import find_registered
from liger_multi.patching.report import Entry, PatchReport, Skipped, promised, warn_once
from liger_multi.patching.rotary import find_rotary
from liger_multi.patching.rotated_norms import find_rotated_norms
from liger_multi.patching.swap import (
    Block,
    Change,
    Patched,
    Relabel,
    Replace,
    Restore,
    apply,
    buried,
    lock,
    refuse_buried,
    restore,
)

# --- model types: a hook after Hugging Face constructors ---


class TypeRequest:
    """A request to patch models of a type; requests are compared by identity."""

    def __init__(self, action: Callable[[nn.Module], Any], lasting: bool) -> None:
        self.action, self.lasting = action, lasting


_type_lock = threading.Lock()
_requests: dict[str, tuple[TypeRequest, ...]] = {}
"""Requests by model type; the last one acts."""
_installed: tuple[Any, Any] | None = None
"""The wrapper of ``PreTrainedModel.post_init``, and the original function."""


def register_type(model_type: str, action: Callable[[nn.Module], Any]) -> None:
    """Call ``action`` with every model of ``model_type`` that is built from now on.

    It replaces an earlier action of this function; requests of open blocks stay.

    Raises:
        PatchError: The installed transformers does not have the model type; names the nearest one.
    """
    _check_type(model_type)
    with _type_lock:
        blocks = [r for r in _requests.get(model_type, ()) if not r.lasting]
        _set_requests(model_type, (*blocks, TypeRequest(action, lasting=True)))


def begin_type(model_type: str, action: Callable[[nn.Module], Any]) -> Callable[[], None]:
    """The same until the returned function is called; such calls may come in any order.

    Raises:
        PatchError: As :func:`register_type`.
    """
    _check_type(model_type)
    request = TypeRequest(action, lasting=False)
    with _type_lock:
        _set_requests(model_type, (*_requests.get(model_type, ()), request))

    def end() -> None:
        with _type_lock:
            _set_requests(
                model_type, tuple(r for r in _requests.get(model_type, ()) if r is not request)
            )

    return end


def unregister_type(model_type: str) -> None:
    """Remove all requests of a type; the last type removes the hook.

    Raises:
        PatchError: The type is not registered.
    """
    with _type_lock:
        if model_type not in _requests:
            raise PatchError(
                f"model type {model_type!r} is not patched; patched types: "
                f"{', '.join(sorted(_requests)) or 'none'}"
            )
        _set_requests(model_type, ())


def is_type_patched(model_type: str) -> bool:
    """Whether models of the type are being patched."""
    return model_type in _requests


def _check_type(model_type: str) -> None:
    from transformers import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:
        raise PatchError(
            _task_head_hint(model_type) or unknown("model type", model_type, CONFIG_MAPPING)
        )


def _task_head_hint(name: str) -> str:
    """The message for a model's name on the hub, or its folder; "" for other names."""
    if "/" not in name and os.sep not in name and not os.path.isdir(name):
        return ""
    return (
        f"{name!r} names a model's files: load it first, patch("
        f"AutoModelForCausalLM.from_pretrained({name!r})), or patch a model type such as 'llama' "
        "for the models of that type built from now on"
    )


def _set_requests(model_type: str, requests: tuple[TypeRequest, ...]) -> None:
    """Set the requests of a type, and install the hook while there are any."""
    if requests:
        _requests[model_type] = requests
        _install()
    else:
        _requests.pop(model_type, None)
        if not _requests:
            _remove()


def _install() -> None:
    global _installed
    from transformers import PreTrainedModel

    if _installed is not None:
        return
    stock = PreTrainedModel.post_init

    @wraps(stock)
    def post_init(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = stock(self, *args, **kwargs)
        requests = _requests.get(getattr(getattr(self, "config", None), "model_type", ""))
        if requests:
            requests[-1].action(self)
        return result

    PreTrainedModel.post_init = post_init
    _installed = (post_init, stock)


def _remove() -> None:
    """Restore the function; if another wrapper is on top, ours stays without effect."""
    global _installed
    if _installed is None:
        return
    from transformers import PreTrainedModel

    wrapper, stock = _installed
    if PreTrainedModel.post_init is wrapper:
        PreTrainedModel.post_init = stock
        _installed = None


__all__ = ["patch", "patched", "unpatch"]


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
            ``rms_norm``, ``swiglu``, ``geglu``, ``fused_moe``, ``rope``, ``lora``, ``four_bits``,
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
        register_type(model, partial(_patch_built, request=request, strict=strict))
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
        unregister_type(model)
        return PatchReport(f"models of type {model}", of_type=True, call="unpatch")
    with lock:
        refuse_buried(_module(model).named_modules(), "unpatch")
        report = PatchReport(type(model).__name__, call="unpatch")
        for path, module in model.named_modules():
            _carry_out(report, Restore(path, module))
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
        end = begin_type(model, partial(_patch_built, request=request, strict=strict))
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
    """Patch a new model, which may be a part of another one, without a head."""
    report = _patch(model, replace(request, whole=False), strict)
    refused = [s for s in report.skipped if s.strict]
    if refused:
        refusals = PatchReport(report.target, [], refused)
        warn_once(f"not everything was patched: {refusals}", f"skipped {report.target}")


def _patch(model: nn.Module, request: Request, strict: bool) -> PatchReport:
    report = PatchReport(type(model).__name__)
    with lock:
        block = Block(model)
        try:
            _run_parts(report, request, ModelFacts(model))
            if strict and any(s.strict for s in report.skipped):
                raise PatchError(
                    f"strict=True, and some modules were skipped; the model is unchanged\n{report}"
                )
        except BaseException:
            block.end()
            raise
        block.forget()
    return report


Find: TypeAlias = Callable[[ModelFacts, Request], Iterator[Change]]
PARTS: tuple[tuple[Find, ...], ...] = (
    (find_float8, find_four_bits),  # whether an MLP is one operator depends on its layers
    (find_norms, find_mlps, find_experts, find_rotary, find_mixers, find_lora, find_registered),
    (find_expert_adapters,),  # after the experts: the wrappers of PEFT stand around them
    (find_shared_inputs,),
    (find_rotated_norms,),
    (find_sparse_attention,),
    (find_packed,),
    (find_loss_head,),
    (find_linear,),  # what nothing else serves
)
"""The parts in order; report lines of the parts in one row are sorted by module."""


def _run_parts(report: PatchReport, request: Request, model: ModelFacts) -> None:
    for row in PARTS:
        entries, skipped = len(report.entries), len(report.skipped)
        for find in row:
            for change in find(model, request):
                _carry_out(report, change)
        if len(row) > 1:
            report.entries[entries:] = sorted(
                report.entries[entries:], key=lambda entry: model.order[entry.path]
            )
            report.skipped[skipped:] = sorted(
                report.skipped[skipped:], key=lambda skip: model.order[skip.path]
            )
    find_absent(report, request, model)


def _carry_out(report: PatchReport, change: Change) -> None:
    """Carry out a change, and add its line to the report."""
    if isinstance(change, Replace):
        _replace(report, change)
    elif isinstance(change, Restore):
        swap, op = restore(change.module), change.instead_of
        if op:
            report.entries = [e for e in report.entries if (e.path, e.op) != (change.path, op)]
        elif swap and swap.behavior.reported:
            name = swap.stock.__name__
            report.entries.append(Entry(change.path, swap.op, name, name, {}, "restored"))
    elif isinstance(change, Relabel):
        report.entries = [
            replace(e, replaced_by=change.replaced_by)
            if e.op == change.op and e.path in change.paths
            else e
            for e in report.entries
        ]
    else:
        report.skipped.append(change)


def _replace(report: PatchReport, change: Replace) -> None:
    """Swap a class; under another library's class, an equal patch counts as patched."""
    path, module, swap = change.path, change.module, change.swap
    status = "already patched"
    if isinstance(module, Patched) and buried(module):
        current_swap = type(module)._liger_multi_swap
        if (current_swap.op, current_swap.settings) != (swap.op, swap.settings):
            name = type(module).__name__
            reason = f"its class is now {name}, on top of an earlier patch; options are fixed"
            report.skipped.append(Skipped(path, swap.op, reason))
            return
        swap = current_swap
    else:
        status = apply(module, swap)
    if change.replaced_by is not None:
        op, options = change.op or swap.op, dict(change.options)
        entry = Entry(path, op, swap.stock.__name__, change.replaced_by, options, status)
        report.entries.append(entry)


_ALONE = ("fused_moe", "rope", "lora", "linear", "linear_float8", "four_bits", SPARSE, ROTATED)
"""Operators that are a family of one."""


def find_absent(report: PatchReport, request: Request, model: ModelFacts) -> None:
    """Report operators without a module that were named or that a language model would have.

    By default, one operator of a family is enough, and a model without a configuration, such as
    ``nn.Sequential``, need not have any.
    """
    names = {facts.module_class.__name__ for facts in model.classes}
    experts = sorted(name for name in names if name.endswith("Experts"))
    experts = [] if report.count("fused_moe") else experts
    covered = {e.op for e in report.entries if e.status != "restored"}
    covered |= {s.op for s in report.skipped}
    if experts and "fused_moe" in request.enabled and not covered & {"fused_moe", *MLP_OPS}:
        covered.add("fused_moe")
        reason = f"{', '.join(experts)} does not use the experts interface of transformers"
        strict = "fused_moe" in request.named
        report.skipped.append(Skipped("", "fused_moe", reason, strict=strict))
    usual = REPORTED if model.with_attribute("config") else ()
    for family in (NORM_OPS, MLP_OPS, MIXER_OPS, *((op,) for op in _ALONE)):
        requested = [op for op in family if op in request.enabled]
        missing = [op for op in requested if op not in covered]
        for op in missing:
            is_requested = op in request.named
            # most models have no experts, for example, which is not reported
            if is_requested or (len(missing) == len(requested) and op in usual):
                reason = "the model has no module of this kind"
                if family is MLP_OPS and experts:
                    reason += f" (its experts, {', '.join(experts)}, are not patched)"
                report.skipped.append(Skipped("", op, reason, strict=is_requested))


# --- callbacks of trainers ---

logger = logging.getLogger("liger_multi")


class TrainerPatch:
    """The patch of a trainer's model, one at a time.

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
        """Patch ``model``, unless it is the patched one or a wrapper of that.

        An earlier model keeps its patch.
        """
        if self._model is not None and any(m is self._model for m in model.modules()):
            return
        block = Block(model)
        self.report = patch(model, strict=self.strict, **self.ops)
        self._model, self._block = model, block
        logger.info("%s", self.report)

    def release(self) -> None:
        """Restore every module; warn if that is not possible."""
        block, self._block, self._model = self._block, None, None
        try:
            if block is not None:
                block.end()
        except PatchError as error:  # the end of a training run is no place for an exception
            warnings.warn(f"the model stays patched: {error}", stacklevel=3)

    def __getstate__(self) -> dict[str, Any]:
        """Options only, since a copy of a callback has not patched a model."""
        return {"strict": self.strict, "ops": self.ops}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Start over with the options."""
        TrainerPatch.__init__(self, **state)
