"""Trees of segments in one row of tokens: which tokens precede a token on its path.

A row holds the segments depth first: a prompt, its first answer, what follows that answer, its
second answer. A token attends to its own segment up to itself and to its ancestors' whole segments;
positions go on from the parent's last one. Masks, recurrences and convolutions all follow from the
start, the length and the parent of every segment.

Two variables say which tree is in force. :func:`offered` is what a caller has announced for a call
of a model with these tokens. :func:`running` is the tree of the model's forward that is under way;
what backward computes again has the tree in its arguments instead: in the ranges of a mask and in
an attribute of the ids of samples.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from liger_multi.errors import PackingError

Cached = TypeVar("Cached")
MOST_RANGES = 16
"""Ranges of keys that a query may see; a path of segments that lie apart has one for each."""
MARK = "_liger_multi_tree"
"""Attribute of ids of samples, which are told to mixers, with the tree that they number."""


class Run(NamedTuple):
    """Segments of one path that follow each other in the row: positions, and where they begin."""

    first: int
    last: int
    start: int


class ScanCall(NamedTuple):
    """Segments of one level whose lengths are alike, as the rows of one call of a recurrence.

    Attributes:
        places: Tokens in the row, ``(segments, longest)``; the first one in place of padding.
        mask: Which of them are no padding; None where all are.
        parents: Numbers among the states of all calls before; None for roots.
        parent: The only one of them; None where they differ.
        states: Whether a segment of the call has children.
        start: The first token, where the call has all tokens from there on, row after row.
    """

    places: Tensor
    mask: Tensor | None
    parents: Tensor | None
    parent: int | None
    states: bool
    start: int | None


class Window(NamedTuple):
    """A row with a few earlier tokens of its path in front of every segment.

    Attributes:
        places: Tokens of the row, with repetitions.
        ids: The segment that each of them is for, ``(1, N)`` int32.
        own: Where among them the tokens of the row are.
    """

    places: Tensor
    ids: Tensor
    own: Tensor


@dataclass(frozen=True)
class Tree:
    """The segments of a row, none of them empty; what follows the last one is padding.

    Attributes:
        lengths: Tokens of every segment, depth first.
        parents: Number of the segment before it on its path; -1 for a root.
        ends: For every path, in order, the segment that it ends with; -1 where it has no tokens.
        tokens: Of the row, with padding.
    """

    lengths: tuple[int, ...]
    parents: tuple[int, ...]
    ends: tuple[int, ...]
    tokens: int
    _cache: dict[object, object] = field(default_factory=dict, compare=False, repr=False)

    @functools.cached_property
    def starts(self) -> list[int]:
        """Where every segment begins in the row."""
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
        """Segments before each one on its path."""
        levels: list[int] = []
        for parent in self.parents:
            levels.append(levels[parent] + 1 if parent >= 0 else 0)
        return levels

    @functools.cached_property
    def leaves(self) -> list[int]:
        """Paths that go through every segment, which is how often an unshared batch has it."""
        leaves = [self.ends.count(number) for number in range(len(self.lengths))]
        for number in range(len(leaves) - 1, 0, -1):
            if self.parents[number] >= 0:
                leaves[self.parents[number]] += leaves[number]
        return leaves

    @property
    def is_path(self) -> bool:
        """Whether the row is one sequence, in which nothing branches."""
        return len(self.lengths) == 1

    @property
    def padding(self) -> int:
        """Tokens after the last segment."""
        return self.tokens - sum(self.lengths)

    @property
    def longest(self) -> int:
        """Tokens of the longest path."""
        return max((o + n for o, n in zip(self.offsets, self.lengths, strict=True)), default=0)

    @functools.cached_property
    def runs(self) -> list[tuple[Run, ...]]:
        """Every segment's path, root first, with adjacent segments joined."""
        return self.runs_without(set(), set())

    def runs_without(self, before: set[int], own: set[int]) -> list[tuple[Run, ...]]:
        """Every segment's path without some of the segments before it, and some without their own.

        Args:
            before: Left out of the paths that go on from them.
            own: Left out of the paths that end with them.
        """
        runs: list[tuple[Run, ...]] = []
        earlier: list[tuple[Run, ...]] = []  # what the path of a child begins with
        for number, parent in enumerate(self.parents):
            start, offset = self.starts[number], self.offsets[number]
            run = Run(offset, offset + self.lengths[number], start)
            path = earlier[parent] if parent >= 0 else ()
            joined = (*path, run)
            if path and path[-1].start + path[-1].last - path[-1].first == start:
                joined = (*path[:-1], Run(path[-1].first, run.last, path[-1].start))
            runs.append(path if number in own else joined)
            earlier.append(path if number in before else joined)
        return runs

    def path(self, segment: int) -> list[int]:
        """Places in the row of a segment's path, its own tokens last."""
        return [
            n
            for run in self.runs[segment]
            for n in range(run.start, run.start + run.last - run.first)
        ]

    def below(self, segment: int) -> list[int]:
        """A segment and all that go on from it."""
        members = [segment]
        for number in range(segment + 1, len(self.parents)):
            if self.parents[number] in members:
                members.append(number)
        return members

    @property
    def width(self) -> int:
        """The most runs of one path."""
        return max((len(runs) for runs in self.runs), default=0)

    def cached(self, key: object, make: Callable[[], Cached]) -> Cached:
        """What ``make`` returns, once; also if that was in inference mode."""
        if key not in self._cache:
            with torch.inference_mode(False):
                self._cache[key] = make()
        return self._cache[key]  # type: ignore[return-value]

    def _on(self, device: torch.device, name: str, values: list[int]) -> Tensor:
        """Numbers of segments on a device, copied there once."""
        return self.cached(
            (name, device), lambda: torch.tensor(values, dtype=torch.int64, device=device)
        )

    def segments(self, device: torch.device) -> Tensor:
        """The segment of every token, ``(tokens,)``; one more for padding."""
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
        place = torch.arange(self.tokens, device=device)
        moved = place + self._of_tokens(device, "shift", shift, 0)
        return torch.where(self.visible(device), moved, 0)[None]

    def visible(self, device: torch.device) -> Tensor:
        """Which tokens are no padding, ``(tokens,)`` bool."""
        return self.segments(device) < len(self.lengths)

    def weights(self, device: torch.device) -> Tensor:
        """How often an unshared batch has every token, ``(1, tokens)`` int64; 0 for padding."""
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
            by_position: Ranges of keys of a single sequence of ``longest`` tokens,
                ``(longest, 2 or 4)``: what a token at this position sees of its path.
            runs: What there is to see of every segment's path; all of it by default.
        """
        runs = self.runs if runs is None else runs
        device, width = by_position.device, max((1, *map(len, runs)))
        bounds = [
            number
            for path in [*runs, ()]
            for run in (*path, *[Run(0, 0, 0)] * (width - len(path)))
            for number in run
        ]
        of_segments = torch.tensor(bounds, device=device).view(-1, width, 3)
        of_tokens = of_segments[self.segments(device)].unbind(-1)
        first, last, start = (part[:, :, None] for part in of_tokens)
        visible = by_position.to(torch.int64)[self.positions(device)[0]].unflatten(-1, (-1, 2))
        low, high = (part[:, None] for part in visible.unbind(-1))  # (tokens, 1, ranges)
        low, high = torch.maximum(low, first), torch.minimum(high, last)
        moved = torch.stack([low, torch.maximum(low, high)], -1) + (start - first)[..., None]
        return moved.flatten(1).to(torch.int32)[None]

    # --- recurrences and convolutions ---

    def scans(
        self, device: torch.device, equal: bool = False
    ) -> tuple[list[ScanCall], Tensor | None]:
        """Calls of a recurrence, level by level, and where each token is among their results.

        A call has segments whose lengths differ by less than a factor of two, so that padding is
        less than half of it. The second result is None where the tokens are in order.

        Args:
            device: Of the tensors.
            equal: Let segments with children have no padding.
        """
        return self.cached(("scans", device, equal), lambda: self._scans(device, equal))

    def _scans(self, device: torch.device, equal: bool) -> tuple[list[ScanCall], Tensor | None]:
        lengths, parents = [*self.lengths], [*self.parents]
        starts, levels = [*self.starts], [*self.levels]
        if self.padding:  # a sequence by itself, like any other root
            lengths, parents = [*lengths, self.padding], [*parents, -1]
            starts, levels = [*starts, self.tokens - self.padding], [*levels, 0]
        calls: list[ScanCall] = []
        order = torch.empty(self.tokens, dtype=torch.int64)
        state_of: dict[int, int] = {}
        with_children, count = set(parents), 0
        for group in _groups(lengths, levels, with_children if equal else set()):
            own = torch.tensor([lengths[n] for n in group])[:, None]
            first = torch.tensor([starts[n] for n in group])[:, None]
            place = torch.arange(int(own.max()))[None]
            mask = place < own
            places = torch.where(mask, first + place, 0)
            order[places[mask]] = mask.flatten().nonzero()[:, 0] + count
            count += places.numel()
            whole = bool(mask.all())
            in_order = whole and bool((places.flatten().diff() == 1).all())
            before = [state_of.get(parents[n], -1) for n in group]
            has_children = not with_children.isdisjoint(group)
            if has_children:
                state_of.update({n: len(state_of) + at for at, n in enumerate(group)})
            calls.append(
                ScanCall(
                    places.to(device),
                    None if whole else mask.to(device),
                    None if before[0] < 0 else torch.tensor(before, device=device),
                    before[0] if len({*before}) == 1 else None,
                    has_children,
                    int(places[0, 0]) if in_order else None,
                )
            )
        if count == self.tokens and bool((order.diff() == 1).all()):
            return calls, None
        return calls, order.to(device)

    def window(self, device: torch.device, before: int) -> Window:
        """Every segment after up to ``before`` tokens of its path."""
        return self.cached(("window", device, before), lambda: self._window(device, before))

    def _window(self, device: torch.device, before: int) -> Window:
        places: list[Tensor] = []
        ids: list[int] = []
        own: list[Tensor] = []
        count = 0
        for number, runs in enumerate(self.runs):
            start, length = self.starts[number], self.lengths[number]
            joined = runs[-1].start < start  # it goes on where the parent ends
            earlier = [] if joined else _tail(runs[:-1], before)
            count += len(earlier)
            places += [
                torch.tensor(earlier, dtype=torch.int64),
                torch.arange(start, start + length),
            ]
            ids += [ids[-1] if joined else number] * (len(earlier) + length)
            own.append(torch.arange(count, count + length))
            count += length
        places.append(torch.arange(self.tokens - self.padding, self.tokens))
        ids += [len(self.lengths)] * self.padding
        own.append(torch.arange(count, count + self.padding))
        return Window(
            torch.cat(places).to(device),
            torch.tensor(ids, dtype=torch.int32, device=device)[None],
            torch.cat(own).to(device),
        )


def _tail(runs: tuple[Run, ...], count: int) -> list[int]:
    """The last tokens of a path, in order."""
    tail: list[int] = []
    for run in reversed(runs):
        stop = run.start + run.last - run.first
        tail[:0] = range(max(run.start, stop - (count - len(tail))), stop)
    return tail


def _groups(lengths: list[int], levels: list[int], alone: set[int]) -> Iterator[list[int]]:
    """Numbers of segments that one call takes: of a level, in falling order of lengths.

    Those that stand in ``alone`` share a call with segments of their length only.
    """
    for level in range(max(levels, default=-1) + 1):
        numbers = [n for n, own in enumerate(levels) if own == level]
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
"""The tokens of a segment, and what follows it."""


class Node(NamedTuple):
    """A branch in the row, which may be empty.

    Attributes:
        start: Where its tokens begin in the row.
        length: How many it has.
        before: The place of the token before it on its path; -1 where there is none.
        root: The number of its tree.
        leaf: Whether nothing follows it.
    """

    start: int
    length: int
    before: int
    root: int
    leaf: bool

    @property
    def last(self) -> int:
        """The place of the last token of its path."""
        return self.start + self.length - 1 if self.length else self.before


def planted(roots: Sequence[Branch], tokens: int | None = None) -> tuple[Tree, list[Node]]:
    """Trees one after another in a row, and every branch of them, depth first.

    A branch that alone follows another one, whose tokens end no path, is part of its segment: a
    tree with one path is one segment.

    Args:
        roots: The trees.
        tokens: Of the row; as many as there are by default.
    """
    nodes: list[Node] = []
    count = 0
    waiting = [(branch, -1, number) for number, branch in enumerate(roots)][::-1]
    while waiting:
        (length, children), before, root = waiting.pop()
        nodes.append(Node(count, length, before, root, not children))
        count += length
        waiting += [(child, nodes[-1].last, root) for child in children[::-1]]
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
    """A tree that a caller announces, and the model that took it."""

    tree: Tree
    once: bool = False
    taken_by: nn.Module | None = None


@dataclass
class Forward:
    """A forward whose layers follow a tree, and whether any of them asked for it."""

    tree: Tree | None
    asked: bool = False


_offered: ContextVar[Offer | None] = ContextVar("liger_multi_tree_offered", default=None)
_running: ContextVar[Forward | None] = ContextVar("liger_multi_tree_running", default=None)


def running(tokens: int, rows: int) -> Tree | None:
    """The tree of the forward that is under way, if it has so many tokens.

    A compiled graph has none: a whole model that is compiled does not follow trees, and whoever
    called it sees that nobody asked.
    """
    forward = None if torch.compiler.is_compiling() else _running.get()
    if forward is None or forward.tree is None or (rows, tokens) != (1, forward.tree.tokens):
        return None
    forward.asked = True
    return forward.tree


def offered(tokens: int, rows: int) -> Offer | None:
    """What a caller announced for a call with so many tokens in so many rows."""
    announced = None if torch.compiler.is_compiling() else _offered.get()
    if announced is None or _running.get() is not None:
        return None
    return announced if (rows, tokens) == (1, announced.tree.tokens) else None


def check_other_rows(model: nn.Module, rows: Tensor) -> None:
    """Refuse the rows that generation goes on with, which would attend to all branches.

    Raises:
        PackingError: The model took the tree that is announced, and got rows of another shape.
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
def offer(tree: Tree, *, once: bool = False) -> Iterator[Offer]:
    """Announce a tree for the calls of models within."""
    announced = Offer(tree, once)
    token = _offered.set(announced)
    try:
        yield announced
    finally:
        _offered.reset(token)


