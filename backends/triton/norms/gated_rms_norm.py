"""RMSNorm of groups of channels times an activated gate (arXiv:2405.21060).

:mod:`.gated_rms_norm_kernels` has the maths; the launchers are here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Optional

import torch
from torch import Tensor

from liger_multi.backends.triton.common.launching import launch
from liger_multi.backends.triton.common.rows import as_rows, cdiv, sum_partials, tile_rows, warps
from liger_multi.backends.triton.norms.gated_rms_norm_kernels import (
    _gated_rms_norm_backward_kernel,
    _gated_rms_norm_backward_wide_kernel,
    _gated_rms_norm_backward_wide_weight_kernel,
    _gated_rms_norm_forward_kernel,
    _gated_rms_norm_forward_wide_kernel,
)
from liger_multi.backends.triton.norms.row_config import (
    BackwardConfig,
    RowConfig,
    backward_config,
    forward_config,
)
from liger_multi.dispatch.launch import DeviceInfo, launch_config


def gated_forward_config(info: DeviceInfo, rows: int, cols: int) -> RowConfig:
    """As the plain norm's, with two values a lane."""
    return forward_config(info, rows, cols, sums=2)


def gated_backward_config(
    info: DeviceInfo, rows: int, cols: int, element_bytes: int
) -> BackwardConfig:
    """As the layer norm's: a third input takes the registers of its second sum, and more.

    So there are 8 elements a thread and not 16.
    """
    k = backward_config(info, rows, cols, element_bytes, sums=2, widest=4096)
    threads = min(max(32, k.rows * k.block // 8), info.max_threads)
    return replace(k, num_warps=warps(threads, info.warp_size))


def _how(
    weight: Optional[Tensor], gate: Optional[Tensor], offset: float, casting: str,
    norm_first: bool, activation: str,
) -> tuple[object, ...]:  # fmt: skip
    """OFFSET, EXACT, ROUND, FIRST and SILU."""
    rounds = casting == "llama" and weight is not None
    first = gate is not None and not norm_first
    return offset, casting == "gemma", rounds, first, activation == "silu"


def forward(
    x: Tensor, gate: Optional[Tensor], weight: Optional[Tensor], eps: float, offset: float,
    casting: str, group_size: int, norm_first: bool, activation: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """y, and rstd (fp32) of every group."""
    how = _how(weight, gate, offset, casting, norm_first, activation)
    wide = weight is not None and casting == "llama" and (gate is None or not norm_first)
    dtype = torch.promote_types(x.dtype, weight.dtype) if weight is not None and wide else x.dtype
    groups = x.shape[-1] // group_size
    y = x.new_empty(x.shape, dtype=dtype)
    rstd = x.new_empty((*x.shape[:-1], groups), dtype=torch.float32)
    if x.numel() == 0:
        return y, rstd
    x, gate = as_rows(x, group_size), None if gate is None else as_rows(gate, group_size)
    weight = None if weight is None else weight.contiguous()
    rows = x.shape[0]
    k = launch_config(
        "gated_rms_norm.forward", gated_forward_config, x.device, rows=rows, cols=group_size
    )
    strides = (x.stride(0), 0 if gate is None else gate.stride(0))
    tensors = (x, gate, weight, y, rstd)
    if k.block >= group_size:
        each = tile_rows(k.rows, *strides, group_size * groups)
        launch(
            _gated_rms_norm_forward_kernel, cdiv(rows, each) * groups,
            (*tensors, *strides, rows, group_size, groups, eps), (*how, each, k.block),
            k.num_warps,
        )  # fmt: skip
    else:
        launch(
            _gated_rms_norm_forward_wide_kernel, rows * groups,
            (*tensors, *strides, group_size, groups, eps), (*how, k.block), k.num_warps,
        )  # fmt: skip
    return y, rstd


def backward(
    dy: Tensor, x: Tensor, gate: Optional[Tensor], weight: Optional[Tensor], rstd: Tensor,
    offset: float, casting: str, group_size: int, norm_first: bool, activation: str,
    needs_x: bool, needs_gate: bool, needs_weight: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of x, gate and weight; one that nobody needs is an empty tensor."""
    how = _how(weight, gate, offset, casting, norm_first, activation)
    needs_gate, needs_weight = needs_gate and gate is not None, needs_weight and weight is not None
    dx = x.new_empty(x.shape if needs_x else 0)
    like = x if gate is None else gate
    dgate = like.new_empty(like.shape if needs_gate else 0)
    if x.numel() == 0 or not (needs_x or needs_gate or needs_weight):
        dweight = x.new_empty(0) if weight is None else torch.zeros_like(weight)
        return dx, dgate, dweight if needs_weight else dweight.new_empty(0)
    dy, x, rstd = as_rows(dy, group_size), as_rows(x, group_size), rstd.contiguous()
    gate = None if gate is None else as_rows(gate, group_size)
    weight = None if weight is None else weight.contiguous()
    made = (dx if needs_x else None, dgate if needs_gate else None)
    partial = _launch(dy, x, gate, weight, rstd, made, group_size, how, needs_weight)
    if partial is None or weight is None:
        return dx, dgate, x.new_empty(0, dtype=x.dtype if weight is None else weight.dtype)
    return dx, dgate, sum_partials(partial, weight.dtype)


def _launch(
    dy: Tensor, x: Tensor, gate: Optional[Tensor], weight: Optional[Tensor], rstd: Tensor,
    made: tuple[Optional[Tensor], Optional[Tensor]], size: int, how: tuple[object, ...],
    needs_weight: bool,
) -> Optional[Tensor]:  # fmt: skip
    """Fill dx and dgate where they have elements; return partials of the weight's gradient."""
    (rows, cols), groups = x.shape, x.shape[1] // size
    read = dy.element_size() + x.element_size() + (0 if gate is None else gate.element_size())
    k = launch_config(
        "gated_rms_norm.backward", gated_backward_config, x.device, rows=rows * groups, cols=size,
        element_bytes=read,
    )  # fmt: skip
    row_programs = max(1, min(cdiv(k.programs, groups), cdiv(rows, k.rows)))
    partial = x.new_empty((row_programs, cols), dtype=torch.float32) if needs_weight else None
    strides = (dy.stride(0), x.stride(0), 0 if gate is None else gate.stride(0))
    if k.block >= size:
        launch(
            _gated_rms_norm_backward_kernel, row_programs * groups,
            (dy, x, gate, weight, rstd, *made, partial, *strides, rows, size, groups),
            (*how, tile_rows(k.rows, *strides, cols), k.block, k.stages), k.num_warps,
        )  # fmt: skip
        return partial
    if made != (None, None):
        launch(
            _gated_rms_norm_backward_wide_kernel, rows * groups,
            (dy, x, gate, weight, rstd, *made, *strides, size, groups), (*how, k.block),
            k.num_warps,
        )  # fmt: skip
    if partial is not None:
        launch(
            _gated_rms_norm_backward_wide_weight_kernel,
            row_programs * groups * cdiv(size, k.block),
            (dy, x, gate, rstd, partial, *strides, rows, size, groups, row_programs),
            (*how[2:], k.block, k.stages), k.num_warps,
        )  # fmt: skip
    return partial
