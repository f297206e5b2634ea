"""Gated convolution, ``y = c u`` of the convolution u of ``b v``; see convolution_kernels.py."""

from torch import Tensor

from liger_multi.backends.triton.common.launching import launch
from liger_multi.backends.triton.common.rows import cdiv
from liger_multi.backends.triton.linear_attention.convolution import (
    ConvolutionConfig,
    Partials,
    adjacent,
    arguments,
    convolution_config,
    convolve,
    programs,
    supports,
)
from liger_multi.backends.triton.linear_attention.convolution_kernels import (
    _gated_convolution_backward_kernel,
)
from liger_multi.dispatch.launch import DeviceInfo, launch_config


def gated_backward_config(
    info: DeviceInfo,
    rows: int,
    length: int,
    cols: int,
    width: int,
    element_bytes: int,
    packed: bool,
) -> ConvolutionConfig:
    """Four inputs, and gates that wait as long as their gradients."""
    channels = max(1, (8 if width <= 4 else 4) // element_bytes)
    return convolution_config(
        info, (rows, length, cols), channels, 256, (128, 1 if packed else 2, 1)
    )


supports = supports


def forward(x: Tensor, weight: Tensor, bias: Tensor | None, segments: Tensor | None) -> Tensor:
    """One launch."""
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
    """One launch, and one for every sum of partials."""
    (batch, length, cols), width = dy.shape, weight.shape[1]
    dx = x.new_empty(x.shape if needs_x else 0)
    total = Partials(x, weight, bias, needs_weight, needs_bias)
    if x.numel():
        dy, x = adjacent(dy), adjacent(x)
        args = arguments(weight, bias, None, segments)
        k = launch_config(
            "gated_short_conv.backward",
            gated_backward_config,
            x.device,
            rows=batch * length,
            length=length,
            cols=cols,
            width=width,
            element_bytes=x.element_size(),
            packed=args.ids is not None,
        )
        chunks = cdiv(length, k.rows)
        strides = (dy.stride(0), dy.stride(1), x.stride(0), x.stride(1))
        launch(
            _gated_convolution_backward_kernel,
            programs(batch * chunks, cols, width, k),
            (
                dy,
                x,
                args.weight,
                args.bias,
                args.ids,
                dx if needs_x else None,
                *total.make(batch * chunks),
                *strides,
                length,
                cols,
                chunks,
            ),
            (width, k.rows, k.step, k.block, k.stages),
            k.num_warps,
        )
    return dx, *total.gradients()
