"""A mixture of frozen experts with adapters: grouped GEMMs, and thin ones for the adapters.

Rows are sorted by expert as in :mod:`.fused_moe`, whose passes and wide GEMMs these are. For every
layer, with a (r, in) and b (out, r) of the row's expert,

    forward     y += scale (x a') b'
    backward    dx += scale (dy b) a,  da = scale (dy b)' x,  db = scale dy' (x a').

``x a'`` and ``dy b`` are grouped GEMMs with r columns. What they add to the wide GEMM's result is
one pass over it, which holds a tile of the expert's thin matrix; it is written back in its place.
Gradients of factors are the grouped gradients of fused_moe with r rows or columns. All of rank r is
fp32. Beside rows in bf16 it is three bf16 parts, made in registers: what is wide is read as it is.

The layer after the activation sees rows that are not weighted by the routing, and its backward rows
that are: d = dy w + scale (dy b) a has no weight, so that drouting = sum of d act(gate) up. The
weighted act(gate) up stands on one side of both gradients of factors.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_multi.backends.triton.common.launching import launch
from liger_multi.backends.triton.common.rows import (
    LONGEST_ROW,
    assume_cols,
    bf16_parts,
    cdiv,
    power_of_2,
    round_to,
)
from liger_multi.backends.triton.experts.fused_moe import (
    PAIRS_BYTES,
    activated,
    activation_of,
    add_bias_share,
    columns,
    combined_product,
    dense,
    inner_gradients,
    supports,
)
from liger_multi.backends.triton.experts.grouped import (
    ProductConfig,
    choice,
    dot,
    product,
    weight_gradient,
)
from liger_multi.backends.triton.experts.pairs import Groups, RowOperand, sorted_pairs
from liger_multi.dispatch.launch import DeviceInfo

__all__ = ["backward", "forward", "supports"]

# --- what an adapter adds ---


@triton.jit
def _thin_dot(low, w, total, PRODUCT: tl.constexpr, PRODUCTS: tl.constexpr):
    """``total`` and one of the products of bf16 parts that make ``low @ w``, the largest last.

    Of fp32 two parts count, 16 bits: the sum is rounded to 8 bits with the row that it is added to.
    Two products of fp32 beside bf16, three of two in fp32, else one.
    """
    if PRODUCTS == 1:
        return dot(low, w, total)
    elif PRODUCTS == 2:
        return dot(bf16_parts(low)[1 - PRODUCT], w, total)
    else:
        return dot(bf16_parts(low)[PRODUCT == 0], bf16_parts(w)[PRODUCT == 1], total)


@triton.jit
def _grouped_update_kernel(
    rows_ptr,
    low_ptr,
    w_ptr,
    bias_ptr,
    tiles_ptr,
    offsets_ptr,
    w_stride,
    n_stride,
    r_stride,
    cols,
    rank,
    steps,
    scale,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    STEPS: tl.constexpr,
    PRODUCTS: tl.constexpr,
):
    """Add a thin GEMM in place: rows[s, n] += scale sum over r of low[s, r] w[group(s), n, r].

    With ``bias_ptr``, the bias of the group is added as well.

    Program: BLOCK_M sorted rows of one group by BLOCK_N columns, by the table of tiles; programs
    past its last tile return.
    Reads low and the group's w, BLOCK_R of the rank at a time, and its tile of the rows, which it
    writes back, rounded once. Products of parts have loops in turn: compilers get several dots of
    one turn wrong (ci.static.patterns). One step is no loop, and reads its factors once.
    """
    tile = tl.program_id(0) // steps
    group = tl.load(tiles_ptr + 2 * tile)
    if group < 0:
        return
    stop = tl.load(offsets_ptr + group + 1)
    first, m = tl.load(tiles_ptr + 2 * tile + 1), tl.arange(0, BLOCK_M)
    first_col = (tl.program_id(0) % steps) * BLOCK_N
    # a tile's rows span less than 2 GiB
    assume_cols(cols, LONGEST_ROW // (2 * BLOCK_M))
    assume_cols(first_col, LONGEST_ROW // (2 * BLOCK_M))
    col, r = first_col + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_R)
    inside, here = (col < cols)[None, :], (first + m < stop)[:, None]
    low_ptr += first.to(tl.int64) * rank
    w_ptr += group.to(tl.int64) * w_stride
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for part in tl.static_range(PRODUCTS):
        for step in tl.range(0, STEPS):
            k = step * BLOCK_R + r
            low_ptrs = low_ptr + (m[:, None] * rank + k[None, :])
            low = tl.load(low_ptrs, mask=here & (k < rank)[None, :], other=0.0)
            w_ptrs = w_ptr + (col[None, :] * n_stride + k[:, None] * r_stride)
            w = tl.load(w_ptrs, mask=(k < rank)[:, None] & inside, other=0.0)
            total = _thin_dot(low, w, total, part, PRODUCTS)
    rows_ptr += first.to(tl.int64) * cols
    ptrs, mask = rows_ptr + (m[:, None] * cols + col[None, :]), here & inside
    y = tl.load(ptrs, mask=mask, other=0.0).to(tl.float32) + scale * total
    if bias_ptr is not None:
        bias_ptr += group.to(tl.int64) * cols
        y += tl.load(bias_ptr + col, mask=col < cols, other=0.0).to(tl.float32)[None, :]
    tl.store(ptrs, round_to(y, rows_ptr.dtype.element_ty), mask=mask)


def update_config(
    info: DeviceInfo, rows: int, groups: int, cols: int, inner: int, element_bytes: int
) -> ProductConfig:
    """64 by 128 elements a program, 64 bytes of a row a thread; fewer rows where groups are few."""
    block_m = max(16, min(64, power_of_2(cdiv(5 * rows, 4 * groups))))
    block_n = max(16, min(128 if element_bytes == 2 else 64, power_of_2(cols)))
    threads = max(info.warp_size, min(128, block_m * block_n // 32))
    return ProductConfig(
        block_m, block_n, max(16, min(32, power_of_2(inner))), 1, threads // info.warp_size
    )


def add_(
    rows: Tensor,
    projected: Tensor,
    w: Tensor,
    scale: float,
    groups: Groups,
    bias: Tensor | None = None,
) -> None:
    """``rows += scale projected @ w' + bias`` with the matrices (E, N, r) of their groups."""
    cols, rank = rows.shape[1], projected.shape[1]
    k = choice("lora_moe.update", update_config, rows, groups, cols, rank)
    tiles, steps = groups.tiles(k.block_m), cdiv(cols, k.block_n)
    counts = {torch.bfloat16: 2, torch.float32: 3} if rows.dtype == torch.bfloat16 else {}
    products = counts.get(w.dtype, 1)
    launch(
        _grouped_update_kernel,
        tiles.shape[0] * steps,
        (
            rows,
            projected,
            w,
            bias,
            tiles,
            groups.offsets,
            *w.stride(),
            cols,
            rank,
            steps,
            float(scale),
        ),
        (k.block_m, k.block_n, k.block_k, cdiv(rank, k.block_k), products),
        k.num_warps,
    )


