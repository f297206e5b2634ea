"""Losses over pairs without a reference: CPO, SimPO, ORPO, AlphaPO."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_multi import checks
from liger_multi.losses.options import Options
from liger_multi.losses.pairs import (
    EXTRA,
    Pairs,
    PreferenceMetrics,
    halves_of,
    logistic,
    logit_means,
    pair_mask,
    pair_metrics,
    paired,
    policy_tokens,
    sequences,
)
from liger_multi.losses.reductions import masked_mean
from liger_multi.losses.sources import IGNORED, Source


def _log_odds(log_p: Tensor) -> Tensor:
    """``log(p / (1 - p))`` of a probability given by its logarithm."""
    # log(1 - e^x) in two branches; the other one is kept finite, for its gradient
    log_p = log_p.clamp(max=-torch.finfo(log_p.dtype).eps)  # a certain answer has finite odds
    near = log_p > -math.log(2)
    small = torch.log(-torch.expm1(torch.where(near, log_p, -1.0)))
    large = torch.log1p(-torch.exp(torch.where(near, -1.0, log_p)))
    return log_p - torch.where(near, small, large)


def _alpha_reward(log_p: Tensor, o: Any) -> Tensor:
    # (1 - p^-a) / a, whose limit for a = 0 is log p
    return log_p if not o.alpha else -torch.expm1(-o.alpha * log_p) / o.alpha


def _cpo_delta(p: Pairs, o: Any) -> Tensor:
    return _alpha_reward(p.chosen, o) - _alpha_reward(p.rejected, o)


class MarginFormula(NamedTuple):
    """A loss type without a reference."""

    pairs: Callable[[Pairs, Any], Tensor]
    source: str
    mean: bool = False
    smooth: bool = False
    gamma: bool = False
    alpha: bool = True


CPO: dict[str, MarginFormula] = {
    "sigmoid": MarginFormula(
        lambda p, o: logistic(o.beta * _cpo_delta(p, o), o.label_smoothing),
        "CPO, arXiv:2401.08417", smooth=True,
    ),
    "hinge": MarginFormula(
        lambda p, o: torch.relu(1 - o.beta * _cpo_delta(p, o)), "SLiC, arXiv:2305.10425"
    ),
    "ipo": MarginFormula(
        lambda p, o: (_cpo_delta(p, o) - 1 / (2 * o.beta)).square(), "IPO, arXiv:2310.12036",
        mean=True,
    ),
    "simpo": MarginFormula(
        lambda p, o: logistic(o.beta * _cpo_delta(p, o) - o.gamma, o.label_smoothing),
        "SimPO, arXiv:2405.14734", mean=True, smooth=True, gamma=True,
    ),
    "orpo": MarginFormula(
        lambda p, o: o.beta * logistic(_log_odds(p.chosen) - _log_odds(p.rejected)),
        "ORPO, arXiv:2403.07691 eq. 4 and 7", mean=True, alpha=False,
    ),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class CPOOptions(Options):
    """Options of :func:`cpo_loss`.

    Args:
        loss_type: One of the loss types.
        beta: Factor of the margin; of the whole term for orpo.
        label_smoothing: Share of pairs whose labels are taken to be flipped.
        gamma: Margin that simpo wants between the rewards.
        nll_weight: Factor of the chosen answers' negative log-likelihood.
        alpha: Shape of the reward (AlphaPO, arXiv:2501.03884); 0 is the log-probability.
        length_normalized: Whether log-probabilities of sequences are means over their tokens;
            None for what the loss type's paper says.
        metrics: Further metrics: entropy, token_accuracy, logits (their means).
    """

    loss_type: str = "sigmoid"
    beta: float = 0.1
    label_smoothing: float = 0.0
    gamma: float = 0.5
    nll_weight: float = 1.0
    alpha: float = 0.0
    length_normalized: bool | None = None
    metrics: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.one_of(self.title(), "loss_type", self.loss_type, CPO)
        formula = CPO[self.loss_type]
        self.number("beta", 0.0, above=True)
        self.number("label_smoothing", 0.0, 1.0)
        self.number("gamma")
        self.number("nll_weight", 0.0)
        self.number("alpha")
        checks.names(self.title(), self.metrics, EXTRA, "metrics")
        self.serves("label_smoothing", 0.0, formula.smooth, self.loss_type)
        self.serves("gamma", 0.5, formula.gamma, self.loss_type)
        self.serves("alpha", 0.0, formula.alpha, self.loss_type)
        odds = self.loss_type == "orpo"
        self.serves("length_normalized", None, not odds, "orpo, which needs means")


def cpo_loss(
    policy: Source,
    target: Tensor,
    nll_target: Tensor | None = None,
    *,
    ignore_index: int = IGNORED,
    **options: Any,
) -> tuple[Tensor, PreferenceMetrics]:
    """Preferences without a reference: CPO, SimPO, ORPO and AlphaPO.

    Args:
        policy: The trained model's tokens.
        target: Ids ``(2 B, T)``, chosen answers before rejected ones; prompts and padding ignored.
        nll_target: Ids ``(B, T)`` of the chosen rows whose likelihood is the NLL term's, such as
            prompt and answer (ORPO); without it, those of target. Where both count they agree.
        ignore_index: Targets that cost nothing.
        options: As :class:`CPOOptions`.
    """
    o = CPOOptions.of(**options)
    mask, every = pair_mask("CPO", target, ignore_index), target
    wanted = mask.chunk(2)[0]
    if nll_target is not None:
        half = target.chunk(2)[0]
        checks.ids("CPO", "nll_target", nll_target)
        if nll_target.shape != half.shape:
            raise ValueError(
                f"CPO: nll_target must have shape {tuple(half.shape)}, that of the chosen rows, "
                f"got {checks.describe(nll_target)}"
            )
        wanted = nll_target != ignore_index
        every = torch.cat((torch.where(wanted, nll_target, half), target.chunk(2)[1]))
    own = policy_tokens("CPO", policy, every, o.metrics, ignore_index)
    assert own.log_prob is not None
    nll = -masked_mean(own.log_prob.chunk(2)[0], wanted)
    formula = CPO[o.loss_type]
    mean = formula.mean if o.length_normalized is None else o.length_normalized
    sums = sequences(torch.where(mask, own.log_prob, 0), mask, None, mean)
    pairs = paired(sums, torch.zeros_like(sums), mask, nll, lambda t: t)
    loss = formula.pairs(pairs, o).mean()
    loss = loss + o.nll_weight * nll if o.nll_weight else loss
    rewarded = pairs
    if o.alpha:
        rewarded = pairs._replace(
            chosen=_alpha_reward(pairs.chosen, o), rejected=_alpha_reward(pairs.rejected, o)
        )
    means = logit_means("CPO", policy, target, o.metrics, ignore_index, halves_of(target))
    return loss, pair_metrics(rewarded, own, mask, target, o.beta, means)
