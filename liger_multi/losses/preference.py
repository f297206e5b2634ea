"""Losses over pairs of a chosen and a rejected answer, against a reference.

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
from liger_multi.losses.options import Options
from liger_multi.losses.pairs import (
    EXTRA,
    Pairs,
    PreferenceMetrics,
    delta,
    halves_of,
    logistic,
    logit_means,
    mean_delta,
    pair_mask,
    pair_metrics,
    paired,
    policy_tokens,
    reference_sums,
    sequences,
)
from liger_multi.losses.reductions import masked_mean
from liger_multi.losses.sources import IGNORED, Source, log_square_sum

# --- formulas: pairs and options to a loss a pair ---


def _sigmoid(p: Pairs, o: Any) -> Any:
    return logistic(o.beta * delta(p), o.label_smoothing)


def _sigmoid_norm(p: Pairs, o: Any) -> Any:
    return logistic(o.beta * mean_delta(p), o.label_smoothing)


def _hinge(p: Pairs, o: Any) -> Any:
    return torch.relu(1 - o.beta * delta(p))


def _ipo(p: Pairs, o: Any) -> Any:
    return (mean_delta(p) - 1 / (2 * o.beta)).square()


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


def _bco_pair(p: Pairs, o: Any) -> Any:
    return logistic(o.beta * p.chosen) + logistic(-o.beta * p.rejected)


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


def _apo_zero(p: Pairs, o: Any) -> Any:
    return torch.sigmoid(-o.beta * p.chosen) + torch.sigmoid(o.beta * p.rejected)


def _apo_down(p: Pairs, o: Any) -> Any:
    return torch.sigmoid(o.beta * p.chosen) + torch.sigmoid(o.beta * (p.rejected - p.chosen))


def _discopop(p: Pairs, o: Any) -> Any:
    x = o.beta * delta(p)
    mix = torch.sigmoid(x / o.discopop_tau)
    return (1 - mix) * logistic(x) + mix * torch.exp(-x)


def _sft(p: Pairs, o: Any) -> Any:
    return p.nll.expand(p.chosen.shape)


class Formula(NamedTuple):
    """A loss type: its formula, what it reads beside beta, and where it comes from."""

    pairs: Callable[[Pairs, Any], Tensor]
    source: str
    smooth: bool = False
    divergence: bool = False
    paired: bool = True


DPO: dict[str, Formula] = {
    "sigmoid": Formula(_sigmoid, "DPO, arXiv:2305.18290; smoothed cDPO", True, True),
    "sigmoid_norm": Formula(_sigmoid_norm, "DPO of mean scores, arXiv:2405.14734", True, True),
    "hinge": Formula(_hinge, "SLiC, arXiv:2305.10425", False, True),
    "ipo": Formula(_ipo, "IPO, arXiv:2310.12036 eq. 17, scores a token", False, True),
    "exo_pair": Formula(_exo_pair, "EXO, arXiv:2402.00856 eq. 16", True, True),
    "nca_pair": Formula(_nca_pair, "NCA, arXiv:2402.05369"),
    "robust": Formula(_robust, "Robust DPO, arXiv:2403.00409", True, True),
    "bco_pair": Formula(_bco_pair, "BCO, arXiv:2404.04656"),
    "sppo_hard": Formula(_sppo_hard, "SPPO, arXiv:2405.00675 eq. 4.7"),
    "aot": Formula(_aot, "AOT, arXiv:2406.05882", True, paired=False),
    "aot_unpaired": Formula(_aot_unpaired, "AOT, arXiv:2406.05882", True, paired=False),
    "apo_zero": Formula(_apo_zero, "APO, arXiv:2408.06266 eq. 7"),
    "apo_down": Formula(_apo_down, "APO, arXiv:2408.06266 eq. 8"),
    "discopop": Formula(_discopop, "DiscoPOP, arXiv:2406.08414 eq. 5", False, True),
    "sft": Formula(_sft, "negative log-likelihood of the chosen tokens", False, True),
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

    def __post_init__(self) -> None:
        super().__post_init__()
        name = self.title()
        if not isinstance(self.loss_type, (str, tuple, list)):
            raise TypeError(
                f"{name}: loss_type must be a name or a tuple of names, got "
                f"{checks.describe(self.loss_type)}"
            )
        types = self.types
        for kind in types:
            checks.one_of(name, "loss_type", kind, DPO)
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
        self.number("beta", 0.0, above=True)
        self.number("label_smoothing", 0.0, 1.0)
        self.number("discopop_tau", 0.0, above=True)
        self.number("alpha")
        self.number("rpo_alpha", 0.0)
        checks.one_of(name, "divergence", self.divergence, SCORES)
        checks.names(name, self.metrics, EXTRA, "metrics")
        chosen = [DPO[kind] for kind in types]
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
    before = _reference("DPO", reference, target, mask, o, ignore_index)
    own = policy_tokens("DPO", policy, target, o.metrics, ignore_index)
    sums = sequences(own.log_prob, mask, o.tail, o.length_normalized)
    nll = -masked_mean(own.log_prob.chunk(2)[0], mask.chunk(2)[0])  # type: ignore[union-attr]
    pairs = paired(sums, before, mask, nll, lambda t: SCORES[o.divergence](t, o))
    factor: Tensor | float = 1.0
    if o.weighting:
        square = log_square_sum(policy, target, ignore_index=ignore_index, name="DPO")
        likely = sequences((own.log_prob - square).detach(), mask, None, True).exp()  # type: ignore[operator]
        factor = likely.chunk(2)[0] * likely.chunk(2)[1]
    loss: Any = 0.0
    for kind, weight in zip(o.types, o.weights, strict=True):
        loss = loss + weight * (DPO[kind].pairs(pairs, o) * factor).mean()
    if o.rpo_alpha:
        mean = sequences(own.log_prob, mask, None, True).chunk(2)[0]
        loss = loss - o.rpo_alpha * mean.mean()
    means = logit_means("DPO", policy, target, o.metrics, ignore_index, halves_of(target))
    return loss, pair_metrics(pairs, own, mask, target, o.beta, means)


def _reference(
    name: str, reference: Source | None, target: Tensor, mask: Tensor, o: Any, ignore_index: int
) -> Tensor:
    """Log-probabilities of sequences under the reference; zeros without one."""
    if reference is None:
        return torch.zeros(mask.shape[0], device=mask.device)
    return reference_sums(
        name, reference, target, mask, ignore_index,
        lambda found: sequences(found, mask, o.tail, o.length_normalized),
    )  # fmt: skip
