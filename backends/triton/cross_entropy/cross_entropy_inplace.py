"""Cross entropy whose gradient overwrites the logits, by the row kernel of cross_entropy.py."""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from liger_multi.backends.triton.common.launching import launch
from liger_multi.backends.triton.common.rows import checked_cols, power_of_2, round_to, warps
from liger_multi.backends.triton.cross_entropy import cross_entropy as rows_of
from liger_multi.backends.triton.cross_entropy.cross_entropy import finish, reduce_rows
from liger_multi.dispatch.launch import DeviceInfo, launch_config
from liger_multi.reference.cross_entropy.reduction import check_targets
from liger_multi.reference.cross_entropy.rows import Objective, RowStats


@dataclass(frozen=True)
class ScaleConfig:
    """Columns a step and warps a program."""

    block: int
    num_warps: int


def scale_config(info: DeviceInfo, rows: int, cols: int) -> ScaleConfig:
    """8 columns a thread."""
    return ScaleConfig(
        min(8192, power_of_2(checked_cols(cols))), warps(min(8192, cols) // 8, info.warp_size)
    )


@triton.jit
def _cross_entropy_inplace_backward_kernel(
    dloss_ptr,
    logits_ptr,
    dloss_stride,
    row_stride,
    col_stride,
    cols,
    ADJACENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Multiply one row of the gradient, which has overwritten the logits, by the upstream one.

    Program: one row; returns at once where the upstream gradient is 1. ADJACENT: columns are
    contiguous; otherwise they are ``col_stride`` apart.
    """
    row = tl.program_id(0).to(tl.int64)
    dloss = tl.load(dloss_ptr + row * dloss_stride).to(tl.float32)
    if dloss != 1.0:  # NaN differs from 1 and is multiplied
        row_ptr = logits_ptr + row * row_stride
        lane = tl.arange(0, BLOCK)
        for start in tl.range(0, cols, BLOCK):
            mask = start + lane < cols
            if ADJACENT:
                at = row_ptr + start + lane
            else:
                at = row_ptr + (tl.cast(start, tl.int64) + lane) * col_stride
            value = tl.load(at, mask=mask, other=0.0).to(tl.float32)
            scaled = round_to(value * dloss, logits_ptr.dtype.element_ty)
            tl.store(at, scaled, mask=mask)


def forward(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss_weight: float,
    softcap: float | None,
    reduction: str,
    validate: bool,
    outputs: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Loss and requested outputs; ``logits`` holds the gradient of the loss, or of every row's."""
    check_targets(target, logits.shape[1], ignore_index, validate)
    options = Objective(ignore_index, label_smoothing, z_loss_weight, softcap)
    weight = None if weight is None else weight.contiguous()
    *_, denominators = reduce_rows(
        target, weight, None, logits.shape[1], ignore_index, reduction, ""
    )
    rows = RowStats.empty(logits.shape[0], options, outputs, logits)
    wide = logits if logits.stride(1) == 1 else logits.contiguous()
    add_zl = reduction == "none" and z_loss_weight != 0.0
    rows_of.loss_and_gradient_(
        wide, target, weight, options, rows, denominators, add_zl=add_zl, inverse=True
    )
    if wide is not logits:
        logits.copy_(wide)
    cols = logits.shape[1]
    return finish(rows, target, weight, cols, ignore_index, reduction, outputs)[:7]


def backward(dloss: Tensor, logits: Tensor) -> None:
    """Scale the gradient in ``logits`` by the upstream gradient, unless that is 1."""
    rows, cols = logits.shape
    if not logits.numel():
        return
    k = launch_config(
        "cross_entropy_inplace.backward", scale_config, logits.device, rows=rows, cols=cols
    )
    strides = (dloss.stride(0) if dloss.ndim else 0, logits.stride(0), logits.stride(1))
    launch(
        _cross_entropy_inplace_backward_kernel,
        rows,
        (dloss, logits, *strides, cols),
        (logits.stride(1) == 1, k.block),
        k.num_warps,
    )
