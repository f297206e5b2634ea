"""From rows to the loss: sums over rows and the denominators of the mean, in one program."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_multi.backends.triton.common.launching import launch
from liger_multi.backends.triton.common.rows import power_of_2, warps
from liger_multi.dispatch.launch import DeviceInfo, launch_config
from liger_multi.reference.cross_entropy.rows import RowStats


@dataclass(frozen=True)
class ReduceConfig:
    """Rows a step and warps of the one program."""

    block: int
    num_warps: int


def reduce_config(info: DeviceInfo, rows: int) -> ReduceConfig:
    """One program for all rows, 8 of them a thread."""
    block = min(4096, power_of_2(rows))
    return ReduceConfig(block, warps(block // 8, info.warp_size))


@triton.jit
def _cross_entropy_reduce_kernel(
    target_ptr, weight_ptr, ce_ptr, zl_ptr, argmax_ptr, loss_ptr, z_loss_ptr, accuracy_ptr,
    denominators_ptr, target_stride, rows, cols, ignore_index, MEAN: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Denominators of the mean and, where asked for, the reduced losses and the accuracy.

    Program: the only one, so that sums have one order. It passes over the rows, BLOCK at a time.
    Reads targets, their weights, and the rows' ce, zl and argmax. Writes the denominators (sum of
    weights, count), and loss, z-loss and accuracy where they have a pointer. A mean over nothing is
    0.
    """
    ce = tl.zeros([BLOCK], tl.float32)
    zl = tl.zeros([BLOCK], tl.float32)
    weights = tl.zeros([BLOCK], tl.float32)
    count = tl.zeros([BLOCK], tl.int32)
    hits = tl.zeros([BLOCK], tl.int32)
    for start in tl.range(0, rows, BLOCK):
        row = start + tl.arange(0, BLOCK)
        mask = row < rows
        target = tl.load(target_ptr + row.to(tl.int64) * target_stride, mask=mask, other=0)
        valid = mask & (target != ignore_index)
        count += valid.to(tl.int32)
        if weight_ptr is not None:
            label = tl.where((target >= 0) & (target < cols), target, 0)
            weights += tl.load(weight_ptr + label, mask=valid, other=0.0).to(tl.float32)
        if ce_ptr is not None:
            ce += tl.load(ce_ptr + row, mask=mask, other=0.0)
        if zl_ptr is not None:
            zl += tl.load(zl_ptr + row, mask=mask, other=0.0)
        if argmax_ptr is not None:
            argmax = tl.load(argmax_ptr + row, mask=mask, other=-1)
            hits += (valid & (argmax == target)).to(tl.int32)
    counted = tl.sum(count, axis=0).to(tl.float32)
    by_weight = tl.full([], 1.0, tl.float32)
    by_count = by_weight
    if MEAN:
        by_count = counted
        by_weight = tl.sum(weights, axis=0) if weight_ptr is not None else counted
    tl.store(denominators_ptr, by_weight)
    tl.store(denominators_ptr + 1, by_count)
    z_loss = tl.sum(zl, axis=0)
    z_loss = tl.where(by_count == 0.0, 0.0, z_loss / by_count)
    if loss_ptr is not None:
        loss = tl.sum(ce, axis=0)
        tl.store(loss_ptr, tl.where(by_weight == 0.0, 0.0, loss / by_weight) + z_loss)
    if z_loss_ptr is not None:
        tl.store(z_loss_ptr, z_loss)
    if accuracy_ptr is not None:
        tl.store(accuracy_ptr, tl.sum(hits, axis=0).to(tl.float32) / tl.maximum(counted, 1.0))


def filled(x: Optional[Tensor]) -> Optional[Tensor]:
    """None in place of an output that nobody asked for."""
    return x if x is not None and x.numel() else None


def reduce_rows(
    target: Tensor,
    weight: Optional[Tensor],
    rows: Optional[RowStats],
    cols: int,
    ignore_index: int,
    reduction: str,
    outputs: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Loss, z_loss, token_accuracy (scalars, empty where unwanted) and the two denominators.

    Without ``rows`` only the denominators are computed.
    """
    wanted = outputs.split(",") if rows is not None else []

    def empty(keep: bool) -> Tensor:
        return target.new_empty(() if keep else (0,), dtype=torch.float32)

    loss, by = empty(rows is not None), target.new_empty(2, dtype=torch.float32)
    z_loss, accuracy = empty("z_loss" in wanted), empty("token_accuracy" in wanted)
    ce, zl, argmax = (rows.ce, rows.zl, rows.argmax) if rows is not None else (None, None, None)
    count = target.shape[0]
    k = launch_config("cross_entropy.reduce", reduce_config, target.device, rows=count)
    launch(
        _cross_entropy_reduce_kernel, 1,
        (target, weight, filled(ce), filled(zl), filled(argmax), filled(loss),
         filled(z_loss), filled(accuracy), by, target.stride(0), count, cols, ignore_index),
        (reduction == "mean", k.block), k.num_warps,
    )  # fmt: skip
    return loss, z_loss, accuracy, by


def finish(
    rows: RowStats, target: Tensor, weight: Optional[Tensor], cols: int, ignore_index: int,
    reduction: str, outputs: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The outputs of the contract and the denominators; ``ce`` holds ``zl`` too for none."""
    wanted = outputs.split(",")
    predicted = rows.argmax if "predicted_tokens" in wanted else rows.argmax.new_empty(0)
    if reduction == "none":
        z_loss = rows.zl if "z_loss" in wanted else rows.ce.new_empty(0)
        loss, by, accuracy = rows.ce, rows.ce.new_ones(2), rows.ce.new_empty(0)
        if "token_accuracy" in wanted:
            accuracy = ((rows.argmax == target) & (target != ignore_index)).to(torch.float32)
    else:
        loss, z_loss, accuracy, by = reduce_rows(
            target, weight, rows, cols, ignore_index, reduction, outputs
        )
    return loss, z_loss, accuracy, predicted, rows.log_prob, rows.entropy, rows.lse, by
