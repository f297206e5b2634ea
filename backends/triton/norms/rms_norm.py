"""RMSNorm (arXiv:1910.07467), in the roundings of the Hugging Face classes.

:mod:`.rms_norm_kernels` has the maths; the launchers here also serve ``fused_add_rms_norm``.
"""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor

from liger_multi.backends.triton.common.launching import launch
from liger_multi.backends.triton.common.rows import (
    cdiv,
    empty_contiguous,
    sum_partials,
    with_stride,
)
from liger_multi.backends.triton.norms.rms_norm_kernels import (
    _rms_norm_backward_kernel,
    _rms_norm_backward_wide_kernel,
    _rms_norm_backward_wide_weight_kernel,
    _rms_norm_forward_kernel,
    _rms_norm_forward_wide_kernel,
)
from liger_multi.backends.triton.norms.row_config import (
    BackwardConfig,
    backward_config,
    forward_config,
)
from liger_multi.dispatch.launch import launch_config


def forward(
    x: Tensor, weight: Optional[Tensor], eps: float, offset: float, casting: str
) -> tuple[Tensor, Tensor]:
    """Normalize the last axis; return y and rstd (fp32)."""
    y, _, rstd = normalize("rms_norm", x, None, weight, eps, offset, casting)
    return y, rstd


def backward(
    dy: Tensor, x: Tensor, weight: Optional[Tensor], rstd: Tensor, offset: float, casting: str,
    needs_x: bool, needs_weight: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradients of x and weight; one that nobody needs is an empty tensor."""
    return gradients("rms_norm", dy, None, x, weight, rstd, offset, casting, needs_x, needs_weight)


def _rounds(casting: str, weight: Optional[Tensor]) -> bool:
    # without a weight there is one rounding only, that of the output
    return casting == "llama" and weight is not None


def normalize(
    name: str, x: Tensor, residual: Optional[Tensor], weight: Optional[Tensor], eps: float,
    offset: float, casting: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """y, what it is the norm of (x, or the new sum x + residual), and rstd (fp32)."""
    kind = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    rounds = _rounds(casting, weight)
    dtype = torch.promote_types(kind, weight.dtype) if weight is not None and rounds else kind
    *lead, cols = x.shape
    y, rstd = empty_contiguous(x, dtype), x.new_empty(lead, dtype=torch.float32)
    s = None if residual is None else empty_contiguous(x, kind)
    if x.numel() == 0:
        return y, x if s is None else s, rstd.fill_(float("nan"))  # the mean of no column
    x, x_stride = with_stride(x)
    residual, residual_stride = (None, 0) if residual is None else with_stride(residual)
    weight = None if weight is None else weight.contiguous()
    rows = x.numel() // cols
    k = launch_config(f"{name}.forward", forward_config, x.device, rows=rows, cols=cols)
    constants = (offset, casting == "gemma", rounds)
    tensors = (x, residual, weight, y, s, rstd)
    strides = (x_stride, residual_stride)
    if k.block >= cols:
        launch(
            _rms_norm_forward_kernel, cdiv(rows, k.rows), (*tensors, *strides, rows, cols, eps),
            (*constants, k.rows, k.block), k.num_warps,
        )  # fmt: skip
    else:
        launch(
            _rms_norm_forward_wide_kernel, rows, (*tensors, *strides, cols, eps),
            (*constants, k.block), k.num_warps,
        )  # fmt: skip
    return y, x if s is None else s, rstd


def gradients(
    name: str, dy: Tensor, ds: Optional[Tensor], x: Tensor, weight: Optional[Tensor], rstd: Tensor,
    offset: float, casting: str, needs_x: bool, needs_weight: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradients of what was normalized and of weight; ``ds``, from other uses of x, is added."""
    needs_weight = needs_weight and weight is not None
    dx = empty_contiguous(x) if needs_x else x.new_empty(0)
    if x.numel() == 0 or not (needs_x or needs_weight):
        dweight = x.new_empty(0) if weight is None else torch.zeros_like(weight)
        return dx, dweight if needs_weight else dweight.new_empty(0)
    (dy, dy_stride), (x, x_stride), rstd = with_stride(dy), with_stride(x), rstd.contiguous()
    ds, ds_stride = with_stride(ds) if ds is not None and needs_x else (None, 0)
    weight = None if weight is None else weight.contiguous()
    cols = x.shape[-1]
    rows = x.numel() // cols
    read = dy.element_size() + x.element_size() + (0 if ds is None else ds.element_size())
    k = launch_config(
        f"{name}.backward", backward_config, x.device, rows=rows, cols=cols, element_bytes=read
    )
    partial = x.new_empty(k.programs, cols, dtype=torch.float32) if needs_weight else None
    strides = (dy_stride, ds_stride, x_stride)
    target = dx if needs_x else None
    if k.block < cols:
        _wide(dy, ds, x, weight, rstd, target, partial, strides, rows, offset, casting, k)
    else:
        launch(
            _rms_norm_backward_kernel, k.programs,
            (dy, ds, x, weight, rstd, target, partial, *strides, rows, cols),
            (offset, _rounds(casting, weight), k.rows, k.block, k.stages), k.num_warps,
        )  # fmt: skip
    if partial is None or weight is None:
        return dx, x.new_empty(0)
    return dx, sum_partials(partial, weight.dtype)


def _wide(
    dy: Tensor, ds: Optional[Tensor], x: Tensor, weight: Optional[Tensor], rstd: Tensor,
    dx: Optional[Tensor], partial: Optional[Tensor], strides: tuple[int, int, int], rows: int,
    offset: float, casting: str, k: BackwardConfig,
) -> None:  # fmt: skip
    cols = x.shape[-1]
    if dx is not None:
        launch(
            _rms_norm_backward_wide_kernel, rows, (dy, ds, x, weight, rstd, dx, *strides, cols),
            (offset, k.block), k.num_warps,
        )  # fmt: skip
    if partial is not None:
        groups = partial.shape[0]
        launch(
            _rms_norm_backward_wide_weight_kernel, groups * cdiv(cols, k.block),
            (dy, x, rstd, partial, strides[0], strides[2], rows, cols, groups),
            (_rounds(casting, weight), k.block, k.stages), k.num_warps,
        )  # fmt: skip
