"""Whom an operator is compared with by name: eager PyTorch, its fused kernels, and other packages.

A peer takes the operator's tensors and those of its options that it supports, by name. Where a
sample sets an option that a peer does not have, the provider is skipped with that reason.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_multi.bench import peers_attention
from liger_multi.bench.eager import EAGER
from liger_multi.testing.formulas import FORMULAS, Formula


def _rms_norm_aten(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def _fused_add_rms_norm_aten(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    total = x + residual
    return F.rms_norm(total, x.shape[-1:], weight, eps), total


def _layer_norm_aten(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def _group_norm_aten(
    x: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    return F.group_norm(x, num_groups, weight, bias, eps)


def _cross_entropy_aten(
    logits: Tensor, target: Tensor, *, ignore_index: int = -100, reduction: str = "mean"
) -> Tensor:
    return F.cross_entropy(logits, target, ignore_index=ignore_index, reduction=reduction)


def _linear_cross_entropy_aten(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> Tensor:
    logits = F.linear(hidden, weight, bias)
    return F.cross_entropy(logits, target, ignore_index=ignore_index, reduction=reduction)


def _token_log_prob_aten(
    logits: Tensor, target: Tensor, *, outputs: tuple[str, ...] = ("log_prob",)
) -> Any:
    found = -F.cross_entropy(logits, target, reduction="none")
    return (found, torch.special.entr(logits.softmax(-1)).sum(-1)) if len(outputs) > 1 else found


def _linear_log_prob_aten(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    temperature: float = 1.0,
    outputs: tuple[str, ...] = ("log_prob",),
) -> Any:
    z = hidden @ weight.mT / temperature
    found = -F.cross_entropy(z, target, reduction="none")
    return (found, torch.special.entr(z.softmax(-1)).sum(-1)) if "entropy" in outputs else found


def _selective_aten(logits: Tensor, index: Tensor, *, temperature: float = 1.0) -> Tensor:
    z = logits.float() / temperature
    places = index if index.ndim == logits.ndim else index.unsqueeze(-1)
    return (z.gather(-1, places) - z.logsumexp(-1, keepdim=True)).view(index.shape)


def _kl_aten(
    student: Tensor, teacher: Tensor, *, form: str = "log_prob", teacher_form: str = "log_prob"
) -> Tensor:
    log_q = student.log_softmax(-1) if form == "logits" else student
    log_p = teacher.log_softmax(-1) if teacher_form == "logits" else teacher
    return F.kl_div(log_q, log_p, reduction="batchmean", log_target=True)


def _torch_fused(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    found: Tensor = F.linear_cross_entropy(hidden, weight, target)
    return found


def _cut_cross_entropy(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    peer = importlib.import_module("cut_cross_entropy")
    found: Tensor = peer.linear_cross_entropy(hidden, weight, target)
    return found


# --- lower bounds: the GEMMs alone ---


class _Products(torch.autograd.Function):
    """The three GEMMs of a linear loss and nothing else."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        """Logits, kept as if they were their own gradient."""
        logits = hidden @ weight.mT
        ctx.save_for_backward(hidden, weight, logits)
        return logits.new_ones((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor, Tensor]:
        """GEMMs with the shapes of both gradients."""
        hidden, weight, logits = ctx.saved_tensors
        return logits @ weight, logits.mT @ hidden


def _products(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    apply: Any = _Products.apply
    found: Tensor = apply(hidden, weight)
    return found


def _log_prob_products(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    temperature: float = 1.0,
    outputs: tuple[str, ...] = ("log_prob",),
) -> Any:
    found = _products(hidden, weight, target).expand(target.shape)
    return (found,) * len(outputs) if len(outputs) > 1 else found


class _PairProducts(torch.autograd.Function):
    """The four GEMMs of a divergence of two heads and nothing else."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, other: Tensor, head: Tensor) -> Tensor:
        """Both logits; the student's are kept as if they were their own gradient."""
        logits = hidden @ weight.mT
        _ = other @ head.mT
        ctx.save_for_backward(hidden, weight, logits)
        return logits.new_ones((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """GEMMs with the shapes of both gradients."""
        hidden, weight, logits = ctx.saved_tensors
        return logits @ weight, logits.mT @ hidden, None, None


def _pair_products(
    hidden: Tensor, weight: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor, target: Tensor
) -> Tensor:
    apply: Any = _PairProducts.apply
    found: Tensor = apply(hidden, weight, teacher_hidden, teacher_weight)
    return found


_PEERS: dict[str, dict[str, Formula]] = {
    **peers_attention.PEERS,
    "cross_entropy": {"aten": _cross_entropy_aten},
    "cross_entropy_inplace": {"aten": _cross_entropy_aten},
    "fused_add_rms_norm": {"aten": _fused_add_rms_norm_aten},
    "fused_linear_cross_entropy": {
        "aten": _linear_cross_entropy_aten,
        "torch-fused": _torch_fused,
        "cce": _cut_cross_entropy,
        "products": _products,
    },
    "fused_linear_jsd": {"products": _pair_products},
    "fused_linear_kl_div": {"products": _pair_products},
    "fused_linear_log_prob": {"aten": _linear_log_prob_aten, "products": _log_prob_products},
    "fused_linear_tvd": {"products": _pair_products},
    "group_norm": {"aten": _group_norm_aten},
    "kl_div": {"aten": _kl_aten},
    "kl_div_inplace": {"aten": _kl_aten},
    "layer_norm": {"aten": _layer_norm_aten},
    "rms_norm": {"aten": _rms_norm_aten},
    "selective_log_softmax": {"aten": _selective_aten},
    "token_log_prob": {"aten": _token_log_prob_aten},
}
TABLE: dict[str, dict[str, Formula]] = {
    op: {"torch": EAGER.get(op, formula), **_PEERS.get(op, {})} for op, formula in FORMULAS.items()
}
"""Eager PyTorch and peers by operator."""
FLOORS = ("products",)
PACKAGES = {"cce": "cut_cross_entropy"}
"""Packages that peers import."""
