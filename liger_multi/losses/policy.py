"""Policy gradient losses over sampled answers: GRPO and its relatives.

A loss type is a surrogate, which makes a loss of every token, and a reduction, which gives every
token its weight in the sum:

    loss = sum_i w[i] (surrogate(r[i], A[i]) v[i] + beta kl[i]) - entropy_weight H

with the ratio ``r = exp(log_prob - old)``, of the token or of its sequence (GSPO), advantages
``A``, ratios ``v`` of the sampler's policy, and ``H`` the mean entropy. Where every token's loss
depends on its own statistics only, logits are computed once (:mod:`liger_multi.losses.one_pass`).
Surrogates and reductions are tables, with the options that they read.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_multi import checks
from liger_multi.losses.one_pass import PASSES, Columns, token_sum
from liger_multi.losses.shared import (
    ABOVE_0,
    AT_LEAST_0,
    SHARE,
    Options,
    counting_mask,
    divisor,
    lengths,
    masked_mean,
    of_tokens,
    positive,
    reciprocal,
    select_number,
)
from liger_multi.losses.sources import IGNORED, Source, detached, tokens
from liger_multi.ops import LogProbOutput

# --- surrogates: the loss of a token ---


def clipped(ratio: Tensor, log_prob: Tensor, c: Columns, o: Any) -> Tensor:
    """The smaller of the plain and the clipped gain (PPO, arXiv:1707.06347 eq. 7)."""
    a = c["advantage"]
    bounded = ratio.clamp(1 - o.epsilon_low, 1 + o.epsilon_high)
    outer = ratio if o.delta is None else ratio.clamp(max=o.delta)
    return -torch.min(outer * a, bounded * a)


def cispo(ratio: Tensor, log_prob: Tensor, c: Columns, o: Any) -> Tensor:
    """Clipped weights without gradient, times the log-probability."""
    return -ratio.clamp(max=o.epsilon_high).detach() * c["advantage"] * log_prob


def sapo(ratio: Tensor, log_prob: Tensor, c: Columns, o: Any) -> Tensor:
    """A soft gate in the place of the clip."""
    a = c["advantage"]
    t = select_number(a > 0, o.sapo_temperature_pos, o.sapo_temperature_neg)
    return -torch.sigmoid(t * (ratio - 1)) * (4 / t) * a


def vespo(ratio: Tensor, log_prob: Tensor, c: Columns, o: Any) -> Tensor:
    """The weight of the answer on the log-probability."""
    return -c["weight"] * c["advantage"] * log_prob


# --- reductions: the weight of a token in the sum ---


class Batch(NamedTuple):
    """The tensors that token weights are computed from."""

    mask: Tensor
    divisor: Callable[[], Tensor]
    accumulation: int
    max_length: int | None


def _sequence_mean(b: Batch) -> Tensor:
    return reciprocal(lengths(b.mask).unsqueeze(1) * (b.mask.shape[0] * b.accumulation))


def token_mean(b: Batch) -> Tensor:
    """The mean over the tokens of the batch."""
    return reciprocal(b.mask.sum().clamp(min=1) * b.accumulation)


def _share(value: float, mask: Tensor) -> Tensor:
    return torch.full((), value, dtype=torch.float32, device=mask.device)


def _constant_length(b: Batch) -> Tensor:
    assert b.max_length is not None
    return _share(1.0 / (b.mask.shape[0] * b.max_length * b.accumulation), b.mask)


def _step_mean(b: Batch) -> Tensor:
    return 1.0 / b.divisor()


def _sequence_sum(b: Batch) -> Tensor:
    return _share(1.0 / (b.mask.shape[0] * b.accumulation), b.mask)


class Policy(NamedTuple):
    """A loss type: surrogate, reduction, source, and what it reads."""

    surrogate: Callable[[Tensor, Tensor, Columns, Any], Tensor]
    weight: Callable[[Batch], Tensor]
    source: str
    level: str = "token"
    reads: tuple[str, ...] = ()


_CLIP = ("epsilon_low", "epsilon_high", "delta")
POLICY: dict[str, Policy] = {
    "grpo": Policy(clipped, _sequence_mean, "GRPO, arXiv:2402.03300 eq. 3", reads=_CLIP),
    "bnpo": Policy(clipped, token_mean, "GRPO, a mean over the tokens of the batch", reads=_CLIP),
    "dr_grpo": Policy(
        clipped, _constant_length, "Dr. GRPO, arXiv:2503.20783", reads=(*_CLIP, "max_length")
    ),
    "dapo": Policy(clipped, _step_mean, "DAPO, arXiv:2503.14476 eq. 8", reads=_CLIP),
    "gspo": Policy(
        clipped, _sequence_mean, "GSPO, arXiv:2507.18071 eq. 5", "sequence", reads=_CLIP
    ),
    "cispo": Policy(cispo, _step_mean, "CISPO, arXiv:2506.13585 eq. 4", reads=("epsilon_high",)),
    "sapo": Policy(
        sapo,
        _sequence_mean,
        "SAPO, arXiv:2511.20347",
        reads=("sapo_temperature_pos", "sapo_temperature_neg"),
    ),
    "luspo": Policy(clipped, _sequence_sum, "LUSPO, arXiv:2602.05261", "sequence", reads=_CLIP),
    "vespo": Policy(
        vespo,
        _step_mean,
        "VESPO, arXiv:2602.10693",
        reads=("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"),
    ),
}


@dataclass(frozen=True, kw_only=True)
class PolicyOptions(Options):
    """Options of :func:`policy_loss`.

    Args:
        loss_type: One of the loss types.
        level: Whether ratios are those of a token or of its sequence (the exponential of the mean
            log-ratio, GSPO); None for what the loss type's paper says.
        epsilon_low: Ratios below 1 - epsilon_low are clipped.
        epsilon_high: Ratios above 1 + epsilon_high are clipped; for cispo above epsilon_high.
        delta: Ratios above it are clipped whatever the advantage (two-sided clipping, INTELLECT-2,
            arXiv:2505.07291).
        beta: Factor of the divergence from the reference (the estimator k3).
        correct_kl: Multiply that by the ratio, which makes it unbiased off policy (DeepSeek-V3.2,
            arXiv:2512.02556).
        entropy_weight: Factor of the mean entropy, which is subtracted.
        top_entropy: Only this share of tokens, those with the highest entropy, gets a policy loss
            (arXiv:2506.01939).
        off_policy_threshold: Answers with a negative advantage whose mean log-ratio of sampler to
            policy is above it get no policy loss (DeepSeek-V3.2).
        max_length: Length that dr_grpo divides by.
        sapo_temperature_pos: Of tokens with a positive advantage.
        sapo_temperature_neg: Of the others.
        vespo_k_pos: Shape of the weight of answers with an advantage that is not negative.
        vespo_lambda_pos: Rate of that weight.
        vespo_k_neg: Shape for the others.
        vespo_lambda_neg: Rate for the others.
        metrics: Further metrics: entropy.
        passes: Passes over the vocabulary: one, two or auto.
    """

    loss_type: str = "grpo"
    level: str | None = None
    epsilon_low: float = 0.2
    epsilon_high: float = 0.2
    delta: float | None = None
    beta: float = 0.0
    correct_kl: bool = False
    entropy_weight: float = 0.0
    top_entropy: float = 1.0
    off_policy_threshold: float | None = None
    max_length: int | None = None
    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0
    metrics: tuple[str, ...] = ("entropy",)
    passes: str = "auto"

    WORDS = (("loss_type", POLICY), ("passes", PASSES))
    METRICS = ("entropy",)
    RANGES = (
        ("beta", AT_LEAST_0),
        ("epsilon_low", AT_LEAST_0),
        ("epsilon_high", AT_LEAST_0),
        ("top_entropy", SHARE),
        ("sapo_temperature_pos", ABOVE_0),
        ("sapo_temperature_neg", ABOVE_0),
        ("delta", ABOVE_0),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        name = self.title()
        if self.level is not None:
            checks.one_of(name, "level", self.level, ("token", "sequence"))
        own_reads = POLICY[self.loss_type].reads
        all_reads = [key for policy in POLICY.values() for key in policy.reads]
        for key in dict.fromkeys(all_reads):
            self.serves(
                key, type(self).__dataclass_fields__[key].default, key in own_reads, self.loss_type
            )
        self.serves("correct_kl", False, self.beta != 0, "beta=0")
        self.serves("level", None, self.loss_type != "vespo", "vespo, whose weights are sequences'")
        if self.loss_type == "dr_grpo" and (self.max_length is None or self.max_length < 1):
            raise ValueError(
                f"{name}: dr_grpo needs max_length, at least 1, got {self.max_length!r}"
            )

    @property
    def sequence_level(self) -> bool:
        """Whether ratios are those of sequences."""
        return (self.level or POLICY[self.loss_type].level) == "sequence"

    @property
    def own_only(self) -> bool:
        """Whether the loss of a token depends on nothing but its own statistics."""
        needs_others = self.sequence_level or self.loss_type == "vespo"
        return not needs_others and self.top_entropy == 1.0 and self.off_policy_threshold is None


# --- the loss ---


class PolicyMetrics(NamedTuple):
    """What trainers log, means over tokens without gradients; None where a loss has no such thing.

    ``clip_low`` and ``clip_high`` are shares of tokens beyond the clipping range in the direction
    that their advantage pulls; the extremes are of the means of sequences. ``weight`` is the mean
    of a loss type's own factor (VESPO).
    """

    policy_loss: Tensor
    ratio: Tensor
    entropy: Tensor | None = None
    kl: Tensor | None = None
    clip_low: Tensor | None = None
    clip_high: Tensor | None = None
    clip_region: Tensor | None = None
    clip_low_min: Tensor | None = None
    clip_high_max: Tensor | None = None
    weight: Tensor | None = None


def policy_loss(
    policy: Source,
    target: Tensor,
    advantages: Tensor,
    *,
    old: Tensor | None = None,
    reference: Source | None = None,
    ratios: Tensor | None = None,
    sampled: Tensor | None = None,
    token_mask: Tensor | None = None,
    num_items: Tensor | float | None = None,
    processes: int = 1,
    group: Any = None,
    accumulation: int = 1,
    ignore_index: int = IGNORED,
    **options: Any,
) -> tuple[Tensor, PolicyMetrics]:
    """The loss of sampled answers.

    Args:
        policy: The trained model's tokens.
        target: Sampled ids ``(B, T)``; prompts and padding ignored.
        advantages: Of answers ``(B,)`` or of tokens ``(B, T)``.
        old: Log-probabilities ``(B, T)`` under the policy that sampled; None: the policy itself, so
            that every ratio is 1.
        reference: The frozen model's tokens or their log-probabilities; needed for beta.
        ratios: Importance ratios ``(B, T)`` or ``(B, 1)`` of policy to sampler (the inference
            engine's); they multiply the policy loss, in vespo its weight.
        sampled: Log-probabilities ``(B, T)`` under the sampler, for off_policy_threshold; without
            them those of ``old``. NaN where it has none.
        token_mask: Further tokens that do not count are False or 0, ``(B, T)`` (tools' answers).
        num_items: Tokens of all ranks and micro-batches of a step, for dapo, cispo and vespo;
            without it they are counted here: this batch, over the ranks of group.
        processes: Ranks whose gradients are averaged, with num_items.
        group: Ranks to count tokens over, by one collective, without num_items.
        accumulation: Micro-batches a step: the other loss types divide by it, and so does the
            entropy.
        ignore_index: Targets that cost nothing.
        options: As :class:`PolicyOptions`.
    """
    o = PolicyOptions.of(**options)
    target = _target(target, token_mask, ignore_index)
    mask = counting_mask("Policy", target, ignore_index)
    positive("Policy", "accumulation", accumulation)
    columns = _columns({"old": old, "ratios": ratios, "sampled": sampled}, advantages, target)
    if sampled is not None and o.off_policy_threshold is None:
        raise ValueError("Policy: sampled is read with off_policy_threshold only")
    if (o.beta != 0) != (reference is not None):
        raise ValueError(
            "Policy: beta needs a reference"
            if reference is None
            else "Policy: a reference without beta has no effect"
        )
    if reference is not None:
        with torch.no_grad():
            statistics = tokens(
                reference, target, ignore_index=ignore_index, name="Policy", role="reference"
            ).log_prob
        columns["reference"] = statistics  # type: ignore[assignment]
    batch = Batch(
        mask,
        lambda: divisor("Policy", mask, num_items, processes, group),
        accumulation,
        o.max_length,
    )
    columns["share"] = POLICY[o.loss_type].weight(batch).expand(mask.shape)
    if o.entropy_weight:
        columns["entropy_share"] = token_mean(batch).mul(o.entropy_weight).expand(mask.shape)
    needs_entropy = o.entropy_weight or o.top_entropy < 1
    outputs = ("log_prob", "entropy") if needs_entropy or o.metrics else ("log_prob",)
    if o.own_only:
        formula = _formula(o)
        loss, token_statistics = token_sum(
            policy,
            target,
            formula,
            columns,
            outputs,
            passes=o.passes,
            ignore_index=ignore_index,
            name="Policy",
            role="policy",
        )
    else:
        if o.passes == "one":
            raise ValueError(
                "Policy: one pass needs losses that depend on a token's own statistics; "
                f"{o.loss_type} with these options looks at its sequence or batch"
            )
        output = tokens(
            policy, target, outputs, ignore_index=ignore_index, name="Policy", role="policy"
        )
        columns |= _columns_of_all_tokens(output, columns, mask, o)
        loss = torch.where(mask, _formula(o)(output, columns), 0).sum()
        token_statistics = detached(output)
    return loss, _metrics(token_statistics, columns, mask, o, loss)


def _target(target: Tensor, token_mask: Tensor | None, ignore_index: int) -> Tensor:
    if not isinstance(target, Tensor) or target.ndim != 2 or not target.shape[0]:
        raise ValueError(
            f"Policy: target must have shape (B, T) with B >= 1, got {checks.describe(target)}"
        )
    if token_mask is None:
        return target
    of_tokens("Policy", "token_mask", token_mask, target)
    checks.ids("Policy", "target", target)
    return target.masked_fill(token_mask == 0, ignore_index)


def _columns(
    tensors: dict[str, Tensor | None], advantages: Tensor, target: Tensor
) -> dict[str, Tensor]:
    """Numbers of tokens by name."""
    columns = {}
    checks.floating("Policy", advantages=advantages)
    for key, x in {"advantage": advantages, **tensors}.items():
        if x is None:
            continue
        checks.floating("Policy", **{key: x}, optional=())
        wide = x.unsqueeze(1) if x.ndim == 1 and key == "advantage" else x
        row = key in ("advantage", "ratios") and wide.shape == (target.shape[0], 1)
        if not row and wide.shape != target.shape:
            argument = "advantages" if key == "advantage" else key
            raise ValueError(
                f"Policy: {argument} must have the shape {tuple(target.shape)} of the targets"
                + (" or one number an answer" if key in ("advantage", "ratios") else "")
                + f", got {checks.describe(x)}"
            )
        checks.constant("Policy", key, x)
        columns[key] = wide.expand(target.shape)
    return columns


def _ratio(log_prob: Tensor, c: Columns, o: PolicyOptions) -> Tensor:
    """The ratio of policies of every token, or of its sequence."""
    log_ratio = log_prob - c.get("old", log_prob.detach())
    if o.sequence_level:
        mask = c["mask"]
        mean = torch.where(mask, log_ratio, 0).sum(-1, keepdim=True)
        log_ratio = (mean / lengths(mask).unsqueeze(1)).expand(log_prob.shape)
    return torch.exp(log_ratio)


def _kl(log_prob: Tensor, ratio: Tensor, c: Columns, o: PolicyOptions) -> Tensor:
    """The estimator k3 of the divergence (Schulman 2020), unbiased off policy if asked for."""
    gap = c["reference"] - log_prob
    kl = torch.expm1(gap) - gap
    return kl * ratio if o.correct_kl else kl


def _formula(o: PolicyOptions) -> Callable[[LogProbOutput, Columns], Tensor]:
    """The weighted loss of every token."""

    def formula(log_prob_output: LogProbOutput, c: Columns) -> Tensor:
        log_prob = log_prob_output.log_prob
        assert log_prob is not None
        ratio = _ratio(log_prob, c, o)
        loss = POLICY[o.loss_type].surrogate(ratio, log_prob, c, o)
        if "keep" in c:
            loss = torch.where(c["keep"], loss, 0)
        if "ratios" in c and o.loss_type != "vespo":
            loss = loss * c["ratios"]
        if o.beta:
            loss = loss + o.beta * _kl(log_prob, ratio, c, o)
        loss = loss * c["share"]
        if o.entropy_weight:
            assert log_prob_output.entropy is not None
            bonus = c["entropy_share"] * log_prob_output.entropy
            loss = loss - (torch.where(c["high"], bonus, 0) if "high" in c else bonus)
        return loss

    return formula


def _columns_of_all_tokens(
    log_prob_output: LogProbOutput, c: Columns, mask: Tensor, o: PolicyOptions
) -> dict[str, Tensor]:
    """Columns that need all tokens first: weights of answers, and which are masked out."""
    assert log_prob_output.log_prob is not None
    log_prob, a = log_prob_output.log_prob.detach(), c["advantage"]
    terms: dict[str, Tensor] = {"mask": mask}
    masks = []
    if o.top_entropy < 1:
        assert log_prob_output.entropy is not None
        entropy = log_prob_output.entropy.detach()
        if bool(mask.any()):
            limit = torch.quantile(entropy[mask].float(), 1 - o.top_entropy)
            terms["high"] = (entropy >= limit) & mask
        else:
            terms["high"] = mask
        masks.append(terms["high"])
        if o.entropy_weight:  # the mean over the tokens that it acts on
            part = mask.sum().clamp(min=1) / terms["high"].sum().clamp(min=1)
            terms["entropy_share"] = c["entropy_share"] * part
    if o.off_policy_threshold is not None:
        sampled = c.get("sampled", c.get("old", log_prob))
        gap = torch.where(mask, torch.nan_to_num(sampled - log_prob, nan=0.0), 0).sum(-1)
        is_on_policy = gap / lengths(mask) <= o.off_policy_threshold
        masks.append((a >= 0) | is_on_policy.unsqueeze(1))
    if masks:
        terms["keep"] = torch.stack(masks).all(0)
    if o.loss_type == "vespo":
        terms["weight"] = _vespo_weight(log_prob, c, mask, o)
    return terms


def _vespo_weight(log_prob: Tensor, c: Columns, mask: Tensor, o: PolicyOptions) -> Tensor:
    """``w^k exp(lambda (1 - w))`` of the ratio w of an answer, in logarithms, 1 at w = 1."""
    lowest, highest = math.log(1e-8), 20.0
    log_w = torch.where(mask, (log_prob - c.get("old", log_prob)).clamp(-highest, highest), 0).sum(
        -1
    )
    if "ratios" in c:
        log_w = log_w + torch.where(mask, c["ratios"].log().clamp(lowest, highest), 0).sum(-1)
    log_w = log_w.clamp(lowest, highest).unsqueeze(1)
    is_positive = c["advantage"] >= 0
    k = select_number(is_positive, o.vespo_k_pos, o.vespo_k_neg)
    rate = select_number(is_positive, o.vespo_lambda_pos, o.vespo_lambda_neg).clamp(min=1e-4)
    return torch.exp(rate + k * log_w - rate * log_w.exp())


def _metrics(
    statistics: LogProbOutput, c: Columns, mask: Tensor, o: PolicyOptions, loss: Tensor
) -> PolicyMetrics:
    with torch.no_grad():
        c = {"mask": mask, **c}
        assert statistics.log_prob is not None
        ratio = _ratio(statistics.log_prob, c, o)
        metrics: dict[str, Tensor | None] = {"ratio": masked_mean(ratio, mask)}
        metrics["policy_loss"] = loss.detach()
        if statistics.entropy is not None:
            metrics["entropy"] = masked_mean(statistics.entropy, mask)
            if o.entropy_weight:
                bonus = torch.where(c.get("high", mask), c["entropy_share"] * statistics.entropy, 0)
                metrics["policy_loss"] = loss.detach() + bonus.sum()
        if o.beta:
            metrics["kl"] = masked_mean(_kl(statistics.log_prob, ratio, c, o), mask)
        if "weight" in c:
            metrics["weight"] = masked_mean(c["weight"], mask)
        return PolicyMetrics(**metrics, **_clips(ratio, c, mask, o))  # type: ignore[arg-type]


def _clips(ratio: Tensor, c: Columns, mask: Tensor, o: PolicyOptions) -> dict[str, Tensor]:
    """Shares of clipped tokens."""
    a, surrogate = c["advantage"], POLICY[o.loss_type].surrogate
    if surrogate is cispo:
        return {"clip_high": masked_mean(((ratio > o.epsilon_high) & (a > 0)).float(), mask)}
    if surrogate is not clipped:
        return {}
    if o.delta is not None:
        ratio = ratio.clamp(max=o.delta)
    below = (ratio < 1 - o.epsilon_low) & (a < 0)
    above = (ratio > 1 + o.epsilon_high) & (a > 0)
    has_tokens = mask.any(-1)
    by_row = [(x & mask).sum(-1) * reciprocal(lengths(mask)) for x in (below, above)]
    return {
        "clip_low": masked_mean(below.float(), mask),
        "clip_high": masked_mean(above.float(), mask),
        "clip_region": masked_mean((below | above).float(), mask),
        "clip_low_min": torch.where(has_tokens, by_row[0], torch.inf).amin()
        if len(has_tokens)
        else ratio.sum(),
        "clip_high_max": torch.where(has_tokens, by_row[1], -torch.inf).amax()
        if len(has_tokens)
        else ratio.sum(),
    }
