"""Launches of depthwise causal convolutions; convolution_kernels.py has the maths."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from liger_multi.backends.triton.common.launching import launch
from liger_multi.backends.triton.common.rows import (
    cdiv,
    checked_cols,
    power_of_2,
    sum_partials,
    warps,
)
from liger_multi.backends.triton.linear_attention.convolution_kernels import (
    _convolution_forward_kernel,
)
from liger_multi.dispatch.launch import DeviceInfo, launch_config
from liger_multi.reference.common.strict import by_rows

WIDEST = 8  # taps; a program's registers hold three vectors for each


@dataclass(frozen=True)
class ConvolutionConfig:
    """``rows`` tokens by ``block`` channels a program; ``step`` tokens are loaded at a time."""

    rows: int
    step: int
    block: int
    num_warps: int
    stages: int


def convolution_config(
    info: DeviceInfo, shape: tuple[int, int, int], each: int, threads: int, k: tuple[int, int, int]
) -> ConvolutionConfig:
    """``each`` channels a thread. Of k, fewer rows where sequences are short or programs few.

    Gradients of the initial state want at least WIDEST - 1 of them.
    """
    rows, length, cols = shape
    rows = length if by_rows() else rows  # sums at the seams of pieces have another order
    rows_per_program, step, stages = k
    rows_per_program = min(rows_per_program, max(WIDEST, power_of_2(length)))
    block = min(power_of_2(cols), each * threads)
    while (
        rows_per_program > 16 and cdiv(rows, rows_per_program) * cdiv(cols, block) < 2 * info.cores
    ):
        rows_per_program //= 2
    num_warps = warps(block // each, info.warp_size)
    return ConvolutionConfig(rows_per_program, step, block, num_warps, stages)


def forward_config(
    info: DeviceInfo,
    rows: int,
    length: int,
    cols: int,
    width: int,
    element_bytes: int,
    packed: bool,
) -> ConvolutionConfig:
    """16 bytes a thread and token, 8 where many taps need registers; loads two steps ahead.

    Args:
        info: Limits of the device.
        rows: Tokens of all rows.
        length: Tokens of one row.
        cols: Channels.
        width: Taps of the filter.
        element_bytes: Of x, an element.
        packed: Whether there are ids.
    """
    each = max(1, (16 if width <= 4 else 8) // element_bytes)
    return convolution_config(info, (rows, length, cols), each, 64, (64, 4, 3))


def gated_forward_config(
    info: DeviceInfo,
    rows: int,
    length: int,
    cols: int,
    width: int,
    element_bytes: int,
    packed: bool,
) -> ConvolutionConfig:
    """Three inputs: 8 bytes of each a thread, and short chunks."""
    return convolution_config(
        info, (rows, length, cols), max(1, 8 // element_bytes), 128, (16, 8, 1)
    )


# --- launchers ---


class Arguments(NamedTuple):
    """What the kernels read in addition to x, in the form that they take."""

    weight: Tensor
    bias: Tensor | None
    state: Tensor | None
    ids: Tensor | None


def adjacent(x: Tensor) -> Tensor:
    """``(B, T, C)`` with adjacent channels; copied only where they are not."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _dense(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def arguments(
    weight: Tensor, bias: Tensor | None, state: Tensor | None, ids: Tensor | None
) -> Arguments:
    """What the kernels read in addition to x, in the form that they take."""
    return Arguments(weight.contiguous(), _dense(bias), _dense(state), _dense(ids))


def programs(chunks: int, cols: int, width: int, k: ConvolutionConfig) -> int:
    """The number of programs, one for each chunk and block of channels."""
    checked_cols(cols * max(3, width))  # offsets in a token and in the weight fit into 32 bits
    return chunks * cdiv(cols, k.block)


def convolve(x: Tensor, args: Arguments, silu: bool, gated: bool) -> Tensor:
    """The convolution in one launch, with its activation or its gates."""
    batch, length, cols = x.shape
    cols, width = cols // 3 if gated else cols, args.weight.shape[1]
    y = x.new_empty((batch, length, cols))
    if y.numel():
        x = adjacent(x)
        name = "gated_short_conv.forward" if gated else "causal_conv1d.forward"
        k = launch_config(
            name,
            gated_forward_config if gated else forward_config,
            x.device,
            rows=batch * length,
            length=length,
            cols=cols,
            width=width,
            element_bytes=x.element_size(),
            packed=args.ids is not None,
        )
        chunks = cdiv(length, k.rows)
        launch(
            _convolution_forward_kernel,
            programs(batch * chunks, cols, width, k),
            (x, *args, y, x.stride(0), x.stride(1), length, cols, chunks),
            (width, silu, gated, k.rows, k.step, k.block, k.stages),
            k.num_warps,
        )
    return y


class Partials:
    """fp32 sums of every program's tokens for the gradients of weight and bias."""

    def __init__(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        needs_weight: bool,
        needs_bias: bool,
    ) -> None:
        self.like, self.of_weight, self.of_bias = x, weight, bias
        self.needs = (needs_weight, needs_bias and bias is not None)
        self.weight: Tensor | None = None
        self.bias: Tensor | None = None

    def make(self, programs: int) -> tuple[Tensor | None, Tensor | None]:
        """Memory for so many programs of every channel."""
        parts = [
            self.like.new_empty((programs, size), dtype=torch.float32) if is_needed else None
            for is_needed, size in zip(
                self.needs, (self.of_weight.numel(), len(self.of_weight)), strict=True
            )
        ]
        self.weight, self.bias = parts
        return self.weight, self.bias

    def gradients(self) -> tuple[Tensor, Tensor]:
        """Sums of all programs; zeros where there were none; empty if not needed."""
        tensor = self.like if self.of_bias is None else self.of_bias
        dweight, dbias = self.of_weight.new_empty(0), tensor.new_empty(0)
        if self.needs[0]:
            shape = self.of_weight.shape
            dweight = (
                self.of_weight.new_zeros(shape)
                if self.weight is None
                else (sum_partials(self.weight, self.of_weight.dtype).view(shape))
            )
        if self.needs[1]:
            dbias = (
                tensor.new_zeros(tensor.shape)
                if self.bias is None
                else (sum_partials(self.bias, tensor.dtype))
            )
        return dweight, dbias


def supports(weight: Tensor) -> str | None:
    """Why a filter is refused, or None."""
    if weight.shape[1] > WIDEST:
        return f"takes filters of up to {WIDEST} taps, got {weight.shape[1]}"
    return None
