"""Trees of segments in one row of tokens, for sequences with shared prefixes.

A row holds segments depth first: a prompt, its first answer, the continuation of that answer, its
second answer. A token attends to its own segment up to itself, and to all of its ancestors'
segments. Positions continue from the end of the parent. :func:`tree_of_roots` takes nested lengths
and returns a :class:`Tree`, which has the masks, recurrences and convolutions of the row.

Two variables tell which tree is in force. :func:`offered` is the tree that a caller has announced
for the next call of a model. :func:`running` is the tree of the running forward. Recomputation in
backward does not depend on them: it finds the tree in the ranges of a mask, or in an attribute of
the ids of samples.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from liger_multi.errors import PackingError

Cached = TypeVar("Cached")
MOST_RANGES = 16
"""Most ranges of keys of a query; a path has one per run of adjacent segments."""
MARK = "_liger_multi_tree"
"""Attribute of the ids of samples that mixers get, which holds their tree."""


class Run(NamedTuple):
    """Adjacent segments of one path: first position, end position, and start in the row."""

    first: int
    last: int
    start: int


class ScanCall(NamedTuple):
    """Segments of one level with similar lengths: the rows of one call of a recurrence.

    Attributes:
        places: Indices of tokens in the row, ``(segments, longest)``; 0 for padding.
        mask: Which of them are not padding; None if there is none.
        parents: Indices of initial states among the final states of earlier calls; None for roots.
        parent: The common index; None if they differ.
        states: Whether final states are needed, because a segment has children.
        start: Index of the first token if the segments are adjacent in the row; else None.
    """

    places: Tensor
    mask: Tensor | None
    parents: Tensor | None
    parent: int | None
    states: bool
    start: int | None


class Window(NamedTuple):
    """A row in which each segment follows the last tokens of its path, for a convolution.

    Attributes:
        places: Indices of tokens in the row, with repetitions.
        ids: The segment of each of them, ``(1, N)`` int32.
        own: Indices, among these, of the tokens of the row.
    """

    places: Tensor
    ids: Tensor
    own: Tensor


@dataclass(frozen=True)
class Tree:
    """The segments of a row. None is empty; padding follows the last one.

    Attributes:
        lengths: Number of tokens of every segment, depth first.
        parents: Index of every segment's parent; -1 for a root.
        ends: Index of the last segment of every path, in order; -1 for a path without tokens.
        tokens: Length of the row with padding.
    """

    lengths: tuple[int, ...]
    parents: tuple[int, ...]
    ends: tuple[int, ...]
    tokens: int
    _cache: dict[object, object] = field(default_factory=dict, compare=False, repr=False)

    @functools.cached_property
    def starts(self) -> list[int]:
        """The index in the row of every segment's first token."""
        starts = [0]
        for length in self.lengths[:-1]:
            starts.append(starts[-1] + length)
        return starts[: len(self.lengths)]

    @functools.cached_property
    def offsets(self) -> list[int]:
        """The position of every segment's first token."""
        offsets: list[int] = []
        for parent in self.parents:
            offsets.append(offsets[parent] + self.lengths[parent] if parent >= 0 else 0)
        return offsets

    @functools.cached_property
    def levels(self) -> list[int]:
        """The depth of every segment; 0 for roots."""
        levels: list[int] = []
        for parent in self.parents:
            levels.append(levels[parent] + 1 if parent >= 0 else 0)
        return levels

    @functools.cached_property
    def leaves(self) -> list[int]:
        """The number of paths through every segment: its copies in an unshared batch."""
        leaves = [self.ends.count(segment) for segment in range(len(self.lengths))]
        for segment in range(len(leaves) - 1, 0, -1):
            if self.parents[segment] >= 0:
                leaves[self.parents[segment]] += leaves[segment]
        return leaves

    @property
    def is_path(self) -> bool:
        """Whether the row is one sequence, in which nothing branches."""
        return len(self.lengths) == 1

    @property
    def padding(self) -> int:
        """Tokens after the last segment."""
        return self.tokens - sum(self.lengths)

    def padded(self, tokens: int) -> Tree:
        """The tree in a row of so many tokens."""
        if tokens == self.tokens:
            return self
        return self.cached(("padded", tokens), lambda: replace(self, tokens=tokens, _cache={}))

    @property
    def longest(self) -> int:
        """Tokens of the longest path."""
        return max((o + n for o, n in zip(self.offsets, self.lengths, strict=True)), default=0)

    @functools.cached_property
    def runs(self) -> list[tuple[Run, ...]]:
        """Every segment's path, root first, with adjacent segments joined."""
        return self.runs_without(set(), set())

    def runs_without(
        self, without_rectangle: set[int], without_square: set[int]
    ) -> list[tuple[Run, ...]]:
        """Every segment's path, without some segments.

        Args:
            without_rectangle: Segments to leave out of the paths of their descendants.
            without_square: Segments to leave out of their own paths.
        """
        runs: list[tuple[Run, ...]] = []
        earlier: list[tuple[Run, ...]] = []  # the start of a child's path
        for segment, parent in enumerate(self.parents):
            start, offset = self.starts[segment], self.offsets[segment]
            run = Run(offset, offset + self.lengths[segment], start)
            path = earlier[parent] if parent >= 0 else ()
            extended = (*path, run)
            if path and path[-1].start + path[-1].last - path[-1].first == start:
                extended = (*path[:-1], Run(path[-1].first, run.last, path[-1].start))
            runs.append(path if segment in without_square else extended)
            earlier.append(path if segment in without_rectangle else extended)
        return runs

    def path(self, segment: int) -> list[int]:
        """Indices in the row of the tokens of a segment's path."""
        return [
            n
            for run in self.runs[segment]
            for n in range(run.start, run.start + run.last - run.first)
        ]

    def below(self, segment: int) -> list[int]:
        """A segment and its descendants."""
        members = [segment]
        for child in range(segment + 1, len(self.parents)):
            if self.parents[child] in members:
                members.append(child)
        return members

    @property
    def width(self) -> int:
        """The most runs of one path."""
        return max((len(runs) for runs in self.runs), default=0)

    def cached(self, key: object, make: Callable[[], Cached]) -> Cached:
        """The cached result of ``make``, as an ordinary tensor also in inference mode."""
        if key not in self._cache:
            with torch.inference_mode(False):
                self._cache[key] = make()
        return self._cache[key]  # type: ignore[return-value]

    def _on(self, device: torch.device, name: str, values: list[int]) -> Tensor:
        """One number per segment as a cached tensor on a device."""
        return self.cached(
            (name, device), lambda: torch.tensor(values, dtype=torch.int64, device=device)
        )

    def segments(self, device: torch.device) -> Tensor:
        """The index of every token's segment, ``(tokens,)``; the number of segments for padding."""
        numbers = torch.arange(len(self.lengths) + 1)
        lengths = torch.tensor([*self.lengths, self.padding])
        return self.cached(
            ("segments", device), lambda: torch.repeat_interleave(numbers, lengths).to(device)
        )

    def _of_tokens(
        self, device: torch.device, name: str, values: list[int], padding: int
    ) -> Tensor:
        return self._on(device, name, [*values, padding])[self.segments(device)]

    def positions(self, device: torch.device) -> Tensor:
        """Positions ``(1, tokens)``; 0 for padding."""
        shift = [o - s for o, s in zip(self.offsets, self.starts, strict=True)]
        token = torch.arange(self.tokens, device=device)
        positions = token + self._of_tokens(device, "shift", shift, 0)
        return torch.where(self.visible(device), positions, 0)[None]

    def visible(self, device: torch.device) -> Tensor:
        """Which tokens are not padding, ``(tokens,)`` bool."""
        return self.segments(device) < len(self.lengths)

    def weights(self, device: torch.device) -> Tensor:
        """The number of paths through every token, ``(1, tokens)`` int64; 0 for padding."""
        return self._of_tokens(device, "leaves", self.leaves, 0)[None]

    def ids(self, device: torch.device) -> Tensor:
        """Ids of segments ``(1, tokens)`` int32 that carry the tree, for mixers."""
        ids = self.segments(device).to(torch.int32)[None]
        setattr(ids, MARK, self)
        return ids

    # --- attention ---

    def ranges(self, by_position: Tensor, runs: Sequence[tuple[Run, ...]] | None = None) -> Tensor:
        """Ranges of keys in the row, ``(1, tokens, 2 * n)`` int32.

        Args:
            by_position: Ranges of keys of one sequence of ``longest`` tokens, ``(longest, 2 or
                4)``: the positions on its path that a token attends to.
            runs: The visible runs of every segment's path; all by default.
        """
        runs = self.runs if runs is None else runs
        device, width = by_position.device, max((1, *map(len, runs)))
        bounds = [
            value
            for path in [*runs, ()]
            for run in (*path, *[Run(0, 0, 0)] * (width - len(path)))
            for value in run
        ]
        of_segments = torch.tensor(bounds, device=device).view(-1, width, 3)
        of_tokens = of_segments[self.segments(device)].unbind(-1)
        first, last, start = (part[:, :, None] for part in of_tokens)
        visible = by_position.to(torch.int64)[self.positions(device)[0]].unflatten(-1, (-1, 2))
        lower, upper = (part[:, None] for part in visible.unbind(-1))  # (tokens, 1, ranges)
        lower, upper = torch.maximum(lower, first), torch.minimum(upper, last)
        row_ranges = (
            torch.stack([lower, torch.maximum(lower, upper)], -1) + (start - first)[..., None]
        )
        return row_ranges.flatten(1).to(torch.int32)[None]

    # --- recurrences and convolutions ---

    def scans(
        self, device: torch.device, equal: bool = False
    ) -> tuple[list[ScanCall], Tensor | None]:
        """Calls of a recurrence, level by level, and the index of each token among their results.

        Lengths within a call differ by less than a factor of two, so that less than half of it is
        padding. The second result is None if the tokens are in order.

        Args:
            device: Device of the tensors.
            equal: Whether segments with children must have no padding.
        """
        return self.cached(("scans", device, equal), lambda: self._scans(device, equal))

    def _scans(self, device: torch.device, equal: bool) -> tuple[list[ScanCall], Tensor | None]:
        """Calls of a recurrence, level by level, and the order of their outputs in the row."""
        lengths, parents = [*self.lengths], [*self.parents]
        starts, levels = [*self.starts], [*self.levels]
        if self.padding:  # one more root
            lengths, parents = [*lengths, self.padding], [*parents, -1]
            starts, levels = [*starts, self.tokens - self.padding], [*levels, 0]
        calls: list[ScanCall] = []
        order = torch.empty(self.tokens, dtype=torch.int64)
        state_of: dict[int, int] = {}
        with_children, count = set(parents), 0
        for group in _groups(lengths, levels, with_children if equal else set()):
            lengths_of_group = torch.tensor([lengths[n] for n in group])[:, None]
            first = torch.tensor([starts[n] for n in group])[:, None]
            step = torch.arange(int(lengths_of_group.max()))[None]
            mask = step < lengths_of_group
            tokens = torch.where(mask, first + step, 0)
            order[tokens[mask]] = mask.flatten().nonzero()[:, 0] + count
            count += tokens.numel()
            is_full = bool(mask.all())
            in_order = is_full and bool((tokens.flatten().diff() == 1).all())
            parent_states = [state_of.get(parents[n], -1) for n in group]
            has_children = not with_children.isdisjoint(group)
            if has_children:
                state_of.update({n: len(state_of) + index for index, n in enumerate(group)})
            calls.append(
                ScanCall(
                    tokens.to(device),
                    None if is_full else mask.to(device),
                    None if parent_states[0] < 0 else torch.tensor(parent_states, device=device),
                    parent_states[0] if len({*parent_states}) == 1 else None,
                    has_children,
                    int(tokens[0, 0]) if in_order else None,
                )
            )
        if count == self.tokens and bool((order.diff() == 1).all()):
            return calls, None
        return calls, order.to(device)

    def window(self, device: torch.device, before: int) -> Window:
        """The row with up to ``before`` earlier tokens of its path before every segment."""
        return self.cached(("window", device, before), lambda: self._window(device, before))

    def _window(self, device: torch.device, before: int) -> Window:
        """Every segment behind the last tokens of its path, which a convolution sees."""
        tokens: list[Tensor] = []
        ids: list[int] = []
        own_tokens: list[Tensor] = []
        count = 0
        for segment, runs in enumerate(self.runs):
            start, length = self.starts[segment], self.lengths[segment]
            is_adjacent = runs[-1].start < start  # the segment follows its parent in the row
            earlier = [] if is_adjacent else _last_tokens(runs[:-1], before)
            count += len(earlier)
            tokens += [
                torch.tensor(earlier, dtype=torch.int64),
                torch.arange(start, start + length),
            ]
            ids += [ids[-1] if is_adjacent else segment] * (len(earlier) + length)
            own_tokens.append(torch.arange(count, count + length))
            count += length
        tokens.append(torch.arange(self.tokens - self.padding, self.tokens))
        ids += [len(self.lengths)] * self.padding
        own_tokens.append(torch.arange(count, count + self.padding))
        return Window(
            torch.cat(tokens).to(device),
            torch.tensor(ids, dtype=torch.int32, device=device)[None],
            torch.cat(own_tokens).to(device),
        )


