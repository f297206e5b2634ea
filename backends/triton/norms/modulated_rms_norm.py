"""RMSNorm modulated by a condition (AdaLN, arXiv:2212.09748).

:mod:`.modulated_rms_norm_kernels` has the maths; the launchers are here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

import torch
from torch import Tensor

from liger_multi.backends.triton.common.launching import launch
from liger_multi.backends.triton.common.rows import (
    as_rows,
    cdiv,
    power_of_2,
    sum_all_partials,
    sum_partials,
    warps,
)
from liger_multi.backends.triton.norms.modulated_rms_norm_kernels import (
    _modulated_rms_norm_backward_kernel,
    _modulated_rms_norm_backward_wide_kernel,
    _modulated_rms_norm_backward_wide_sums_kernel,
    _modulated_rms_norm_forward_kernel,
    _modulated_rms_norm_forward_wide_kernel,
)
from liger_multi.backends.triton.norms.row_config import (
    BackwardConfig,
    backward_config,
    forward_config,
)
from liger_multi.dispatch.launch import DeviceInfo, launch_config


@dataclass(frozen=True)
class ModulatedConfig(BackwardConfig):
    """As BackwardConfig; ``splits`` programs share the rows of a modulation."""

    splits: int


def modulated_backward_config(
    info: DeviceInfo, rows: int, cols: int, modulations: int, element_bytes: int
) -> ModulatedConfig:
    """As the layer norm's, in tiles that no modulation's rows overlap."""
    k = backward_config(info, rows, cols, element_bytes, sums=2, widest=4096)
    each = max(1, rows // modulations)
    per_tile = min(k.rows, power_of_2(each))
    splits = max(1, min(k.programs // modulations, cdiv(each, per_tile)))
    programs = modulations * splits if splits > 1 else min(modulations, k.programs)
    threads = k.num_warps * info.warp_size * per_tile // k.rows
    num_warps = warps(max(32, threads), info.warp_size)
    return ModulatedConfig(per_tile, k.block, num_warps, programs, k.stages, splits)


def forward(
    x: Tensor, scale: Tensor, shift: Optional[Tensor], weight: Optional[Tensor], eps: float,
    offset: float, casting: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Y and rstd (fp32)."""
    dtype = x.dtype
    if weight is not None and casting == "llama":
        dtype = torch.promote_types(dtype, weight.dtype)
    for t in (scale, shift):
        dtype = dtype if t is None else torch.promote_types(dtype, t.dtype)
    y = x.new_empty(x.shape, dtype=dtype)
    rstd = x.new_empty(x.shape[:-1], dtype=torch.float32)
    if x.numel() == 0:
        return y, rstd
    x, scale, shift = as_rows(x), scale.contiguous(), None if shift is None else shift.contiguous()
    weight = None if weight is None else weight.contiguous()
    rows, cols = x.shape
    each = rows * cols // scale.numel()
    how = (offset, casting == "gemma", casting == "llama" and weight is not None)
    k = launch_config(
        "modulated_rms_norm.forward", forward_config, x.device, rows=rows, cols=cols, sums=2
    )
    tensors = (x, scale, shift, weight, y, rstd, x.stride(0))
    if k.block >= cols:
        launch(
            _modulated_rms_norm_forward_kernel, cdiv(rows, k.rows),
            (*tensors, rows, cols, each, eps), (*how, k.rows, k.block), k.num_warps,
        )  # fmt: skip
    else:
        launch(
            _modulated_rms_norm_forward_wide_kernel, rows, (*tensors, cols, each, eps),
            (*how, k.block), k.num_warps,
        )  # fmt: skip
    return y, rstd


def backward(
    dy: Tensor, x: Tensor, scale: Tensor, shift_dtype: Optional[torch.dtype],
    weight: Optional[Tensor], rstd: Tensor, offset: float, casting: str, needs_x: bool,
    needs_scale: bool, needs_shift: bool, needs_weight: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of x, scale, shift and weight; one that nobody needs is an empty tensor."""
    like = x if weight is None else weight
    dx = x.new_empty(x.shape if needs_x else 0)
    if x.numel() == 0:
        kinds = ((needs_scale, scale.dtype), (needs_shift, shift_dtype))
        made = [scale.new_zeros(scale.shape if n else 0, dtype=d) for n, d in kinds]
        return dx, made[0], made[1], like.new_zeros(like.shape if needs_weight else 0)
    how = (offset, casting == "gemma", casting == "llama" and weight is not None)
    wanted = [d for n, d in ((needs_scale, scale.dtype), (needs_shift, shift_dtype)) if n and d]
    sums, partial = _launch(
        dy, x, scale, weight, rstd, dx if needs_x else None, wanted, needs_scale, needs_weight, how
    )
    dscale = sums.pop(0).view(scale.shape) if needs_scale else scale.new_empty(0)
    dshift = sums.pop(0).view(scale.shape) if needs_shift else x.new_empty(0, dtype=shift_dtype)
    dweight = like.new_empty(0) if partial is None else sum_partials(partial, like.dtype)
    return dx, dscale, dshift, dweight


def _launch(
    dy: Tensor, x: Tensor, scale: Tensor, weight: Optional[Tensor], rstd: Tensor,
    dx: Optional[Tensor], wanted: list[torch.dtype], needs_scale: bool, needs_weight: bool,
    how: tuple[object, ...],
) -> tuple[list[Tensor], Optional[Tensor]]:  # fmt: skip
    """Fill dx; the sums of scale and shift in the dtypes wanted; partial sums of the weight's."""
    dy, x, rstd, scale = as_rows(dy), as_rows(x), rstd.contiguous(), scale.contiguous()
    weight = None if weight is None else weight.contiguous()
    (rows, cols), count = x.shape, scale.numel() // x.shape[1]
    size = dy.element_size() + x.element_size()
    k = launch_config(
        "modulated_rms_norm.backward", modulated_backward_config, x.device, rows=rows, cols=cols,
        modulations=count, element_bytes=size,
    )  # fmt: skip
    partial = x.new_empty((len(wanted), k.splits, count * cols), dtype=torch.float32)
    sums = list(partial) if k.splits > 1 else [x.new_empty(count * cols, dtype=d) for d in wanted]
    ds, db = ([*sums, None, None] if needs_scale else [None, *sums, None])[:2]
    dw = x.new_empty((k.programs, cols), dtype=torch.float32) if needs_weight else None
    inputs, strides = (dy, x, scale, weight, rstd), (dy.stride(0), x.stride(0))
    sizes = (cols, rows // count)
    if k.block >= cols:
        launch(
            _modulated_rms_norm_backward_kernel, k.programs,
            (*inputs, dx, ds, db, dw, *strides, *sizes, count, k.splits),
            (*how, k.rows, k.block, k.stages), k.num_warps,
        )  # fmt: skip
    elif dx is not None:
        launch(
            _modulated_rms_norm_backward_wide_kernel, rows, (*inputs, dx, *strides, *sizes),
            (*how[:2], k.block), k.num_warps,
        )  # fmt: skip
    if k.block < cols and (wanted or dw is not None):
        launch(
            _modulated_rms_norm_backward_wide_sums_kernel, k.programs * cdiv(cols, k.block),
            (*inputs, ds, db, dw, *strides, *sizes, count, k.splits, k.programs),
            (*how, k.block, k.stages), k.num_warps,
        )  # fmt: skip
    if k.splits > 1 and wanted:
        sums = list(sum_all_partials(partial, *wanted))
    return sums, dw
