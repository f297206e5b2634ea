"""Losses of policies, and the formulas that they are made of."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from liger_multi import losses, ops
from liger_multi.compat.liger_kernel import bases
from liger_multi.compat.liger_kernel.bases import check_policy, ranks, sampler_ratios
from liger_multi.compat.liger_kernel.modules import Options, defaults_of
from liger_multi.compat.liger_kernel.signatures import ArgumentError, adapter, function_class
from liger_multi.losses import policy as formulas
from liger_multi.losses.policy import POLICY, _vespo_weight
from liger_multi.losses.shared import divisor, masked_mean

TOKENS_ONLY = ("cispo", "sapo", "vespo")
_POSITIVE = ("sapo_temperature_pos", "sapo_temperature_neg", "delta")
_VESPO = ("k_pos", "lambda_pos", "k_neg", "lambda_neg")


def k3_loss_fn(log_p: Tensor, log_q: Tensor) -> Tensor:
    """``p / q - log(p / q) - 1``, the estimator k3 of KL(q, p)."""
    return torch.expm1(log_p - log_q) - (log_p - log_q)


def sapo_loss_fn(importance_ratio: Tensor, temperature: float) -> Tensor:
    """The soft gate of SAPO, ``4 / t sigmoid(t (ratio - 1))``."""
    if temperature <= 0:
        raise ArgumentError(f"sapo_temperature must be > 0. Got {temperature}.")
    return torch.sigmoid(temperature * (importance_ratio - 1)) * (4 / temperature)


def clip_coef_fn(
    coef: Tensor, epsilon_low: float, epsilon_high: float, loss_type: str
) -> tuple[Tensor | None, Tensor | bool, Tensor]:
    """Clipped ratios, and which are below and above the range of the loss type."""
    if loss_type == "cispo":
        return coef.clamp(max=epsilon_high).detach(), False, coef > epsilon_high
    if loss_type in TOKENS_ONLY:
        none = torch.zeros_like(coef, dtype=torch.bool)
        return None, none, none
    lowest, highest = 1 - epsilon_low, 1 + epsilon_high
    return coef.clamp(lowest, highest), coef < lowest, coef > highest


def get_gamma_weights(
    advantages: Tensor,
    log_ratio_per_token: Tensor,
    mask: Tensor,
    importance_sampling_ratio: Tensor | None = None,
    k_pos: float = 2.0,
    lambda_pos: float = 3.0,
    k_neg: float = 3.0,
    lambda_neg: float = 2.0,
) -> Tensor:
    """The weight of every answer in VESPO, ``(B, 1)``, without a gradient.

    A ratio for every token is multiplied over the answer; one for the answer counts once.
    """
    log_ratio, mask = log_ratio_per_token.detach(), mask.bool()
    wide = advantages.unsqueeze(1) if advantages.ndim == 1 else advantages
    columns = {"advantage": wide, "old": torch.zeros_like(log_ratio)}
    if importance_sampling_ratio is not None:
        columns["ratios"] = of_answers(importance_sampling_ratio.detach(), mask)
    values = (k_pos, lambda_pos, k_neg, lambda_neg)
    vespo_options: dict[str, Any] = {f"vespo_{n}": v for n, v in zip(_VESPO, values, strict=True)}
    options = losses.PolicyOptions(loss_type="vespo", **vespo_options)
    return _vespo_weight(log_ratio, columns, mask, options)


def of_answers(ratios: Tensor, mask: Tensor) -> Tensor:
    """Ratios of tokens whose product over an answer is the ratio of the answer."""
    if ratios.shape[-1] == mask.shape[-1]:
        return ratios
    first = mask & (mask.cumsum(-1) == 1)
    return torch.where(first, ratios, 1.0)


def check_level(level: str, loss_type: str) -> None:
    """A loss that weighs tokens by themselves has no ratios of sequences."""
    if level not in ("token", "sequence"):
        raise ArgumentError(
            f"Unknown importance sampling level: {level}. Possible values are 'token' and "
            "'sequence'."
        )
    if level == "sequence" and loss_type in TOKENS_ONLY:
        raise ArgumentError(
            "Sequence-level importance sampling is not supported for "
            f"loss_type='{loss_type}'. Use importance_sampling_level='token' instead."
        )


class LigerFusedLinearGRPOLoss(Options):
    """:func:`liger_multi.losses.policy_loss`."""

    positive: tuple[str, ...] = _POSITIVE
    """Options that must be above 0, whatever the loss type reads."""

    defaults = defaults_of(
        "beta compiled use_ref_model chunk_size epsilon_low epsilon_high loss_type "
        "max_completion_length importance_sampling_level sapo_temperature_pos "
        "sapo_temperature_neg temperature delta use_bias_correction_kl vespo_k_pos "
        "vespo_lambda_pos vespo_k_neg vespo_lambda_neg",
        bases.LigerFusedLinearPPOBase.forward,
        use_ref_model=True,
    )

    def check(self) -> None:
        for name in self.positive:
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ArgumentError(f"{name} must be positive, got {value}")
        if self.loss_type in POLICY and (
            self.loss_type != "dr_grpo" or self.max_completion_length is not None
        ):
            losses.PolicyOptions(**self.loss_options)

    @property
    def loss_options(self) -> dict[str, Any]:
        """Options of the loss type; trainers pass those of all of them."""
        names = POLICY[self.loss_type].reads if self.loss_type in POLICY else ()
        options = {name: getattr(self, name, self.max_completion_length) for name in names}
        level = None if self.loss_type == "vespo" else self.importance_sampling_level
        correct = self.use_bias_correction_kl and self.beta != 0
        return {
            "loss_type": self.loss_type,
            "level": level,
            "beta": self.beta,
            "correct_kl": correct,
            "metrics": (),
            **options,
        }

    def forward(
        self,
        _input: Tensor,
        lin_weight: Tensor,
        selected_token_ids: Tensor,
        attention_mask: Tensor,
        advantages: Tensor,
        bias: Tensor | None = None,
        ref_per_token_logps: Tensor | None = None,
        old_per_token_logps: Tensor | None = None,
        ref_input: Tensor | None = None,
        ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None,
        vllm_is_ratio: Tensor | None = None,
        num_items_in_batch: Tensor | float | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Loss, and the mean divergence (with a beta) and the share of clipped tokens."""
        self.check_call(ref_per_token_logps, ref_input)
        ratios = sampler_ratios("LigerFusedLinearGRPOLoss", vllm_is_ratio, selected_token_ids)
        if ratios is not None and self.loss_type == "vespo":
            ratios = of_answers(ratios, attention_mask.bool())
        reference = self.reference(ref_per_token_logps, (ref_input, ref_weight, ref_bias))
        options = self.loss_options
        if reference is None:  # the policy is its own reference: no divergence, and no gradient
            options |= {"beta": 0.0, "correct_kl": False}
        processes, group = ranks()
        loss, metrics = losses.policy_loss(
            losses.Head(_input, lin_weight, bias, temperature=self.temperature),
            selected_token_ids,
            advantages.to(torch.promote_types(advantages.dtype, torch.float32)),
            old=old_per_token_logps,
            reference=reference,
            ratios=ratios,
            token_mask=attention_mask,
            num_items=num_items_in_batch,
            processes=processes,
            group=group,
            **options,
        )
        zero = loss.detach().new_zeros(())
        shares = (metrics.clip_region, metrics.clip_high, zero)
        clipped = next(share for share in shares if share is not None)
        return loss, (zero if metrics.kl is None else metrics.kl, clipped) if self.beta else (
            clipped,
        )

    def check_call(self, logps: Tensor | None, ref_input: Tensor | None) -> None:
        """Loss type and level are known and go together, and what they need is there."""
        check_policy(
            "LigerFusedLinearGRPOLoss",
            self.loss_type,
            self.max_completion_length,
            self.use_ref_model and self.beta != 0,
            (logps, ref_input),
        )
        check_level(self.importance_sampling_level, self.loss_type)
        if self.loss_type not in POLICY:
            raise ArgumentError(f"Unknown loss type: {self.loss_type}")

    def reference(
        self, logps: Tensor | None, tensors: tuple[Tensor | None, Tensor | None, Tensor | None]
    ) -> losses.Source | None:
        """The reference, where the loss has one and reads it."""
        if not self.beta or not self.use_ref_model:
            return None
        if logps is not None:
            return logps
        hidden, weight, bias = tensors
        if weight is None:
            raise ArgumentError("LigerFusedLinearGRPOLoss: ref_input needs ref_weight, got None")
        assert hidden is not None
        return losses.Head(hidden, weight, bias, temperature=self.temperature)


