"""Models that raise when the samples of a packed row attend to each other.

transformers keeps the samples of a row apart under conditions that it does not check: positions
that restart, no mask, no cache, masks made of positions. :class:`CheckedModel` takes a call with
packed samples. The first call of each form runs a trial (:func:`.trial.trial`), whose verdict is
cached. :func:`find_packed` yields the patches for packed rows.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from liger_multi.checks import describe
from liger_multi.errors import PackingError, summary
from liger_multi.modules.arguments import by_name, fills_cache, has_cache, parameters_of
from liger_multi.patching import shards
from liger_multi.patching.attention.interface import NAME, samples_in_graph, samples_of_call
from liger_multi.patching.evidence.facts import ClassFacts, ModelFacts
from liger_multi.patching.options import MIXER_OPS, PACKING, Request
from liger_multi.patching.packing import trial as trials
from liger_multi.patching.packing.hybrids import IdPassingModel, PackedModel, SeparateModel, packing
from liger_multi.patching.packing.samples import has_samples, is_numbered, rows_of, sample_ids
from liger_multi.patching.packing.tree import (
    Branch,
    Offer,
    Tree,
    check_other_rows,
    offered,
    run,
    tree_of_roots,
)
from liger_multi.patching.packing.trial import (
    SHIFT,
    Arguments,
    Verdict,
    checkpoints,
    text_config,
    trial,
)
from liger_multi.patching.report import warn_once
from liger_multi.patching.swap import (
    Change,
    Patched,
    Replace,
    Restore,
    Swap,
    conflict_of,
    swapped,
    unpatched_class,
)

# --- rows of trees (shared prefixes) ---

# A trial runs a small tree with branches of several lengths, one of them a single token. Outputs of
# a branch must equal those of its path alone, and must not change with tokens of other branches.

EXAMPLE: Branch = (
    9,
    [(5, [(7, []), (1, [])]), (1, []), (3, [(4, []), (6, [(2, []), (3, [])])])],
)
"""The tree of a trial."""
_PER_TOKEN = ("position_ids", "attention_mask")
_REFUSED = (
    *("seq_idx", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"),
    "labels",
)

# --- the arguments of a call ---


def tree_arguments(
    model: nn.Module, called_with: Mapping[str, Any], tokens: Tensor, tree: Tree
) -> Arguments:
    """The arguments of a call whose tokens are a tree, with its positions and its padding mask.

    Positions with several axes, as for images, must come from the caller.

    Raises:
        PackingError: A cache or another argument that a tree cannot have, or too few positions.
    """
    name, names = unpatched_class(model).__name__, parameters_of(unpatched_class(model).forward)
    if has_cache((), called_with) or fills_cache(called_with):
        raise PackingError(
            f"{name} got a cache beside shared prefixes, as generation does: a cache keeps no "
            "branches apart. Generate outside of trees.shared"
        )
    logits_to_keep = called_with.get("logits_to_keep")
    if isinstance(logits_to_keep, Tensor) or logits_to_keep:
        raise PackingError(
            f"{name} got logits_to_keep beside shared prefixes, as generation does. Generate "
            "outside of trees.shared; log-probabilities take the logits of all branches"
        )
    refused = [n for n in _REFUSED if called_with.get(n) is not None]
    if refused:
        raise PackingError(
            f"{name} got {', '.join(refused)} beside shared prefixes, which say it all"
        )
    own_mask = called_with.get("attention_mask")
    if own_mask is not None and not (isinstance(own_mask, Tensor) and own_mask.ndim == 2):
        raise PackingError(
            f"{name} got a mask of its own beside shared prefixes, {describe(own_mask)}: pass that "
            "of batch.inputs"
        )
    maximum = getattr(text_config(model), "max_position_embeddings", None)
    if isinstance(maximum, int) and 0 < maximum < tree.longest:
        raise PackingError(
            f"{name} has {maximum} positions (max_position_embeddings), and the longest path of "
            f"the shared prefixes has {tree.longest} tokens"
        )
    positions = called_with.get("position_ids")
    if not (isinstance(positions, Tensor) and positions.ndim == 3):
        positions = tree.positions(tokens.device)
    mask = tree.visible(tokens.device).to(torch.int64)[None]
    other_inputs = [n for n, v in called_with.items() if _is_no_text(v, tokens)]
    if other_inputs and positions.ndim < 3 and _has_axes(model):
        raise PackingError(
            f"{name} got {', '.join(other_inputs)} beside shared prefixes, and its positions have "
            f"several axes: pass position_ids (3 or 4, 1, {tree.tokens}) of the tree, in which "
            "branches go on from the prompt"
        )
    values = {"position_ids": positions, "attention_mask": mask}
    return {**called_with, **{n: v for n, v in values.items() if n in names or n in called_with}}


def _is_no_text(value: Any, tokens: Tensor) -> bool:
    """Whether an argument is a tensor that is not per token of a row."""
    return isinstance(value, Tensor) and value.ndim > 0 and value.shape[-1:] != tokens.shape[1:2]


def _has_axes(model: nn.Module) -> bool:
    """Whether positions of a model have axes for time, height and width."""
    config = text_config(model)
    tables = (getattr(config, n, None) for n in ("rope_parameters", "rope_scaling"))
    return any("mrope_section" in str(table) for table in tables)


@contextlib.contextmanager
def weighted(model: nn.Module, arguments: Arguments, tree: Tree) -> Iterator[Arguments]:
    """Arguments for a model with a router loss, in which each token counts once per path.

    The model weights the tokens of that loss by its mask. So its mask has the number of paths of
    each token, and hooks pass the original mask to its modules.
    """
    mask = arguments.get("attention_mask")
    routed = arguments.get("output_router_logits")
    if routed is None:
        routed = getattr(text_config(model), "output_router_logits", False)
    if not routed or not isinstance(mask, Tensor):
        yield arguments
        return
    weights = tree.weights(mask.device)

    def unweighted(module: nn.Module, args: Any, kwargs: Any) -> Any:
        plain = tuple(mask if value is weights else value for value in args)
        return plain, {n: mask if value is weights else value for n, value in kwargs.items()}

    masked = [m for m in model.children() if "attention_mask" in parameters_of(type(m).forward)]
    hooks = [m.register_forward_pre_hook(unweighted, with_kwargs=True) for m in masked]
    try:
        yield {**arguments, "attention_mask": weights}
    finally:
        for hook in hooks:
            hook.remove()


def call_with_tree(
    model: nn.Module, forward: Callable[..., Any], arguments: Arguments, offer: Offer
) -> Any:
    """Call the forward of a model with a tree in force.

    Raises:
        PackingError: None of its layers used the tree.
    """
    plain = contextlib.nullcontext(arguments)
    weighing = plain if offer.once else weighted(model, arguments, offer.tree)
    with run(offer.tree) as running, weighing as weighed:
        output = forward(**weighed)
    if not running.asked:
        raise PackingError(
            f"{unpatched_class(model).__name__} did not ask which tokens a branch follows: compile "
            "its layers, not the model around them"
        )
    balance = getattr(output, "aux_loss", None)
    if offer.ranks is not None and isinstance(balance, Tensor):
        output["aux_loss"] = shards.shared_input(balance, offer.ranks)
    return output


# --- a trial ---


def trial_of_tree(
    model: nn.Module,
    forward: Callable[..., Any],
    called_with: Mapping[str, Any],
    rows: Tensor,
) -> Verdict:
    """Try a model on a small tree, with arguments of the form of a call; then restore it."""
    row = trials.row_of(model, called_with, rows)
    tree, _ = tree_of_roots([EXAMPLE])
    plain = trials.arguments_of(called_with, row, rows)
    token_arguments = {
        n: v for n, v in plain.items() if isinstance(v, Tensor) and v.shape[:2] == (1, row.tokens)
    }
    plain = {n: v for n, v in plain.items() if n not in {*token_arguments, *_PER_TOKEN}}
    first_tokens = {n: v[:, :1] for n, v in token_arguments.items() if n not in _PER_TOKEN}
    trial_run = _Trial(model, forward, row, plain, first_tokens, tree)
    if row.tokens < tree.longest:
        return Verdict(untried=f"it has {row.tokens} positions")
    if called_with.get("input_ids") is None:
        return Verdict(untried="it was called with embeddings")
    with trials.undisturbed(model), trials.short_chunks(model):
        try:
            return Verdict(trial_run.change(trials.is_coarse(model, rows.device)))
        except Exception as error:  # of any model's code, on synthetic inputs
            return Verdict(untried=summary(error))


def _largest_change(parts: list[Tensor], usual: list[list[Tensor]], coarse: bool) -> float:
    """The largest change of a token; if ``coarse``, the largest median over parts.

    Args:
        parts: Changes of the tokens of each part.
        usual: Changes of one token of every branch, such as the first, whose medians also count:
            errors at the border of branches reach few tokens of a part.
        coarse: Whether rounding may select other experts for a few tokens.
    """
    if not coarse:
        return max(float(part.max()) for part in parts)
    halves = [part.median() for part in (*parts, *(torch.stack(tokens) for tokens in usual))]
    return float(torch.stack(halves).max())


@dataclass(frozen=True)
class _Trial:
    """Runs of a tree and of its paths."""

    model: nn.Module
    forward: Callable[..., Any]
    row: trials.Row
    plain: Arguments
    per_token: Arguments
    tree: Tree

    def change(self, coarse: bool) -> float:
        """The largest change of a branch against its path alone, or with other branches' tokens."""
        limit = trials.COARSE if coarse else trials.FINE
        shared, tree = self._shared(()), self.tree
        paths = [tree.path(segment) for segment in range(len(tree.lengths))]
        changes_alone = [trials.relative(shared[path], self._run_path(path)) for path in paths]
        separate = [n for n, runs in enumerate(tree.runs) if runs[-1].start == tree.starts[n]]
        edges = [
            [changes_alone[n][-tree.lengths[n]] for n in separate],
            [branch_changes[-1] for branch_changes in changes_alone],
        ]
        token_sets = [
            [p for n in tree.below(segment) for p in self._tokens_of_segment(n)]
            for segment, parent in enumerate(tree.parents)
            if parent >= 0
        ]
        changes = []
        for moved_tokens in token_sets:
            unmoved = [n for n in range(tree.tokens) if n not in set(moved_tokens)]
            changes.append(trials.relative(shared[unmoved], self._shared(moved_tokens)[unmoved]))
        return max(
            trials.excess(_largest_change(changes_alone, edges, coarse), trials.ALONE * limit),
            trials.excess(
                _largest_change(
                    changes, [[branch_changes.max() for branch_changes in changes]], coarse
                ),
                limit,
            ),
        )

    def _tokens_of_segment(self, segment: int) -> range:
        start = self.tree.starts[segment]
        return range(start, start + self.tree.lengths[segment])

    def _tokens(self, tokens: list[int], moved_tokens: set[int]) -> Arguments:
        ids = torch.cat([self.row.ids(), self.row.ids(SHIFT, SHIFT)])
        numbers = [
            [token in moved_tokens for token in tokens],
            [p % self.row.tokens for p in tokens],
        ]
        indices = torch.tensor(numbers, device=ids.device)
        other_arguments = {
            n: v.expand(1, len(tokens), *v.shape[2:]) for n, v in self.per_token.items()
        }
        return {"input_ids": ids[indices[0], indices[1]][None], **other_arguments}

    def _shared(self, moved_tokens: Any) -> Tensor:
        row = self._tokens(list(range(self.tree.tokens)), set(moved_tokens))
        arguments = {**self.plain, **row}
        arguments = tree_arguments(self.model, arguments, row["input_ids"], self.tree)
        torch.manual_seed(0)
        with run(self.tree):
            return trials.per_token(self.forward(**arguments), self.tree.tokens)

    def _run_path(self, path: list[int]) -> Tensor:
        torch.manual_seed(0)
        with run(None):
            output = self.forward(**self.plain, **self._tokens(path, set()))
            return trials.per_token(output, len(path))


