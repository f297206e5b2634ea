"""Linear layers with LoRA adapters: one, those of one input, and a gated MLP.

A function makes forward and backward of each from a backend's parts: its products with the two thin
matrices of an update ``scale (x a') b'`` and, for the MLP, its activation. Wide products are
PyTorch's.

Thin products: a base in bf16 with adapters in fp32 multiplies as exactly as in fp32, as PEFT does.
Where a device writes products of bf16 in fp32, a thin matrix is taken as the sum of three in bf16
(8 bits of its 24 each): their products with bf16 numbers are exact, so a wide matrix is read as it
is, once. Elsewhere the wide one is converted, some rows at a time. The scale meets sums, never a
rounded factor.

One layer, ``y = base + scale (x a') b'``: ``x a'`` is not kept, backward computes it again. Layers
of one input: what all of them read of x with few columns is one product, and so is what they add to
its gradient, which is one sum. A gated MLP of frozen layers: its gradients need no dense product.
Kept are x, gate and up; everything of rank r, and the inner product, is computed again.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor

from liger_multi.reference.activations.operators import CodedActivation, ReferenceActivation
from liger_multi.reference.common.chunking import as_rows, has_out_dtype, row_blocks
from liger_multi.reference.common.implementation import Implementation
from liger_multi.reference.common.strict import addmm, apart, matmul, multiply, product
from liger_multi.reference.float8.frozen import (
    Weight,
    frozen_gradient,
    frozen_linear,
    held,
    shared_rows,
)
from liger_multi.reference.float8.rows import PLAIN, Float8Rows, Quantizer

# --- thin products ---

# Products of parts, first and second; the other three are below fp32's last bit.
TERMS = ((0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (2, 0))
LEFT, RIGHT = (tuple(term[side] for term in TERMS) for side in (0, 1))
PARTS = (0, 1, 2)


def split(x: Tensor, order: Sequence[int], axis: int) -> Tensor:
    """Three in bf16 whose sum is ``x``, each the rounded rest of those before, in ``order``."""
    found = []
    for _ in PARTS:
        found.append(x.to(torch.bfloat16))
        x = x - found[-1]
    return torch.cat([found[part] for part in order], axis)


class LowRank:
    """The GEMMs of forward and backward.

    Args:
        split: How a backend makes the parts of a thin matrix.
        to: How a backend rounds rows to FP8, for wide weights that are held in it.
    """

    def __init__(
        self, split: Callable[[Tensor, Sequence[int], int], Tensor] = split, to: Quantizer = PLAIN
    ) -> None:
        self._split, self.to = split, to

    def narrow(self, wide: Tensor, thin: Tensor) -> Tensor:
        """``wide @ thin``, (rows, r), in the dtype of ``thin``."""
        if wide.dtype == thin.dtype:
            return matmul(wide, thin)
        if _splits(wide, thin):
            multiplied = product if apart() else _product
            made = multiplied(wide, self._split(thin, PARTS, 1)).view(-1, 3, thin.shape[1])
            return made[:, 0] + made[:, 1] + made[:, 2] if apart() else made.sum(1)
        made = wide.new_empty(wide.shape[0], thin.shape[1], dtype=thin.dtype)
        for block in _blocks(wide, thin.dtype):
            multiply(wide[block].to(thin.dtype), thin, None, made[block])
        return made

    def add_(self, rows: Tensor, low: Tensor, thin: Tensor, scale: float) -> Tensor:
        """``rows += scale low @ thin``, rounded once."""
        if rows.dtype == low.dtype:
            return addmm(rows, low, thin, scale, into=True)
        if _splits(rows, low):
            return addmm(rows, *self._terms(low, thin), scale, into=True)
        for block in _blocks(rows, low.dtype):
            rows[block] = addmm(rows[block].to(low.dtype), low[block], thin, scale)
        return rows

    def added(self, rows: Tensor, low: Tensor, thin: Tensor, scale: float) -> Tensor:
        """``rows + scale low @ thin``, rounded once."""
        if rows.dtype == low.dtype:
            return addmm(rows, low, thin, scale)
        if _splits(rows, low):
            return addmm(rows, *self._terms(low, thin), scale)
        return self.add_(rows.clone(memory_format=torch.contiguous_format), low, thin, scale)

    def widened(self, low: Tensor, thin: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
        """``scale low @ thin`` in a dtype of its own."""
        if dtype == low.dtype:
            return matmul(low, thin).mul_(scale)
        made = low.new_empty(low.shape[0], thin.shape[1], dtype=dtype)
        if _splits(made, low):
            if apart():
                return made.copy_(product(*self._terms(low, thin)).mul_(scale))
            return made.addmm_(*self._terms(low, thin), beta=0, alpha=scale)
        for block in _blocks(made, low.dtype):
            made[block] = matmul(low[block], thin).mul_(scale)
        return made

    def gradient(self, left: Tensor, right: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
        """``scale left' @ right``, the gradient of a thin matrix, in its dtype."""
        return self.sums(left, right, dtype).mul_(scale)

    def sums(self, left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
        """``left' @ right`` in a dtype of its own."""
        if left.dtype == right.dtype == dtype:
            return left.t() @ right
        if _splits(left, right):
            made = _product(left.t(), self._split(right, PARTS, 1))
            return made.view(-1, 3, right.shape[1]).sum(1)
        if _splits(right, left):
            made = _product(self._split(left, PARTS, 1).t(), right)
            return made.view(3, -1, right.shape[1]).sum(0)
        total = left.new_zeros(left.shape[1], right.shape[1], dtype=dtype)
        wider = left if left.shape[1] > right.shape[1] else right
        for block in _blocks(wider, dtype):
            total.addmm_(left[block].to(dtype).t(), right[block].to(dtype))
        return total

    def _terms(self, low: Tensor, thin: Tensor) -> tuple[Tensor, Tensor]:
        """Two in bf16 whose product is that of two in fp32."""
        return self._split(low, LEFT, 1), self._split(thin, RIGHT, 0)


def _splits(wide: Tensor, thin: Tensor) -> bool:
    kinds = wide.dtype == torch.bfloat16 and thin.dtype == torch.float32
    return kinds and wide.numel() > 0 and has_out_dtype(wide.device.type, torch.bfloat16)


def _product(a: Tensor, b: Tensor) -> Tensor:
    return torch.mm(a, b, out_dtype=torch.float32)


def _blocks(wide: Tensor, dtype: torch.dtype) -> list[slice]:
    return list(row_blocks(wide.shape[0], wide.shape[1] * dtype.itemsize))


# --- one layer ---


def implement_lora_update(thin: LowRank) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Forward and backward of the contract."""

    def forward(base: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
        low = thin.narrow(as_rows(x), a.t())
        return thin.added(as_rows(base), low, b.t(), scale).view(base.shape)

    def backward(
        dy: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: float,
        needs_x: bool, needs_a: bool, needs_b: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        rows, upstream = as_rows(x), as_rows(dy)
        dx, da, db = x.new_empty(0), a.new_empty(0), b.new_empty(0)
        if needs_x or needs_a:
            low = thin.narrow(upstream, b)
            if needs_x:
                dx = thin.widened(low, a, scale, x.dtype).view(x.shape)
            if needs_a:
                da = thin.gradient(low, rows, scale, a.dtype)
        if needs_b:
            db = thin.gradient(upstream, thin.narrow(rows, a.t()), scale, b.dtype)
        return dx, da, db

    return forward, backward


lora_update = Implementation(*implement_lora_update(LowRank()))


# --- layers of one input ---


class Reached(NamedTuple):
    """An adapter that an upstream gradient came to; ``low = x a'``, ``back = dy b``."""

    a: Tensor
    b: Tensor
    scale: float
    low: Tensor
    dy: Tensor
    back: Tensor


def implement_lora_qkv(thin: LowRank) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Forward and backward of the contract."""

    def forward(
        x: Tensor, q_weight: Optional[Tensor], k_weight: Optional[Tensor],
        v_weight: Optional[Tensor], q_a: Optional[Tensor], q_b: Optional[Tensor],
        k_a: Optional[Tensor], k_b: Optional[Tensor], v_a: Optional[Tensor], v_b: Optional[Tensor],
        q_bias: Optional[Tensor], k_bias: Optional[Tensor], v_bias: Optional[Tensor],
        q_scale: float, k_scale: float, v_scale: float, q_weight_scale: Optional[Tensor],
        k_weight_scale: Optional[Tensor], v_weight_scale: Optional[Tensor],
        codes: Optional[Tensor], codes_scale: Optional[Tensor],
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        rows, lead, a = as_rows(x), x.shape[:-1], (q_a, k_a, v_a)
        own = (q_weight_scale, k_weight_scale, v_weight_scale)
        wide = _held((q_weight, k_weight, v_weight), own)
        left = shared_rows(x, codes, codes_scale, thin.to, *wide)
        given = [t for t in a if t is not None] or [rows.new_empty(0, rows.shape[1])]
        low = thin.narrow(rows, torch.cat(given).t())
        layers = zip(
            wide, (q_bias, k_bias, v_bias), (q_b, k_b, v_b),
            _columns(low, a), (q_scale, k_scale, v_scale), strict=True,
        )  # fmt: skip
        made = []
        for weight, bias, b, part, scale in layers:
            y = rows.new_empty(0) if weight is None else frozen_linear(rows, weight, bias, left)
            if b is not None:
                thin.add_(y, part, b.t(), scale)
            made.append(y if weight is None else y.view(*lead, y.shape[1]))
        return (*made, low.view(*lead, low.shape[1]))  # type: ignore[return-value]

    def backward(
        dq: Optional[Tensor], dk: Optional[Tensor], dv: Optional[Tensor], x: Tensor,
        q_weight: Optional[Tensor], k_weight: Optional[Tensor], v_weight: Optional[Tensor],
        q_a: Optional[Tensor], q_b: Optional[Tensor], k_a: Optional[Tensor], k_b: Optional[Tensor],
        v_a: Optional[Tensor], v_b: Optional[Tensor], low: Tensor,
        q_scale: float, k_scale: float, v_scale: float, q_weight_scale: Optional[Tensor],
        k_weight_scale: Optional[Tensor], v_weight_scale: Optional[Tensor], needs_x: bool,
        needs_q_a: bool,
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
        own = (q_weight_scale, k_weight_scale, v_weight_scale)
        dx, weights = x.new_empty(0), _held((q_weight, k_weight, v_weight), own)
        if needs_x:
            dx = _common_input_gradient(thin, upstream, weights, [a for a in adapters if a]).view(
                x.shape
            )
        das = _first_gradients(
            thin, rows, [o for o, n in zip(adapters, needs_a, strict=True) if o and n]
        )
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


def _common_input_gradient(
    thin: LowRank, upstream: Sequence[Optional[Tensor]], weights: Sequence[Optional[Weight]],
    adapters: Sequence[Reached],
) -> Tensor:  # fmt: skip
    """The sum of all layers' gradients of x; adapters of one scale add to it together."""
    dx: Tensor | None = None
    for dy, weight in zip(upstream, weights, strict=True):
        if dy is not None and weight is not None:
            dx = frozen_gradient(dy, weight, thin.to, dx)
    assert dx is not None
    for scale in dict.fromkeys(one.scale for one in adapters):
        same = [one for one in adapters if one.scale == scale]
        back, a = torch.cat([o.back for o in same], 1), torch.cat([o.a for o in same])
        thin.add_(dx, back, a, scale)
    return dx


def _first_gradients(thin: LowRank, rows: Tensor, adapters: Sequence[Reached]) -> list[Tensor]:
    """The gradients of the first factors, each in memory of its own."""
    if not adapters:
        return []
    made = thin.sums(torch.cat([one.back for one in adapters], 1), rows, adapters[0].a.dtype)
    own = made.split([one.a.shape[0] for one in adapters])
    return [part * one.scale for part, one in zip(own, adapters, strict=True)]


def _held(
    weights: Sequence[Optional[Tensor]], scales: Sequence[Optional[Tensor]]
) -> list[Optional[Weight]]:
    pairs = zip(weights, scales, strict=True)
    return [None if weight is None else held(weight, scale) for weight, scale in pairs]


def _columns(low: Tensor, a: Sequence[Optional[Tensor]]) -> tuple[Tensor, ...]:
    return torch.split(low, [0 if t is None else t.shape[0] for t in a], 1)


lora_qkv = Implementation(*implement_lora_qkv(LowRank()))


# --- a gated MLP ---


def implement_lora_mlp(
    kernels: CodedActivation, thin: LowRank
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Forward and backward of the contract over a backend's activation and thin products."""

    def forward(
        x: Tensor, gate_weight: Tensor, up_weight: Tensor, down_weight: Tensor,
        gate_a: Optional[Tensor], gate_b: Optional[Tensor], up_a: Optional[Tensor],
        up_b: Optional[Tensor], down_a: Optional[Tensor], down_b: Optional[Tensor],
        gate_bias: Optional[Tensor], up_bias: Optional[Tensor], down_bias: Optional[Tensor],
        gate_scale: float, up_scale: float, down_scale: float, activation: str,
        gate_weight_scale: Optional[Tensor], up_weight_scale: Optional[Tensor],
        down_weight_scale: Optional[Tensor], codes: Optional[Tensor],
        codes_scale: Optional[Tensor],
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        rows, lead = as_rows(x), x.shape[:-1]
        first, second = held(gate_weight, gate_weight_scale), held(up_weight, up_weight_scale)
        left = shared_rows(x, codes, codes_scale, thin.to, first, second)
        gate = adapted_layer(thin, rows, first, gate_bias, gate_a, gate_b, gate_scale, left)
        up = adapted_layer(thin, rows, second, up_bias, up_a, up_b, up_scale, left)
        third, left = held(down_weight, down_weight_scale), None
        if isinstance(third, Float8Rows):
            inner, left = kernels.coded(gate, up, activation, down_a is not None)
        else:
            inner = kernels.product(gate, up, activation)
        y = adapted_layer(thin, inner, third, down_bias, down_a, down_b, down_scale, left)
        return tuple(t.view(*lead, t.shape[-1]) for t in (y, gate, up))  # type: ignore[return-value]

    def backward(
        dy: Tensor, x: Tensor, gate_weight: Tensor, up_weight: Tensor, down_weight: Tensor,
        gate_a: Optional[Tensor], gate_b: Optional[Tensor], up_a: Optional[Tensor],
        up_b: Optional[Tensor], down_a: Optional[Tensor], down_b: Optional[Tensor],
        gate: Tensor, up: Tensor, gate_scale: float, up_scale: float, down_scale: float,
        activation: str, gate_weight_scale: Optional[Tensor], up_weight_scale: Optional[Tensor],
        down_weight_scale: Optional[Tensor], needs_x: bool, needs_gate_a: bool,
        needs_gate_b: bool, needs_up_a: bool,
        needs_up_b: bool, needs_down_a: bool, needs_down_b: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        rows, upstream = as_rows(x), as_rows(dy)
        wide = held(down_weight, down_weight_scale)
        dinner, low = input_gradient(thin, upstream, wide, down_a, down_b, down_scale)
        needs = (needs_down_a, needs_down_b)
        columns = (gate_weight_scale, up_weight_scale) if needs_x else (None, None)
        wanted = [  # by adapters, and by a weight that is not in FP8
            b is not None or (needs_x and scale is None)
            for b, scale in ((gate_b, gate_weight_scale), (up_b, up_weight_scale))
        ]
        made = kernels.coded_gradients(
            dinner, as_rows(gate), as_rows(up), activation, columns, (wanted[0], wanted[1]),
            any(needs),
        )  # fmt: skip
        dgate, dup, inner, gate_rows, up_rows = made
        ddown = adapter_gradients(thin, inner, upstream, low, down_a, down_b, down_scale, *needs)
        del inner, dinner, made
        wide = held(gate_weight, gate_weight_scale)
        dx, low = input_gradient(
            thin, dgate, wide, gate_a, gate_b, gate_scale, None, needs_x, gate_rows
        )
        needs = (needs_gate_a, needs_gate_b)
        dgates = adapter_gradients(thin, rows, dgate, low, gate_a, gate_b, gate_scale, *needs)
        del dgate, gate_rows
        wide = held(up_weight, up_weight_scale)
        dx, low = input_gradient(thin, dup, wide, up_a, up_b, up_scale, dx, needs_x, up_rows)
        dups = adapter_gradients(thin, rows, dup, low, up_a, up_b, up_scale, needs_up_a, needs_up_b)
        return (dx.view(x.shape) if needs_x else dx, *dgates, *dups, *ddown)

    return forward, backward


def adapted_layer(
    thin: LowRank, rows: Tensor, weight: Weight, bias: Optional[Tensor], a: Optional[Tensor],
    b: Optional[Tensor], scale: float, left: Optional[Float8Rows] = None,
) -> Tensor:  # fmt: skip
    """A linear layer's output, with what its adapter adds; ``left`` are its rows in FP8."""
    y = frozen_linear(rows, weight, bias, left)
    if a is None or b is None:
        return y
    return thin.add_(y, thin.narrow(rows, a.t()), b.t(), scale)


def input_gradient(
    thin: LowRank, dy: Tensor, weight: Weight, a: Optional[Tensor], b: Optional[Tensor],
    scale: float, into: Tensor | None = None, needed: bool = True,
    left: Optional[Float8Rows] = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gradient of a layer's input, added to ``into``, and ``dy @ b``; ``left``: dy in FP8."""
    low = dy.new_empty(0) if b is None else thin.narrow(dy, b)
    if not needed:
        return dy.new_empty(0), low
    dx = frozen_gradient(dy, weight, thin.to, into, left)
    return (dx if a is None else thin.add_(dx, low, a, scale)), low


def adapter_gradients(
    thin: LowRank, rows: Tensor, dy: Tensor, low: Tensor, a: Optional[Tensor],
    b: Optional[Tensor], scale: float, needs_a: bool, needs_b: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gradients of a and b, empty where nobody needs them."""
    da, db = dy.new_empty(0), dy.new_empty(0)
    if a is not None and b is not None:
        da, db = a.new_empty(0), b.new_empty(0)
        if needs_a:
            da = thin.gradient(low, rows, scale, a.dtype)
        if needs_b:
            db = thin.gradient(dy, thin.narrow(rows, a.t()), scale, b.dtype)
    return da, db


lora_mlp = Implementation(*implement_lora_mlp(ReferenceActivation(), LowRank()))


OPERATORS = {
    "lora_update": lora_update,
    "lora_qkv": lora_qkv,
    "lora_mlp": lora_mlp,
}
