"""Policy gradient losses over sampled answers: GRPO and its relatives.

A loss type is a surrogate, which makes a loss of every token, and a reduction, which gives every
token its weight in the sum:

    loss = sum_i w[i] (surrogate(r[i], A[i]) v[i] + beta kl[i]) - entropy_weight H

with the ratio ``r = exp(log_prob - old)``, of the token or of its sequence (GSPO), advantages
``A``, ratios ``v`` of the sampler's policy, and ``H`` the mean entropy. Where every token's loss
depends on its own statistics only, logits are computed once (see :mod:`one_pass`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_multi import checks
from liger_multi.losses.one_pass import Columns, token_sum
from liger_multi.losses.policies import POLICY, Batch, PolicyOptions, cispo, clipped, token_mean
from liger_multi.losses.reductions import (
    counted,
    divisor,
    lengths,
    masked_mean,
    of_tokens,
    positive,
)
from liger_multi.losses.sources import IGNORED, Source, detached, tokens
from liger_multi.ops import LogProbOutput


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
    mask = counted("Policy", target, ignore_index)
    positive("Policy", "accumulation", accumulation)
    given = {"old": old, "ratios": ratios, "sampled": sampled}
    columns = _columns(given, advantages, target)
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
            found = tokens(
                reference, target, ignore_index=ignore_index, name="Policy", role="reference"
            ).log_prob
        columns["reference"] = found  # type: ignore[assignment]
    batch = Batch(mask, lambda: divisor("Policy", mask, num_items, processes, group), accumulation,
                  o.max_length)  # fmt: skip
    weight = POLICY[o.loss_type].weight(batch).to(mask.device)
    columns["share"] = weight.expand(mask.shape)
    if o.entropy_weight:
        columns["entropy_share"] = token_mean(batch).mul(o.entropy_weight).expand(mask.shape)
    needed = o.entropy_weight or o.top_entropy < 1
    outputs = ("log_prob", "entropy") if needed or o.metrics else ("log_prob",)
    if o.own_only:
        formula = _formula(o)
        loss, own = token_sum(
            policy, target, formula, columns, outputs, passes=o.passes,
            ignore_index=ignore_index, name="Policy", role="policy",
        )  # fmt: skip
    else:
        if o.passes == "one":
            raise ValueError(
                "Policy: one pass needs losses that depend on a token's own statistics; "
                f"{o.loss_type} with these options looks at its sequence or batch"
            )
        made = tokens(
            policy, target, outputs, ignore_index=ignore_index, name="Policy", role="policy"
        )
        columns |= _beyond(made, columns, mask, o)
        loss = torch.where(mask, _formula(o)(made, columns), 0).sum()
        own = detached(made)
    return loss, _metrics(own, columns, mask, o, loss)


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
    given: dict[str, Tensor | None], advantages: Tensor, target: Tensor
) -> dict[str, Tensor]:
    """Numbers of tokens by name."""
    found = {}
    checks.floating("Policy", advantages=advantages)
    for key, x in {"advantage": advantages, **given}.items():
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
        found[key] = wide.expand(target.shape)
    return found


def _ratio(own: Tensor, c: Columns, o: PolicyOptions) -> Tensor:
    """The ratio of policies of every token, or of its sequence."""
    log_ratio = own - c.get("old", own.detach())
    if o.sequence_level:
        mask = c["mask"]
        mean = torch.where(mask, log_ratio, 0).sum(-1, keepdim=True)
        log_ratio = (mean / lengths(mask).unsqueeze(1)).expand(own.shape)
    return torch.exp(log_ratio)


def _kl(own: Tensor, ratio: Tensor, c: Columns, o: PolicyOptions) -> Tensor:
    """The estimator k3 of the divergence (Schulman 2020), unbiased off policy if asked for."""
    gap = c["reference"] - own
    found = torch.expm1(gap) - gap
    return found * ratio if o.correct_kl else found


def _formula(o: PolicyOptions) -> Callable[[LogProbOutput, Columns], Tensor]:
    """The weighted loss of every token."""

    def formula(made: LogProbOutput, c: Columns) -> Tensor:
        own = made.log_prob
        assert own is not None
        ratio = _ratio(own, c, o)
        loss = POLICY[o.loss_type].surrogate(ratio, own, c, o)
        if "keep" in c:
            loss = torch.where(c["keep"], loss, 0)
        if "ratios" in c and o.loss_type != "vespo":
            loss = loss * c["ratios"]
        if o.beta:
            loss = loss + o.beta * _kl(own, ratio, c, o)
        loss = loss * c["share"]
        if o.entropy_weight:
            assert made.entropy is not None
            bonus = c["entropy_share"] * made.entropy
            loss = loss - (torch.where(c["high"], bonus, 0) if "high" in c else bonus)
        return loss

    return formula


def _beyond(made: LogProbOutput, c: Columns, mask: Tensor, o: PolicyOptions) -> dict[str, Tensor]:
    """Columns that are known when all tokens are: weights of answers, and who is left out."""
    assert made.log_prob is not None
    own, a = made.log_prob.detach(), c["advantage"]
    found: dict[str, Tensor] = {"mask": mask}
    keep = []
    if o.top_entropy < 1:
        assert made.entropy is not None
        entropy = made.entropy.detach()
        if bool(mask.any()):
            limit = torch.quantile(entropy[mask].float(), 1 - o.top_entropy)
            found["high"] = (entropy >= limit) & mask
        else:
            found["high"] = mask
        keep.append(found["high"])
        if o.entropy_weight:  # the mean over the tokens that it acts on
            part = mask.sum().clamp(min=1) / found["high"].sum().clamp(min=1)
            found["entropy_share"] = c["entropy_share"] * part
    if o.off_policy_threshold is not None:
        before = c.get("sampled", c.get("old", own))
        gap = torch.where(mask, torch.nan_to_num(before - own, nan=0.0), 0).sum(-1)
        near = gap / lengths(mask) <= o.off_policy_threshold
        keep.append((a >= 0) | near.unsqueeze(1))
    if keep:
        found["keep"] = torch.stack(keep).all(0)
    if o.loss_type == "vespo":
        found["weight"] = _vespo_weight(own, c, mask, o)
    return found


def _vespo_weight(own: Tensor, c: Columns, mask: Tensor, o: PolicyOptions) -> Tensor:
    """``w^k exp(lambda (1 - w))`` of the ratio w of an answer, in logarithms, 1 at w = 1."""
    low, high = math.log(1e-8), 20.0
    log_w = torch.where(mask, (own - c.get("old", own)).clamp(-high, high), 0).sum(-1)
    if "ratios" in c:
        ratio = c["ratios"].log().clamp(low, high)
        log_w = log_w + torch.where(mask, ratio, 0).sum(-1)
    log_w = log_w.clamp(low, high).unsqueeze(1)
    good = c["advantage"] >= 0
    k = torch.where(good, o.vespo_k_pos, o.vespo_k_neg)
    rate = torch.where(good, o.vespo_lambda_pos, o.vespo_lambda_neg).clamp(min=1e-4)
    return torch.exp(rate + k * log_w - rate * log_w.exp())


def _metrics(
    own: LogProbOutput, c: Columns, mask: Tensor, o: PolicyOptions, loss: Tensor
) -> PolicyMetrics:
    with torch.no_grad():
        c = {"mask": mask, **c}
        assert own.log_prob is not None
        ratio = _ratio(own.log_prob, c, o)
        found: dict[str, Tensor | None] = {"ratio": masked_mean(ratio, mask)}
        found["policy_loss"] = loss.detach()
        if own.entropy is not None:
            found["entropy"] = masked_mean(own.entropy, mask)
            if o.entropy_weight:
                bonus = torch.where(c.get("high", mask), c["entropy_share"] * own.entropy, 0)
                found["policy_loss"] = loss.detach() + bonus.sum()
        if o.beta:
            found["kl"] = masked_mean(_kl(own.log_prob, ratio, c, o), mask)
        if "weight" in c:
            found["weight"] = masked_mean(c["weight"], mask)
        return PolicyMetrics(**found, **_clips(ratio, c, mask, o))  # type: ignore[arg-type]


def _clips(ratio: Tensor, c: Columns, mask: Tensor, o: PolicyOptions) -> dict[str, Tensor]:
    """Shares of clipped tokens."""
    a, surrogate = c["advantage"], POLICY[o.loss_type].surrogate
    if surrogate is cispo:
        return {"clip_high": masked_mean(((ratio > o.epsilon_high) & (a > 0)).float(), mask)}
    if surrogate is not clipped:
        return {}
    if o.delta is not None:
        ratio = ratio.clamp(max=o.delta)
    low = (ratio < 1 - o.epsilon_low) & (a < 0)
    high = (ratio > 1 + o.epsilon_high) & (a > 0)
    some = mask.any(-1)
    by_row = [torch.where(mask, x, False).sum(-1) / lengths(mask) for x in (low, high)]
    return {
        "clip_low": masked_mean(low.float(), mask),
        "clip_high": masked_mean(high.float(), mask),
        "clip_region": masked_mean((low | high).float(), mask),
        "clip_low_min": torch.where(some, by_row[0], torch.inf).amin()
        if len(some)
        else ratio.sum(),
        "clip_high_max": torch.where(some, by_row[1], -torch.inf).amax()
        if len(some)
        else ratio.sum(),
    }
