"""Models that take a row of trees: tried on a small one against its paths, one by one.

The row of a trial has branches of several lengths, one of them a single token. What comes out for
a branch is to be what comes out for its path by itself, and may not change with the tokens of
another branch. So nothing needs to be known of a model, as in :mod:`.trial`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from liger_multi.arguments import fills_cache, has_cache, parameters_of
from liger_multi.checks import describe
from liger_multi.errors import PackingError, summary
from liger_multi.patching.packing import trial as trials
from liger_multi.patching.packing.tree import Branch, Offer, Tree, planted, run
from liger_multi.patching.packing.trial import SHIFT, Arguments, Verdict
from liger_multi.patching.swap import unpatched_class

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


def arguments_of(
    model: nn.Module, called_with: Mapping[str, Any], tokens: Tensor, tree: Tree
) -> Arguments:
    """The arguments of a call whose tokens are a tree: positions that go on, and what is padding.

    Positions in several axes, as those of images, are the caller's.

    Raises:
        PackingError: A cache; a model that takes no positions, or has fewer than the longest path.
    """
    name, names = unpatched_class(model).__name__, parameters_of(unpatched_class(model).forward)
    if has_cache((), called_with) or fills_cache(called_with):
        raise PackingError(
            f"{name} got a cache beside shared prefixes, as generation does: a cache keeps no "
            "branches apart. Generate outside of trees.shared"
        )
    kept = called_with.get("logits_to_keep")
    if isinstance(kept, Tensor) or kept:
        raise PackingError(
            f"{name} got logits_to_keep beside shared prefixes, as generation does. Generate "
            "outside of trees.shared; log-probabilities take the logits of all branches"
        )
    known = [n for n in _REFUSED if called_with.get(n) is not None]
    if known:
        raise PackingError(
            f"{name} got {', '.join(known)} beside shared prefixes, which say it all"
        )
    own_mask = called_with.get("attention_mask")
    if own_mask is not None and not (isinstance(own_mask, Tensor) and own_mask.ndim == 2):
        raise PackingError(
            f"{name} got a mask of its own beside shared prefixes, {describe(own_mask)}: pass that "
            "of batch.inputs"
        )
    most = getattr(trials.text_config(model), "max_position_embeddings", None)
    if isinstance(most, int) and 0 < most < tree.longest:
        raise PackingError(
            f"{name} has {most} positions (max_position_embeddings), and the longest path of the "
            f"shared prefixes has {tree.longest} tokens"
        )
    positions = called_with.get("position_ids")
    if not (isinstance(positions, Tensor) and positions.ndim == 3):
        positions = tree.positions(tokens.device)
    mask = tree.visible(tokens.device).to(torch.int64)[None]
    others = [n for n, v in called_with.items() if _is_no_text(v, tokens)]
    if others and positions.ndim < 3 and _has_axes(model):
        raise PackingError(
            f"{name} got {', '.join(others)} beside shared prefixes, and its positions have "
            f"several axes: pass position_ids (3 or 4, 1, {tree.tokens}) of the tree, in which "
            "branches go on from the prompt"
        )
    values = {"position_ids": positions, "attention_mask": mask}
    return {**called_with, **{n: v for n, v in values.items() if n in names or n in called_with}}


def _is_no_text(value: Any, tokens: Tensor) -> bool:
    """Whether an argument is a tensor of other things than the tokens of a row."""
    return isinstance(value, Tensor) and value.ndim > 0 and value.shape[-1:] != tokens.shape[1:2]


def _has_axes(model: nn.Module) -> bool:
    """Whether positions of a model have an axis each for time, height and width."""
    config = trials.text_config(model)
    tables = (getattr(config, n, None) for n in ("rope_parameters", "rope_scaling"))
    return any("mrope_section" in str(table) for table in tables)


@contextlib.contextmanager
def weighted(model: nn.Module, arguments: Arguments, tree: Tree) -> Iterator[Arguments]:
    """Arguments of a model with a loss of its routers: every token counts as if nothing was shared.

    The model weighs the tokens of that loss by the mask. So it gets how often an unshared batch has
    each token, and the modules in it get the mask.
    """
    mask = arguments.get("attention_mask")
    routed = arguments.get("output_router_logits")
    if routed is None:
        routed = getattr(trials.text_config(model), "output_router_logits", False)
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


def call(model: nn.Module, forward: Callable[..., Any], arguments: Arguments, offer: Offer) -> Any:
    """Call the forward of a model whose layers follow a tree.

    Raises:
        PackingError: None of its layers asked for the tree.
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
    return output