def adding(
    projected: Tensor, w: Tensor, scale: float, groups: Groups
) -> Callable[[Tensor, slice], None]:
    """What adds ``scale projected @ w'`` to some columns of rows, in place."""

    def add(rows: Tensor, cols: slice) -> None:
        add_(rows, projected, w[:, cols], scale, groups)

    return add


@dataclass
class Adapter:
    """The factors of all experts of a layer: a (E, r, in) and b (E, out, r)."""

    a: Tensor
    b: Tensor
    scale: float

    def low(self, x: RowOperand, groups: Groups) -> Tensor:
        """``x a'``."""
        return product("lora_moe.low", x, self.a, groups, torch.float32)

    def back(self, dy: RowOperand, groups: Groups) -> Tensor:
        """``dy b``."""
        return product("lora_moe.back", dy, self.b.mT, groups, torch.float32)

    def gradients(
        self,
        x: RowOperand,
        dy: RowOperand,
        dprojected: Tensor,
        groups: Groups,
        needs: tuple[bool, bool],
    ) -> tuple[Tensor, Tensor]:
        """The gradients of a and b; empty if not needed."""
        da, db = self.a.new_empty(0), self.b.new_empty(0)
        if needs[0]:
            da = self._gradient("lora_moe.da", RowOperand(dprojected), x, groups).to(da.dtype)
        if needs[1]:
            projected = RowOperand(self.low(x, groups))
            db = self._gradient("lora_moe.db", dy, projected, groups).to(db.dtype)
        return da, db

    def _gradient(self, name: str, left: RowOperand, right: RowOperand, groups: Groups) -> Tensor:
        parts = 3 if self.a.dtype == torch.float32 else 2  # of which a gradient keeps 8 to 11 bits
        product = weight_gradient(name, left, right, groups, False, torch.float32, parts)
        return product.mul_(self.scale)


def _adapter(a: Tensor | None, b: Tensor | None, scale: float) -> Adapter | None:
    """PEFT keeps b with the experts last; a copy of r columns lets tiles be read in lines."""
    return None if a is None or b is None else Adapter(a.contiguous(), b.contiguous(), scale)