class FunctionalGRPOLoss(LigerFusedLinearGRPOLoss):
    """The same for ``apply``, which checks what the loss type reads, and nothing else."""

    positive = ()

    def check(self) -> None:
        vars(self)["temperature"] = float(self.temperature)
        lowest = min(self.sapo_temperature_pos, self.sapo_temperature_neg)
        if self.loss_type == "sapo" and lowest <= 0:
            raise ArgumentError("sapo_temperature must be > 0.")
        super().check()


# --- of logits, with a number of every token: liger_kernel.ops.grpo_loss ---

Tokens = tuple[Tensor, Tensor | None, Tensor]
"""The loss, the divergence (None without a beta) and whether it was clipped, of every token."""

GRPO = "GrpoLossFunction"


def _tokens(
    logits: Tensor, ids: Tensor, mask: Tensor | None, temperature: float
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the tokens that count, and which these are."""
    if logits.ndim != 3 or ids.ndim != 2 or logits.shape[1] != ids.shape[1] + 1:
        raise ArgumentError(
            f"{GRPO}: logits must be (B, L + 1, V) and completion_ids (B, L), got "
            f"{tuple(logits.shape)} and {tuple(ids.shape)}"
        )
    is_counted = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask != 0
    tokens = ops.token_log_prob(
        logits[:, :-1],
        ids.masked_fill(~is_counted, -100),
        temperature=temperature,
        outputs=("log_prob",),
    )
    assert tokens.log_prob is not None
    return tokens.log_prob, is_counted


def _options(loss_type: str, **options: Any) -> losses.PolicyOptions:
    """Options that the loss type reads; callers pass those of all of them."""
    if loss_type not in POLICY:
        raise ArgumentError(f"Unknown loss_type: {loss_type}")
    names = {*POLICY[loss_type].reads, "beta", "correct_kl", "level"}
    if loss_type == "vespo":
        names.remove("level")
    return losses.PolicyOptions(
        loss_type=loss_type, **{name: value for name, value in options.items() if name in names}
    )


def _clipped(ratio: Tensor, advantage: Tensor, o: losses.PolicyOptions) -> Tensor:
    """Which ratios are beyond the range in the direction that their advantage pulls, 1 or 0."""
    if o.loss_type == "cispo":
        clipped = (ratio > o.epsilon_high) & (advantage > 0)
    elif POLICY[o.loss_type].surrogate is formulas.clipped:
        is_below, is_above = ratio < 1 - o.epsilon_low, ratio > 1 + o.epsilon_high
        clipped = (is_below & (advantage < 0)) | (is_above & (advantage > 0))
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
    log_prob, is_counted = _tokens(logits, ids, mask, temperature)
    c: dict[str, Tensor] = {k: x.detach().float() for k, x in columns.items() if x is not None}
    c = {k: (x.unsqueeze(1) if x.ndim == 1 else x).expand(log_prob.shape) for k, x in c.items()}
    c["mask"] = is_counted
    ratio = formulas._ratio(log_prob, c, o)
    loss = POLICY[o.loss_type].surrogate(ratio, log_prob, c, o)
    if "ratios" in c and o.loss_type != "vespo":
        loss = loss * c["ratios"]
    kl = None
    if o.beta:
        kl = formulas._kl(log_prob, ratio, c, o)
        loss = loss + o.beta * kl
        kl = torch.where(is_counted, kl.detach(), 0)
    clipped = torch.where(is_counted, _clipped(ratio.detach(), c["advantage"], o), 0)
    return torch.where(is_counted, loss, 0), kl, clipped, is_counted


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
    check_policy(GRPO, loss_type, max_completion_length, beta != 0, (ref_logp, None))
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
    loss, kl, clipped, is_counted = _losses(
        logits, completion_ids, columns, completion_mask, temperature, o
    )
    if not reduce:
        return loss, kl, clipped
    return _reduced(loss, kl, clipped, is_counted, o, num_items_in_batch)


def _reduced(
    loss: Tensor,
    kl: Tensor | None,
    clipped: Tensor,
    is_counted: Tensor,
    o: losses.PolicyOptions,
    num_items: Tensor | float | None,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """The loss of a batch, and means over the tokens that count."""
    processes, group = ranks()
    batch = formulas.Batch(
        is_counted, lambda: divisor(GRPO, is_counted, num_items, processes, group), 1, o.max_length
    )
    total = (loss * POLICY[o.loss_type].weight(batch).to(loss.device)).sum()
    mean = None if kl is None else masked_mean(kl, is_counted)
    return total, mean, masked_mean(clipped, is_counted)


GrpoLossFunction = function_class("GrpoLossFunction", grpo_loss)


def _reduce_grpo_loss(
    per_token_loss: Tensor,
    completion_mask: Tensor | None,
    loss_type: str,
    max_completion_length: int | None,
    num_items_in_batch: Tensor | float | None = None,
) -> Tensor:
    """The loss of a batch, of losses of its tokens."""
    mask = torch.ones_like(per_token_loss) if completion_mask is None else completion_mask
    is_counted, none = mask != 0, torch.zeros_like(per_token_loss)
    length = max_completion_length or per_token_loss.shape[1]
    o = _options(loss_type, max_length=length)
    loss = torch.where(is_counted, per_token_loss, 0)
    return _reduced(loss, None, none, is_counted, o, num_items_in_batch)[0]


_VESPO_OPTIONS: dict[str, Any] = {
    "vespo_k_pos": 2.0,
    "vespo_lambda_pos": 3.0,
    "vespo_k_neg": 3.0,
    "vespo_lambda_neg": 2.0,
}


def _grpo_loss(**options: Any) -> Any:
    """:class:`GrpoLossFunction`; with ``reduce`` the loss and a list of the metrics."""
    vespo = [options.pop(name) for name in _VESPO_OPTIONS]
    if options["loss_type"] == "vespo":
        if options.get("importance_sampling_level") == "sequence":
            raise ArgumentError("loss_type='vespo' requires importance_sampling_level='token'.")
        log_prob, is_counted = _tokens(
            options["logits"].detach(),
            options["completion_ids"],
            options["completion_mask"],
            options["temperature"],
        )
        old_log_prob = log_prob if options["old_logp"] is None else options["old_logp"]
        ratios = options.get("vllm_is_ratio")
        options["phi_seq"] = get_gamma_weights(
            options["advantages"], log_prob - old_log_prob, is_counted, ratios, *vespo
        )
    loss, kl, clipped = grpo_loss(**options)
    if not options["reduce"]:
        return loss, kl, clipped
    return loss, [clipped] if kl is None else [kl, clipped]


triton_grpo_loss = adapter(
    _grpo_loss,
    "logits old_logp ref_logp completion_ids advantages completion_mask temperature beta eps_low "
    "eps_high inplace loss_type max_completion_length importance_sampling_level reduce "
    "sapo_temperature_pos sapo_temperature_neg vllm_is_ratio delta use_bias_correction_kl "
    f"num_items_in_batch {' '.join(_VESPO_OPTIONS)}",
    grpo_loss,
    completion_mask=None,
    temperature=0.9,
    beta=0.04,
    eps_low=0.2,
    eps_high=0.4,
    inplace=True,
    loss_type="dapo",
    reduce=False,
    **_VESPO_OPTIONS,
)
