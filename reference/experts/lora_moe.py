"""A mixture of frozen gated experts with adapters, one expert after the other.

As :mod:`.fused_moe`, with the layers of :mod:`liger_multi.reference.adapters.lora_mlp`: what an
adapter adds are GEMMs with r columns or terms, on the rows of its expert.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_multi.reference.adapters.lora_mlp import (
    adapted_layer,
    adapter_gradients,
    input_gradient,
)
from liger_multi.reference.adapters.low_rank import LowRank
from liger_multi.reference.common.chunking import statistics_dtype
from liger_multi.reference.experts.fused_moe import (
    gradients,
    product,
    sorted_pairs,
    sum_of_pairs,
    used_experts,
)

THIN = LowRank()


class Factors(NamedTuple):
    """The adapters of all experts of one layer; absent where it has none."""

    a: Tensor | None
    b: Tensor | None
    scale: float

    def of(self, e: int) -> tuple[Tensor | None, Tensor | None, float]:
        """The factors of one expert in at least fp32, so that rank-r products are not rounded."""
        if self.a is None or self.b is None:
            return None, None, self.scale
        acc_dtype = statistics_dtype(self.a.dtype)
        return self.a[e].to(acc_dtype), self.b[e].to(acc_dtype), self.scale


def forward(
    x: Tensor,
    gate_up_weight: Tensor,
    down_weight: Tensor,
    index: Tensor,
    routing: Tensor,
    gate_up_a: Tensor | None,
    gate_up_b: Tensor | None,
    down_a: Tensor | None,
    down_b: Tensor | None,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    gate_up_scale: float,
    down_scale: float,
    activation: str,
    limit: float,
    alpha: float,
    up_offset: float,
    interleaved: bool,
    transposed: bool,
    y_dtype: torch.dtype,
    needs_x: bool,
    needs_routing: bool,
    needs_gate_up_a: bool,
    needs_gate_up_b: bool,
    needs_down_a: bool,
    needs_down_b: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Two layers with adapters for every expert that has tokens."""
    weights = [w.mT if transposed else w for w in (gate_up_weight, down_weight)]
    factors = (Factors(gate_up_a, gate_up_b, gate_up_scale), Factors(down_a, down_b, down_scale))
    keeps_gate_up = needs_x or needs_routing or needs_gate_up_a or needs_gate_up_b
    keeps_gate_up = keeps_gate_up or needs_down_a or needs_down_b
    activation_options, experts = (
        (activation, limit, alpha, up_offset, interleaved),
        weights[0].shape[0],
    )
    _, order, offsets = sorted_pairs(index, experts)
    gate_up = x.new_zeros(index.numel() if keeps_gate_up else 0, weights[0].shape[1])
    pairs = x.new_zeros(index.numel(), x.shape[1])
    for e, span, pair in used_experts(order, offsets, index.numel()):
        bias, down_bias_of = (None if b is None else b[e] for b in (gate_up_bias, down_bias))
        rows = x[pair // index.shape[1]]
        inner = adapted_layer(THIN, rows, weights[0][e], bias, *factors[0].of(e))
        if keeps_gate_up:
            gate_up[span] = inner
        activated = product(inner, activation_options)
        pairs[pair] = adapted_layer(THIN, activated, weights[1][e], down_bias_of, *factors[1].of(e))
    return sum_of_pairs(pairs, x.shape[0], routing, y_dtype), gate_up, order, offsets


def backward(
    dy: Tensor,
    x: Tensor | None,
    gate_up_weight: Tensor | None,
    down_weight: Tensor,
    index: Tensor,
    routing: Tensor,
    gate_up_a: Tensor | None,
    gate_up_b: Tensor | None,
    down_a: Tensor | None,
    down_b: Tensor | None,
    down_bias: Tensor | None,
    gate_up: Tensor,
    order: Tensor,
    offsets: Tensor,
    gate_up_scale: float,
    down_scale: float,
    activation: str,
    limit: float,
    alpha: float,
    up_offset: float,
    interleaved: bool,
    transposed: bool,
    needs_x: bool,
    needs_routing: bool,
    needs_gate_up_a: bool,
    needs_gate_up_b: bool,
    needs_down_a: bool,
    needs_down_b: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of two layers with adapters for every expert; no gradient of a weight."""
    dy = dy.to(gate_up.dtype)
    activation_options, acc_dtype = (
        (activation, limit, alpha, up_offset, interleaved),
        statistics_dtype(dy.dtype),
    )
    first, second = (
        Factors(gate_up_a, gate_up_b, gate_up_scale),
        Factors(down_a, down_b, down_scale),
    )
    needs = ((needs_gate_up_a, needs_gate_up_b), (needs_down_a, needs_down_b))
    factor_gradients = [
        _zeros(dy, layer, layer_needs)
        for layer, layer_needs in zip((first, second), needs, strict=True)
    ]
    drouting = routing.new_zeros(routing.shape if needs_routing else 0)
    pairs = dy.new_zeros(index.numel() if needs_x else 0, dy.shape[1])
    needs_inner = needs_x or any(needs[0])
    for e, span, pair in used_experts(order, offsets, index.numel()):
        upstream, inner = dy[pair // index.shape[1]], gate_up[span]
        weight = routing.reshape(-1)[pair].to(acc_dtype).unsqueeze(1)
        down = down_weight[e].mT if transposed else down_weight[e]
        dproduct, dprojected = input_gradient(THIN, upstream, down, *second.of(e))
        dproduct, activated = (
            dproduct.to(acc_dtype),
            product(inner.to(acc_dtype), activation_options),
        )
        if needs_routing:
            share = (dproduct * activated).sum(1)
            if down_bias is not None:
                share = share + (upstream.to(acc_dtype) * down_bias[e].to(acc_dtype)).sum(1)
            drouting.view(-1)[pair] = share.to(drouting.dtype)
        weighted = (activated * weight).to(dy.dtype)
        _store_gradients(
            factor_gradients[1],
            e,
            adapter_gradients(THIN, weighted, upstream, dprojected, *second.of(e), *needs[1]),
        )
        if not needs_inner:
            continue
        dinner = gradients((dproduct * weight).to(dy.dtype), inner, activation_options)
        up = _oriented(gate_up_weight, e, transposed)
        dx, dprojected = input_gradient(THIN, dinner, up, *first.of(e), None, needs_x)
        if needs_x:
            pairs[pair] = dx
        if x is not None:
            rows = x[pair // index.shape[1]]
            _store_gradients(
                factor_gradients[0],
                e,
                adapter_gradients(THIN, rows, dinner, dprojected, *first.of(e), *needs[0]),
            )
    dx = sum_of_pairs(pairs, dy.shape[0], None, dy.dtype) if needs_x else pairs.view(-1)
    return dx, drouting, *factor_gradients[0], *factor_gradients[1]  # type: ignore[return-value]


def _oriented(weight: Tensor | None, e: int, transposed: bool) -> Any:
    """The matrix of an expert, outputs first; None if it is not read."""
    return None if weight is None else weight[e].mT if transposed else weight[e]


def _zeros(dy: Tensor, layer: Factors, needs: tuple[bool, bool]) -> list[Tensor]:
    return [
        dy.new_zeros(0) if t is None else t.new_zeros(t.shape if wants else (0,))
        for t, wants in zip((layer.a, layer.b), needs, strict=True)
    ]


def _store_gradients(outputs: list[Tensor], e: int, gradients: tuple[Tensor, Tensor]) -> None:
    """Store the gradients of one expert's factors that are needed."""
    for output, gradient in zip(outputs, gradients, strict=True):
        if gradient.numel():
            output[e] = gradient