def _last_tokens(runs: tuple[Run, ...], count: int) -> list[int]:
    """Indices of the last ``count`` tokens of a path, in order."""
    tail: list[int] = []
    for run in reversed(runs):
        stop = run.start + run.last - run.first
        tail[:0] = range(max(run.start, stop - (count - len(tail))), stop)
    return tail


def _groups(lengths: list[int], levels: list[int], alone: set[int]) -> Iterator[list[int]]:
    """The segments of each call: of one level, in descending order of lengths.

    Segments in ``alone`` share a call only with others of their length.
    """
    for level in range(max(levels, default=-1) + 1):
        numbers = [n for n, level_of in enumerate(levels) if level_of == level]
        if len({lengths[n] for n in numbers}) > 1:
            numbers.sort(key=lambda n: (n in alone, -lengths[n]))
        group: list[int] = []
        for n in numbers:
            longest = lengths[group[0]] if group else lengths[n]
            if lengths[n] * 2 < longest or (n in alone and lengths[n] != longest):
                yield group
                group = []
            group.append(n)
        yield group


# --- trees from nested lengths ---

Branch: TypeAlias = "tuple[int, list[Branch]]"
"""The number of tokens of a segment, and its children."""


class Node(NamedTuple):
    """A branch in the row, which may be empty.

    Attributes:
        start: Index of its first token.
        length: Number of its tokens.
        before: Index of the preceding token on its path; -1 if there is none.
        root: Index of its tree.
        leaf: Whether it has no children.
    """

    start: int
    length: int
    before: int
    root: int
    leaf: bool

    @property
    def last(self) -> int:
        """Index of the last token of its path."""
        return self.start + self.length - 1 if self.length else self.before


