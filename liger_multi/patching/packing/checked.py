"""Models that are tried before a packed row trains them: samples that see each other raise.

transformers keeps the samples of a row apart under conditions that nothing checks: positions that
begin again, no mask, no cache, masks that are made of positions. The first call with arguments of a
form tries the model (:mod:`liger_multi.patching.packing.trial`); where it keeps samples apart,
nothing is looked at again.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from liger_multi.arguments import by_name, fills_cache, has_cache
from liger_multi.errors import PackingError
from liger_multi.patching import shards
from liger_multi.patching.attention.interface import NAME, samples_in_graph, samples_of_call
from liger_multi.patching.packing import shared
from liger_multi.patching.packing.samples import is_numbered, rows_of, sample_ids, several
from liger_multi.patching.packing.tree import check_other_rows, offered
from liger_multi.patching.packing.trial import Verdict, checkpoints, text_config, trial
from liger_multi.patching.report import warn_once
from liger_multi.patching.swap import Patched, Swap, swapped, unpatched_class

TOLD_BY = ("position_ids", "seq_idx", "cu_seq_lens_q")
"""Arguments that say where samples begin."""


@dataclass(frozen=True)
class CheckSettings:
    """There is nothing to set."""


class CheckedModel(Patched):
    """A model whose samples of a packed row are checked to be apart; results are its own."""

    loose: ClassVar[bool] = True

    def __init_subclass__(cls, **keywords: Any) -> None:
        """Make the forward with the class."""
        super().__init_subclass__(**keywords)
        if "_liger_multi_swap" in vars(cls):
            cls.forward = _checked(cls)


def _checked(cls: Any) -> Callable[..., Any]:
    swap: Swap = vars(cls)["_liger_multi_swap"]
    below: Any = vars(cls)["_liger_multi_inner"]  # its forward may be replaced at any time

    @functools.wraps(swap.stock.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if shards.row() is not None:  # a share, whose masks and ids are of whole rows
            return below.forward(self, *args, **kwargs)
        if not torch.compiler.is_compiling() and isinstance(self, CheckedModel):
            arguments = by_name(swap.stock.forward, args, kwargs)
            rows = rows_of(arguments)
            offer = offered(rows.shape[1], rows.shape[0]) if isinstance(rows, Tensor) else None
            if offer is not None and isinstance(rows, Tensor):
                offer.taken_by = self
                inner = functools.partial(below.forward, self)
                arguments = shared.arguments_of(self, arguments, rows, offer.tree)
                check_shared(self, inner, arguments, rows)
                return shared.call(self, inner, arguments, offer)
            if isinstance(rows, Tensor):
                check_other_rows(self, rows)
            if any(arguments.get(name) is not None for name in TOLD_BY):
                check(self, functools.partial(_forward, below, self), arguments)
                with _kept_apart(self, arguments):
                    return below.forward(self, *args, **kwargs)
            if _has_numbered_masks(self, arguments):
                warn_once(_NUMBERED.format(unpatched_class(self).__name__), "numbered masks")
        elif isinstance(self, CheckedModel) and _is_unmasked(self, kwargs):
            positions = kwargs.get("position_ids")
            text_alone = not getattr(self.config, "sub_configs", ())
            if text_alone and isinstance(positions, Tensor) and positions.ndim == 2:
                ids = sample_ids({"position_ids": positions})
                return samples_in_graph(ids, lambda: below.forward(self, *args, **kwargs))
        return below.forward(self, *args, **kwargs)

    return forward


def _forward(below: Any, model: Any, **arguments: Any) -> Any:
    with _kept_apart(model, arguments):
        return below.forward(model, **arguments)


def _is_unmasked(model: nn.Module, arguments: Mapping[str, Any]) -> bool:
    """Whether a call of a model with our attention has neither a mask nor a cache."""
    unmasked = NAME in _attentions(model) and arguments.get("attention_mask") is None
    return unmasked and not has_cache((), arguments) and not fills_cache(arguments)


@contextlib.contextmanager
def _kept_apart(model: nn.Module, arguments: Mapping[str, Any]) -> Iterator[None]:
    """Our attention, where a model uses it, keeps apart what the arguments tell apart."""
    if not _is_unmasked(model, arguments):
        yield
        return

    def ids() -> Tensor | None:
        return sample_ids(arguments) if several(arguments) else None

    with samples_of_call(ids, _types_beside_text(model)):
        yield


def _types_beside_text(model: nn.Module) -> set[str]:
    """Types of the parts of a model that have other tokens than its rows: images, audio."""
    config, text = getattr(model, "config", None), text_config(model)
    names = [name for name in getattr(config, "sub_configs", ()) if name.endswith("_config")]
    parts = [getattr(config, name, None) for name in names]
    own = {getattr(c, "model_type", None) for c in (config, text)}
    return {part.model_type for part in parts if part is not None} - own


_numbered: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()


_NUMBERED = (
    "{} got an attention_mask that numbers samples, and nothing else that tells them. transformers "
    "takes all numbers but 0 alike, so samples of a row see each other, unless other code reads "
    "the numbers. Pass position_ids that begin again with every sample, and no attention_mask"
)


def _has_numbered_masks(model: nn.Module, arguments: Mapping[str, Any]) -> bool:
    """Whether the masks of a model number samples: the first one tells, as to look is to wait.

    Ranks may differ in that, so nothing that runs the model follows from it.
    """
    mask = arguments.get("attention_mask")
    if type(mask) is not Tensor or torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        return False
    is_numbered_model = _numbered.get(model)  # once: a patch in another thread forgets it
    if is_numbered_model is None:
        is_numbered_model = not getattr(model, "_is_replica", False) and is_numbered(mask)
        _numbered[model] = is_numbered_model
    return is_numbered_model


class _Verdicts(dict[Hashable, Verdict]):
    """What is known of a model, and a lock: other threads that call it wait for a trial."""

    def __init__(self) -> None:
        self.lock = threading.RLock()


_verdicts: weakref.WeakKeyDictionary[nn.Module, _Verdicts] = weakref.WeakKeyDictionary()
_first_call = threading.Lock()


def check(model: nn.Module, forward: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    """Try a model with the form of these arguments, unless that is known.

    A call that mixes samples waits for the device, to see whether it has several in a row.

    Raises:
        PackingError: A row has several samples, and they see each other.
    """
    rows = rows_of(arguments)
    if not isinstance(rows, Tensor) or _left(model, rows, arguments):
        return
    with _first_call:
        known = _verdicts.setdefault(model, _Verdicts())
    with known.lock:
        form = _form(model, arguments)
        if form not in known:
            with shards.suspended():
                known[form] = trial(model, forward, arguments, rows)
        verdict = known[form]
    if not (verdict.change or verdict.untried) or not several(arguments) or _unpatched(model):
        return
    if not verdict.untried:
        raise PackingError(_message(model, arguments, verdict))
    warn_once(
        f"{unpatched_class(model).__name__} got rows of several samples, and it could not be tried "
        f"whether it keeps them apart: {verdict.untried}",
        f"packing {unpatched_class(model).__name__}",
    )


def check_shared(
    model: nn.Module,
    forward: Callable[..., Any],
    arguments: Mapping[str, Any],
    rows: Tensor,
) -> None:
    """Try a model with shared prefixes, unless that is known.

    Raises:
        PackingError: It computes something else than for every path by itself, or cannot be tried.
    """
    with _first_call:
        known = _verdicts.setdefault(model, _Verdicts())
    with known.lock:  # whatever the tree: FSDP2 gathers weights in a trial, and ranks' trees differ
        form = ("shared", _form(model, arguments))
        if form not in known:
            known[form] = shared.trial(model, forward, arguments, rows)
        verdict = known[form]
    name, attention = unpatched_class(model).__name__, set(_attentions(model)) - {NAME}
    way = f"; {_SELECT.format(', '.join(sorted(attention)))}" if attention else ""
    if verdict.untried:
        raise PackingError(
            f"{name} could not be tried with shared prefixes: {verdict.untried}{way}"
        )
    if verdict.change:
        raise PackingError(
            f"{name} does not serve shared prefixes: the output of a branch differs by "
            f"{verdict.change:.1%} from that of its path by itself, or with another branch's "
            f"tokens{way}"
        )


_SELECT = (
    "its attention is {}: call liger_multi.patching.register_attention() and "
    f"model.set_attn_implementation({NAME!r})"
)


def _attentions(model: nn.Module) -> list[str]:
    """The attention implementations that the configurations of a model name."""
    configs = (getattr(model, "config", None), text_config(model))
    names = (getattr(config, "_attn_implementation", None) for config in configs)
    return [name for name in names if isinstance(name, str)]


def forget(model: nn.Module) -> None:
    """Try a model again: what it runs is not what it was."""
    _verdicts.pop(model, None)
    _numbered.pop(model, None)


def _left(model: Any, rows: Tensor, arguments: Mapping[str, Any]) -> bool:
    """Calls that nobody checks: of generation, of tracers, with masks that say it all."""
    mask = arguments.get("attention_mask")
    return (
        type(rows) is not Tensor
        or rows.device.type == "meta"
        or rows.shape[1] < 2
        or has_cache((), arguments)
        or fills_cache(arguments)
        or not (mask is None or (isinstance(mask, Tensor) and mask.ndim == 2))
        or torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
        or getattr(model, "_is_replica", False)
    )


_SETTINGS = ("use_cache", "_attn_implementation")  # of configurations


def _form(model: Any, arguments: Mapping[str, Any]) -> Hashable:
    """What decides whether samples are kept apart, and is not written in the model."""
    config = getattr(model, "config", None)
    text = text_config(model)
    tensors = {n: v.ndim for n, v in arguments.items() if isinstance(v, Tensor)}
    positions = arguments.get("position_ids")
    return (
        frozenset(tensors.items()),
        positions.shape[0] if isinstance(positions, Tensor) and positions.ndim == 3 else 0,
        arguments.get("use_cache"),
        _has_numbered_masks(model, arguments),
        *(getattr(c, name, None) for c in (config, text) for name in _SETTINGS),
        # which turns the cache off in training
        checkpoints(model),
        model.training,
        torch.is_grad_enabled(),
    )


def _unpatched(model: nn.Module) -> bool:
    """Whether only a class that others put on top of ours keeps the check alive."""
    return swapped(model) is None and not any(swapped(m) for m in model.modules())


def _message(model: nn.Module, arguments: Mapping[str, Any], verdict: Verdict) -> str:
    argument = next(name for name in TOLD_BY if arguments.get(name) is not None)
    name = unpatched_class(model).__name__
    if verdict.remedy:
        way = f"With {' and '.join(verdict.remedy)} they are kept apart (this was tried)."
    else:
        way = "Nothing that was tried keeps them apart: pass one sample per row."
    return (
        f"{name} got rows of several samples ({argument}), and it does not keep them apart: the "
        f"output of a sample differs by {verdict.change:.1%} with other tokens beside it, or with "
        f"none. {way} To train on such rows on purpose: patch(model, packing=False)"
    )


# --- which models of a model are checked ---


def checked(model: nn.Module) -> dict[str, nn.Module]:
    """The outermost modules that take tokens, by their paths; wrappers of PEFT are none."""
    models: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        inside = any(not outer or path.startswith(f"{outer}.") for outer in models)
        if not inside and _takes_tokens(module):
            models[path] = module
    return models


def _takes_tokens(module: nn.Module) -> bool:
    module_class = unpatched_class(module)
    if module_class.__module__.partition(".")[0] == "peft" or not hasattr(module, "config"):
        return False
    names = inspect.signature(cast(Any, module_class).forward).parameters
    embeds = callable(getattr(module, "get_input_embeddings", None))
    return embeds and ("input_ids" in names or "inputs_embeds" in names)
