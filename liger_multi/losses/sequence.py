"""Losses of given sequences: likelihood, its weighted forms, z-loss, and several predicted tokens.

    loss = sum_i w[i] (-s[i] log_prob[i] + z_loss lse[i]^2) - entropy_weight H

``s`` is 1, or a token's own probability without its gradient (DFT); ``w`` is a token's weight in
the mean over tokens or over sequences. Everything is computed in one pass over the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_multi import checks
from liger_multi.losses.one_pass import PASSES, Columns, token_sum
from liger_multi.losses.shared import (
    AT_LEAST_0,
    Options,
    counting_mask,
    divisor,
    masked_mean,
    mean_over_ranks,
    of_tokens,
    segment_weights,
)
from liger_multi.losses.sources import IGNORED, Source
from liger_multi.ops import LogProbOutput


class SequenceMetrics(NamedTuple):
    """What trainers log: means over tokens without gradients; None unless asked for."""

    nll: Tensor
    tokens: Tensor
    entropy: Tensor | None = None
    token_accuracy: Tensor | None = None
    z_loss: Tensor | None = None


class Likelihood(NamedTuple):
    """A loss type: the factor of a token's negative log-likelihood, and its source."""

    factor: Callable[[Tensor], Tensor] | None
    source: str


SEQUENCE: dict[str, Likelihood] = {
    "nll": Likelihood(None, "negative log-likelihood"),
    "dft": Likelihood(lambda log_p: log_p.detach().exp(), "DFT, arXiv:2508.05629 eq. 9"),
}
REDUCTIONS = ("token", "sequence", "sum")


@dataclass(frozen=True, kw_only=True)
class SequenceOptions(Options):
    """Options of :func:`sequence_loss`.

    Args:
        loss_type: nll or dft.
        reduction: token (the mean over tokens), sequence (the mean over sequences of the means over
            their tokens) or sum.
        z_loss: Factor of ``lse^2`` (PaLM, arXiv:2204.02311 section 5).
        entropy_weight: Factor of the entropy, which is subtracted.
        metrics: Further metrics: entropy, token_accuracy, z_loss.
        passes: Passes over the vocabulary: one, two or auto.
    """

    loss_type: str = "nll"
    reduction: str = "token"
    z_loss: float = 0.0
    entropy_weight: float = 0.0
    metrics: tuple[str, ...] = ()
    passes: str = "auto"

    WORDS = (("loss_type", SEQUENCE), ("reduction", REDUCTIONS), ("passes", PASSES))
    METRICS = ("entropy", "token_accuracy", "z_loss")
    RANGES = (("z_loss", AT_LEAST_0),)


def sequence_loss(
    policy: Source,
    target: Tensor,
    token_weight: Tensor | None = None,
    *,
    segments: Tensor | None = None,
    num_items: Tensor | float | None = None,
    processes: int = 1,
    group: Any = None,
    ignore_index: int = IGNORED,
    **options: Any,
) -> tuple[Tensor, SequenceMetrics]:
    """The loss of given tokens.

    Args:
        policy: The trained model's tokens.
        target: Ids ``(..., T)``, already shifted; prompts and padding ignored.
        token_weight: Factors of tokens, of the target's shape. The mean over tokens divides by
            their sum, unless num_items is given; the others take them as they are.
        segments: Numbers of the packed sequences of a row, such as
            :func:`~liger_multi.losses.segments_of` gives; for the reduction sequence.
        num_items: Tokens of all ranks and micro-batches of a step, which the token mean divides by;
            without it they are counted here: this batch, over the ranks of group.
        processes: Ranks whose gradients are averaged, with num_items.
        group: Ranks to count tokens over, by one collective, without num_items.
        ignore_index: Targets that cost nothing.
        options: As :class:`SequenceOptions`.
    """
    o = SequenceOptions.of(**options)
    mask = counting_mask("Sequence", target, ignore_index)
    if segments is not None:
        of_tokens("Sequence", "segments", segments, target)
        if o.reduction != "sequence":
            raise ValueError(
                f"Sequence: segments serve reduction='sequence', got reduction={o.reduction!r}"
            )
    if num_items is not None and o.reduction != "token":
        raise ValueError(f"Sequence: num_items serves reduction='token', got {o.reduction!r}")
    if token_weight is not None:
        of_tokens("Sequence", "token_weight", token_weight, target)
    share = _shares(mask, token_weight, segments, o, (num_items, processes, group))
    needs = {"entropy": "entropy", "token_accuracy": "argmax", "z_loss": "lse"}
    requested = [needs[m] for m in o.metrics]
    requested += ["entropy"] * (o.entropy_weight != 0) + ["lse"] * (o.z_loss != 0)
    loss, statistics = token_sum(
        policy,
        target,
        _formula(o),
        {"share": share},
        tuple(dict.fromkeys(["log_prob", *requested])),
        passes=o.passes,
        ignore_index=ignore_index,
        name="Sequence",
        role="policy",
    )
    assert statistics.log_prob is not None
    hits = None if statistics.argmax is None else (statistics.argmax == target).float()
    return loss, SequenceMetrics(
        masked_mean(-statistics.log_prob, mask),
        mask.sum(),
        None if statistics.entropy is None else masked_mean(statistics.entropy, mask),
        None if hits is None else masked_mean(hits, mask),
        None if statistics.lse is None else masked_mean(statistics.lse.square(), mask),
    )


