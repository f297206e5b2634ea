"""A linear layer's LoRA update, ``y = base + scale (x a') b'``.

``x a'`` is kept, r numbers per token: x is read once less. :func:`implement_lora_update` makes
forward and backward from a backend's products with thin matrices.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from liger_multi.reference.adapters.low_rank import LowRank
from liger_multi.reference.common.chunking import as_rows


def implement_lora_update(lora: LowRank) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Forward and backward of the contract."""

    def forward(
        base: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        low = lora.narrow(as_rows(x), a.t())
        y = lora.added(as_rows(base), low, b.t(), scale)
        return y.view(base.shape), low.view(*x.shape[:-1], low.shape[1])

    def backward(
        dy: Tensor,
        x: Tensor,
        a: Tensor,
        b: Tensor,
        low: Tensor,
        scale: float,
        needs_x: bool,
        needs_a: bool,
        needs_b: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        x2d, dy2d = as_rows(x), as_rows(dy)
        dx, da = x.new_empty(0), a.new_empty(0)
        dprojected, db = lora.narrow_and_gradient(
            dy2d, b, as_rows(low), scale, needs_x or needs_a, needs_b
        )
        if needs_x:
            dx = lora.widened(dprojected, a, scale, x.dtype).view(x.shape)
        if needs_a:
            da = lora.gradient(dprojected, x2d, scale, a.dtype)
        return dx, da, db

    return forward, backward


forward, backward = implement_lora_update(LowRank())
