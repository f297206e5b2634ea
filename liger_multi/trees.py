"""Shared prefixes: a tree of sequences is computed once, token by token.

Completions of one prompt, turns of a conversation that branch, and the two answers of a preference
have a prefix in common. A :class:`Batch` holds it once, in one row of tokens with its branches
behind it, and a patched model computes for every branch what it computes for the whole sequence.

    batch = trees.pack([(prompt, [answer, answer, (answer, [answer, answer])]), ...])
    with trees.shared(batch):
        output = model(**batch.inputs)
    log_probs = trees.log_probs(model, batch)  # for every tree, a tensor for each branch
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias, overload

import torch
from torch import Tensor, nn

from liger_multi import checks
from liger_multi.errors import PackingError
from liger_multi.patching import shards
from liger_multi.patching.packing.tree import (
    MOST_RANGES,
    Branch,
    Node,
    Offer,
    Tree,
    announce_tree,
    tree_of_roots,
)

__all__ = ["Batch", "Scores", "from_batch", "log_probs", "pack", "scores", "shared"]

Tokens: TypeAlias = "Sequence[int] | Tensor"
Answer: TypeAlias = "Tokens | tuple[Tokens, list[Answer]]"
"""Ids of tokens, or these and the answers that go on from them."""


# --- a batch ---


@dataclass(frozen=True)
class Batch:
    """Trees in one row of tokens.

    Attributes:
        inputs: Arguments of a model's forward.
        tree: The segments of the row.
        nodes: Prompts and branches, depth first, in the order of the row.
        sources: Places ``(N,)`` of the hidden states that predict a token of a branch.
        targets: These tokens, ``(N,)``, branch after branch.
        rows: For a batch of :func:`from_batch`, the index among the N tokens of every token of the
            original rows, ``(B, T)``; -1 for tokens that nothing predicts.
    """

    inputs: dict[str, Any]
    tree: Tree
    nodes: tuple[Node, ...]
    sources: Tensor
    targets: Tensor
    rows: Tensor | None = field(default=None, repr=False)

    def to(self, device: torch.device | str) -> Batch:
        """The batch on another device."""
        moved = {n: v.to(device) if isinstance(v, Tensor) else v for n, v in self.inputs.items()}
        sources, targets = self.sources.to(device), self.targets.to(device)
        rows = None if self.rows is None else self.rows.to(device)
        return replace(self, inputs=moved, sources=sources, targets=targets, rows=rows)

    @property
    def counts(self) -> list[list[int]]:
        """For every tree, how many tokens of each branch are predicted.

        All of them, but the first one of a branch that nothing precedes.
        """
        counts: list[list[int]] = []
        for node, is_root in self._nodes():
            if is_root:
                counts.append([])
            else:
                counts[-1].append(max(0, node.length - (node.before < 0)))
        return counts

    def _nodes(self) -> Iterator[tuple[Node, bool]]:
        last_root = -1
        for node in self.nodes:
            yield node, node.root != last_root
            last_root = node.root

    def split(self, values: Tensor) -> list[list[Tensor]]:
        """Numbers of the N predicted tokens, as a tensor for each branch of each tree."""
        self._check(values)
        counts = self.counts
        parts = iter(values.split([n for branch_counts in counts for n in branch_counts]))
        return [list(itertools.islice(parts, len(branch_counts))) for branch_counts in counts]

    def _check(self, values: Tensor) -> None:
        if values.shape[:1] != self.sources.shape:
            raise ValueError(
                f"Batch: values must be of the {len(self.sources)} predicted tokens, got "
                f"{checks.describe(values)}"
            )

    def to_rows(self, values: Tensor) -> Tensor:
        """Numbers of the N predicted tokens at the places of the original rows, ``(B, T)``.

        0 where nothing predicts a token. A token that rows share has its number in each of them.

        Raises:
            ValueError: The batch is none of :func:`from_batch`.
        """
        if self.rows is None:
            raise ValueError("Batch.to_rows: the batch was made by pack, which has no rows")
        self._check(values)
        if not values.numel():  # zeros of which the model has gradients, as of other values
            return values.sum(-1).expand(self.rows.shape)
        placed = values.index_select(0, self.rows.clamp(min=0).flatten()).view(self.rows.shape)
        return torch.where(self.rows >= 0, placed, 0)

    def unshared(self) -> tuple[Tensor, Tensor]:
        """The same sequences as a batch of rows: ids and mask, ``(paths, longest)``, both int64."""
        ids = self.inputs["input_ids"][0]
        paths = [ids[self.tree.path(end)] if end >= 0 else ids[:0] for end in self.tree.ends]
        padded = torch.nn.utils.rnn.pad_sequence(paths, batch_first=True)
        mask = torch.nn.utils.rnn.pad_sequence(
            [torch.ones_like(p) for p in paths], batch_first=True
        )
        return padded, mask


class _Branch(NamedTuple):
    """A branch as its tokens, what follows, and the row of a batch that ends here, if any."""

    tokens: list[int]
    children: list[_Branch]
    row: int = -1

    @property
    def lengths(self) -> Branch:
        return len(self.tokens), [child.lengths for child in self.children]

    def each(self) -> Iterator[_Branch]:
        """The branch and all below it, depth first."""
        yield self
        for child in self.children:
            yield from child.each()


def _batch(roots: list[_Branch], pad_to: int | None, device: torch.device | None) -> Batch:
    """The row of some trees."""
    if not roots:
        raise ValueError("trees: a batch needs at least one tree, got none")
    tree, nodes = tree_of_roots([root.lengths for root in roots])
    count, total = tree.tokens, tree.tokens
    if pad_to is not None:
        total = -(-count // _positive("pad_to", pad_to)) * pad_to
    if not total:
        raise ValueError(f"trees: a batch needs at least one token, got {len(roots)} empty trees")
    tree = replace(tree, tokens=total)
    if tree.width > MOST_RANGES:
        raise ValueError(
            f"trees: a path may have {MOST_RANGES} segments that lie apart in the row, got "
            f"{tree.width} in a tree of {max(tree.levels) + 1} levels"
        )
    tokens = [token for root in roots for part in root.each() for token in part.tokens]
    ids = torch.tensor([*tokens, *[0] * (total - count)], device=device)
    sources_of_nodes = []
    targets = []
    for parent, node in itertools.pairwise(nodes):
        if not node.length or parent.root != node.root:
            continue
        end = node.start + node.length
        if node.before >= 0:
            sources_of_nodes.append(torch.tensor([node.before]))
        sources_of_nodes.append(torch.arange(node.start, end - 1))
        targets.append(ids[node.start + (node.before < 0) : end])
    sources = torch.cat([torch.zeros(0, dtype=torch.int64), *sources_of_nodes]).to(ids.device)
    inputs = {
        "input_ids": ids[None],
        "position_ids": tree.positions(ids.device),
        "attention_mask": tree.visible(ids.device).to(torch.int64)[None],
        "use_cache": False,
    }
    return Batch(inputs, tree, tuple(nodes), sources, torch.cat([ids[:0], *targets]))


def _positive(name: str, value: object) -> int:
    size = checks.integer("trees", name, value)
    if size < 1:
        raise ValueError(f"trees: {name} must be at least 1, got {size}")
    return size


# --- from prompts and answers ---


def _tokens(value: object, what: str) -> list[int]:
    """Ids as a list."""
    if hasattr(value, "__array__") and not isinstance(value, Tensor):
        value = torch.as_tensor(value)
    if isinstance(value, Tensor):
        if value.ndim != 1 or not _is_integral(value):
            raise TypeError(f"trees: {what} must be ids of one axis, got {checks.describe(value)}")
        return _valid_ids(value.tolist(), what)
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise TypeError(f"trees: {what} must be a list or a tensor of ids, got {value!r:.80}")
    if any(isinstance(token, bool) or not hasattr(token, "__index__") for token in value):
        raise TypeError(f"trees: {what} must be ids, got {value!r:.80}")
    return _valid_ids([int(token) for token in value], what)


def _is_integral(value: Tensor) -> bool:
    return not (value.is_floating_point() or value.is_complex() or value.dtype == torch.bool)


def _valid_ids(ids: list[int], what: str) -> list[int]:
    """The ids, if a vocabulary may have them: labels have others, such as -100."""
    if min(ids, default=0) < 0:
        raise ValueError(f"trees: {what} has the id {min(ids)}")
    return ids


MOST_LEVELS = 256


def _grown(answer: object, what: str, depth: int = 0) -> _Branch:
    """An answer and what follows it."""
    if depth > MOST_LEVELS:
        raise ValueError(
            f"trees: answers are nested in more than {MOST_LEVELS} levels; join turns of a "
            "conversation that nothing branches off"
        )
    children: Sequence[object] = []
    if isinstance(answer, tuple):
        if len(answer) != 2 or not isinstance(answer[1], (list, tuple)):
            raise TypeError(
                f"trees: {what} must be ids, or a tuple of ids and a list of answers, got "
                f"{answer!r:.80}"
            )
        answer, children = answer
    what_follows = what if what.startswith("an answer") else f"an answer to {what}"
    branches = [_grown(child, what_follows, depth + 1) for child in children]
    return _Branch(_tokens(answer, what), branches)


@overload
def pack(
    groups: Sequence[tuple[Tokens, list[Answer]]],
    *,
    pad_to: int | None = None,
    max_tokens: None = None,
    device: torch.device | str | None = None,
) -> Batch: ...
@overload
def pack(
    groups: Sequence[tuple[Tokens, list[Answer]]],
    *,
    pad_to: int | None = None,
    max_tokens: int,
    device: torch.device | str | None = None,
) -> list[Batch]: ...
def pack(
    groups: Sequence[tuple[Tokens, list[Answer]]],
    *,
    pad_to: int | None = None,
    max_tokens: int | None = None,
    device: torch.device | str | None = None,
) -> Batch | list[Batch]:
    """Prompts with their answers as a batch, or as batches of limited size.

    Args:
        groups: The trees: a prompt and its answers, each a list, a tensor or an array ``(n,)`` of
            ids. An answer may be a tuple of ids and of the answers that follow. All may be empty.
        pad_to: Fill the row up to a multiple of so many tokens.
        max_tokens: Return a list of batches of at most so many tokens; trees stay in order, and a
            batch is full when the next one does not fit. A tree is not split.
        device: Of the tensors.

    Returns:
        A batch with all trees in one row; with ``max_tokens`` a list of batches.

    Raises:
        TypeError: Something is neither ids nor a tuple of ids and answers.
        ValueError: No tokens; an id below 0; a tree of more than ``max_tokens``; more than 256
            levels; a path of more segments than attention has ranges of keys (16 that lie apart:
            the first answers to an answer do not).
    """
    grown = [_grown(group, "a prompt") for group in groups]
    target_device = None if device is None else torch.device(device)
    if max_tokens is None:
        return _batch(grown, pad_to, target_device)
    limit = _positive("max_tokens", max_tokens)
    parts: list[list[_Branch]] = []
    room = 0
    for index, tree in enumerate(grown):
        tokens = sum(len(part.tokens) for part in tree.each())
        if tokens > limit:
            raise ValueError(f"trees: tree {index} has {tokens} tokens, max_tokens is {limit}")
        if not parts or tokens > room:
            parts.append([])
            room = limit
        parts[-1].append(tree)
        room -= tokens
    return [_batch(part, pad_to, target_device) for part in parts]


# --- from rows ---


def from_batch(
    ids: Tensor,
    mask: Tensor,
    *,
    prompt_lengths: Sequence[int] | Tensor | None = None,
    shortest: int = 16,
    depth: int = 8,
    pad_to: int | None = None,
) -> Batch:
    """The rows of a padded batch as trees of their common prefixes.

    Rows with the same prompt become one tree. Below it, rows that go on alike for ``shortest``
    tokens or more share these too. Without ``prompt_lengths``, the prompt of a tree is what its
    rows have in common. Looking at the tokens waits for the device.

    Args:
        ids: Ids ``(B, T)``.
        mask: Which of them are tokens, ``(B, T)``; padding may stand on either side.
        prompt_lengths: Tokens of every row's prompt, which are not predicted.
        shortest: Tokens that rows have in common at least.
        depth: Most segments of a path.
        pad_to: As for :func:`pack`.

    Returns:
        A batch whose :meth:`Batch.to_rows` gives numbers of tokens back at their places.

    Raises:
        TypeError: The arguments are no tensors; ids or lengths that are no integers.
        ValueError: Their shapes differ; no tokens; an id below 0; a prompt that is longer than its
            row; ``shortest`` or ``depth`` below 1.
    """
    if not isinstance(ids, Tensor) or not isinstance(mask, Tensor):
        raise TypeError(f"from_batch: ids and mask must be tensors, got {type(mask).__name__}")
    if ids.ndim != 2 or mask.shape != ids.shape:
        raise ValueError(
            f"from_batch: ids and mask must have one shape (B, T), got {tuple(ids.shape)} and "
            f"{tuple(mask.shape)}"
        )
    if not _is_integral(ids):
        raise TypeError(f"from_batch: ids must be integers, got {checks.describe(ids)}")
    _positive("shortest", shortest)
    _positive("depth", depth)
    columns = [row.nonzero()[:, 0].tolist() for row in mask.cpu() != 0]
    rows = [
        _valid_ids([row[c] for c in row_columns], "a row")
        for row, row_columns in zip(ids.tolist(), columns, strict=True)
    ]
    numbers = list(range(len(rows)))
    if prompt_lengths is None:
        roots = [
            node if node.children else _Branch([], [node])
            for node in _merged(rows, numbers, shortest, depth)
        ]
    else:
        prompts: dict[tuple[int, ...], list[int]] = {}
        lengths = _lengths(prompt_lengths)
        sizes = [len(row) for row in rows]
        if len(lengths) != len(sizes) or any(not 0 <= n <= m for n, m in zip(lengths, sizes)):
            raise ValueError(
                f"from_batch: prompt_lengths must be within the rows' {sizes}, got {lengths}"
            )
        for index, n in enumerate(lengths):
            prompts.setdefault(tuple(rows[index][:n]), []).append(index)
        answers = [row[n:] for row, n in zip(rows, lengths, strict=True)]
        roots = [
            _Branch(list(prompt), _merged(answers, members, shortest, depth - 1))
            for prompt, members in prompts.items()
        ]
    batch = _batch(roots, pad_to, ids.device)
    return replace(batch, rows=_target_numbers(batch, roots, columns, ids))


def _lengths(values: object) -> list[int]:
    """Numbers of tokens, each an integer."""
    numbers = values.tolist() if isinstance(values, Tensor) else values
    try:
        return [checks.integer("from_batch", "prompt_lengths", n) for n in numbers]  # type: ignore[attr-defined]
    except TypeError:
        raise TypeError(
            f"from_batch: prompt_lengths must be integers, one a row, got {values!r:.80}"
        ) from None


def _merged(rows: list[list[int]], numbers: list[int], shortest: int, depth: int) -> list[_Branch]:
    """Branches of some rows, which share what they have in common at their beginning."""
    ordered = sorted(numbers, key=lambda n: rows[n])
    groups: list[list[int]] = []
    for n in ordered:
        if groups and depth > 1 and _common(rows[groups[-1][-1]], rows[n]) >= shortest:
            groups[-1].append(n)
        else:
            groups.append([n])
    branches = []
    for group in groups:
        first = rows[group[0]]
        if len(group) == 1:
            branches.append(_Branch(first, [], group[0]))
            continue
        length = _common(first, rows[group[-1]])
        suffixes = {n: rows[n][length:] for n in group}
        branches_after = _merged(
            [suffixes.get(n, []) for n in range(len(rows))], group, shortest, depth - 1
        )
        branches.append(_Branch(first[:length], branches_after))
    return branches


def _common(ids: list[int], other_ids: list[int]) -> int:
    """How many tokens two rows have in common at their beginning."""
    pairs = enumerate(zip(ids, other_ids, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(ids), len(other_ids)))


def _target_numbers(
    batch: Batch, roots: list[_Branch], columns: list[list[int]], ids: Tensor
) -> Tensor:
    """The number among the predicted tokens of every token of the rows; -1 where it has none."""
    numbers = torch.full(ids.shape, -1)
    paths: dict[int, list[int]] = {-1: []}  # by last place, of predicted tokens; -1 for others
    count = 0
    parts = [part for root in roots for part in root.each()]
    for (node, is_root), part in zip(batch._nodes(), parts, strict=True):
        path = paths[node.before]
        if node.length:
            unpredicted = node.length if is_root else int(node.before < 0)
            targets = range(count, count + node.length - unpredicted)
            paths[node.last] = path = [*path, *[-1] * unpredicted, *targets]
            count += len(targets)
        if part.row >= 0:
            numbers[part.row, columns[part.row]] = torch.tensor(path, dtype=torch.int64)
    return numbers.to(ids.device)


# --- models ---


@contextlib.contextmanager
def shared(batch: Batch, *, router_counts: str = "unshared") -> Iterator[Batch]:
    """Let patched models compute the rows of a batch as a tree.

    Calls with as many tokens as the batch follow its tree; others are not affected. The first one
    of a model computes a small tree and each of its paths by itself, and compares.

    Args:
        batch: Whose ``inputs`` the model is called with.
        router_counts: How often a token counts in the load-balancing loss of routers: "unshared",
            as often as a batch without sharing has it, or "once".

    Raises:
        PackingError: The model computes something else for a tree than for its paths, or no patched
            model was called.
        ValueError: An unknown ``router_counts``.
    """
    with _announced(batch, router_counts):
        yield batch


@contextlib.contextmanager
def _announced(batch: Batch, router_counts: str, by_rank: bool = False) -> Iterator[Offer]:
    checks.one_of("shared", "router_counts", router_counts, ("unshared", "once"))
    with announce_tree(batch.tree, once=router_counts == "once", by_rank=by_rank) as announced:
        yield announced
    if announced.taken_by is None:
        raise PackingError(
            f"trees.shared: no patched model was called with {batch.tree.tokens} tokens. Call "
            "liger_multi.patch(model) before, without packing=False, and call that model, not a "
            "part of it; one that is compiled as a whole is not served, its layers may be"
        )


class Share(NamedTuple):
    """The predicted tokens whose logits a rank has; all of them on one rank.

    Attributes:
        sources: Their places in its logits, ``(n,)``.
        targets: The tokens, ``(n,)``.
        places: Their places among the N predicted tokens; None for all of them.
        total: N.
        ranks: The ranks of a sharded model, or None.
    """

    sources: Tensor
    targets: Tensor
    places: Tensor | None
    total: int
    ranks: Any

    @classmethod
    def of(cls, batch: Batch, ranks: Any) -> Share:
        """Those of this rank. Over ranks, this waits for the device."""
        sources, targets = batch.sources, batch.targets
        if ranks is None:
            return cls(sources, targets, None, len(sources), None)
        tokens = -(-batch.tree.tokens // ranks.size)
        local = (sources // tokens == ranks.rank).nonzero()[:, 0]
        return cls(sources[local] - ranks.rank * tokens, targets[local], local, len(sources), ranks)

    def whole(self, values: Tensor) -> Tensor:
        """Numbers ``(n,)`` of every rank's tokens as those of all N, on all ranks."""
        if self.places is None:
            return values
        return shards.merge(values, self.places, self.total, self.ranks)


