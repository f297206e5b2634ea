"""Losses over single answers that are desirable or not: KTO and unpaired APO."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_multi import checks
from liger_multi.losses.options import Options
from liger_multi.losses.pairs import EXTRA, logit_means, policy_tokens, reference_sums
from liger_multi.losses.reductions import counted, masked_mean
from liger_multi.losses.sources import IGNORED, Source


class KTOMetrics(NamedTuple):
    """What trainers log of single answers; a mean over none is NaN."""

    chosen_reward: Tensor
    rejected_reward: Tensor
    margin: Tensor
    chosen_log_prob: Tensor
    rejected_log_prob: Tensor
    chosen_count: Tensor
    rejected_count: Tensor
    kl: Tensor
    entropy: Tensor | None = None
    token_accuracy: Tensor | None = None
    chosen_logit: Tensor | None = None
    rejected_logit: Tensor | None = None


class Single(NamedTuple):
    """A loss type: whether the divergence from the reference is its zero, and its source."""

    divergence: bool
    source: str


KTO: dict[str, Single] = {
    "kto": Single(True, "KTO, arXiv:2402.01306 eq. 7"),
    "apo_zero_unpaired": Single(False, "APO, arXiv:2408.06266 eq. 7, without pairs"),
}


@dataclass(frozen=True, kw_only=True)
class KTOOptions(Options):
    """Options of :func:`kto_loss`.

    Args:
        loss_type: kto or apo_zero_unpaired.
        beta: Strength of the reference.
        desirable_weight: Factor of the desirable answers' losses.
        undesirable_weight: Factor of the others'.
        metrics: Further metrics: entropy, token_accuracy, logits (their means).
    """

    loss_type: str = "kto"
    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0
    metrics: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.one_of(self.title(), "loss_type", self.loss_type, KTO)
        self.number("beta", 0.0, above=True)
        self.number("desirable_weight", 0.0)
        self.number("undesirable_weight", 0.0)
        checks.names(self.title(), self.metrics, EXTRA, "metrics")


def kto_loss(
    policy: Source,
    target: Tensor,
    desirable: Tensor,
    reference: Source | None = None,
    kl: Tensor | float | None = None,
    *,
    ignore_index: int = IGNORED,
    **options: Any,
) -> tuple[Tensor, KTOMetrics]:
    """Answers against a reference, each by itself: ``sigmoid(-beta s (log-ratio - kl))``.

    ``s`` is 1 for a desirable answer and -1 for another one.

    Args:
        policy: The trained model's tokens.
        target: Ids ``(B, T)``; prompts and padding ignored.
        desirable: Whether each answer is desirable, ``(B,)``.
        reference: The frozen model's tokens, log-probabilities of tokens or of sequences ``(B,)``
            computed before, or None for no reference.
        kl: The divergence of the policy from the reference, such as :func:`kto_divergence` of
            mismatched answers; required by kto, refused by others.
        ignore_index: Targets that cost nothing.
        options: As :class:`KTOOptions`.
    """
    o = KTOOptions.of(**options)
    if not isinstance(target, Tensor) or target.ndim != 2:
        raise ValueError(f"KTO: target must have shape (B, T), got {checks.describe(target)}")
    rows = target.shape[:1]
    if not isinstance(desirable, Tensor) or desirable.shape != rows:
        raise ValueError(
            f"KTO: desirable must have shape {tuple(rows)}, got {checks.describe(desirable)}"
        )
    if (kl is not None) != KTO[o.loss_type].divergence:
        raise ValueError(
            f"KTO: {o.loss_type} "
            + ("needs kl (0.0 if nobody estimates it)" if kl is None else "does not read kl")
        )
    if kl is not None and not isinstance(kl, Tensor):
        checks.number("KTO", "kl", kl)
    mask, good = counted("KTO", target, ignore_index), desirable.to(torch.bool)
    before: Tensor | float = 0.0
    if reference is not None:  # first, so that its logits are gone when the policy's come
        before = reference_sums("KTO", reference, target, mask, ignore_index, lambda x: x.sum(-1))
    own = policy_tokens("KTO", policy, target, o.metrics, ignore_index)
    assert own.log_prob is not None
    sums = own.log_prob.sum(-1)
    ratio = sums - before
    zero = torch.as_tensor(0.0 if kl is None else kl, device=sums.device).detach().to(sums.dtype)
    sign = torch.where(good, 1.0, -1.0)
    weight = torch.where(good, o.desirable_weight, o.undesirable_weight)
    loss = (weight * torch.sigmoid(-o.beta * sign * (ratio - zero))).mean()
    with torch.no_grad():
        up, count = o.beta * ratio.detach(), good.sum()
        means = [
            torch.where(kind, x, 0).sum() / kind.sum()
            for x in (up, sums.detach())
            for kind in (good, ~good)
        ]
        hits = None if own.argmax is None else (own.argmax == target).float()
        metrics = KTOMetrics(
            means[0], means[1], means[0] - means[1], means[2], means[3], count,
            good.numel() - count, zero,
            None if own.entropy is None else masked_mean(own.entropy, mask),
            None if hits is None else masked_mean(hits, mask & good.unsqueeze(1)),
            *logit_means("KTO", policy, target, o.metrics, ignore_index, (good, ~good)),
        )  # fmt: skip
    return loss, metrics


def kto_divergence(policy: Tensor, reference: Tensor, group: Any = None) -> Tensor:
    """The mean log-ratio of mismatched answers, averaged over ranks, at least 0.

    Args:
        policy: Log-probabilities of sequences ``(B,)`` under the policy.
        reference: Of the same under the reference.
        group: Ranks to average over, with one collective.
    """
    checks.floating("KTO", policy=policy, reference=reference)
    checks.same_shape("KTO", policy=policy, reference=reference)
    mean = (policy - reference).mean().detach()
    if group is not None:
        import torch.distributed as dist

        mean = mean.clone()
        dist.all_reduce(mean, group=group)
        mean /= dist.get_world_size(group)
    return mean.clamp(min=0)
