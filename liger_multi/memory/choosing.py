"""Choose recompute policies by a budget of bytes, and again before each forward by live headroom."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from liger_multi.memory.recompute import Recompute


@dataclass(frozen=True)
class Cost:
    """One layer under one policy.

    Attributes:
        kept_bytes: What it keeps from forward to backward, its input included.
        seconds: Of what is computed again, by the roof of the device (relative numbers suffice).
    """

    kept_bytes: int
    seconds: float


@dataclass(frozen=True)
class Stats:
    """What policies cost in every layer of a model, for one shape of batch.

    Attributes:
        layers: For every layer, in order, the cost by name of policy.
        tokens: Of the batch that was looked at; bytes grow in proportion.
    """

    layers: tuple[Mapping[str, Cost], ...]
    tokens: int


@dataclass(frozen=True)
class Choice:
    """A policy for every layer (goes to ``apply_recompute``), and what all layers keep and cost."""

    policies: tuple[str, ...]
    kept_bytes: int
    seconds: float
    fits: bool


def layer_stats(model_or_config: Any, batch: int, sequence: int, **options: Any) -> Stats:
    """Measure every layer under every policy on the meta device (options as of ``estimate``)."""
    raise NotImplementedError


def choose(model_or_stats: Any, budget_bytes: int, **options: Any) -> Choice:
    """The cheapest policies whose layers together keep at most ``budget_bytes``.

    ``options`` for a model: batch, sequence and those of :func:`layer_stats`.
    """
    raise NotImplementedError


def adapt(
    model: nn.Module,
    stats: Stats,
    *,
    reserve_bytes: int = 0,
    probe: Callable[[], int] | None = None,
) -> Recompute:
    """Choose again before each forward, by the bytes that ``probe`` says are free."""
    raise NotImplementedError
