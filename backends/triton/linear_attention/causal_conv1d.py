"""Depthwise causal convolution, ``y = u`` or ``silu(u)``; convolution_kernels.py has the maths."""

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
    _convolution_backward_kernel,
)
from liger_multi.dispatch.launch import DeviceInfo, launch_config


def backward_config(
    info: DeviceInfo,
    rows: int,
    length: int,
    cols: int,
    width: int,
    element_bytes: int,
    packed: bool,
) -> ConvolutionConfig:
    """8 bytes a thread, whose sums need registers; long chunks, each of which leaves a partial."""
    channels = max(1, (8 if width <= 4 else 4) // element_bytes)
    return convolution_config(
        info, (rows, length, cols), channels, 256, (256, 2 if packed else 4, 3)
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
    """One launch."""
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
    """One launch, and one for every sum of partials."""
    (batch, length, cols), width = x.shape, weight.shape[1]
    dx, dstate = x.new_empty(x.shape if needs_x else 0), x.new_empty(0)
    if initial_state is not None:
        shape = initial_state.shape if needs_initial_state else (0,)
        allocate = initial_state.new_empty if x.numel() else initial_state.new_zeros
        dstate = allocate(shape)
    total = Partials(x, weight, bias, needs_weight, needs_bias)
    if x.numel():
        dy, x = adjacent(dy), adjacent(x)
        args = arguments(weight, bias, initial_state, segments)
        k = launch_config(
            "causal_conv1d.backward",
            backward_config,
            x.device,
            rows=batch * length,
            length=length,
            cols=cols,
            width=width,
            element_bytes=x.element_size(),
            packed=args.ids is not None,
        )
        chunks = cdiv(length, k.rows)
        outs = (dx if dx.numel() else None, dstate if dstate.numel() else None)
        strides = (dy.stride(0), dy.stride(1), x.stride(0), x.stride(1))
        launch(
            _convolution_backward_kernel,
            programs(batch * chunks, cols, width, k),
            (dy, x, *args, *outs, *total.make(batch * chunks), *strides, length, cols, chunks),
            (width, activation == "silu", k.rows, k.step, k.block, k.stages),
            k.num_warps,
        )
    return dx, *total.gradients(), dstate
