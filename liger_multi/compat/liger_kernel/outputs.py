"""What cross entropies return besides a loss."""

from __future__ import annotations

from dataclasses import dataclass, fields

from torch import Tensor


@dataclass
class CrossEntropyOutput:
    """Losses, the share of right tokens and the likeliest tokens; None: not asked for."""

    loss: Tensor
    z_loss: Tensor | None = None
    token_accuracy: Tensor | None = None
    predicted_tokens: Tensor | None = None


NAMES = tuple(field.name for field in fields(CrossEntropyOutput))
"""Its fields; compilers do not trace the function that lists them."""
