"""Linear layers of one input with LoRA adapters, whose gradients of it are one sum.

:func:`forward_and_backward` makes forward and backward from a backend's thin products; wide
products are PyTorch's. What all layers read of x with few columns is one product, and so is what
they add to its gradient.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor
from torch.nn.functional import linear

from liger_multi.reference.adapters.low_rank import LowRank
from liger_multi.reference.common.chunking import as_rows


class Reached(NamedTuple):
    """An adapter that an upstream gradient came to; ``low = x a'``, ``back = dy b``."""

    a: Tensor
    b: Tensor
    scale: float
    low: Tensor
    dy: Tensor
    back: Tensor


def forward_and_backward(thin: LowRank) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Forward and backward of the contract."""

    def forward(
        x: Tensor, q_weight: Optional[Tensor], k_weight: Optional[Tensor],
        v_weight: Optional[Tensor], q_a: Optional[Tensor], q_b: Optional[Tensor],
        k_a: Optional[Tensor], k_b: Optional[Tensor], v_a: Optional[Tensor], v_b: Optional[Tensor],
        q_bias: Optional[Tensor], k_bias: Optional[Tensor], v_bias: Optional[Tensor],
        q_scale: float, k_scale: float, v_scale: float,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        rows, lead, a = as_rows(x), x.shape[:-1], (q_a, k_a, v_a)
        given = [t for t in a if t is not None] or [rows.new_empty(0, rows.shape[1])]
        low = thin.narrow(rows, torch.cat(given).t())
        layers = zip(
            (q_weight, k_weight, v_weight), (q_bias, k_bias, v_bias), (q_b, k_b, v_b),
            _columns(low, a), (q_scale, k_scale, v_scale), strict=True,
        )  # fmt: skip
        made = []
        for weight, bias, b, own, scale in layers:
            y = rows.new_empty(0) if weight is None else linear(rows, weight, bias)
            if b is not None:
                thin.add_(y, own, b.t(), scale)
            made.append(y if weight is None else y.view(*lead, y.shape[1]))
        return (*made, low.view(*lead, low.shape[1]))  # type: ignore[return-value]

    def backward(
        dq: Optional[Tensor], dk: Optional[Tensor], dv: Optional[Tensor], x: Tensor,
        q_weight: Optional[Tensor], k_weight: Optional[Tensor], v_weight: Optional[Tensor],
        q_a: Optional[Tensor], q_b: Optional[Tensor], k_a: Optional[Tensor], k_b: Optional[Tensor],
        v_a: Optional[Tensor], v_b: Optional[Tensor], low: Tensor,
        q_scale: float, k_scale: float, v_scale: float, needs_x: bool, needs_q_a: bool,
        needs_q_b: bool, needs_k_a: bool, needs_k_b: bool, needs_v_a: bool, needs_v_b: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        rows, a, b = as_rows(x), (q_a, k_a, v_a), (q_b, k_b, v_b)
        upstream = [dy if dy is None else as_rows(dy) for dy in (dq, dk, dv)]
        needs_a, needs_b = (needs_q_a, needs_k_a, needs_v_a), (needs_q_b, needs_k_b, needs_v_b)
        scales, lows, wanted = (q_scale, k_scale, v_scale), as_rows(low), needs_x or any(needs_a)
        parts = zip(a, b, scales, _columns(lows, a), upstream, strict=True)
        adapters = [
            None if a is None or b is None or dy is None
            else Reached(a, b, scale, own, dy, thin.narrow(dy, b) if wanted else own)
            for a, b, scale, own, dy in parts
        ]  # fmt: skip
        dx, weights = x.new_empty(0), (q_weight, k_weight, v_weight)
        if needs_x:
            dx = _input_gradient(thin, upstream, weights, [a for a in adapters if a]).view(x.shape)
        das = _gradients(thin, rows, [o for o, n in zip(adapters, needs_a, strict=True) if o and n])
        found = [dx]
        for at, one in enumerate(adapters):
            da, db = (x.new_empty(0) if t is None else t.new_empty(0) for t in (a[at], b[at]))
            if one and needs_a[at]:
                da = das.pop(0)
            if one and needs_b[at]:
                db = thin.gradient(one.dy, one.low, one.scale, one.b.dtype)
            found += [da, db]
        return tuple(found)  # type: ignore[return-value]

    return forward, backward


def _input_gradient(
    thin: LowRank, upstream: Sequence[Optional[Tensor]], weights: Sequence[Optional[Tensor]],
    adapters: Sequence[Reached],
) -> Tensor:  # fmt: skip
    """The sum of all layers' gradients of x; adapters of one scale add to it together."""
    dx: Tensor | None = None
    for dy, weight in zip(upstream, weights, strict=True):
        if dy is not None and weight is not None:
            dx = dy @ weight if dx is None else dx.addmm_(dy, weight)
    assert dx is not None
    for scale in dict.fromkeys(one.scale for one in adapters):
        same = [one for one in adapters if one.scale == scale]
        back, a = torch.cat([o.back for o in same], 1), torch.cat([o.a for o in same])
        thin.add_(dx, back, a, scale)
    return dx


def _gradients(thin: LowRank, rows: Tensor, adapters: Sequence[Reached]) -> list[Tensor]:
    """The gradients of the first factors, each in memory of its own."""
    if not adapters:
        return []
    made = thin.sums(torch.cat([one.back for one in adapters], 1), rows, adapters[0].a.dtype)
    own = made.split([one.a.shape[0] for one in adapters])
    return [part * one.scale for part, one in zip(own, adapters, strict=True)]


def _columns(low: Tensor, a: Sequence[Optional[Tensor]]) -> tuple[Tensor, ...]:
    return torch.split(low, [0 if t is None else t.shape[0] for t in a], 1)


forward, backward = forward_and_backward(LowRank())