def _shares(
    mask: Tensor,
    token_weight: Tensor | None,
    segments: Tensor | None,
    o: SequenceOptions,
    count: tuple[Tensor | float | None, int, Any],
) -> Tensor:
    """What every token's loss is multiplied by in the sum."""
    weight = mask.to(torch.float32)
    if token_weight is not None:
        checks.constant("Sequence", "token_weight", token_weight)
        weight = torch.where(mask, token_weight.to(torch.float32), 0)
    if o.reduction == "sequence":
        return weight * segment_weights(mask, segments)
    if o.reduction == "sum":
        return weight
    if token_weight is not None and count[0] is None:
        total = mean_over_ranks(weight.sum(), count[2])
        return torch.where(total == 0, 0, weight / total)
    return weight / divisor("Sequence", mask, *count)


def _formula(o: SequenceOptions) -> Callable[[LogProbOutput, Columns], Tensor]:
    factor = SEQUENCE[o.loss_type].factor

    def formula(log_prob_output: LogProbOutput, c: Columns) -> Tensor:
        assert log_prob_output.log_prob is not None
        loss = (
            -log_prob_output.log_prob
            if factor is None
            else -factor(log_prob_output.log_prob) * log_prob_output.log_prob
        )
        if o.z_loss:
            assert log_prob_output.lse is not None
            loss = loss + o.z_loss * log_prob_output.lse.square()
        if o.entropy_weight:
            assert log_prob_output.entropy is not None
            loss = loss - o.entropy_weight * log_prob_output.entropy
        return loss * c["share"]

    return formula


class MTPMetrics(NamedTuple):
    """The first head's metrics, and the negative log-likelihoods of the heads ahead."""

    first: SequenceMetrics
    ahead: tuple[Tensor, ...]


def mtp_loss(
    heads: Sequence[Source],
    target: Tensor,
    *,
    ahead_weight: float = 0.3,
    segments: Tensor | None = None,
    num_items: Tensor | float | None = None,
    processes: int = 1,
    group: Any = None,
    ignore_index: int = IGNORED,
    **options: Any,
) -> tuple[Tensor, MTPMetrics]:
    """The next token, and tokens further ahead by more heads (multi-token prediction).

    ``loss = L_0 + ahead_weight / D sum_k L_k``, where head k of D predicts the token k + 1
    positions ahead (DeepSeek-V3, arXiv:2412.19437 eq. 24 and 25; with D Gloeckle et al.,
    arXiv:2404.19737).

    Args:
        heads: The main head's tokens, and those of every head ahead, at the same positions.
        target: Ids ``(..., T)`` of the next token, already shifted; prompts and padding ignored.
        ahead_weight: Factor of the mean over the heads ahead.
        segments: Numbers of the packed sequences of a row; no head looks into the next one.
        num_items: As in :func:`sequence_loss`, of the main head; every head divides by it.
        processes: Ranks whose gradients are averaged, with num_items.
        group: Ranks to count tokens over, without num_items.
        ignore_index: Targets that cost nothing.
        options: As :class:`SequenceOptions`.
    """
    if not isinstance(heads, Sequence) or isinstance(heads, str) or not heads:
        raise ValueError(
            "MTP: heads must be a sequence with at least the main one, got "
            f"{checks.describe(heads)}"
        )
    counting_mask("MTP", target, ignore_index)
    if segments is not None:
        of_tokens("MTP", "segments", segments, target)
    checks.number("MTP", "ahead_weight", ahead_weight, 0.0)
    count = {"num_items": num_items, "processes": processes, "group": group}
    segments_of_head = segments if options.get("reduction") == "sequence" else None
    loss, first = sequence_loss(
        heads[0], target, segments=segments_of_head, ignore_index=ignore_index, **count, **options
    )
    ahead = []
    for k, head in enumerate(heads[1:], 1):
        aim = further(target, k, segments, ignore_index)
        part, metrics = sequence_loss(
            head, aim, segments=segments_of_head, ignore_index=ignore_index, **count, **options
        )
        loss = loss + ahead_weight / (len(heads) - 1) * part
        ahead.append(metrics.nll)
    return loss, MTPMetrics(first, tuple(ahead))


def further(target: Tensor, k: int, segments: Tensor | None, ignore_index: int) -> Tensor:
    """Targets k positions further on; ignored where that leaves the row or its sequence."""
    shifted = torch.full_like(target, ignore_index)
    length = max(target.shape[-1] - k, 0)
    shifted[..., :length] = target[..., k:]
    if segments is not None:
        same_segment = segments[..., k:] == segments[..., :length]
        shifted[..., :length].masked_fill_(~same_segment, ignore_index)
    return shifted
