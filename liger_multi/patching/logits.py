"""Turn lazy logits into an ordinary tensor."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from liger_multi.patching.lazy import LazyLogits
from liger_multi.patching.traced import TracedLogits


def real_logits(logits: Any) -> Tensor:
    """The logits as an ordinary tensor with its autograd history.

    Needed where values must outlive a change of the weights, as between two optimizer steps.

    Raises:
        TypeError: ``logits`` is no tensor.
    """
    if isinstance(logits, LazyLogits):
        return logits._slot.real()
    if isinstance(logits, TracedLogits):
        return logits.real()
    if isinstance(logits, Tensor):
        return logits
    raise TypeError(f"expected logits (a tensor), got {type(logits).__name__}")
