"""Root mean square norm (arXiv:1910.07467), in the roundings of the Hugging Face classes.

:mod:`.rms_norm_kernels` has the maths; what launches them here also serves ``fused_add_rms_norm``.
"""

from __future__ import annotations

from typing import Optional

import torch
import triton
from torch import Tensor

from liger_multi.backends.triton.common import as_rows, sum_partials
from liger_multi.backends.triton.norm_knobs import BackwardKnobs, backward_knobs, forward_knobs
from liger_multi.backends.triton.rms_norm_kernels import (
    _rms_norm_backward_kernel,
    _rms_norm_backward_wide_kernel,
    _rms_norm_backward_wide_weight_kernel,
    _rms_norm_forward_kernel,
    _rms_norm_forward_wide_kernel,
)
from liger_multi.launch import device_info, knobs


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
    wide = weight is not None and casting == "llama"
    dtype = torch.promote_types(kind, weight.dtype) if weight is not None and wide else kind
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    rstd = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    s = None if residual is None else torch.empty(x.shape, dtype=kind, device=x.device)
    if x.numel() == 0:
        return y, x if s is None else s, rstd.fill_(float("nan"))  # the mean of no column
    x = as_rows(x)
    residual = None if residual is None else as_rows(residual)
    weight = None if weight is None else weight.contiguous()
    rows, cols = x.shape
    default = forward_knobs(device_info(x.device), rows, cols)
    k = knobs(f"{name}.forward", default, x.device, rows=rows, cols=cols)
    common = {"OFFSET": offset, "EXACT": casting == "gemma", "ROUND": _rounds(casting, weight)}
    common |= {"BLOCK": k.block, "num_warps": k.num_warps, "enable_fp_fusion": True}
    tensors = (x, residual, weight, y, s, rstd)
    strides = (x.stride(0), 0 if residual is None else residual.stride(0))
    if k.block >= cols:
        _rms_norm_forward_kernel[(triton.cdiv(rows, k.rows),)](
            *tensors, *strides, rows, cols, eps, ROWS=k.rows, **common
        )
    else:
        _rms_norm_forward_wide_kernel[(rows,)](*tensors, *strides, cols, eps, **common)
    return y, x if s is None else s, rstd


def gradients(
    name: str, dy: Tensor, ds: Optional[Tensor], x: Tensor, weight: Optional[Tensor], rstd: Tensor,
    offset: float, casting: str, needs_x: bool, needs_weight: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradients of what was normalized and of weight; ``ds``, from other uses of x, is added."""
    needs_weight = needs_weight and weight is not None
    dx = torch.empty(x.shape if needs_x else 0, dtype=x.dtype, device=x.device)
    if x.numel() == 0 or not (needs_x or needs_weight):
        dweight = x.new_empty(0) if weight is None else torch.zeros_like(weight)
        return dx, dweight if needs_weight else dweight.new_empty(0)
    dy, x, rstd = as_rows(dy), as_rows(x), rstd.contiguous()
    ds = as_rows(ds) if ds is not None and needs_x else None
    weight = None if weight is None else weight.contiguous()
    rows, cols = x.shape
    read = dy.element_size() + x.element_size() + (0 if ds is None else ds.element_size())
    default = backward_knobs(device_info(x.device), rows, cols, read)
    k = knobs(f"{name}.backward", default, x.device, rows=rows, cols=cols)
    partial = x.new_empty((k.programs, cols), dtype=torch.float32) if needs_weight else None
    strides = (dy.stride(0), 0 if ds is None else ds.stride(0), x.stride(0))
    if k.block < cols:
        _wide(dy, ds, x, weight, rstd, dx if needs_x else None, partial, offset, casting, k)
    else:
        _rms_norm_backward_kernel[(k.programs,)](
            dy, ds, x, weight, rstd, dx if needs_x else None, partial, *strides, rows, cols, offset,
            _rounds(casting, weight), k.rows, k.block, k.stages,
            num_warps=k.num_warps, enable_fp_fusion=True,
        )  # fmt: skip
    if partial is None or weight is None:
        return dx, x.new_empty(0)
    return dx, sum_partials(partial, weight.dtype)


def _wide(
    dy: Tensor, ds: Optional[Tensor], x: Tensor, weight: Optional[Tensor], rstd: Tensor,
    dx: Optional[Tensor], partial: Optional[Tensor], offset: float, casting: str, k: BackwardKnobs,
) -> None:  # fmt: skip
    rows, cols = x.shape
    common = {"BLOCK": k.block, "num_warps": k.num_warps, "enable_fp_fusion": True}
    if dx is not None:
        _rms_norm_backward_wide_kernel[(rows,)](
            dy, ds, x, weight, rstd, dx, dy.stride(0), 0 if ds is None else ds.stride(0),
            x.stride(0), cols, OFFSET=offset, **common,
        )  # fmt: skip
    if partial is not None:
        groups = partial.shape[0]
        _rms_norm_backward_wide_weight_kernel[(groups * triton.cdiv(cols, k.block),)](
            dy, x, rstd, partial, dy.stride(0), x.stride(0), rows, cols, groups,
            ROUND=_rounds(casting, weight), STAGES=k.stages, **common,
        )  # fmt: skip