def tree_of_roots(roots: Sequence[Branch], tokens: int | None = None) -> tuple[Tree, list[Node]]:
    """The tree of a row with several roots, and all branches depth first.

    An only child is joined with its parent, unless a path ends there: a tree with one path is one
    segment.

    Args:
        roots: The trees.
        tokens: Length of the row; without padding by default.
    """
    nodes: list[Node] = []
    count = 0
    todo = [(branch, -1, root_index) for root_index, branch in enumerate(roots)][::-1]
    while todo:
        (length, children), parent, root = todo.pop()
        nodes.append(Node(count, length, parent, root, not children))
        count += length
        todo += [(child, nodes[-1].last, root) for child in children[::-1]]
    ends = [node.last for node in nodes if node.leaf]
    followers = Counter([*ends, *(node.before for node in nodes if node.length)])
    lengths: list[int] = []
    parents: list[int] = []
    segments = {-1: -1}  # by the place of a branch's last token
    for node in nodes:
        if node.length and node.before >= 0 and followers[node.before] == 1:
            lengths[-1] += node.length
        elif node.length:
            lengths.append(node.length)
            parents.append(segments[node.before])
        if node.length:
            segments[node.last] = len(lengths) - 1
    paths = tuple(segments[end] for end in ends)
    return Tree(tuple(lengths), tuple(parents), paths, tokens or count), nodes