# --- launchers ---


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
    """Sort, two GEMMs and what adapters add to them, a weighted sum."""
    first, second = (w.mT if transposed else w for w in (gate_up_weight, down_weight))
    up, down = _adapter(gate_up_a, gate_up_b, gate_up_scale), _adapter(down_a, down_b, down_scale)
    keeps_gate_up = needs_x or needs_routing or needs_gate_up_a or needs_gate_up_b
    keeps_gate_up = keeps_gate_up or needs_down_a or needs_down_b
    index = index.contiguous()
    order, inverse, offsets = sorted_pairs(index, first.shape[0])
    if not order.numel() or not x.numel():
        gate_up = x.new_zeros(order.numel() if keeps_gate_up else 0, first.shape[1])
        return x.new_zeros(x.shape, dtype=y_dtype), gate_up, order, offsets
    groups = Groups(offsets, order, index.shape[1], inverse)
    activation_options = (activation, (limit, alpha, up_offset), interleaved)
    rows, bias = RowOperand(columns(x), gather=True), dense(gate_up_bias)
    if up is None:
        inner, gate_up = activated(
            rows, first, bias, index, groups, keeps_gate_up, activation_options
        )
    else:
        gate_up = product("lora_moe.up", rows, first, groups)
        add_(gate_up, up.low(rows, groups), up.b, up.scale, groups, bias)
        rows.cached = None
        inner = activation_of(gate_up, None, index, groups, activation_options)
        gate_up = gate_up if keeps_gate_up else gate_up[:0]
    rows = RowOperand(inner)
    update = None if down is None else adding(down.low(rows, groups), down.b, down.scale, groups)
    factors = (groups, routing.contiguous(), down_bias, index, y_dtype, PAIRS_BYTES)
    y = combined_product("fused_moe.down", rows, second, *factors, update)
    return y, gate_up, order, offsets


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
    """Two wide GEMMs, thin ones for the adapters, and one pass over the activation."""
    dy = dy.to(gate_up.dtype)
    needs_up, needs_down = (needs_gate_up_a, needs_gate_up_b), (needs_down_a, needs_down_b)
    factors = (gate_up_a, gate_up_b, down_a, down_b)
    factor_gradients = [dy.new_empty(0) if t is None else t.new_empty(0) for t in factors]
    if not order.numel() or not dy.numel():
        outputs = zip(factor_gradients, factors, (*needs_up, *needs_down), strict=True)
        zeros = [t.new_zeros(g.shape) if g is not None and need else t for t, g, need in outputs]
        dx = dy.new_zeros(dy.shape if needs_x else 0)
        return dx, routing.new_zeros(routing.shape if needs_routing else 0), *zeros  # type: ignore[return-value]
    up, down = _adapter(gate_up_a, gate_up_b, gate_up_scale), _adapter(down_a, down_b, down_scale)
    groups = Groups(offsets, order, index.shape[1])
    index, routing = index.contiguous(), routing.contiguous()
    upstream = RowOperand(columns(dy), gather=True)
    second = down_weight if transposed else down_weight.mT
    dproduct, dprojected = product("fused_moe.dproduct", upstream, second, groups), None
    upstream.cached = None
    if down is not None:
        dprojected = down.back(upstream, groups)
        add_(dproduct, dprojected, down.a.mT, down.scale, groups)
    activation_options = (activation, (limit, alpha, up_offset), interleaved)
    needs = (needs_routing, needs_x or any(needs_up), any(needs_down))
    dgate_up, drouting = inner_gradients(
        dproduct, gate_up, routing, groups, activation_options, *needs
    )
    if down is not None and dprojected is not None:
        factor_gradients[2:] = down.gradients(
            RowOperand(dproduct), upstream, dprojected, groups, needs_down
        )
    del dproduct
    if needs_routing and down_bias is not None:
        add_bias_share(drouting, upstream.source, down_bias.contiguous(), index, groups)
    dx = dy.new_empty(0)
    if dgate_up is not None:
        rows = RowOperand(dgate_up)
        back = None if up is None else up.back(rows, groups)
        if up is not None and back is not None and x is not None:
            sides = (RowOperand(columns(x), gather=True), rows)
            factor_gradients[:2] = up.gradients(*sides, back, groups, needs_up)
        if needs_x and gate_up_weight is not None:
            transposed_weight = gate_up_weight if transposed else gate_up_weight.mT
            update = None
            if up is not None and back is not None:
                update = adding(back, up.a.mT, up.scale, groups)
            sums = (groups, None, None, index, dy.dtype, PAIRS_BYTES)
            dx = combined_product("fused_moe.dx", rows, transposed_weight, *sums, update)
    return dx, drouting, *factor_gradients  # type: ignore[return-value]
