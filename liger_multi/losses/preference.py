"""Losses of preferences: over pairs, with and without a reference, and over single answers.

A batch holds the chosen sequences in its first half and the rejected ones, in the same order, in
the second. ``log_prob`` of a sequence is the sum over its targets that are not ignored.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_multi import checks
from liger_multi.losses.one_pass import mean_logits
from liger_multi.losses.shared import (
    ABOVE_0,
    AT_LEAST_0,
    SHARE,
    Options,
    counting_mask,
    lengths,
    masked_mean,
    select_number,
)
from liger_multi.losses.sources import IGNORED, Source, log_square_sum, tokens
from liger_multi.ops import LogProbOutput

# --- what losses over pairs and single answers share: sequences, references, metrics ---

EXTRA = ("entropy", "token_accuracy", "logits")


class PreferenceMetrics(NamedTuple):
    """What trainers log of pairs: means over the batch, without gradients.

    ``entropy``, ``token_accuracy`` (of the chosen answers) and the means of logits are None unless
    asked for.
    """

    chosen_reward: Tensor
    rejected_reward: Tensor
    margin: Tensor
    accuracy: Tensor
    chosen_log_prob: Tensor
    rejected_log_prob: Tensor
    nll: Tensor
    entropy: Tensor | None = None
    token_accuracy: Tensor | None = None
    chosen_logit: Tensor | None = None
    rejected_logit: Tensor | None = None


class Pairs(NamedTuple):
    """Numbers of every pair, ``(B,)``.

    ``chosen`` and ``rejected`` are log-ratios to the reference (log-probabilities without one), the
    scores are the same under the chosen divergence.
    """

    chosen: Tensor
    rejected: Tensor
    chosen_score: Tensor
    rejected_score: Tensor
    chosen_log_prob: Tensor
    rejected_log_prob: Tensor
    chosen_reference: Tensor
    rejected_reference: Tensor
    chosen_length: Tensor
    rejected_length: Tensor
    nll: Tensor


def delta(p: Pairs) -> Tensor:
    """The difference of scores."""
    return p.chosen_score - p.rejected_score


def mean_delta(p: Pairs) -> Tensor:
    """The same of scores a token."""
    return p.chosen_score / p.chosen_length - p.rejected_score / p.rejected_length


def logistic(x: Tensor, smoothing: float = 0.0) -> Tensor:
    """``-log sigmoid(x)``, with a share of flipped labels."""
    if not smoothing:
        return -F.logsigmoid(x)
    return -(1 - smoothing) * F.logsigmoid(x) - smoothing * F.logsigmoid(-x)


def pair_mask(name: str, target: Tensor, ignore_index: int) -> Tensor:
    """Tokens that count, of a batch with two halves."""
    if not isinstance(target, Tensor) or target.ndim != 2 or target.shape[0] % 2:
        raise ValueError(
            f"{name}: target must have shape (2 B, T), chosen answers before rejected ones, got "
            f"{checks.describe(target)}"
        )
    return counting_mask(name, target, ignore_index)


def policy_tokens(
    name: str, policy: Source, target: Tensor, metrics: tuple[str, ...], ignore_index: int
) -> LogProbOutput:
    """The policy's log-probabilities, and statistics for the requested metrics."""
    needs = {"entropy": "entropy", "token_accuracy": "argmax"}
    outputs = ("log_prob", *[needs[m] for m in metrics if m in needs])
    return tokens(policy, target, outputs, ignore_index=ignore_index, name=name, role="policy")


def with_nll_targets(target: Tensor, nll_target: Tensor, ignore_index: int) -> Tensor:
    """Targets of one pass: those of pairs, and of the chosen rows those of the NLL beside them."""
    chosen, rejected = target.chunk(2)
    prompt_only = (nll_target != ignore_index) & (chosen == ignore_index)
    return torch.cat((torch.where(prompt_only, nll_target, chosen), rejected))


