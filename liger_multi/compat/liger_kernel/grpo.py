"""Policy losses of logits, with a number of every token: ``liger_kernel.ops.grpo_loss``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from liger_multi import losses, ops
from liger_multi.compat.liger_kernel.chunked.bases import check_policy, ranks
from liger_multi.compat.liger_kernel.chunked.policy import check_level, get_gamma_weights
from liger_multi.compat.liger_kernel.outputs import ArgumentError
from liger_multi.compat.liger_kernel.signatures import function_class
from liger_multi.losses import policy
from liger_multi.losses.shared import divisor, masked_mean

Tokens = tuple[Tensor, Tensor | None, Tensor]
"""The loss, the divergence (None without a beta) and whether it was clipped, of every token."""

NAME = "GrpoLossFunction"


def _tokens(
    logits: Tensor, ids: Tensor, mask: Tensor | None, temperature: float
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the tokens that count, and which these are."""
    if logits.ndim != 3 or ids.ndim != 2 or logits.shape[1] != ids.shape[1] + 1:
        raise ArgumentError(
            f"{NAME}: logits must be (B, L + 1, V) and completion_ids (B, L), got "
            f"{tuple(logits.shape)} and {tuple(ids.shape)}"
        )
    counted = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask != 0
    tokens = ops.token_log_prob(
        logits[:, :-1],
        ids.masked_fill(~counted, -100),
        temperature=temperature,
        outputs=("log_prob",),
    )
    assert tokens.log_prob is not None
    return tokens.log_prob, counted


def _options(loss_type: str, **options: Any) -> losses.PolicyOptions:
    """Options that the loss type reads; callers pass those of all of them."""
    if loss_type not in policy.POLICY:
        raise ArgumentError(f"Unknown loss_type: {loss_type}")
    read = {*policy.POLICY[loss_type].reads, "beta", "correct_kl", "level"}
    if loss_type == "vespo":
        read.remove("level")
    return losses.PolicyOptions(
        loss_type=loss_type, **{name: value for name, value in options.items() if name in read}
    )


def _clipped(ratio: Tensor, advantage: Tensor, o: losses.PolicyOptions) -> Tensor:
    """Which ratios are beyond the range in the direction that their advantage pulls, 1 or 0."""
    if o.loss_type == "cispo":
        clipped = (ratio > o.epsilon_high) & (advantage > 0)
    elif policy.POLICY[o.loss_type].surrogate is policy.clipped:
        low, high = ratio < 1 - o.epsilon_low, ratio > 1 + o.epsilon_high
        clipped = (low & (advantage < 0)) | (high & (advantage > 0))
    else:
        clipped = torch.zeros_like(ratio, dtype=torch.bool)
    return clipped.float()


