"""Recurrences and convolutions over a row of trees.

A recurrence goes level by level: the segments of a level are the rows of a call, each from the
state that its parent ended with, whose gradient is then the sum over its branches. Shorter segments
are filled up by tokens that leave a state as it is. A convolution is one call, in which every
segment comes after the last tokens of its path.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_multi.errors import PackingError
from liger_multi.patching.packing.tree import ScanCall, Tree

STILL = -1e4
"""A step before ``softplus`` that is 0 after it, in every dtype."""


class PerToken(NamedTuple):
    """A tensor ``(1, T, ...)`` of a recurrence.

    Attributes:
        tensor: The tensor, or None where the call has none.
        filling: Its number at tokens that leave the state as it is.
    """

    tensor: Tensor | None
    filling: float = 0.0

    def of(self, call: ScanCall) -> Tensor | None:
        """Its tokens in the order of a call, ``(segments, longest, ...)``."""
        x = self.tensor
        if x is None:
            return None
        count = call.places.numel()
        if call.start is not None:
            segments: Tensor = x[0, call.start : call.start + count].unflatten(0, call.places.shape)
            return segments
        part: Tensor = x[0].index_select(0, call.places.flatten()).unflatten(0, call.places.shape)
        if call.mask is None:
            return part
        mask = call.mask.view(*call.mask.shape, *[1] * (part.ndim - 2))
        return torch.where(mask, part, self.filling)


Run = Callable[[Sequence[Any], Tensor | None, bool], tuple[Tensor, Tensor | None]]


def scan(tree: Tree, inputs: Sequence[PerToken], run: Run, *, equal: bool = False) -> Tensor:
    """The results ``(1, T, ...)`` of a recurrence along every path.

    Args:
        tree: Of the row.
        inputs: What the recurrence has for every token.
        run: From the inputs of a call, the states before it, and whether states are needed, to its
            results and the states after it.
        equal: Give segments with children no tokens to fill them up: none leaves a state as it is.
    """
    first = next(x.tensor for x in inputs if x.tensor is not None)
    calls, order = tree.scans(first.device, equal)
    results: list[Tensor] = []
    states: list[Tensor] = []
    for call in calls:
        before = None
        if call.parents is not None:
            every = torch.cat(states)
            # the gradient of an index adds in one order, that of index_select does not
            before = every[call.parents] if call.parent is None else every[call.parent][None]
            before = before.expand(len(call.places), *before.shape[1:])
        y, state = run([x.of(call) for x in inputs], before, call.states)
        results.append(y.flatten(0, 1))
        if call.states and state is not None:
            states.append(state)
    y = torch.cat(results)
    return (y if order is None else y.index_select(0, order))[None]


def windowed(tree: Tree, x: Tensor, before: int, run: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """The results ``(1, T, ...)`` of a function of every token and ``before`` tokens before it.

    Args:
        tree: Of the row.
        x: The tokens ``(1, T, ...)``.
        before: How many earlier tokens of its path a token depends on.
        run: The function, of tokens and the ids of samples.
    """
    window = tree.window(x.device, before)
    return run(x[:, window.places], window.ids).index_select(1, window.own)


def refuse_states(what: str, refused: bool) -> None:
    """Refuse a call that a tree cannot have.

    Raises:
        PackingError: ``refused``.
    """
    if refused:
        raise PackingError(
            f"{what} got a cache, or what its operator does not take, with shared prefixes; pass "
            "use_cache=False"
        )
