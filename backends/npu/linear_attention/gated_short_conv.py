"""``y = c u`` of the convolution u of ``b v``: an Ascend kernel in each direction."""

from torch import Tensor

from liger_multi.backends.npu.linear_attention.convolution import (
    arguments,
    convolve,
    gradients,
    supports,
)

supports = supports


def forward(x: Tensor, weight: Tensor, bias: Tensor | None, segments: Tensor | None) -> Tensor:
    """One launch; packed sequences add a few small ones that read their ids."""
    return convolve(x, arguments(weight, bias, None, segments), False, True)


def backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    segments: Tensor | None,
    needs_x: bool,
    needs_weight: bool,
    needs_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """One launch, and sums of its partial gradients of weight and bias."""
    needs = (needs_x, needs_weight, needs_bias, False)
    return gradients(dy, x, weight, bias, None, segments, silu=False, gated=True, needs=needs)[:3]
