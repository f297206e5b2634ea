"""From rows to a loss: checked targets, divisors of the mean, and the outputs of the contracts."""

import torch
from torch import Tensor

from liger_multi.reference.common.chunking import statistics_dtype
from liger_multi.reference.cross_entropy.rows import Objective, RowStats


def check_targets(
    target: Tensor, vocabulary: int, ignore_index: int | None, validate: bool, name: str = "target"
) -> None:
    """Raise for a target outside of ``[0, vocabulary)``: on a CPU, elsewhere on demand (a sync)."""
    if not (validate or target.device.type == "cpu") or target.numel() == 0:
        return
    invalid = (target < 0) | (target >= vocabulary)
    if ignore_index is not None:
        invalid &= target != ignore_index
    if bool(invalid.any()):
        row, value = int(invalid.nonzero()[0, 0]), int(target[invalid][0])
        raise IndexError(
            f"{name} {value} at row {row} is out of range: expected 0 <= {name} < {vocabulary}"
            + ("" if ignore_index is None else f" or ignore_index = {ignore_index}")
        )


def denominators(
    target: Tensor, weight: Tensor | None, ignore_index: int, reduction: str, dtype: torch.dtype
) -> Tensor:
    """Divisors of ``ce`` and ``zl``: sum of the class weights of valid targets and their count."""
    acc_dtype = statistics_dtype(dtype)
    if reduction != "mean":
        return torch.ones(2, dtype=acc_dtype, device=target.device)
    valid = target != ignore_index
    count = valid.sum(dtype=acc_dtype)
    if weight is None:
        return torch.stack((count, count))
    label = torch.where(valid & (target >= 0) & (target < weight.shape[0]), target, 0)
    return torch.stack((torch.where(valid, weight.to(acc_dtype)[label], 0).sum(), count))


def divide(value: Tensor, divisor: Tensor) -> Tensor:
    """``value / divisor``, and 0 where ``divisor`` is 0."""
    return torch.where(divisor == 0, 0, value / divisor)


def upstream(dloss: Tensor, divisors: Tensor, reduction: str) -> tuple[Tensor, Tensor]:
    """Factors of the gradients of ``ce`` and ``zl``: scalars, or one a row for ``none``."""
    return (
        (dloss, dloss)
        if reduction == "none"
        else (divide(dloss, divisors[0]), divide(dloss, divisors[1]))
    )


def results(
    rows: RowStats,
    target: Tensor,
    weight: Tensor | None,
    objective: Objective,
    reduction: str,
    outputs: str,
) -> tuple[Tensor, ...]:
    """The outputs of the contract, and the divisors behind them."""
    ignored, acc_dtype = objective.ignore_index, rows.ce.dtype
    divisors = denominators(target, weight, ignored, reduction, acc_dtype)
    return (*reduced(rows, target, objective, reduction, divisors, outputs), divisors)


def reduced(
    rows: RowStats,
    target: Tensor,
    objective: Objective,
    reduction: str,
    divisors: Tensor,
    outputs: str,
) -> tuple[Tensor, ...]:
    """Loss and the needed outputs in the order of the contract."""
    requested = outputs.split(",")
    if reduction == "none":
        loss, z_loss = rows.ce + rows.zl if rows.zl.numel() else rows.ce, rows.zl
    else:
        z_loss = divide(rows.zl.sum(), divisors[1])
        loss = divide(rows.ce.sum(), divisors[0]) + z_loss
    accuracy = rows.ce.new_empty(0)
    if "token_accuracy" in requested:
        hits = ((rows.argmax == target) & (target != objective.ignore_index)).to(rows.ce.dtype)
        valid = (target != objective.ignore_index).sum(dtype=rows.ce.dtype)
        accuracy = hits if reduction == "none" else divide(hits.sum(), valid)
    return (
        loss,
        z_loss if "z_loss" in requested else rows.ce.new_empty(0),
        accuracy,
        rows.argmax if "predicted_tokens" in requested else rows.argmax.new_empty(0),
        rows.log_prob,
        rows.entropy,
        rows.lse,
    )