def pair_tokens(
    name: str,
    policy: Source,
    target: Tensor,
    nll_target: Tensor | None,
    metrics: tuple[str, ...],
    ignore_index: int,
) -> tuple[LogProbOutput, Tensor]:
    """Statistics of tokens, and the mean NLL of the chosen answers or of ``nll_target``.

    Where ``nll_target`` has a token that ``target`` ignores, the statistics have it too. Tokens
    whose two targets differ are computed once more.
    """
    all_targets = (
        target if nll_target is None else with_nll_targets(target, nll_target, ignore_index)
    )
    statistics = policy_tokens(name, policy, all_targets, metrics, ignore_index)
    assert statistics.log_prob is not None
    chosen, log_prob = target.chunk(2)[0], statistics.log_prob.chunk(2)[0]
    if nll_target is None:
        return statistics, -masked_mean(log_prob, chosen != ignore_index)
    requested = nll_target != ignore_index
    is_other = requested & (chosen != ignore_index) & (nll_target != chosen)
    if torch.compiler.is_compiling() or bool(is_other.any()):  # in most trainers they are the same
        other_targets = torch.full_like(target, ignore_index)
        other_targets[: len(chosen)] = torch.where(is_other, nll_target, ignore_index)
        nll_log_prob = policy_tokens(name, policy, other_targets, (), ignore_index).log_prob
        assert nll_log_prob is not None
        log_prob = torch.where(is_other, nll_log_prob.chunk(2)[0], log_prob)
    return statistics, -masked_mean(log_prob, requested)


def sequences(
    log_prob: Tensor | None, mask: Tensor, tail: float | None, normalized: bool
) -> Tensor:
    """Log-probabilities of sequences from those of tokens, which are 0 where they do not count."""
    assert log_prob is not None
    if tail is not None:
        position, counts = mask.cumsum(1), mask.sum(1)
        shared = torch.minimum(*counts.chunk(2)).repeat(2).unsqueeze(1)
        log_prob = torch.where(position <= shared, log_prob, tail * log_prob)
    total = log_prob.sum(-1)
    return total / lengths(mask) if normalized else total


def reference_sums(
    name: str,
    reference: Source,
    target: Tensor,
    mask: Tensor,
    ignore_index: int,
    reduce: Callable[[Tensor], Tensor],
) -> Tensor:
    """Numbers a sequence of a reference that may bring them already."""
    if isinstance(reference, Tensor) and reference.shape == mask.shape[:1]:
        return reference.detach()
    with torch.no_grad():
        statistics = tokens(
            reference, target, ignore_index=ignore_index, name=name, role="reference"
        ).log_prob
        assert statistics is not None
        return reduce(statistics)


def paired(
    sums: Tensor, reference: Tensor, mask: Tensor, nll: Tensor, score: Callable[[Tensor], Tensor]
) -> Pairs:
    """Numbers of pairs from those of sequences."""
    ratio = sums - reference
    c, r = ratio.chunk(2)
    (c_score, r_score), (c_own, r_own) = score(ratio).chunk(2), sums.chunk(2)
    (c_before, r_before), (c_length, r_length) = reference.chunk(2), lengths(mask).chunk(2)
    return Pairs(
        c,
        r,
        c_score,
        r_score,
        c_own,
        r_own,
        c_before,
        r_before,
        chosen_length=c_length,
        rejected_length=r_length,
        nll=nll,
    )


def logit_means(
    name: str,
    policy: Source,
    target: Tensor,
    metrics: tuple[str, ...],
    ignore_index: int,
    rows: tuple[Tensor, Tensor],
) -> tuple[Tensor | None, Tensor | None]:
    """Means of logits over the tokens of both groups of answers, if requested."""
    if "logits" not in metrics:
        return None, None
    means = mean_logits(policy, target, ignore_index, name)
    mask = target != ignore_index
    chosen, rejected = (masked_mean(means, mask & part.unsqueeze(1)) for part in rows)
    return chosen, rejected


def halves_of(target: Tensor) -> tuple[Tensor, Tensor]:
    """Which rows are chosen, and which rejected."""
    first = torch.arange(target.shape[0], device=target.device) < target.shape[0] // 2
    return first, ~first


def pair_metrics(
    pairs: Pairs,
    statistics: LogProbOutput,
    mask: Tensor,
    target: Tensor,
    beta: float,
    means: tuple[Tensor | None, Tensor | None],
) -> PreferenceMetrics:
    """What trainers log."""
    with torch.no_grad():
        up, down = beta * pairs.chosen.detach(), beta * pairs.rejected.detach()
        first = mask.chunk(2)[0]
        hits = None if statistics.argmax is None else (statistics.argmax == target).chunk(2)[0]
        return PreferenceMetrics(
            up.mean(),
            down.mean(),
            (up - down).mean(),
            (up > down).float().mean(),
            pairs.chosen_log_prob.detach().mean(),
            pairs.rejected_log_prob.detach().mean(),
            pairs.nll.detach(),
            None if statistics.entropy is None else masked_mean(statistics.entropy, mask),
            None if hits is None else masked_mean(hits.float(), first),
            *means,
        )