@contextlib.contextmanager
def run(tree: Tree | None) -> Iterator[Forward]:
    """Let the layers of a forward follow a tree."""
    forward = Forward(tree)
    token = _running.set(forward)
    try:
        yield forward
    finally:
        _running.reset(token)


# --- attention of a row of trees as a few calls without ranges of keys ---

# All that follows a segment sees all of it, and stands behind it in one piece: a block of queries
# by keys without a mask. Every segment sees itself causally; segments of one length behind each
# other are a batch. Kernels for plain masks are faster than those for ranges, so large blocks are
# calls by themselves, and ranges say what is left.

Sizes = tuple[int, int, int, int, int, bool]
"""Of a ``Block`` of the reference, in order."""

LEAST_PAIRS = 2**20
"""Queries by keys that are worth a call; with 16 heads of 128, some 20 us of an H100's work."""
MOST_BLOCKS = 32
FEW_BATCHES = 4
"""Batches of squares that are calls whatever their size, so that nothing is left for ranges."""


def causal_ranges(tree: Tree, device: torch.device) -> Tensor:
    """Ranges of keys ``(1, tokens, 2 n)`` under a causal mask, with the blocks of the tree.

    They are made once for a tree and a device.
    """
    return tree.cached(("causal", device), lambda: _causal_ranges(tree, device))


