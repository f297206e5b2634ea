"""Attention of a row of trees as a few calls without ranges of keys.

All that follows a segment sees all of it, and stands behind it in one piece: a block of queries by
keys without a mask. Every segment sees itself causally; segments of one length behind each other
are a batch. Kernels for plain masks are faster than those for ranges, so large blocks are calls by
themselves, and ranges say what is left.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from liger_multi.patching.packing.tree import Tree

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