# --- formulas: pairs and options to a loss a pair ---


def _exo_pair(p: Pairs, o: Any) -> Any:
    x, e = o.beta * delta(p), o.label_smoothing
    won = torch.sigmoid(x) * (F.logsigmoid(x) - math.log1p(-e))
    return won + torch.sigmoid(-x) * (F.logsigmoid(-x) - math.log(e))


def _nca_pair(p: Pairs, o: Any) -> Any:
    up, down = o.beta * p.chosen, o.beta * p.rejected
    return -F.logsigmoid(up) - 0.5 * F.logsigmoid(-up) - 0.5 * F.logsigmoid(-down)


def _robust(p: Pairs, o: Any) -> Any:
    x, e = o.beta * delta(p), o.label_smoothing
    return ((1 - e) * logistic(x) - e * logistic(-x)) / (1 - 2 * e)


def _sppo_hard(p: Pairs, o: Any) -> Any:
    half = 0.5 / o.beta
    return (p.chosen - half).square() + (p.rejected + half).square()


def _aot(p: Pairs, o: Any) -> Any:
    policy = torch.sort(p.chosen_log_prob - p.rejected_log_prob)[0]
    reference = torch.sort(p.chosen_reference - p.rejected_reference)[0]
    return logistic(o.beta * (policy - reference), o.label_smoothing)


def _aot_unpaired(p: Pairs, o: Any) -> Any:
    gap = torch.sort(p.chosen)[0] - torch.sort(p.rejected)[0]
    return logistic(o.beta * gap, o.label_smoothing)


def _discopop(p: Pairs, o: Any) -> Any:
    x = o.beta * delta(p)
    mix = torch.sigmoid(x / o.discopop_tau)
    return (1 - mix) * logistic(x) + mix * torch.exp(-x)


class Formula(NamedTuple):
    """A loss type: its formula, what it reads in addition to beta, and where it comes from."""

    pairs: Callable[[Pairs, Any], Tensor]
    source: str
    smooth: bool = False
    divergence: bool = False
    paired: bool = True


DPO: dict[str, Formula] = {
    "sigmoid": Formula(
        lambda p, o: logistic(o.beta * delta(p), o.label_smoothing),
        "DPO, arXiv:2305.18290; smoothed cDPO",
        True,
        True,
    ),
    "sigmoid_norm": Formula(
        lambda p, o: logistic(o.beta * mean_delta(p), o.label_smoothing),
        "DPO of mean scores, arXiv:2405.14734",
        True,
        True,
    ),
    "hinge": Formula(
        lambda p, o: torch.relu(1 - o.beta * delta(p)), "SLiC, arXiv:2305.10425", False, True
    ),
    "ipo": Formula(
        lambda p, o: (mean_delta(p) - 1 / (2 * o.beta)).square(),
        "IPO, arXiv:2310.12036 eq. 17, scores a token",
        False,
        True,
    ),
    "exo_pair": Formula(_exo_pair, "EXO, arXiv:2402.00856 eq. 16", True, True),
    "nca_pair": Formula(_nca_pair, "NCA, arXiv:2402.05369"),
    "robust": Formula(_robust, "Robust DPO, arXiv:2403.00409", True, True),
    "bco_pair": Formula(
        lambda p, o: logistic(o.beta * p.chosen) + logistic(-o.beta * p.rejected),
        "BCO, arXiv:2404.04656",
    ),
    "sppo_hard": Formula(_sppo_hard, "SPPO, arXiv:2405.00675 eq. 4.7"),
    "aot": Formula(_aot, "AOT, arXiv:2406.05882", True, paired=False),
    "aot_unpaired": Formula(_aot_unpaired, "AOT, arXiv:2406.05882", True, paired=False),
    "apo_zero": Formula(
        lambda p, o: torch.sigmoid(-o.beta * p.chosen) + torch.sigmoid(o.beta * p.rejected),
        "APO, arXiv:2408.06266 eq. 7",
    ),
    "apo_down": Formula(
        lambda p, o: (
            torch.sigmoid(o.beta * p.chosen) + torch.sigmoid(o.beta * (p.rejected - p.chosen))
        ),
        "APO, arXiv:2408.06266 eq. 8",
    ),
    "discopop": Formula(_discopop, "DiscoPOP, arXiv:2406.08414 eq. 5", False, True),
    "sft": Formula(
        lambda p, o: p.nll.expand(p.chosen.shape),
        "negative log-likelihood of the chosen tokens",
        False,
        True,
    ),
}