def _causal_ranges(tree: Tree, device: torch.device) -> Tensor:
    from liger_multi.reference.attention.attention import BLOCKS, Block, Blocks

    end = torch.arange(1, tree.longest + 1, device=device, dtype=torch.int32)
    by_position = torch.stack([torch.zeros_like(end), end], -1)
    ranges = tree.ranges(by_position)
    seen_whole, seen_by_itself = _large(tree)
    if not seen_whole:
        return ranges
    squares = _squares(tree, seen_by_itself)
    rectangles = _rectangles(tree)
    calls = [Block(*sizes) for sizes in (*squares, *(rectangles[n] for n in seen_whole))]
    rest = None
    if len(seen_by_itself) < len(tree.lengths) or len(seen_whole) < len(rectangles):
        rest = tree.ranges(by_position, tree.runs_without(set(seen_whole), seen_by_itself))
    setattr(ranges, BLOCKS, Blocks(tuple(calls), rest))
    return ranges


def _large(tree: Tree) -> tuple[list[int], set[int]]:
    """Segments that are seen by blocks: by all that follow, and by themselves."""
    pairs = {n: sizes[3] * sizes[4] for n, sizes in _rectangles(tree).items()}
    whole = [n for n in sorted(pairs, key=lambda n: -pairs[n]) if pairs[n] >= LEAST_PAIRS]
    batches = list(_batches(tree))
    few = len(batches) <= FEW_BATCHES and len(whole) == len(pairs) <= MOST_BLOCKS // 2
    large = [b for b in batches if few or len(b) * tree.lengths[b[0]] ** 2 // 2 >= LEAST_PAIRS]
    whole = whole[: MOST_BLOCKS // 2]
    return sorted(whole), {n for batch in large[: MOST_BLOCKS - len(whole)] for n in batch}


def _rectangles(tree: Tree) -> dict[int, Sizes]:
    """By segment, the queries that follow it by its keys."""
    queries = [0] * len(tree.lengths)
    for number in reversed(range(len(queries))):
        if tree.parents[number] >= 0:
            queries[tree.parents[number]] += tree.lengths[number] + queries[number]
    blocks = zip(tree.starts, tree.lengths, queries, strict=True)
    return {n: (at + size, at, 1, q, size, False) for n, (at, size, q) in enumerate(blocks) if q}


def _batches(tree: Tree) -> Iterator[list[int]]:
    """Segments of one length behind each other."""
    batch: list[int] = []
    for number, length in enumerate(tree.lengths):
        if batch and tree.lengths[batch[0]] != length:
            yield batch
            batch = []
        batch.append(number)
    yield batch


def _squares(tree: Tree, members: set[int]) -> Iterator[Sizes]:
    for batch in _batches(tree):
        if batch[0] in members:
            start, length = tree.starts[batch[0]], tree.lengths[batch[0]]
            yield start, start, len(batch), length, length, True
