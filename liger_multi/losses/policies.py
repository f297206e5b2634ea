"""Policy losses as tables: surrogates, weights of tokens, and the options that they read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_multi import checks
from liger_multi.losses.one_pass import PASSES, Columns
from liger_multi.losses.options import Options
from liger_multi.losses.reductions import lengths

# --- surrogates: the loss of a token ---


def clipped(ratio: Tensor, log_prob: Tensor, c: Columns, o: Any) -> Tensor:
    """The smaller of the plain and the clipped gain (PPO, arXiv:1707.06347 eq. 7)."""
    a = c["advantage"]
    inside = ratio.clamp(1 - o.epsilon_low, 1 + o.epsilon_high)
    outer = ratio if o.delta is None else ratio.clamp(max=o.delta)
    return -torch.min(outer * a, inside * a)


def cispo(ratio: Tensor, log_prob: Tensor, c: Columns, o: Any) -> Tensor:
    """Clipped weights, of which nobody takes a gradient, on the log-probability."""
    return -ratio.clamp(max=o.epsilon_high).detach() * c["advantage"] * log_prob


def sapo(ratio: Tensor, log_prob: Tensor, c: Columns, o: Any) -> Tensor:
    """A soft gate in the place of the clip."""
    a = c["advantage"]
    t = torch.where(a > 0, o.sapo_temperature_pos, o.sapo_temperature_neg)
    return -torch.sigmoid(t * (ratio - 1)) * (4 / t) * a


def vespo(ratio: Tensor, log_prob: Tensor, c: Columns, o: Any) -> Tensor:
    """The weight of the answer on the log-probability."""
    return -c["weight"] * c["advantage"] * log_prob


# --- reductions: the weight of a token in the sum ---


class Batch(NamedTuple):
    """What weights of tokens are made of."""

    mask: Tensor
    divisor: Callable[[], Tensor]
    accumulation: int
    max_length: int | None


def _sequence_mean(b: Batch) -> Tensor:
    return 1.0 / (lengths(b.mask).unsqueeze(1) * (b.mask.shape[0] * b.accumulation))


def token_mean(b: Batch) -> Tensor:
    """The mean over the tokens of the batch."""
    return 1.0 / (b.mask.sum().clamp(min=1) * b.accumulation)


def _constant_length(b: Batch) -> Tensor:
    assert b.max_length is not None
    return torch.as_tensor(1.0 / (b.mask.shape[0] * b.max_length * b.accumulation))


def _step_mean(b: Batch) -> Tensor:
    return 1.0 / b.divisor()


def _sequence_sum(b: Batch) -> Tensor:
    return torch.as_tensor(1.0 / (b.mask.shape[0] * b.accumulation))


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
    "cispo": Policy(
        cispo, _step_mean, "CISPO, arXiv:2506.13585 eq. 4", reads=("epsilon_high",)
    ),
    "sapo": Policy(
        sapo, _sequence_mean, "SAPO, arXiv:2511.20347",
        reads=("sapo_temperature_pos", "sapo_temperature_neg"),
    ),
    "luspo": Policy(clipped, _sequence_sum, "LUSPO, arXiv:2602.05261", "sequence", reads=_CLIP),
    "vespo": Policy(
        vespo, _step_mean, "VESPO, arXiv:2602.10693",
        reads=("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"),
    ),
}  # fmt: skip


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
        passes: Looks at the vocabulary: one, two or auto.
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

    def __post_init__(self) -> None:
        super().__post_init__()
        name = self.title()
        checks.one_of(name, "loss_type", self.loss_type, POLICY)
        checks.one_of(name, "passes", self.passes, PASSES)
        if self.level is not None:
            checks.one_of(name, "level", self.level, ("token", "sequence"))
        own = POLICY[self.loss_type].reads
        every = [key for policy in POLICY.values() for key in policy.reads]
        for key in dict.fromkeys(every):
            self.serves(key, type(self).__dataclass_fields__[key].default, key in own,
                        self.loss_type)  # fmt: skip
        self.serves("correct_kl", False, self.beta != 0, "beta=0")
        self.serves("level", None, self.loss_type != "vespo", "vespo, whose weights are sequences'")
        for key in ("beta", "epsilon_low", "epsilon_high"):
            self.number(key, 0.0)
        self.number("entropy_weight")
        self.number("top_entropy", 0.0, 1.0)
        for key in ("sapo_temperature_pos", "sapo_temperature_neg"):
            self.number(key, 0.0, above=True)
        if self.delta is not None:
            self.number("delta", 0.0, above=True)
        if self.loss_type == "dr_grpo" and (self.max_length is None or self.max_length < 1):
            raise ValueError(
                f"{name}: dr_grpo needs max_length, at least 1, got {self.max_length!r}"
            )
        checks.names(name, self.metrics, ("entropy",), "metrics")

    @property
    def sequence_level(self) -> bool:
        """Whether ratios are those of sequences."""
        return (self.level or POLICY[self.loss_type].level) == "sequence"

    @property
    def own_only(self) -> bool:
        """Whether the loss of a token depends on nothing but its own statistics."""
        far = self.sequence_level or self.loss_type == "vespo"
        return not far and self.top_entropy == 1.0 and self.off_policy_threshold is None