SAMPLE_ARGUMENTS = ("position_ids", "seq_idx", "cu_seq_lens_q")
"""Arguments that tell where samples begin."""


class CheckedModel(Patched):
    """A model that checks whether samples of a packed row stay apart; its results are unchanged."""

    loose: ClassVar[bool] = True

    def __init_subclass__(cls, **keywords: Any) -> None:
        """Make the forward with the class."""
        super().__init_subclass__(**keywords)
        if "_liger_multi_swap" in vars(cls):
            cls.forward = _checked(cls)


def _checked(cls: Any) -> Callable[..., Any]:
    """The forward of a checked model: it refuses packed rows that are not kept apart."""
    swap: Swap = vars(cls)["_liger_multi_swap"]
    inner_class: Any = vars(cls)["_liger_multi_inner"]  # its forward may be replaced at any time

    @functools.wraps(swap.stock.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if shards.row() is not None:  # a share, whose masks and ids are of whole rows
            return inner_class.forward(self, *args, **kwargs)
        if not torch.compiler.is_compiling() and isinstance(self, CheckedModel):
            arguments = by_name(swap.stock.forward, args, kwargs)
            rows = rows_of(arguments)
            offer = offered(rows.shape[1], rows.shape[0]) if isinstance(rows, Tensor) else None
            if offer is not None and isinstance(rows, Tensor):
                offer.taken_by = self
                inner = functools.partial(inner_class.forward, self)
                arguments = tree_arguments(self, arguments, rows, offer.tree)
                check_shared(self, inner, arguments, rows)
                return call_with_tree(self, inner, arguments, offer)
            if isinstance(rows, Tensor):
                check_other_rows(self, rows)
            if any(arguments.get(name) is not None for name in SAMPLE_ARGUMENTS):
                check(self, functools.partial(_forward, inner_class, self), arguments)
                with _kept_apart(self, arguments):
                    return inner_class.forward(self, *args, **kwargs)
            if _has_numbered_masks(self, arguments):
                warn_once(_NUMBERED.format(unpatched_class(self).__name__), "numbered masks")
        elif isinstance(self, CheckedModel) and _is_unmasked(self, kwargs):
            positions = kwargs.get("position_ids")
            text_alone = not getattr(self.config, "sub_configs", ())
            if text_alone and isinstance(positions, Tensor) and positions.ndim == 2:
                ids = sample_ids({"position_ids": positions})
                return samples_in_graph(ids, lambda: inner_class.forward(self, *args, **kwargs))
        return inner_class.forward(self, *args, **kwargs)

    return forward


def _forward(inner_class: Any, model: Any, **arguments: Any) -> Any:
    with _kept_apart(model, arguments):
        return inner_class.forward(model, **arguments)


def _is_unmasked(model: nn.Module, arguments: Mapping[str, Any]) -> bool:
    """Whether a call of a model with our attention has neither a mask nor a cache."""
    unmasked = NAME in _attentions(model) and arguments.get("attention_mask") is None
    return unmasked and not has_cache((), arguments) and not fills_cache(arguments)


@contextlib.contextmanager
def _kept_apart(model: nn.Module, arguments: Mapping[str, Any]) -> Iterator[None]:
    """Let our attention, if the model uses it, separate the samples that the arguments tell."""
    if not _is_unmasked(model, arguments):
        yield
        return

    def ids() -> Tensor | None:
        return sample_ids(arguments) if has_samples(arguments) else None

    with samples_of_call(ids, _other_model_types(model)):
        yield


def _other_model_types(model: nn.Module) -> set[str]:
    """Types of the parts of a model that do not process the tokens of its rows: images, audio."""
    config, text = getattr(model, "config", None), text_config(model)
    names = [name for name in getattr(config, "sub_configs", ()) if name.endswith("_config")]
    parts = [getattr(config, name, None) for name in names]
    own_types = {getattr(c, "model_type", None) for c in (config, text)}
    return {part.model_type for part in parts if part is not None} - own_types


_numbered: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()


_NUMBERED = (
    "{} got an attention_mask that numbers samples, and nothing else that tells them. transformers "
    "takes all numbers but 0 alike, so samples of a row see each other, unless other code reads "
    "the numbers. Pass position_ids that begin again with every sample, and no attention_mask"
)


def _has_numbered_masks(model: nn.Module, arguments: Mapping[str, Any]) -> bool:
    """Whether the first mask of a model numbers samples; reading later ones would wait, too.

    Ranks may get different answers, so no run of the model may depend on them.
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
    """Verdicts of a model by the form of a call, and a lock while a trial runs."""

    def __init__(self) -> None:
        self.lock = threading.RLock()


_verdicts: weakref.WeakKeyDictionary[nn.Module, _Verdicts] = weakref.WeakKeyDictionary()
_first_call = threading.Lock()


def check(model: nn.Module, forward: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    """Try a model with arguments of this form, unless there is a verdict.

    If the model mixes samples, each call waits for the device: does a row have several samples?

    Raises:
        PackingError: A row has several samples, and they attend to each other.
    """
    rows = rows_of(arguments)
    if not isinstance(rows, Tensor) or _is_unchecked(model, rows, arguments):
        return
    with _first_call:
        verdicts = _verdicts.setdefault(model, _Verdicts())
    with verdicts.lock:
        form = _form(model, arguments)
        if form not in verdicts:
            with shards.suspended():
                verdicts[form] = trial(model, forward, arguments, rows)
        verdict = verdicts[form]
    if not (verdict.change or verdict.untried) or not has_samples(arguments) or _unpatched(model):
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
    """Try a model with shared prefixes, unless there is a verdict.

    Raises:
        PackingError: Its results differ from those of every path alone, or it cannot be tried.
    """
    with _first_call:
        verdicts = _verdicts.setdefault(model, _Verdicts())
    with verdicts.lock:  # for any tree: ranks have different ones, but must run the same trials
        form = ("shared", _form(model, arguments))
        if form not in verdicts:
            with shards.suspended():
                verdicts[form] = trial_of_tree(model, forward, arguments, rows)
        verdict = verdicts[form]
    name, attention = unpatched_class(model).__name__, set(_attentions(model)) - {NAME}
    hint = f"; {_SELECT.format(', '.join(sorted(attention)))}" if attention else ""
    if verdict.untried:
        raise PackingError(
            f"{name} could not be tried with shared prefixes: {verdict.untried}{hint}"
        )
    if verdict.change:
        raise PackingError(
            f"{name} does not serve shared prefixes: the output of a branch differs by "
            f"{verdict.change:.1%} from that of its path by itself, or with another branch's "
            f"tokens{hint}"
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
    """Drop the verdicts of a model that is patched again."""
    _verdicts.pop(model, None)
    _numbered.pop(model, None)


def _is_unchecked(model: Any, rows: Tensor, arguments: Mapping[str, Any]) -> bool:
    """Whether a call is not checked: in generation, under tracers, with a mask of other axes."""
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
    """The properties of a call, and the settings, on which a verdict depends."""
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
        # disables the cache in training
        checkpoints(model),
        model.training,
        torch.is_grad_enabled(),
    )


def _unpatched(model: nn.Module) -> bool:
    """Whether no module is patched any more: a class on top of ours kept the check."""
    return swapped(model) is None and not any(swapped(m) for m in model.modules())


def _message(model: nn.Module, arguments: Mapping[str, Any], verdict: Verdict) -> str:
    argument = next(name for name in SAMPLE_ARGUMENTS if arguments.get(name) is not None)
    name = unpatched_class(model).__name__
    if verdict.remedy:
        advice = f"With {' and '.join(verdict.remedy)} they are kept apart (this was tried)."
    else:
        advice = "Nothing that was tried keeps them apart: pass one sample per row."
    return (
        f"{name} got rows of several samples ({argument}), and it does not keep them apart: the "
        f"output of a sample differs by {verdict.change:.1%} with other tokens beside it, or with "
        f"none. {advice} To train on such rows on purpose: patch(model, packing=False)"
    )


# --- which modules are patched ---


def checked(model: ModelFacts) -> dict[str, nn.Module]:
    """The outermost modules that take tokens, by their paths; wrappers of PEFT are none."""
    models: dict[str, nn.Module] = {}
    for path, module in model.of_class(_takes_tokens):
        is_inner = any(not outer or path.startswith(f"{outer}.") for outer in models)
        embeds = callable(getattr(module, "get_input_embeddings", None))
        if not is_inner and embeds and hasattr(module, "config"):
            models[path] = module
    return models


def _takes_tokens(facts: ClassFacts) -> bool:
    of_peft = facts.module_class.__module__.partition(".")[0] == "peft"
    return not of_peft and not {"input_ids", "inputs_embeds"}.isdisjoint(facts.arguments)


def find_packed(model: ModelFacts, request: Request) -> Iterator[Change]:
    """Models that pass ids of samples to mixers, that refuse packed rows, or that are checked."""
    packed = packing(model) if any(request.get(op) is not None for op in MIXER_OPS) else {}
    refuses = any(swap.behavior is SeparateModel for swap in packed.values())
    if request.get(PACKING) is None:
        packed = {} if refuses else packed
    elif not refuses:
        packed |= {
            p: _with_trial(m, packed.get(p))
            for p, m in checked(model).items()
            if not isinstance(m, Patched) or _is_packed(m)
        }
    concerned = [(path, model.root.get_submodule(path)) for path in packed]
    for path, module in model.merged(concerned, model.instances(*_PACKED)):
        swap = packed.get(path)
        if swap is not None and not conflict_of(module):
            forget(module)
            yield Replace(path, module, swap, _PACKED[swap.behavior], {})
        elif _is_packed(module):
            yield Restore(path, module)


_PACKED: dict[type[Patched], str] = {
    PackedModel: "ids of samples",
    IdPassingModel: "hands ids of samples on",
    SeparateModel: "one sample a row only",
    CheckedModel: "a check that samples of a row are apart",
}


def _is_packed(module: nn.Module) -> bool:
    return any(isinstance(module, behavior) for behavior in _PACKED)


def _with_trial(module: nn.Module, swap: Swap | None) -> Swap:
    if swap is not None:
        return replace(swap, around=CheckedModel)
    return Swap(PACKING, unpatched_class(module), CheckedModel, None)
