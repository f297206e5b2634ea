"""What cross entropies return besides a loss, and the errors of losses."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

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


def unpack_cross_entropy_result(result: Any) -> tuple[Any, Any, Any, Any]:
    """The loss, the z-loss, the share of right tokens and the likeliest ones; None: not there."""
    if isinstance(result, CrossEntropyOutput):
        return result.loss, result.z_loss, result.token_accuracy, result.predicted_tokens
    return result, None, None, None


class ArgumentError(ValueError, AssertionError):
    """An argument that Liger-Kernel asserts and this library checks."""


class TargetError(IndexError, AssertionError):
    """A target outside of the vocabulary, which Liger-Kernel asserts."""
