"""Turn lazy logits into an ordinary tensor."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from liger_multi.patching.lazy_logits.lazy_tensor import LazyLogits, real_tensor
from liger_multi.patching.lazy_logits.traced import TracedLogits


def real_logits(logits: Any) -> Tensor:
    """The logits as an ordinary tensor with its autograd history.

    Needed where values must outlive a change of the weights, as between two optimizer steps. Lazy
    logits become ordinary ones: the result is the same object, and a later loss is PyTorch's.

    Raises:
        TypeError: ``logits`` is no tensor.
    """
    if isinstance(logits, LazyLogits):
        # as a function of tensors, at which a graph breaks
        return LazyLogits.__torch_function__(real_tensor, (LazyLogits,), (logits,))  # type: ignore[no-any-return]
    if isinstance(logits, TracedLogits):
        return logits.real()
    if isinstance(logits, Tensor):
        return logits
    raise TypeError(f"expected logits (a tensor), got {type(logits).__name__}")