class Scores(NamedTuple):
    """What :func:`scores` returns.

    Attributes:
        log_probs: Of the N predicted tokens, fp32.
        entropy: Of their distributions, fp32; None where it was not asked for.
        output: What the model returned; a sharded model's logits are of the rank's tokens.
        share: The tokens that this rank has predicted.
    """

    log_probs: Tensor
    entropy: Tensor | None
    output: Any
    share: Share


def scores(
    model: Callable[..., Any],
    batch: Batch,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    router_counts: str = "unshared",
    **arguments: Any,
) -> Scores:
    """Log-probabilities of all branches' tokens, one after another; see :func:`log_probs`.

    ``model`` may also be the forward of a patched model.
    """
    scale = checks.number("trees", "temperature", temperature, 0, above=True)
    with _announced(batch, router_counts, by_rank=True) as announced:
        output = model(**batch.inputs, **arguments)
    share = Share.of(batch, announced.ranks)  # every rank computes the head of its own tokens
    logits = output.logits[:, share.sources]
    if scale != 1:
        logits = logits / scale
    log_p = logits.log_softmax(-1, dtype=torch.float32)
    log_prob = share.whole(log_p.gather(-1, share.targets[None, :, None])[0, :, 0])
    own_entropy = -(log_p.exp() * log_p).sum(-1)[0] if entropy else None
    return Scores(
        log_prob, None if own_entropy is None else share.whole(own_entropy), output, share
    )


def log_probs(
    model: nn.Module,
    batch: Batch,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    **arguments: Any,
) -> Any:
    """Log-probabilities of the tokens of every branch, with gradients.

    Math:
        ``log softmax(z / temperature)[token]`` of the logits z at the token before it; for the
        first token of a branch, that is the last one of its parent.

    Shapes:
        For every tree a list with a tensor ``(n,)`` for each branch, depth first; n is the number
        of its tokens, and one less where nothing precedes it (an empty prompt).

    Dtypes:
        Out: fp32.

    Memory:
        The head is computed for the predicted tokens only, in chunks. With the head patched, no
        logits are kept.

    Args:
        model: A patched model.
        batch: The trees.
        temperature: By which the logits are divided.
        entropy: Return entropies too, as a second list of the same form.
        **arguments: Of the model's forward, such as ``output_router_logits``.

    Raises:
        PackingError: As :func:`shared`.
    """
    result = scores(model, batch, temperature=temperature, entropy=entropy, **arguments)
    parts = batch.split(result.log_probs)
    return parts if result.entropy is None else (parts, batch.split(result.entropy))
