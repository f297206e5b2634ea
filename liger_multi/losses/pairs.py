"""Shared by losses over pairs and single answers: sequences, references, metrics."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_multi import checks
from liger_multi.losses.one_pass import mean_logits
from liger_multi.losses.shared import counted, lengths, masked_mean
from liger_multi.losses.sources import Source, tokens
from liger_multi.ops import LogProbOutput

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
    return counted(name, target, ignore_index)


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
    every = target if nll_target is None else with_nll_targets(target, nll_target, ignore_index)
    own = policy_tokens(name, policy, every, metrics, ignore_index)
    assert own.log_prob is not None
    chosen, log_prob = target.chunk(2)[0], own.log_prob.chunk(2)[0]
    if nll_target is None:
        return own, -masked_mean(log_prob, chosen != ignore_index)
    requested = nll_target != ignore_index
    other = requested & (chosen != ignore_index) & (nll_target != chosen)
    if torch.compiler.is_compiling() or bool(other.any()):  # in most trainers they are the same
        rest = torch.full_like(target, ignore_index)
        rest[: len(chosen)] = torch.where(other, nll_target, ignore_index)
        again = policy_tokens(name, policy, rest, (), ignore_index).log_prob
        assert again is not None
        log_prob = torch.where(other, again.chunk(2)[0], log_prob)
    return own, -masked_mean(log_prob, requested)


def sequences(
    log_prob: Tensor | None, mask: Tensor, tail: float | None, normalized: bool
) -> Tensor:
    """Log-probabilities of sequences from those of tokens, which are 0 where they do not count."""
    assert log_prob is not None
    if tail is not None:
        place, own = mask.cumsum(1), mask.sum(1)
        shared = torch.minimum(*own.chunk(2)).repeat(2).unsqueeze(1)
        log_prob = torch.where(place <= shared, log_prob, tail * log_prob)
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
    sums: Tensor, before: Tensor, mask: Tensor, nll: Tensor, score: Callable[[Tensor], Tensor]
) -> Pairs:
    """Numbers of pairs from those of sequences."""
    ratio = sums - before
    c, r = ratio.chunk(2)
    (c_score, r_score), (c_own, r_own) = score(ratio).chunk(2), sums.chunk(2)
    (c_before, r_before), (c_length, r_length) = before.chunk(2), lengths(mask).chunk(2)
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
    each = mean_logits(policy, target, ignore_index, name)
    mask = target != ignore_index
    chosen, rejected = (masked_mean(each, mask & part.unsqueeze(1)) for part in rows)
    return chosen, rejected


def halves_of(target: Tensor) -> tuple[Tensor, Tensor]:
    """Which rows are chosen, and which rejected."""
    first = torch.arange(target.shape[0], device=target.device) < target.shape[0] // 2
    return first, ~first


def pair_metrics(
    pairs: Pairs,
    own: LogProbOutput,
    mask: Tensor,
    target: Tensor,
    beta: float,
    means: tuple[Tensor | None, Tensor | None],
) -> PreferenceMetrics:
    """Metrics for logging."""
    with torch.no_grad():
        up, down = beta * pairs.chosen.detach(), beta * pairs.rejected.detach()
        first = mask.chunk(2)[0]
        hits = None if own.argmax is None else (own.argmax == target).chunk(2)[0]
        return PreferenceMetrics(
            up.mean(),
            down.mean(),
            (up - down).mean(),
            (up > down).float().mean(),
            pairs.chosen_log_prob.detach().mean(),
            pairs.rejected_log_prob.detach().mean(),
            pairs.nll.detach(),
            None if own.entropy is None else masked_mean(own.entropy, mask),
            None if hits is None else masked_mean(hits.float(), first),
            *means,
        )