def _alpha_score(t: Tensor, o: Any) -> Any:
    # (t^(a - 1) - 1) / (a - 1) of a ratio given by its logarithm; a = 1 is the logarithm itself
    a = o.alpha - 1.0
    return t if abs(a) < 1e-6 else torch.expm1((a * t).clamp(max=80.0)) / a


SCORES: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "reverse_kl": lambda t, o: t,
    "forward_kl": lambda t, o: -torch.expm1(-t),
    "js_divergence": lambda t, o: math.log(2) + F.logsigmoid(t),
    "alpha_divergence": _alpha_score,
}


@dataclass(frozen=True, kw_only=True)
class DPOOptions(Options):
    """Options of :func:`dpo_loss`.

    Args:
        loss_type: One of the loss types, or several.
        loss_weights: One factor for each of several loss types; without it all are 1.
        beta: Strength of the reference.
        label_smoothing: Share of pairs whose labels are taken to be flipped.
        divergence: Scores of log-ratios: reverse_kl, forward_kl, js_divergence, alpha_divergence
            (f-DPO, arXiv:2309.16240).
        alpha: Of alpha_divergence.
        discopop_tau: Temperature of discopop's mixture.
        tail: Factor of the tokens past the shorter answer's length (LD-DPO, arXiv:2409.06411).
        length_normalized: Log-probabilities of sequences are means over their tokens.
        weighting: Weigh pairs by how likely the policy finds them (WPO, arXiv:2406.11827 eq. 2).
        rpo_alpha: Factor of the chosen answers' mean negative log-likelihood a token (RPO,
            arXiv:2404.19733 eq. 3).
        metrics: Further metrics: entropy, token_accuracy, logits (their means).
    """

    loss_type: str | tuple[str, ...] = "sigmoid"
    loss_weights: tuple[float, ...] | None = None
    beta: float = 0.1
    label_smoothing: float = 0.0
    divergence: str = "reverse_kl"
    alpha: float = 0.5
    discopop_tau: float = 0.05
    tail: float | None = None
    length_normalized: bool = False
    weighting: bool = False
    rpo_alpha: float = 0.0
    metrics: tuple[str, ...] = ()

    WORDS = (("divergence", SCORES),)
    METRICS = EXTRA
    RANGES = (
        ("beta", ABOVE_0),
        ("label_smoothing", SHARE),
        ("discopop_tau", ABOVE_0),
        ("rpo_alpha", AT_LEAST_0),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        name = self.title()
        if not isinstance(self.loss_type, (str, tuple, list)):
            raise TypeError(
                f"{name}: loss_type must be a name or a tuple of names, got "
                f"{checks.describe(self.loss_type)}"
            )
        types = self.types
        for loss_type in types:
            checks.one_of(name, "loss_type", loss_type, DPO)
        if self.loss_weights is not None and not isinstance(self.loss_weights, (tuple, list)):
            raise TypeError(
                f"{name}: loss_weights must be a tuple of numbers, got "
                f"{checks.describe(self.loss_weights)}"
            )
        for i, weight in enumerate(self.weights):
            checks.number(name, f"loss_weights[{i}]", weight)
        if not types or len(self.weights) != len(types):
            raise ValueError(
                f"{name}: loss_weights must have one number for each of the {len(types)} loss "
                f"types, got {self.loss_weights!r}"
            )
        chosen = [DPO[loss_type] for loss_type in types]
        self.serves("label_smoothing", 0.0, any(f.smooth for f in chosen), f"{types}")
        self.serves("divergence", "reverse_kl", all(f.divergence for f in chosen), f"{types}")
        self.serves("weighting", False, all(f.paired for f in chosen), f"{types}, which sort pairs")
        self.serves("alpha", 0.5, self.divergence == "alpha_divergence", self.divergence)
        self.serves("discopop_tau", 0.05, "discopop" in types, f"{types}")
        if "exo_pair" in types and not 0 < self.label_smoothing < 1:
            raise ValueError(f"{name}: exo_pair needs label_smoothing in (0, 1), such as 1e-3")
        if "robust" in types and self.label_smoothing >= 0.5:
            raise ValueError(
                f"{name}: robust needs label_smoothing below 0.5, got {self.label_smoothing}"
            )
        if self.tail is not None and self.length_normalized:
            raise ValueError(f"{name}: tail and length_normalized exclude each other")

    @property
    def types(self) -> tuple[str, ...]:
        """The loss types."""
        return (self.loss_type,) if isinstance(self.loss_type, str) else tuple(self.loss_type)

    @property
    def weights(self) -> tuple[float, ...]:
        """Their factors."""
        return (1.0,) * len(self.types) if self.loss_weights is None else tuple(self.loss_weights)


def dpo_loss(
    policy: Source,
    target: Tensor,
    reference: Source | None = None,
    *,
    ignore_index: int = IGNORED,
    **options: Any,
) -> tuple[Tensor, PreferenceMetrics]:
    """Direct preference optimization with every loss type of its family.

    Args:
        policy: The trained model's tokens.
        target: Ids ``(2 B, T)``, chosen answers before rejected ones; prompts and padding ignored.
        reference: The frozen model's tokens (a second model, or the policy with its adapter off),
            log-probabilities of tokens ``(2 B, T)`` or of sequences ``(2 B,)`` computed before, or
            None for no reference. It gets no gradient.
        ignore_index: Targets that cost nothing.
        options: As :class:`DPOOptions`.
    """
    o = DPOOptions.of(**options)
    mask = pair_mask("DPO", target, ignore_index)
    # first, so that its logits are gone when the policy's come, which may stay
    reference_sums_of_pairs = _reference("DPO", reference, target, mask, o, ignore_index)
    statistics, nll = pair_tokens("DPO", policy, target, None, o.metrics, ignore_index)
    sums = sequences(statistics.log_prob, mask, o.tail, o.length_normalized)
    pairs = paired(sums, reference_sums_of_pairs, mask, nll, lambda t: SCORES[o.divergence](t, o))
    factor: Tensor | float = 1.0
    if o.weighting:
        square = log_square_sum(policy, target, ignore_index=ignore_index, name="DPO")
        likely = sequences((statistics.log_prob - square).detach(), mask, None, True).exp()  # type: ignore[operator]
        factor = likely.chunk(2)[0] * likely.chunk(2)[1]
    loss: Any = 0.0
    for loss_type, weight in zip(o.types, o.weights, strict=True):
        loss = loss + weight * (DPO[loss_type].pairs(pairs, o) * factor).mean()
    if o.rpo_alpha:
        loss = (
            loss - o.rpo_alpha * sequences(statistics.log_prob, mask, None, True).chunk(2)[0].mean()
        )
    means = logit_means("DPO", policy, target, o.metrics, ignore_index, halves_of(target))
    return loss, pair_metrics(pairs, statistics, mask, target, o.beta, means)


def _reference(
    name: str, reference: Source | None, target: Tensor, mask: Tensor, o: Any, ignore_index: int
) -> Tensor:
    """Log-probabilities of sequences under the reference; zeros without one."""
    if reference is None:
        return torch.zeros(mask.shape[0], device=mask.device)
    return reference_sums(
        name,
        reference,
        target,
        mask,
        ignore_index,
        lambda log_prob_output: sequences(log_prob_output, mask, o.tail, o.length_normalized),
    )


# --- pairs without a reference: CPO, SimPO, ORPO, AlphaPO ---


def _log_odds(log_p: Tensor) -> Tensor:
    """``log(p / (1 - p))`` of a probability given by its logarithm."""
    # log(1 - e^x) in two branches; the other one is kept finite, for its gradient
    log_p = log_p.clamp(max=-torch.finfo(log_p.dtype).eps)  # a certain answer has finite odds
    is_near_one = log_p > -math.log(2)
    small = torch.log(-torch.expm1(torch.where(is_near_one, log_p, -1.0)))
    large = torch.log1p(-torch.exp(torch.where(is_near_one, -1.0, log_p)))
    return log_p - torch.where(is_near_one, small, large)


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
        "CPO, arXiv:2401.08417",
        smooth=True,
    ),
    "hinge": MarginFormula(
        lambda p, o: torch.relu(1 - o.beta * _cpo_delta(p, o)), "SLiC, arXiv:2305.10425"
    ),
    "ipo": MarginFormula(
        lambda p, o: (_cpo_delta(p, o) - 1 / (2 * o.beta)).square(),
        "IPO, arXiv:2310.12036",
        mean=True,
    ),
    "simpo": MarginFormula(
        lambda p, o: logistic(o.beta * _cpo_delta(p, o) - o.gamma, o.label_smoothing),
        "SimPO, arXiv:2405.14734",
        mean=True,
        smooth=True,
        gamma=True,
    ),
    "orpo": MarginFormula(
        lambda p, o: o.beta * logistic(_log_odds(p.chosen) - _log_odds(p.rejected)),
        "ORPO, arXiv:2403.07691 eq. 4 and 7",
        mean=True,
        alpha=False,
    ),
}


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

    WORDS = (("loss_type", CPO),)
    METRICS = EXTRA
    RANGES = (("beta", ABOVE_0), ("label_smoothing", SHARE), ("nll_weight", AT_LEAST_0))

    def __post_init__(self) -> None:
        super().__post_init__()
        formula = CPO[self.loss_type]
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
            prompt and answer (ORPO); without it, those of target. Where both count and differ, a
            second pass computes the tokens; of log-probabilities that are there they agree.
        ignore_index: Targets that cost nothing.
        options: As :class:`CPOOptions`.
    """
    o = CPOOptions.of(**options)
    mask = pair_mask("CPO", target, ignore_index)
    if nll_target is not None:
        half = target.chunk(2)[0]
        checks.ids("CPO", "nll_target", nll_target)
        if nll_target.shape != half.shape:
            raise ValueError(
                f"CPO: nll_target must have shape {tuple(half.shape)}, that of the chosen rows, "
                f"got {checks.describe(nll_target)}"
            )
    statistics, nll = pair_tokens("CPO", policy, target, nll_target, o.metrics, ignore_index)
    assert statistics.log_prob is not None
    formula = CPO[o.loss_type]
    mean = formula.mean if o.length_normalized is None else o.length_normalized
    sums = sequences(torch.where(mask, statistics.log_prob, 0), mask, None, mean)
    pairs = paired(sums, torch.zeros_like(sums), mask, nll, lambda t: t)
    loss = formula.pairs(pairs, o).mean()
    loss = loss + o.nll_weight * nll if o.nll_weight else loss
    rewarded = pairs
    if o.alpha:
        rewarded = pairs._replace(
            chosen=_alpha_reward(pairs.chosen, o), rejected=_alpha_reward(pairs.rejected, o)
        )
    means = logit_means("CPO", policy, target, o.metrics, ignore_index, halves_of(target))
    return loss, pair_metrics(rewarded, statistics, mask, target, o.beta, means)


# --- single answers, desirable or not: KTO and unpaired APO ---


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

    WORDS = (("loss_type", KTO),)
    METRICS = EXTRA
    RANGES = (
        ("beta", ABOVE_0),
        ("desirable_weight", AT_LEAST_0),
        ("undesirable_weight", AT_LEAST_0),
    )


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
    mask, is_desirable = counting_mask("KTO", target, ignore_index), desirable.to(torch.bool)
    reference_of_answers: Tensor | float = 0.0
    if reference is not None:  # first, so that its logits are gone when the policy's come
        reference_of_answers = reference_sums(
            "KTO", reference, target, mask, ignore_index, lambda x: x.sum(-1)
        )
    statistics = policy_tokens("KTO", policy, target, o.metrics, ignore_index)
    assert statistics.log_prob is not None
    sums = statistics.log_prob.sum(-1)
    ratio = sums - reference_of_answers
    zero = torch.as_tensor(0.0 if kl is None else kl, dtype=sums.dtype, device=sums.device).detach()
    sign = select_number(is_desirable, 1.0, -1.0)
    weight = select_number(is_desirable, o.desirable_weight, o.undesirable_weight)
    loss = (weight * torch.sigmoid(-o.beta * sign * (ratio - zero))).mean()
    with torch.no_grad():
        up, count = o.beta * ratio.detach(), is_desirable.sum()
        means = [
            torch.where(group_mask, x, 0).sum() / group_mask.sum()
            for x in (up, sums.detach())
            for group_mask in (is_desirable, ~is_desirable)
        ]
        hits = None if statistics.argmax is None else (statistics.argmax == target).float()
        metrics = KTOMetrics(
            means[0],
            means[1],
            means[0] - means[1],
            means[2],
            means[3],
            count,
            is_desirable.numel() - count,
            zero,
            None if statistics.entropy is None else masked_mean(statistics.entropy, mask),
            None if hits is None else masked_mean(hits, mask & is_desirable.unsqueeze(1)),
            *logit_means(
                "KTO", policy, target, o.metrics, ignore_index, (is_desirable, ~is_desirable)
            ),
        )
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