def tree_of(ids: Tensor | None) -> Tree | None:
    """The tree that ids of samples carry."""
    return getattr(ids, MARK, None)


# --- which tree is in force ---


@dataclass
class Offer:
    """A tree that a caller announces for calls of models.

    Attributes:
        tree: The tree.
        once: Whether routers count each token once.
        by_rank: Whether the caller takes the logits of a rank's share of tokens.
        taken_by: The model that has used it.
        ranks: The ranks over which that model is sharded, or None.
    """

    tree: Tree
    once: bool = False
    by_rank: bool = False
    taken_by: nn.Module | None = None
    ranks: Any = None


@dataclass
class Forward:
    """A running forward with a tree, and whether any of its layers has read the tree."""

    tree: Tree | None
    asked: bool = False


_offered: ContextVar[Offer | None] = ContextVar("liger_multi_tree_offered", default=None)
_running: ContextVar[Forward | None] = ContextVar("liger_multi_tree_running", default=None)


def running(tokens: int, rows: int) -> Tree | None:
    """The tree of the running forward, if rows and tokens match.

    None in compiled graphs: a model that is compiled as a whole does not read the tree, which
    raises after its call.
    """
    forward = None if torch.compiler.is_compiling() else _running.get()
    if forward is None or forward.tree is None or (rows, tokens) != (1, forward.tree.tokens):
        return None
    forward.asked = True
    return forward.tree


