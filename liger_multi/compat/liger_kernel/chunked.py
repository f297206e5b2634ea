"""The losses of ``liger_kernel.chunked_loss``: those of :mod:`liger_multi.losses`.

``compiled`` and ``chunk_size`` are taken and change nothing: the loss of a token, once it is known,
is a handful of numbers, and logits are chunked by bytes whatever the batch. The preference losses
return ``(loss, (chosen log-probabilities, rejected ones, mean of the chosen logits, mean of the
rejected ones, NLL of the chosen, ...))``.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from liger_multi import losses
from liger_multi.compat.liger_kernel.losses import _Options
from liger_multi.losses.one_pass import mean_logits
from liger_multi.losses.pairs import halves_of, logit_means, sequences
from liger_multi.losses.policy import POLICY
from liger_multi.losses.preference import _log_odds
from liger_multi.losses.shared import masked_mean
from liger_multi.ops import LogProbOutput


class _Pairs(_Options):
    """What the losses over pairs share; the first half of a batch is the chosen one."""

    ignore_index: int
    average = False

    def tokens(
        self, head: losses.Head, target: Tensor, nll_target: Tensor | None
    ) -> tuple[LogProbOutput, Tensor, Tensor, tuple[Any, ...]]:
        """Log-probabilities of tokens, of sequences, the chosen NLL, and what is returned first."""
        mask, every = target != self.ignore_index, target
        wanted = mask.chunk(2)[0]
        if nll_target is not None:
            chosen, rejected = target.chunk(2)
            wanted = nll_target != self.ignore_index
            every = torch.cat((torch.where(wanted, nll_target, chosen), rejected))
        own = losses.tokens(head, every, ignore_index=self.ignore_index)
        assert own.log_prob is not None
        nll = -masked_mean(own.log_prob.chunk(2)[0], wanted)
        sums = sequences(torch.where(mask, own.log_prob, 0), mask, None, self.average)
        rows = halves_of(target)
        means = logit_means("pairs", head, target, ("logits",), self.ignore_index, rows)
        return own, sums, nll, (*sums.chunk(2), *means, nll)


class LigerFusedLinearDPOLoss(_Pairs):
    """:func:`liger_multi.losses.dpo_loss`, which also beside the reference's hidden states."""

    def __init__(
        self, ignore_index: int = -100, beta: float = 0.1, alpha: float = 1.0,
        compute_nll_loss: bool = False, compiled: bool = True, use_ref_model: bool = True,
        average_log_prob: bool = False, chunk_size: int = 1,
        loss_type: str | list[str] = "sigmoid", label_smoothing: float = 0.0,
        discopop_tau: float = 0.05,
    ) -> None:  # fmt: skip
        super().__init__(locals())
        types = (loss_type,) if isinstance(loss_type, str) else tuple(loss_type)
        self.given: dict[str, Any] = {
            "loss_type": types, "beta": beta, "label_smoothing": label_smoothing,
            "length_normalized": average_log_prob,
        }  # fmt: skip
        if "discopop" in types:
            self.given["discopop_tau"] = discopop_tau
        losses.DPOOptions(**self.given)
        self.average = average_log_prob

    def forward(
        self, lin_weight: Tensor, _input: Tensor, target: Tensor, bias: Tensor | None = None,
        ref_input: Tensor | None = None, ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Any, ...]]:  # fmt: skip
        """Loss, and the chosen and rejected rewards after the rest."""
        before = torch.zeros(target.shape[0], device=target.device)
        if self.use_ref_model:
            if ref_input is None or ref_weight is None:
                raise ValueError("LigerFusedLinearDPOLoss: needs ref_input and ref_weight")
            mask = target != self.ignore_index
            head = losses.Head(ref_input, ref_weight, ref_bias)
            with torch.no_grad():
                found = losses.tokens(head, target, ignore_index=self.ignore_index).log_prob
                before = sequences(found, mask, None, self.average)
        own, sums, nll, first = self.tokens(losses.Head(_input, lin_weight, bias), target, None)
        loss, _ = losses.dpo_loss(own, target, before, ignore_index=self.ignore_index, **self.given)
        if self.compute_nll_loss:
            loss = loss + self.alpha * nll
        rewards = self.beta * (sums - before).detach()
        return loss, (*first, *rewards.chunk(2))


