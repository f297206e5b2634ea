"""``y = u`` or ``silu(u)``: an Ascend kernel in each direction."""

from torch import Tensor

from liger_multi.backends.npu.linear_attention.convolution import (
    arguments,
    convolve,
    gradients,
    supports,
)

supports = supports


def forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    segments: Tensor | None,
    activation: str,
) -> Tensor:
    """One launch; packed sequences add a few small ones that read their ids."""
    args = arguments(weight, bias, initial_state, segments)
    return convolve(x, args, activation == "silu", False)


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
    """One launch, and sums of its partial gradients of weight and bias."""
    needs = (needs_x, needs_weight, needs_bias, needs_initial_state)
    silu = activation == "silu"
    return gradients(dy, x, weight, bias, initial_state, segments, silu, gated=False, needs=needs)
