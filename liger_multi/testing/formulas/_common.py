"""What formulas of several families share."""

from __future__ import annotations

import torch
from torch import Tensor


def wide(x: Tensor) -> Tensor:
    """At least fp32, in which Hugging Face computes statistics; fp64 stays fp64."""
    return x if x.dtype is torch.float64 else x.float()


def statistics_dtype(x: Tensor) -> torch.dtype:
    """The dtype of :func:`wide`."""
    return torch.float64 if x.dtype is torch.float64 else torch.float32


def rms_normalized(x: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x^2) + eps)`` over the last axis, in the dtype of x."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def weighted(x: Tensor, weight: Tensor | None, offset: float = 0.0) -> Tensor:
    """``x * (weight + offset)``; x where there is no weight."""
    if weight is None:
        return x
    return (weight + offset if offset else weight) * x
