"""PyTorch's own ``linear_cross_entropy``, in chunks of rows.

Its loss has the dtype of hidden states, so in 16 bits it is rounded, and its gradients are divided
before the scale of a loss arrives, which matters in fp16. It returns no ``lse``: that is NaN here,
and no gradient of a scalar loss needs it.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_multi.reference.common.chunking import (
    fits_one_chunk,
    statistics_dtype,
    weight_gradient_dtype,
)
from liger_multi.reference.common.stored import opened
from liger_multi.reference.cross_entropy import reduction as reduction_of
from liger_multi.reference.cross_entropy.fused_linear_cross_entropy import backward

__all__ = ["backward", "forward", "supports"]


def supports(
    label_smoothing: float,
    z_loss_weight: float,
    softcap: float | None,
    reduction: str,
    logit_scale: float,
    compute_dtype: torch.dtype | None,
    outputs: str = "",
) -> str | None:
    """Why a call is refused, or None."""
    if not hasattr(F, "linear_cross_entropy"):
        return f"PyTorch {torch.__version__} has no torch.nn.functional.linear_cross_entropy"
    options = {
        "label_smoothing in chunks": label_smoothing != 0.0,
        "z_loss_weight": z_loss_weight != 0.0,
        "softcap": softcap is not None,
        "reduction='none'": reduction == "none",
        "logit_scale": logit_scale != 1.0,
        "compute_dtype": compute_dtype is not None,
        f"outputs {outputs!r}": bool(outputs),
    }
    refused = [name for name, is_set in options.items() if is_set]
    return f"torch's linear_cross_entropy has no {', no '.join(refused)}" if refused else None


def forward(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss_weight: float,
    softcap: float | None,
    reduction: str,
    logit_scale: float,
    chunk: int,
    budget: int,
    accumulate: torch.dtype,
    compute_dtype: torch.dtype | None,
    compact: bool,
    validate: bool,
    outputs: str,
    needs_hidden: bool,
    needs_weight: bool,
    needs_bias: bool,
) -> tuple[
    Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor
]:
    """The loss, and its gradients; zeros where every row is ignored, as the contract states."""
    reduction_of.check_targets(target, weight.shape[0], ignore_index, validate)
    acc_dtype = statistics_dtype(hidden.dtype)
    native: Any = F
    loss_module: Any = torch.nn
    sums = accumulate if hidden.element_size() < 4 else None
    needs = (needs_hidden, needs_weight, needs_bias)
    with torch.enable_grad():
        leaves = [
            None if t is None else t.detach().requires_grad_(is_needed)
            for t, is_needed in zip((hidden, opened(weight), bias), needs, strict=True)
        ]
        total = native.linear_cross_entropy(
            leaves[0],
            leaves[1],
            target,
            linear_bias=leaves[2],
            weight=class_weight,
            reduction=reduction,
            ignore_index=ignore_index,
            options=loss_module.LinearCrossEntropyOptions(
                batch_chunk_size=chunk or None, acc_dtype=sums
            ),
        )
    differentiable = [t for t in leaves if t is not None and t.requires_grad]
    grads = list(torch.autograd.grad(total, differentiable)) if differentiable else []
    (rows, width), vocabulary = hidden.shape, weight.shape[0]
    one_chunk = fits_one_chunk(rows, width, vocabulary, hidden.element_size(), chunk, budget)
    of_weight = weight_gradient_dtype(hidden.dtype, weight.dtype, accumulate, one_chunk)
    empty = (target == ignore_index).all()
    gradients = [
        grads.pop(0).to(dtype).masked_fill_(empty, 0)
        if is_needed
        else hidden.new_empty(0, dtype=dtype)
        for is_needed, dtype in zip(needs, (hidden.dtype, of_weight, acc_dtype), strict=True)
    ]
    none = hidden.new_empty(0, dtype=acc_dtype)
    lse = hidden.new_full(target.shape, float("nan"), dtype=acc_dtype)
    loss = total.detach().to(acc_dtype).masked_fill(empty, 0)
    other_outputs = (none, none, none.to(torch.int64), none, none, lse, none)
    return (loss, *other_outputs, *gradients, none.new_ones(2))
