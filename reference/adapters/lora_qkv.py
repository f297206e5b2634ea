"""Linear layers of one input, with LoRA.

What all of them read of x with few columns is one product, and so is what they add to its gradient,
which is one sum. :func:`implement_lora_qkv` makes forward and backward from a backend's products
with thin matrices; wide products are PyTorch's.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_multi.reference.adapters.low_rank import LowRank
from liger_multi.reference.common.chunking import as_rows
from liger_multi.reference.float8.frozen import (
    Weight,
    frozen_gradient,
    frozen_linear,
    shared_rows,
    weight_or_codes,
)


class Reached(NamedTuple):
    """An adapter whose layer has an upstream gradient; ``back = dy b``, and the gradient of b."""

    a: Tensor
    scale: float
    back: Tensor
    db: Tensor


def _forward_of(lora: LowRank) -> Callable[..., Any]:
    """The forward pass of the contract, as a function of tensors."""

    def forward(
        x: Tensor,
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        v_weight: Tensor | None,
        q_a: Tensor | None,
        q_b: Tensor | None,
        k_a: Tensor | None,
        k_b: Tensor | None,
        v_a: Tensor | None,
        v_b: Tensor | None,
        q_bias: Tensor | None,
        k_bias: Tensor | None,
        v_bias: Tensor | None,
        q_scale: float,
        k_scale: float,
        v_scale: float,
        q_weight_scale: Tensor | None,
        k_weight_scale: Tensor | None,
        v_weight_scale: Tensor | None,
        codes: Tensor | None,
        codes_scale: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        x2d, row_shape, a = as_rows(x), x.shape[:-1], (q_a, k_a, v_a)
        weight_scales = (q_weight_scale, k_weight_scale, v_weight_scale)
        wide = _wide_weights((q_weight, k_weight, v_weight), weight_scales, lora)
        left = shared_rows(x, codes, codes_scale, lora.quantizer, *wide)
        factors = [t for t in a if t is not None] or [x2d.new_empty(0, x2d.shape[1])]
        projected = lora.narrow(x2d, torch.cat(factors).t())
        layers = zip(
            wide,
            (q_bias, k_bias, v_bias),
            (q_b, k_b, v_b),
            _columns(projected, a),
            (q_scale, k_scale, v_scale),
            strict=True,
        )
        outputs = []
        for weight, bias, b, part, scale in layers:
            y = x2d.new_empty(0) if weight is None else frozen_linear(x2d, weight, bias, left)
            if b is not None:
                lora.add_(y, part, b.t(), scale)
            outputs.append(y if weight is None else y.view(*row_shape, y.shape[1]))
        return (*outputs, projected.view(*row_shape, projected.shape[1]))  # type: ignore[return-value]

    return forward


def _backward_of(lora: LowRank) -> Callable[..., Any]:
    """The backward pass of the contract, as a function of tensors."""

    def backward(
        dq: Tensor | None,
        dk: Tensor | None,
        dv: Tensor | None,
        x: Tensor,
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        v_weight: Tensor | None,
        q_a: Tensor | None,
        q_b: Tensor | None,
        k_a: Tensor | None,
        k_b: Tensor | None,
        v_a: Tensor | None,
        v_b: Tensor | None,
        low: Tensor,
        q_scale: float,
        k_scale: float,
        v_scale: float,
        q_weight_scale: Tensor | None,
        k_weight_scale: Tensor | None,
        v_weight_scale: Tensor | None,
        needs_x: bool,
        needs_q_a: bool,
        needs_q_b: bool,
        needs_k_a: bool,
        needs_k_b: bool,
        needs_v_a: bool,
        needs_v_b: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        x2d, a, b = as_rows(x), (q_a, k_a, v_a), (q_b, k_b, v_b)
        upstream = [dy if dy is None else as_rows(dy) for dy in (dq, dk, dv)]
        needs_a, needs_b = (needs_q_a, needs_k_a, needs_v_a), (needs_q_b, needs_k_b, needs_v_b)
        scales, needs_back = (q_scale, k_scale, v_scale), needs_x or any(needs_a)
        parts = zip(a, b, scales, _columns(as_rows(low), a), upstream, needs_b, strict=True)
        adapters = [
            None
            if a is None or b is None or dy is None
            else Reached(a, scale, *lora.narrow_and_gradient(dy, b, part, scale, needs_back, needs))
            for a, b, scale, part, dy, needs in parts
        ]
        projection = (q_weight_scale, k_weight_scale, v_weight_scale)
        dx = x.new_empty(0)
        if needs_x:
            weights = _wide_weights((q_weight, k_weight, v_weight), projection, lora)
            dx = _common_input_gradient(lora, upstream, weights, [a for a in adapters if a]).view(
                x.shape
            )
        das = _first_gradients(
            lora, x2d, [o for o, n in zip(adapters, needs_a, strict=True) if o and n]
        )
        gradients = [dx]
        for index, adapter in enumerate(adapters):
            da, db = (x.new_empty(0) if t is None else t.new_empty(0) for t in (a[index], b[index]))
            if adapter and needs_a[index]:
                da = das.pop(0)
            if adapter:
                db = adapter.db
            gradients += [da, db]
        return tuple(gradients)  # type: ignore[return-value]

    return backward


def implement_lora_qkv(lora: LowRank) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Forward and backward of the contract."""
    return _forward_of(lora), _backward_of(lora)


def _common_input_gradient(
    lora: LowRank,
    upstream: Sequence[Tensor | None],
    weights: Sequence[Weight | None],
    adapters: Sequence[Reached],
) -> Tensor:
    """The sum of all layers' gradients of x; adapters of one scale add to it together."""
    dx: Tensor | None = None
    for dy, weight in zip(upstream, weights, strict=True):
        if dy is not None and weight is not None:
            dx = frozen_gradient(dy, weight, lora.quantizer, dx)
    assert dx is not None
    for scale in dict.fromkeys(adapter.scale for adapter in adapters):
        of_scale = [adapter for adapter in adapters if adapter.scale == scale]
        dprojected, a = torch.cat([o.back for o in of_scale], 1), torch.cat([o.a for o in of_scale])
        lora.add_(dx, dprojected, a, scale)
    return dx


def _first_gradients(lora: LowRank, rows: Tensor, adapters: Sequence[Reached]) -> list[Tensor]:
    """The gradients of the first factors, each in memory of its own."""
    if not adapters:
        return []
    total = lora.sums(
        torch.cat([adapter.back for adapter in adapters], 1), rows, adapters[0].a.dtype
    )
    parts = total.split([adapter.a.shape[0] for adapter in adapters])
    return [part * adapter.scale for part, adapter in zip(parts, adapters, strict=True)]


def _wide_weights(
    weights: Sequence[Tensor | None], scales: Sequence[Tensor | None], lora: LowRank
) -> list[Weight | None]:
    pairs = zip(weights, scales, strict=True)
    return [
        None if weight is None else weight_or_codes(weight, scale, lora.quantizer)
        for weight, scale in pairs
    ]


def _columns(projected: Tensor, a: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    return torch.split(projected, [0 if t is None else t.shape[0] for t in a], 1)


forward, backward = implement_lora_qkv(LowRank())