# --- a trial ---


def trial(
    model: nn.Module,
    forward: Callable[..., Any],
    called_with: Mapping[str, Any],
    rows: Tensor,
) -> Verdict:
    """Try a model on a small tree, with the form of the arguments of a call.

    The model is afterwards what it was, as after :func:`.trial.trial`.
    """
    row = trials.row_of(model, called_with, rows)
    tree, _ = planted([EXAMPLE])
    plain = trials.arguments_of(called_with, row, rows)
    long = {
        n: v for n, v in plain.items() if isinstance(v, Tensor) and v.shape[:2] == (1, row.tokens)
    }
    plain = {n: v for n, v in plain.items() if n not in {*long, *_PER_TOKEN}}
    others = {n: v[:, :1] for n, v in long.items() if n not in _PER_TOKEN}
    tried = _Trial(model, forward, row, plain, others, tree)
    if row.tokens < tree.longest:
        return Verdict(untried=f"it has {row.tokens} positions")
    if called_with.get("input_ids") is None:
        return Verdict(untried="it was called with embeddings")
    with trials.undisturbed(model), trials.short_chunks(model):
        try:
            return Verdict(tried.change(trials.is_coarse(model, rows.device)))
        except Exception as error:  # of any model's code, which meets inputs of ours
            return Verdict(untried=summary(error))


def _most(parts: list[Tensor], usual: list[list[Tensor]], coarse: bool) -> float:
    """The largest change of a token.

    Where rounding may choose other experts for a few tokens, it is that of half of the tokens of a
    part. What reaches few tokens beside a branch is found in half of the branches.

    Args:
        parts: Changes of tokens.
        usual: Changes of one token of every branch, such as the first.
        coarse: Whether a few tokens may change.
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
        """How much a branch differs from its path by itself, or with others; 0: by rounding."""
        limit = trials.COARSE if coarse else trials.FINE
        together, tree = self._shared(()), self.tree
        paths = [tree.path(segment) for segment in range(len(tree.lengths))]
        alone = [trials.relative(together[path], self._alone(path)) for path in paths]
        apart = [n for n, runs in enumerate(tree.runs) if runs[-1].start == tree.starts[n]]
        edges = [[alone[n][-tree.lengths[n]] for n in apart], [each[-1] for each in alone]]
        moved = [
            [p for n in tree.below(segment) for p in self._own(n)]
            for segment, parent in enumerate(tree.parents)
            if parent >= 0
        ]
        others = []
        for places in moved:
            rest = [n for n in range(tree.tokens) if n not in set(places)]
            others.append(trials.relative(together[rest], self._shared(places)[rest]))
        return max(
            trials.above(_most(alone, edges, coarse), trials.ALONE * limit),
            trials.above(_most(others, [[each.max() for each in others]], coarse), limit),
        )

    def _own(self, segment: int) -> range:
        start = self.tree.starts[segment]
        return range(start, start + self.tree.lengths[segment])

    def _tokens(self, places: list[int], moved: set[int]) -> Arguments:
        ids = torch.cat([self.row.ids(), self.row.ids(SHIFT, SHIFT)])
        numbers = [[place in moved for place in places], [p % self.row.tokens for p in places]]
        at = torch.tensor(numbers, device=ids.device)
        rest = {n: v.expand(1, len(places), *v.shape[2:]) for n, v in self.per_token.items()}
        return {"input_ids": ids[at[0], at[1]][None], **rest}

    def _shared(self, moved: Any) -> Tensor:
        row = self._tokens(list(range(self.tree.tokens)), set(moved))
        arguments = {**self.plain, **row}
        arguments = arguments_of(self.model, arguments, row["input_ids"], self.tree)
        torch.manual_seed(0)
        with run(self.tree):
            return trials.per_token(self.forward(**arguments), self.tree.tokens)

    def _alone(self, path: list[int]) -> Tensor:
        torch.manual_seed(0)
        with run(None):
            output = self.forward(**self.plain, **self._tokens(path, set()))
            return trials.per_token(output, len(path))