class _Margins(_Pairs):
    loss_type = "sigmoid"

    @property
    def given(self) -> dict[str, Any]:
        """Options of :func:`liger_multi.losses.cpo_loss`."""
        names = ("beta", "label_smoothing", "gamma")
        found = {name: getattr(self, name) for name in names if name in self._names}
        weight = getattr(self, "alpha", 1.0) if self.compute_nll_loss else 0.0
        return {"loss_type": self.loss_type, "nll_weight": weight, **found}

    def forward(
        self, lin_weight: Tensor, _input: Tensor, target: Tensor, bias: Tensor | None = None,
        ref_input: Any = None, ref_weight: Any = None, ref_bias: Any = None,
        nll_target: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Any, ...]]:  # fmt: skip
        """Loss, and the chosen and rejected rewards after the rest."""
        head = losses.Head(_input, lin_weight, bias)
        own, sums, _, first = self.tokens(head, target, nll_target)
        more = {} if self.loss_type == "orpo" else {"length_normalized": self.average}
        loss, _ = losses.cpo_loss(
            own, target, nll_target, ignore_index=self.ignore_index, **self.given, **more
        )
        return loss, (*first, *self.beside(sums.detach()))

    def beside(self, sums: Tensor) -> tuple[Tensor, ...]:
        """The rewards."""
        chosen, rejected = (self.beta * sums).chunk(2)
        return chosen, rejected


class LigerFusedLinearCPOLoss(_Margins):
    """:func:`liger_multi.losses.cpo_loss`."""

    def __init__(
        self, ignore_index: int = -100, beta: float = 0.1, alpha: float = 1.0,
        label_smoothing: float = 0.0, compute_nll_loss: bool = True, compiled: bool = True,
        average_log_prob: bool = False, chunk_size: int = 1,
    ) -> None:  # fmt: skip
        super().__init__(locals())
        self.average = average_log_prob
        losses.CPOOptions(**self.given)


class LigerFusedLinearSimPOLoss(_Margins):
    """:func:`liger_multi.losses.cpo_loss` of SimPO."""

    loss_type, average = "simpo", True

    def __init__(
        self, ignore_index: int = -100, beta: float = 0.1, alpha: float = 1.0,
        label_smoothing: float = 0.0, compute_nll_loss: bool = True, compiled: bool = True,
        gamma: float = 0.5, chunk_size: int = 1,
    ) -> None:  # fmt: skip
        super().__init__(locals())
        losses.CPOOptions(**self.given)


class LigerFusedLinearORPOLoss(_Margins):
    """:func:`liger_multi.losses.cpo_loss` of ORPO; after the rewards, log-odds."""

    loss_type, average = "orpo", True

    def __init__(
        self, ignore_index: int = -100, beta: float = 0.1, compute_nll_loss: bool = True,
        compiled: bool = True, chunk_size: int = 1,
    ) -> None:  # fmt: skip
        super().__init__(locals())
        losses.CPOOptions(**self.given)

    def beside(self, sums: Tensor) -> tuple[Tensor, ...]:
        """The rewards, the mean of the log-odds ratio's log-sigmoid, and the mean log-odds."""
        chosen, rejected = _log_odds(sums).chunk(2)
        ratio = torch.nn.functional.logsigmoid(chosen - rejected)
        return (*super().beside(sums), ratio.mean(), (chosen - rejected).mean())


