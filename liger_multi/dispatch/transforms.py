"""Transforms of ``torch.func`` and forward-mode derivatives, neither of which operators have."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.autograd import forward_ad

from liger_multi._torch_private import forward_ad_level, transforms_active


def transforming() -> bool:
    """Whether a transform such as ``grad`` or ``vmap`` runs, or a level of dual tensors is open."""
    return transforms_active() or forward_ad_level() >= 0


def is_transformed(tensors: Iterable[Any]) -> bool:
    """Whether a call is one of a transform, or has a tensor with a tangent, which it would lose."""
    if transforms_active():
        return True
    return forward_ad_level() >= 0 and any(
        isinstance(t, Tensor) and forward_ad.unpack_dual(t).tangent is not None for t in tensors
    )