def offered(tokens: int, rows: int) -> Offer | None:
    """The announced tree, if rows and tokens match; None within a forward with a tree."""
    announced = None if torch.compiler.is_compiling() else _offered.get()
    if announced is None or _running.get() is not None:
        return None
    return announced if (rows, tokens) == (1, announced.tree.tokens) else None


def spread_over(ranks: Any) -> None:
    """Tell the caller of the running forward over which ranks its tokens are sharded."""
    announced = _offered.get()
    if announced is not None:
        announced.ranks = ranks


def check_other_rows(model: nn.Module, rows: Tensor) -> None:
    """Refuse rows of another shape, as in generation, which would attend to all branches.

    Raises:
        PackingError: The model has used the announced tree, and got rows of another shape.
    """
    announced = _offered.get()
    if announced is None or announced.taken_by is not model or _running.get() is not None:
        return
    if tuple(rows.shape[:2]) != (1, announced.tree.tokens):
        raise PackingError(
            f"trees.shared: the batch has {announced.tree.tokens} tokens in a row, and the model "
            f"that took it was called again with {tuple(rows.shape[:2])}, as generation does. "
            "Generate, and call it with other rows, outside of the block"
        )


@contextlib.contextmanager
def announce_tree(tree: Tree, *, once: bool = False, by_rank: bool = False) -> Iterator[Offer]:
    """Announce a tree for calls of models within a block."""
    announced = Offer(tree, once, by_rank)
    token = _offered.set(announced)
    try:
        yield announced
    finally:
        _offered.reset(token)


@contextlib.contextmanager
def run(tree: Tree | None) -> Iterator[Forward]:
    """Set the tree of the running forward within a block."""
    forward = Forward(tree)
    token = _running.set(forward)
    try:
        yield forward
    finally:
        _running.reset(token)


# --- attention of a row of trees as a few calls without ranges of keys ---