class LigerFusedLinearKTOLoss(_Options):
    """:func:`liger_multi.losses.kto_loss`."""

    def __init__(
        self, ignore_index: int = -100, beta: float = 0.1, compiled: bool = True,
        use_ref_model: bool = False, average_log_prob: bool = False, chunk_size: int = 1,
    ) -> None:  # fmt: skip
        super().__init__(locals())
        losses.KTOOptions(beta=beta)

    def forward(
        self, _input: Tensor, lin_weight: Tensor, target: Tensor, bias: Tensor | None = None,
        preference_labels: Tensor | None = None, ref_input: Tensor | None = None,
        ref_weight: Tensor | None = None, ref_bias: Tensor | None = None,
        kl: Tensor | float | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:  # fmt: skip
        """Loss, and sums over chosen and rejected answers: log-probabilities, logits, rewards."""
        if preference_labels is None:
            raise ValueError("LigerFusedLinearKTOLoss: needs preference_labels")
        mask, ignored = target != self.ignore_index, self.ignore_index
        head = losses.Head(_input, lin_weight, bias)

        def sums(source: losses.Head) -> Tensor:
            found = losses.tokens(source, target, ignore_index=ignored).log_prob
            return sequences(found, mask, None, self.average_log_prob)

        before = torch.zeros(target.shape[0], device=target.device)
        if self.use_ref_model:
            if ref_input is None or ref_weight is None:
                raise ValueError("LigerFusedLinearKTOLoss: needs ref_input and ref_weight")
            with torch.no_grad():
                before = sums(losses.Head(ref_input, ref_weight, ref_bias))
        own = sums(head)
        liked = preference_labels.bool()
        sign = torch.where(liked, 1.0, -1.0)
        divergence = torch.as_tensor(0.0 if kl is None else kl, device=own.device).reshape(-1)
        each = 1 - torch.sigmoid(self.beta * sign * (own - before - divergence))
        logits = mean_logits(head, target, ignored, "KTO").sum(-1) * lin_weight.shape[0]
        rewards = self.beta * (own - before).detach()
        kinds = (own.detach(), logits, rewards)
        return each.mean(), tuple(x[side].sum() for x in kinds for side in (liked, ~liked))


class LigerFusedLinearGRPOLoss(_Options):
    """:func:`liger_multi.losses.policy_loss`."""

    def __init__(
        self, beta: float = 0.04, compiled: bool = True, use_ref_model: bool = True,
        chunk_size: int = 1, epsilon_low: float = 0.2, epsilon_high: float = 0.2,
        loss_type: str = "dapo", max_completion_length: int | None = None,
        importance_sampling_level: str = "token", sapo_temperature_pos: float = 1.0,
        sapo_temperature_neg: float = 1.05, temperature: float = 1.0, delta: float | None = None,
        use_bias_correction_kl: bool = False, vespo_k_pos: float = 2.0,
        vespo_lambda_pos: float = 3.0, vespo_k_neg: float = 3.0, vespo_lambda_neg: float = 2.0,
    ) -> None:  # fmt: skip
        super().__init__(locals())
        losses.PolicyOptions(**self.given)

    @property
    def given(self) -> dict[str, Any]:
        """Options of the loss type; trainers pass those of all of them."""
        reads = POLICY[self.loss_type].reads if self.loss_type in POLICY else ()
        found = {name: getattr(self, name, self.max_completion_length) for name in reads}
        level = None if self.loss_type == "vespo" else self.importance_sampling_level
        correct = self.use_bias_correction_kl and self.beta != 0
        return {"loss_type": self.loss_type, "level": level, "beta": self.beta,
                "correct_kl": correct, "metrics": (), **found}  # fmt: skip

    def forward(
        self, _input: Tensor, lin_weight: Tensor, selected_token_ids: Tensor,
        attention_mask: Tensor, advantages: Tensor, bias: Tensor | None = None,
        ref_per_token_logps: Tensor | None = None, old_per_token_logps: Tensor | None = None,
        ref_input: Tensor | None = None, ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None, vllm_is_ratio: Tensor | None = None,
        num_items_in_batch: Tensor | float | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:  # fmt: skip
        """Loss, and the mean divergence (with a beta) and the share of clipped tokens."""
        reference: Any = None
        if self.beta:
            reference = ref_per_token_logps
            if reference is None and ref_input is not None and ref_weight is not None:
                reference = losses.Head(
                    ref_input, ref_weight, ref_bias, temperature=self.temperature
                )
        many = dist.is_available() and dist.is_initialized()
        ratios = vllm_is_ratio
        if ratios is not None and ratios.ndim == 1:
            ratios = ratios.unsqueeze(1)
        loss, metrics = losses.policy_loss(
            losses.Head(_input, lin_weight, bias, temperature=self.temperature),
            selected_token_ids, advantages.to(torch.promote_types(advantages.dtype, torch.float32)),
            old=old_per_token_logps, reference=reference, ratios=ratios,
            token_mask=attention_mask, num_items=num_items_in_batch,
            processes=dist.get_world_size() if many else 1,
            group=dist.group.WORLD if many else None, **self.given,
        )  # fmt: skip
        zero = loss.detach().new_zeros(())
        shares = (metrics.clip_region, metrics.clip_high, zero)
        clipped = next(share for share in shares if share is not None)
        return loss, (metrics.kl, clipped) if metrics.kl is not None else (clipped,)


class _Distilled(_Options):
    divergence = "jsd"

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__(options)
        losses.DistillationOptions(**self.given)

    @property
    def given(self) -> dict[str, Any]:
        """Options of :func:`liger_multi.losses.distillation_loss`."""
        found = {"beta": self.beta} if self.divergence == "jsd" else {}
        return {
            "divergence": self.divergence, "temperature": self.temperature,
            "soft_weight": self.weight_soft_loss, "hard_weight": self.weight_hard_loss,
            "vocabulary": "common", **found,
        }  # fmt: skip

    def forward(
        self, student_input: Tensor, student_weight: Tensor, teacher_input: Tensor,
        teacher_weight: Tensor, true_labels: Tensor, student_bias: Tensor | None = None,
        teacher_bias: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """The loss, and where asked for its soft and its hard term."""
        loss, metrics = losses.distillation_loss(
            losses.Head(student_input, student_weight, student_bias),
            losses.Head(teacher_input, teacher_weight, teacher_bias),
            true_labels.reshape(student_input.shape[:-1]), ignore_index=self.ignore_index,
            **self.given,
        )  # fmt: skip
        if not self.return_soft_hard_loss:
            return loss
        hard = metrics.soft.new_zeros(()) if metrics.hard is None else metrics.hard
        return loss, metrics.soft, hard


class LigerFusedLinearJSDLoss(_Distilled):
    """:func:`liger_multi.losses.distillation_loss`; of two vocabularies the common part."""

    def __init__(
        self, weight_hard_loss: float = 0.5, weight_soft_loss: float = 0.5, beta: float = 0.5,
        ignore_index: int = -100, temperature: float = 1.0, compiled: bool = True,
        chunk_size: int = 1024, return_soft_hard_loss: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(locals())


class LigerFusedLinearCosineSimilarityLoss(_Distilled):
    """:func:`liger_multi.losses.distillation_loss` of the cosine; ``beta`` is its factor."""

    divergence = "cosine"

    def __init__(
        self, weight_hard_loss: float = 0.5, weight_soft_loss: float = 0.5, beta: float = 0.5,
        ignore_index: int = -100, temperature: float = 1.0, compiled: bool = True,
        chunk_size: int = 1024, return_soft_hard_loss: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(locals())

    @property
    def given(self) -> dict[str, Any]:
        """With the factor in the weight of the soft term."""
        return {**super().given, "soft_weight": self.beta * self.weight_soft_loss}


class LigerFusedLinearDistillationBase(torch.autograd.Function):
    """A name that trainers derive from when imported; the protocol behind it is not served."""

    @staticmethod
    def forward(*args: Any, **kwargs: Any) -> Any:
        """Refuse."""
        raise NotImplementedError(
            "LigerFusedLinearDistillationBase: losses of one's own are written on "
            "liger_multi.losses.token_sum or distillation_loss (which takes a top-k teacher) here"
        )