def _losses(
    logits: Tensor,
    ids: Tensor,
    columns: dict[str, Tensor | None],
    mask: Tensor | None,
    temperature: float,
    o: losses.PolicyOptions,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Loss, divergence, clipping and counting of tokens; what does not count is 0."""
    own, counted = _tokens(logits, ids, mask, temperature)
    c: dict[str, Tensor] = {k: x.detach().float() for k, x in columns.items() if x is not None}
    c = {k: (x.unsqueeze(1) if x.ndim == 1 else x).expand(own.shape) for k, x in c.items()}
    c["mask"] = counted
    ratio = policy._ratio(own, c, o)
    loss = policy.POLICY[o.loss_type].surrogate(ratio, own, c, o)
    if "ratios" in c and o.loss_type != "vespo":
        loss = loss * c["ratios"]
    kl = None
    if o.beta:
        kl = policy._kl(own, ratio, c, o)
        loss = loss + o.beta * kl
        kl = torch.where(counted, kl.detach(), 0)
    clipped = torch.where(counted, _clipped(ratio.detach(), c["advantage"], o), 0)
    return torch.where(counted, loss, 0), kl, clipped, counted


def grpo_loss(
    logits: Tensor,
    old_logp: Tensor | None,
    ref_logp: Tensor | None,
    completion_ids: Tensor,
    advantages: Tensor,
    completion_mask: Tensor | None,
    temperature: float,
    beta: float,
    eps_low: float,
    eps_high: float,
    inplace: bool,
    loss_type: str = "grpo",
    max_completion_length: int | None = None,
    reduce: bool = True,
    importance_sampling_level: str = "token",
    sapo_temperature_pos: float = 1.0,
    sapo_temperature_neg: float = 1.05,
    vllm_is_ratio: Tensor | None = None,
    delta: float | None = None,
    use_bias_correction_kl: bool = False,
    num_items_in_batch: Tensor | float | None = None,
    phi_seq: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """:func:`liger_multi.losses.policy_loss` of logits ``(B, L + 1, V)``, whose last is not read.

    Nothing is written over the logits. With ``reduce`` the loss of the batch, the mean divergence
    (None without a beta) and the share of clipped tokens, else these numbers of every token,
    ``(B, L)`` in fp32.
    """
    check_policy(NAME, loss_type, max_completion_length, beta != 0, (ref_logp, None))
    check_level(importance_sampling_level, loss_type)
    o = _options(
        loss_type,
        level=importance_sampling_level,
        beta=beta,
        epsilon_low=eps_low,
        epsilon_high=eps_high,
        delta=delta,
        correct_kl=use_bias_correction_kl and beta != 0,
        max_length=max_completion_length,
        sapo_temperature_pos=sapo_temperature_pos,
        sapo_temperature_neg=sapo_temperature_neg,
    )
    columns = {
        "advantage": advantages,
        "old": old_logp,
        "reference": ref_logp,
        "ratios": vllm_is_ratio,
        "weight": phi_seq,
    }
    loss, kl, clipped, counted = _losses(
        logits, completion_ids, columns, completion_mask, temperature, o
    )
    if not reduce:
        return loss, kl, clipped
    return _reduced(loss, kl, clipped, counted, o, num_items_in_batch)


def _reduced(
    loss: Tensor,
    kl: Tensor | None,
    clipped: Tensor,
    counted: Tensor,
    o: losses.PolicyOptions,
    num_items: Tensor | float | None,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """The loss of a batch, and means over the tokens that count."""
    processes, group = ranks()
    batch = policy.Batch(
        counted, lambda: divisor(NAME, counted, num_items, processes, group), 1, o.max_length
    )
    total = (loss * policy.POLICY[o.loss_type].weight(batch).to(loss.device)).sum()
    mean = None if kl is None else masked_mean(kl, counted)
    return total, mean, masked_mean(clipped, counted)


GrpoLossFunction = function_class("GrpoLossFunction", grpo_loss)


def triton_grpo_loss(
    logits: Tensor,
    old_logp: Tensor | None,
    ref_logp: Tensor | None,
    completion_ids: Tensor,
    advantages: Tensor,
    completion_mask: Tensor | None = None,
    temperature: float = 0.9,
    beta: float = 0.04,
    eps_low: float = 0.2,
    eps_high: float = 0.4,
    inplace: bool = True,
    loss_type: str = "dapo",
    max_completion_length: int | None = None,
    importance_sampling_level: str = "token",
    reduce: bool = False,
    sapo_temperature_pos: float = 1.0,
    sapo_temperature_neg: float = 1.05,
    vllm_is_ratio: Tensor | None = None,
    delta: float | None = None,
    use_bias_correction_kl: bool = False,
    num_items_in_batch: Tensor | float | None = None,
    vespo_k_pos: float = 2.0,
    vespo_lambda_pos: float = 3.0,
    vespo_k_neg: float = 3.0,
    vespo_lambda_neg: float = 2.0,
) -> Any:
    """:class:`GrpoLossFunction`; with ``reduce`` the loss and a list of the metrics."""
    phi = None
    if loss_type == "vespo" and importance_sampling_level == "sequence":
        raise ArgumentError("loss_type='vespo' requires importance_sampling_level='token'.")
    if loss_type == "vespo":
        own, counted = _tokens(logits.detach(), completion_ids, completion_mask, temperature)
        before = own if old_logp is None else old_logp
        phi = get_gamma_weights(
            advantages,
            own - before,
            counted,
            vllm_is_ratio,
            vespo_k_pos,
            vespo_lambda_pos,
            vespo_k_neg,
            vespo_lambda_neg,
        )
    output: Any = grpo_loss(
        logits,
        old_logp,
        ref_logp,
        completion_ids,
        advantages,
        completion_mask,
        temperature,
        beta,
        eps_low,
        eps_high,
        inplace,
        loss_type,
        max_completion_length,
        reduce,
        importance_sampling_level,
        sapo_temperature_pos,
        sapo_temperature_neg,
        vllm_is_ratio,
        delta,
        use_bias_correction_kl,
        num_items_in_batch,
        phi,
    )
    if not reduce:
        return output
    loss, kl, clipped = output
    return loss, [clipped] if kl is None else [kl, clipped]
