"""``u[t] = bias + sum of weight[:, W - 1 - j] x[t - j]``, ``y = u`` or ``silu(u)``."""

import torch
from torch import Tensor

from liger_multi.reference.common.chunking import statistics_dtype
from liger_multi.reference.linear_attention.convolution import Sums, blocks_of, filter_of, window_of


def forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    segments: Tensor | None,
    activation: str,
) -> Tensor:
    """Block by block of tokens."""
    taps_of = filter_of(weight, bias, segments, statistics_dtype(x.dtype))
    y = x.new_empty(x.shape)
    for block in blocks_of(x):
        u = taps_of.sums(taps_of.taps(window_of(x, initial_state, block, taps_of.before), block))
        y[:, block] = u * torch.sigmoid(u) if activation == "silu" else u
    return y


def backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    segments: Tensor | None,
    activation: str,
    needs_x: bool,
    needs_weight: bool,
    needs_bias: bool,
    needs_initial_state: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``dx[t] = sum of weight[:, W - 1 - j] du[t + j]``, also of the initial state."""
    acc_dtype = statistics_dtype(x.dtype)
    taps_of = filter_of(weight, bias, segments, acc_dtype)
    dx, state = x.new_empty(x.shape if needs_x else 0), x.new_empty(0)
    if initial_state is not None:
        state_shape = initial_state.shape if needs_initial_state else (0,)
        state = initial_state.new_empty(state_shape)
    total = Sums(taps_of, needs_weight, needs_bias)
    pending, reach = (
        x.new_zeros(x.shape[0], taps_of.before, x.shape[2], dtype=acc_dtype),
        taps_of.before,
    )

    def write(rows: Tensor, first: int) -> None:
        early = min(max(0, -first), rows.shape[1])
        if needs_initial_state and initial_state is not None:
            state[:, first + reach : first + reach + early] = rows[:, :early]
        if needs_x:
            dx[:, first + early : first + rows.shape[1]] = rows[:, early:]

    for block in blocks_of(x):
        taps = taps_of.taps(window_of(x, initial_state, block, reach), block)
        du = dy[:, block].to(acc_dtype)
        if activation == "silu":
            u = taps_of.sums(taps)
            p = torch.sigmoid(u)
            du = du * p * (1 + u * (1 - p))
        total.add(du, taps)
        if needs_x or needs_initial_state:
            dx_block, pending = taps_of.transposed(du, block, pending)
            write(dx_block, block.start - reach)
    write(pending, x.shape[1] - reach)
    return dx, *total.gradients(weight, x if bias is None else bias), state
