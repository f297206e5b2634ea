"""Eager forms that differ from the formula in fp64, each with its reason.

They are timed as the provider ``torch``. Of every other operator, its formula in
:mod:`liger_multi.testing.formulas` is timed itself.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_multi.testing.formulas import Formula
from liger_multi.testing.formulas.attention import Window, of_all_heads
from liger_multi.testing.formulas.divergences import (
    Rows,
    jsd_rows,
    kl_rows,
    rows_of_heads,
    tvd_rows,
)


def _cross_entropy(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    """PyTorch divides by zero where every target is ignored; the formula gives 0."""
    wide = logits.float()
    return F.cross_entropy(
        wide,
        target,
        None if weight is None else weight.float(),
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction=reduction,
    )


def _linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> Tensor:
    """The same."""
    logits = F.linear(hidden, weight, bias).float()
    return F.cross_entropy(logits, target, ignore_index=ignore_index, reduction=reduction)


def _token_log_prob(
    logits: Tensor, target: Tensor, *, outputs: tuple[str, ...] = ("log_prob",)
) -> Any:
    """Trainers look for no ignored targets; the formula does."""
    log_p = torch.log_softmax(logits.float(), -1)
    found = log_p.gather(-1, target.unsqueeze(-1)).squeeze(-1)
    return (found, -(log_p.exp() * log_p).sum(-1)) if "entropy" in outputs else found


def _linear_log_prob(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    temperature: float = 1.0,
    outputs: tuple[str, ...] = ("log_prob",),
) -> Any:
    """The same."""
    log_p = torch.log_softmax((hidden @ weight.mT).float() / temperature, -1)
    found = log_p.gather(-1, target.unsqueeze(-1)).squeeze(-1)
    return (found, -(log_p.exp() * log_p).sum(-1)) if "entropy" in outputs else found


def _selective(logits: Tensor, index: Tensor, *, temperature: float = 1.0) -> Tensor:
    """The same."""
    log_p = torch.log_softmax(logits.float() / temperature, -1)
    places = index if index.ndim == logits.ndim else index.unsqueeze(-1)
    return log_p.gather(-1, places).view(index.shape)


def _sparsemax(x: Tensor) -> Tensor:
    """ReLU passes a gradient to an entry at the threshold; the formula does not."""
    z = x.float()
    fallen = z.sort(-1, descending=True).values
    count = torch.arange(1, z.shape[-1] + 1, device=z.device)
    total = fallen.cumsum(-1) - 1
    k = (fallen * count > total).sum(-1, keepdim=True)
    return F.relu(z - total.gather(-1, k - 1) / k).to(x.dtype)


def _of_heads(rows_of: Rows) -> Formula:
    """Without the clamp of the count that gives 0 where every target is ignored."""

    def call(
        hidden: Tensor, weight: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor,
        target: Tensor,
    ) -> Tensor:  # fmt: skip
        rows = rows_of_heads(rows_of, hidden, weight, teacher_hidden, teacher_weight)
        valid = target != -100
        return torch.where(valid, rows, 0).sum() / valid.sum()

    return call


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: Window = None,
    global_tokens: int = 0,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    scale: float | None = None,
) -> Tensor:
    """All heads at once; the formula takes one at a time where scores are many."""
    return of_all_heads(
        q, k, v, sinks, causal=causal, window=window, global_tokens=global_tokens,
        softcap=softcap, scale=scale,
    )  # fmt: skip


def _neighborhood(
    q: Tensor, k: Tensor, v: Tensor, kernel_size: int = 7, dilation: int = 1
) -> Tensor:
    """Masked scores of L x L; the formula gathers the few keys and keeps fp64 small."""
    place = torch.arange(q.shape[2], device=q.device)
    apart = place[:, None] - place
    seen = (apart.abs() <= kernel_size // 2 * dilation) & (apart % dilation == 0)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)


def _grouped_moe(
    x: Tensor, gate_up_weight: Tensor, down_weight: Tensor, index: Tensor, routing: Tensor
) -> Tensor:
    """Grouped GEMMs between gathered rows, as Hugging Face; the formula is dense."""
    experts, top_k = gate_up_weight.shape[0], index.shape[-1]
    flat = index.view(-1)
    ids, order = torch.sort(flat)
    every = torch.arange(experts, device=x.device, dtype=ids.dtype)
    offsets = torch.searchsorted(ids, every, right=True, out_int32=True)
    gate_up = torch._grouped_mm(x[order // top_k], gate_up_weight.mT, offs=offsets)
    gate, up = gate_up.chunk(2, -1)
    rows = torch._grouped_mm(F.silu(gate) * up, down_weight.mT, offs=offsets)
    rows = rows * routing.view(-1)[order].unsqueeze(-1)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(flat.shape[0], device=x.device)
    return rows[inverse].view(*index.shape, -1).sum(-2).to(x.dtype)


EAGER: dict[str, Formula] = {
    "attention": _attention,
    "cross_entropy": _cross_entropy,
    "cross_entropy_inplace": _cross_entropy,
    "fused_linear_cross_entropy": _linear_cross_entropy,
    "fused_linear_jsd": _of_heads(jsd_rows(0.5)),
    "fused_linear_kl_div": _of_heads(kl_rows),
    "fused_linear_log_prob": _linear_log_prob,
    "fused_linear_tvd": _of_heads(tvd_rows),
    "fused_moe": _grouped_moe,
    "neighborhood_attention": _neighborhood,
    "selective_log_softmax": _selective,
    "sparsemax": _sparsemax,
    "token_log_prob": _token_log_prob,
}