# The descendants of a segment follow it in the row without gaps, and attend to all of it: a block
# of queries and keys without a mask (a rectangle). Each segment attends to itself causally (a
# square); adjacent segments of equal length form a batch. Kernels without ranges are faster, so
# large blocks are separate calls, and one call with ranges covers the rest.

Sizes = tuple[int, int, int, int, int, bool]
"""The fields of a ``Block`` of the reference."""

LEAST_PAIRS = 2**20
"""Least query-key pairs of a separate call; for 16 heads of 128, about 20 us on an H100."""
MOST_BLOCKS = 32
FEW_BATCHES = 4
"""Up to so many batches of squares are separate calls of any size, if nothing else is left."""


def causal_ranges(tree: Tree, device: torch.device) -> Tensor:
    """Ranges of keys ``(1, tokens, 2 n)`` under a causal mask, with blocks; cached per device."""
    return tree.cached(("causal", device), lambda: _causal_ranges(tree, device))


def _causal_ranges(tree: Tree, device: torch.device) -> Tensor:
    from liger_multi.reference.attention.attention import BLOCKS, Block, Blocks

    end = torch.arange(1, tree.longest + 1, device=device, dtype=torch.int32)
    by_position = torch.stack([torch.zeros_like(end), end], -1)
    ranges = tree.ranges(by_position)
    rectangles_of, squares_of = _large_segments(tree)
    if not rectangles_of:
        return ranges
    squares = _squares(tree, squares_of)
    rectangles = _rectangles(tree)
    calls = [Block(*sizes) for sizes in (*squares, *(rectangles[n] for n in rectangles_of))]
    rest_ranges = None
    if len(squares_of) < len(tree.lengths) or len(rectangles_of) < len(rectangles):
        rest_ranges = tree.ranges(by_position, tree.runs_without(set(rectangles_of), squares_of))
    setattr(ranges, BLOCKS, Blocks(tuple(calls), rest_ranges))
    return ranges


def _large_segments(tree: Tree) -> tuple[list[int], set[int]]:
    """Segments with a separate rectangle, and segments with a separate square."""
    pairs = {n: sizes[3] * sizes[4] for n, sizes in _rectangles(tree).items()}
    rectangles = [n for n in sorted(pairs, key=lambda n: -pairs[n]) if pairs[n] >= LEAST_PAIRS]
    batches = list(_batches(tree))
    is_small = len(batches) <= FEW_BATCHES and len(rectangles) == len(pairs) <= MOST_BLOCKS // 2
    large = [b for b in batches if is_small or len(b) * tree.lengths[b[0]] ** 2 // 2 >= LEAST_PAIRS]
    rectangles = rectangles[: MOST_BLOCKS // 2]
    return sorted(rectangles), {
        n for batch in large[: MOST_BLOCKS - len(rectangles)] for n in batch
    }


def _rectangles(tree: Tree) -> dict[int, Sizes]:
    """The rectangle of every segment that has descendants."""
    queries = [0] * len(tree.lengths)
    for segment in reversed(range(len(queries))):
        if tree.parents[segment] >= 0:
            queries[tree.parents[segment]] += tree.lengths[segment] + queries[segment]
    blocks = zip(tree.starts, tree.lengths, queries, strict=True)
    return {
        n: (start + size, start, 1, q, size, False)
        for n, (start, size, q) in enumerate(blocks)
        if q
    }


def _batches(tree: Tree) -> Iterator[list[int]]:
    """Groups of adjacent segments of equal length."""
    batch: list[int] = []
    for segment, length in enumerate(tree.lengths):
        if batch and tree.lengths[batch[0]] != length:
            yield batch
            batch = []
        batch.append(segment)
    yield batch


def _squares(tree: Tree, members: set[int]) -> Iterator[Sizes]:
    for batch in _batches(tree):
        if batch[0] in members:
            start, length = tree.starts[batch[0]], tree.lengths[batch[0]]
            yield start, start, len(batch), length, length, True
