"""What recompute policies cost in every layer of a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Cost:
    """One layer under one policy.

    Attributes:
        kept_bytes: What it keeps from forward to backward, its input included.
        seconds: Of what is computed again, by the peak of a device.
    """

    kept_bytes: int
    seconds: float


@dataclass(frozen=True)
class Stats:
    """What policies cost in every layer of a model, for one shape of batch.

    Attributes:
        layers: For every layer, in order, the cost by name of policy.
        tokens: Of the batch that was looked at; bytes and seconds grow in proportion.
    """

    layers: tuple[Mapping[str, Cost], ...]
    tokens: int

    def kept_bytes(self, policies: tuple[str, ...]) -> int:
        """What all layers keep, and beside it the largest of them while it is computed again."""
        pairs = list(zip(self.layers, policies, strict=True))
        again = (max(c.kept_bytes for c in layer.values()) - layer[p].kept_bytes
                 for layer, p in pairs if p != "none")  # fmt: skip
        return sum(layer[p].kept_bytes for layer, p in pairs) + max([0, *again])

    def seconds(self, policies: tuple[str, ...]) -> float:
        """What computing again takes."""
        return sum(layer[p].seconds for layer, p in zip(self.layers, policies, strict=True))
