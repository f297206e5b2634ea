"""Causal probabilities of given scores around PyTorch's convolution (arXiv:2504.00927).

    p = softmax of what a row sees, 0 past the diagonal;  y = conv(p), 0 past the diagonal
    dp = conv'(dy up to the diagonal);  dscores = p (dp - sum p dp)   of sparsemax as softmax.py

cuDNN's convolutions of 2-byte numbers take heads on the last axis, and would transpose every tensor
by passes of their own. There, the kernels that copy the lower triangle anyway transpose it as well.

What is past the diagonal is not used: of the scores, of dy, p and dp the kernels read about half,
of the convolution's y nothing. They are in multi_token_attention_kernels.py.
Sparsemax is that of sparsemax.py, of scores that are -inf past the diagonal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

import torch
from torch import Tensor
from torch.nn.functional import conv2d

from liger_multi.backends.triton.attention.multi_token_attention_kernels import (
    GROUP,
    _multi_token_backward_kernel,
    _multi_token_backward_wide_kernel,
    _multi_token_forward_kernel,
    _multi_token_forward_wide_kernel,
    _multi_token_lower_kernel,
    _multi_token_turn_kernel,
    _multi_token_zero_kernel,
)
from liger_multi.backends.triton.common.launching import launch
from liger_multi.backends.triton.common.rows import (
    cdiv,
    checked_cols,
    empty_contiguous,
    power_of_2,
    tile_rows,
    warps,
)
from liger_multi.backends.triton.cross_entropy import sparsemax
from liger_multi.backends.triton.cross_entropy.softmax import tile_config
from liger_multi.dispatch.launch import DeviceInfo, launch_config

FAR = 2**31  # bytes that a tile of all heads may span


@dataclass(frozen=True)
class ZeroConfig:
    """Columns a step of as many rows as a group has columns, and warps a program."""

    block: int
    num_warps: int


def zero_config(info: DeviceInfo, rows: int, cols: int) -> ZeroConfig:
    """Steps of 2048 elements, 16 a thread."""
    return ZeroConfig(2048 // GROUP.value, warps(128, info.warp_size))


@dataclass(frozen=True)
class TransposeConfig:
    """``block`` columns of all heads a program; none where convolutions keep the layout."""

    block: int
    num_warps: int


def transpose_config(
    info: DeviceInfo, heads: int, others: int, size: int, unit: int
) -> TransposeConfig:
    """Tiles of 4096 elements, where convolutions are cuDNN's and have instructions for them.

    ``unit``: what numbers of heads are multiples of. With 8 heads the gradients of a convolution
    gain a third by it, but forward takes half as long again (H200, 1x8x4096).
    """
    fit = all(n % unit == 0 and 0 < n <= 128 for n in (heads, others))
    if not (info.arch.startswith("sm") and size == 2 and fit):
        return TransposeConfig(0, 1)
    return TransposeConfig(4096 // power_of_2(max(heads, others)), warps(128, info.warp_size))


def supports(weight: Tensor) -> str | None:
    """No fp64: probabilities are fp32 inside."""
    double = weight.element_size() == 8
    return "its probabilities are float32 inside, got float64" if double else None


# --- launchers ---


def _by_rows(x: Tensor) -> Tensor:
    """``x`` with adjacent columns."""
    return x if x.stride(3) == 1 or x.shape[3] == 1 else x.contiguous()


def _places(x: Tensor) -> tuple[int, ...]:
    """What kernels need to find the rows of ``x`` (B, C, R, S)."""
    return (*x.stride()[:3], *x.shape[1:])


def _softmax(scores: Tensor) -> Tensor:
    p, x = empty_contiguous(scores), _by_rows(scores)
    if not p.numel():
        return p
    images, (rows, cols) = x.shape[0] * x.shape[1], x.shape[2:]
    k = launch_config(
        "multi_token_attention.forward", tile_config, x.device, rows=rows, cols=cols, arrays=1
    )
    if k.block < cols:
        launch(
            _multi_token_forward_wide_kernel, images * rows, (x, p, *_places(x)), (k.block,),
            k.num_warps,
        )  # fmt: skip
        return p
    tall = tile_rows(k.rows, x.stride(2), cols)
    launch(
        _multi_token_forward_kernel, images * cdiv(rows, tall), (x, p, *_places(x)),
        (tall, k.block), k.num_warps,
    )  # fmt: skip
    return p


def _softmax_backward_(p: Tensor, dp: Tensor, sparse: bool) -> None:
    """Overwrite the gradient of probabilities with that of scores; both contiguous."""
    if not p.numel():
        return
    images, (rows, cols) = p.shape[0] * p.shape[1], p.shape[2:]
    k = launch_config(
        "multi_token_attention.backward", tile_config, p.device, rows=rows, cols=cols, arrays=2
    )
    if k.block < cols:
        launch(
            _multi_token_backward_wide_kernel, images * rows, (p, dp, rows, cols),
            (sparse, k.block), k.num_warps,
        )  # fmt: skip
        return
    tall = tile_rows(k.rows, cols)
    launch(
        _multi_token_backward_kernel, images * cdiv(rows, tall), (p, dp, rows, cols),
        (sparse, tall, k.block), k.num_warps,
    )  # fmt: skip


def _lower(x: Tensor, lowest: bool) -> Tensor:
    """A contiguous copy that is 0 past the diagonal, or -inf where ``lowest``."""
    made, x = empty_contiguous(x), _by_rows(x)
    if not made.numel():
        return made
    images, (rows, cols) = x.shape[0] * x.shape[1], x.shape[2:]
    k = launch_config(
        "multi_token_attention.lower", tile_config, x.device, rows=rows, cols=cols, arrays=1
    )
    tall = tile_rows(k.rows, x.stride(2), cols)
    launch(
        _multi_token_lower_kernel, images * cdiv(rows, tall), (x, made, *_places(x)),
        (lowest, tall, k.block), k.num_warps,
    )  # fmt: skip
    return made


def _zero_(y: Tensor) -> Tensor:
    """Write zeros past the diagonal of a contiguous tensor of our own."""
    if not y.numel():
        return y
    images, (rows, cols) = y.shape[0] * y.shape[1], y.shape[2:]
    k = launch_config("multi_token_attention.zero", zero_config, y.device, rows=rows, cols=cols)
    tall = tile_rows(GROUP.value, checked_cols(cols))
    launch(
        _multi_token_zero_kernel, images * cdiv(rows, tall), (y, rows, cols), (tall, k.block),
        k.num_warps,
    )  # fmt: skip
    return y


def _transpose(x: Tensor, k: TransposeConfig, to_last: bool) -> Tensor:
    """The lower triangle of ``x`` with heads adjacent, or with columns adjacent again."""
    (batch, heads, rows, cols), pieces = x.shape, cdiv(x.shape[3], k.block)
    layout = torch.channels_last if to_last else torch.contiguous_format
    x = _by_rows(x) if to_last else x.contiguous(memory_format=torch.channels_last)
    apart = x.stride(1) if to_last else rows * cols
    if apart * power_of_2(heads) * x.element_size() >= FAR:
        turned = _lower(x, False) if to_last else x
        turned = turned.contiguous(memory_format=layout)
        return turned if to_last else _zero_(turned)
    made = torch.empty_like(x, memory_format=layout)
    strides = (x if to_last else made).stride()[:3]
    if made.numel():
        launch(
            _multi_token_turn_kernel, batch * rows * pieces,
            (x, made, *strides, rows, cols, pieces),
            (to_last, heads, power_of_2(heads), k.block), k.num_warps,
        )  # fmt: skip
    return made


def _transposing(weight: Tensor, p: Tensor, unit: int) -> TransposeConfig:
    sizes = {"heads": p.shape[1], "others": weight.shape[0], "size": p.element_size()}
    found: TransposeConfig = launch_config(
        "multi_token_attention.transpose", transpose_config, p.device, **sizes, unit=unit
    )
    return found


def forward(
    scores: Tensor, weight: Tensor, bias: Optional[Tensor], stride: int, padding: int,
    dilation: int, groups: int, sparse: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Probabilities, their convolution, and zeros past its diagonal."""
    p = sparsemax.forward(_lower(scores, True)) if sparse else _softmax(scores)
    how, k = (stride, padding, dilation, groups), _transposing(weight, p, 16)
    if k.block:
        return _transpose(conv2d(_transpose(p, k, True), weight, bias, *how), k, False), p
    return _zero_(conv2d(p, weight, bias, *how).contiguous()), p


def backward(
    dy: Tensor, weight: Tensor, bias: Optional[Tensor], p: Tensor, stride: int, padding: int,
    dilation: int, groups: int, sparse: bool, needs_scores: bool, needs_weight: bool,
    needs_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The convolution's gradients; that of the probabilities becomes the one of the scores."""
    k = _transposing(weight, p, 8)
    sides = (_transpose(dy, k, True), _transpose(p, k, True)) if k.block else (_lower(dy, False), p)
    found = torch.ops.aten.convolution_backward(
        *sides, weight, None if bias is None else list(bias.shape), [stride] * 2,
        [padding] * 2, [dilation] * 2, False, [0, 0], groups,
        [needs_scores, needs_weight, bias is not None and needs_bias],
    )  # fmt: skip
    dp, dweight, dbias = (weight.new_empty(0) if x is None else x for x in found)
    if needs_scores:
        dp = _transpose(dp, k, False) if k.block else dp.contiguous()
        _softmax_backward_(p.contiguous(), dp, sparse)
    return dp, dweight.contiguous(), dbias
