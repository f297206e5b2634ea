"""The losses of pairs, of single answers, and of distillation."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from liger_multi import losses, ops
from liger_multi.compat.liger_kernel import bases, policy
from liger_multi.compat.liger_kernel.bases import (
    by_side,
    chosen_labels,
    every_logit,
    pair_answers,
    reference_answers,
)
from liger_multi.compat.liger_kernel.modules import Options, defaults_of
from liger_multi.compat.liger_kernel.signatures import ArgumentError
from liger_multi.losses.preference import DPO, _log_odds, sequences


def _reference(loss: Options, tensors: tuple[Any, Any, Any], target: Tensor) -> Tensor:
    """Log-probabilities of sequences under the reference; zeros without one."""
    o, name = loss, type(loss).__name__
    use, average = o.use_ref_model, o.average_log_prob
    sums = reference_answers(name, use, tensors, target, o.ignore_index, average)
    return torch.zeros(target.shape[0], device=target.device) if sums is None else sums


class _Pairs(Options):
    """What the losses over pairs share; the first half of a batch is the chosen one."""

    ignore_index: int
    average = False

    def tokens(
        self, head: losses.Head, target: Tensor, nll_target: Tensor | None
    ) -> tuple[ops.LogProbOutput, Tensor, Tensor, tuple[Tensor, ...]]:
        """Log-probabilities of tokens, of sequences, the chosen NLL, and what is returned first."""
        statistics, sums, nll = pair_answers(
            head, target, nll_target, self.ignore_index, self.average
        )
        means = [x.mean() for x in every_logit(head, target).chunk(2)]
        nll_shown = nll.detach() if self.compute_nll_loss else torch.zeros_like(nll)
        return statistics, sums, nll, (*sums.detach().chunk(2), *means, nll_shown)


def _dpo_types(loss_type: str | list[str], label_smoothing: float) -> tuple[str, ...]:
    """The loss types, checked with the messages of Liger-Kernel."""
    types = (loss_type,) if isinstance(loss_type, str) else tuple(loss_type)
    for name in types:
        if name not in DPO:
            raise ArgumentError(f"Unsupported loss_type: {name}. Supported types are: {[*DPO]}")
    if "exo_pair" in types and label_smoothing <= 0:
        raise ArgumentError(
            "label_smoothing must be > 0 for loss_type='exo_pair'. The EXO paper recommends 1e-3."
        )
    if "robust" in types and not 0.0 <= label_smoothing < 0.5:
        raise ArgumentError(
            f"label_smoothing must lie in [0.0, 0.5) for loss_type='robust'. Got {label_smoothing}."
        )
    return types


class LigerFusedLinearDPOLoss(_Pairs):
    """:func:`liger_multi.losses.dpo_loss`, which takes hidden states of the reference too."""

    defaults = defaults_of(
        "ignore_index beta alpha compute_nll_loss compiled use_ref_model average_log_prob "
        "chunk_size loss_type label_smoothing discopop_tau",
        bases.LigerFusedLinearPreferenceBase.forward,
        compute_nll_loss=False,
        use_ref_model=True,
        average_log_prob=False,
        loss_type="sigmoid",
        label_smoothing=0.0,
        discopop_tau=0.05,
    )

    def check(self) -> None:
        types = _dpo_types(self.loss_type, self.label_smoothing)
        # as in Liger-Kernel, the sigmoid by itself is not smoothed
        smooth = types != ("sigmoid",) and any(DPO[loss_type].smooth for loss_type in types)
        self.loss_options: dict[str, Any] = {
            "loss_type": types,
            "beta": self.beta,
            "length_normalized": self.average_log_prob,
            "label_smoothing": self.label_smoothing if smooth else 0.0,
        }
        if "discopop" in types:
            self.loss_options["discopop_tau"] = self.discopop_tau
        losses.DPOOptions(**self.loss_options)
        self.average = self.average_log_prob

    def forward(
        self,
        lin_weight: Tensor,
        _input: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        ref_input: Tensor | None = None,
        ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Any, ...]]:
        """Loss, and the chosen and rejected rewards after the rest."""
        reference = _reference(self, (ref_input, ref_weight, ref_bias), target)
        statistics, sums, nll, first = self.tokens(
            losses.Head(_input, lin_weight, bias), target, None
        )
        loss, _ = losses.dpo_loss(
            statistics, target, reference, ignore_index=self.ignore_index, **self.loss_options
        )
        if self.compute_nll_loss:
            loss = loss + self.alpha * nll
        rewards = self.beta * (sums - reference).detach()
        return loss, (*first, *rewards.chunk(2))


class _Margins(_Pairs):
    loss_type = "sigmoid"

    def check(self) -> None:
        self.average = self.options.get("average_log_prob", self.average)
        losses.CPOOptions(**self.loss_options)

    @property
    def loss_options(self) -> dict[str, Any]:
        names = ("beta", "label_smoothing", "gamma")
        options = {name: getattr(self, name) for name in names if name in self.defaults}
        return {"loss_type": self.loss_type, "nll_weight": 0.0, **options}

    def forward(
        self,
        lin_weight: Tensor,
        _input: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        nll_target: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Any, ...]]:
        """Loss, and the chosen and rejected rewards after the rest."""
        head = losses.Head(_input, lin_weight, bias)
        nll_target = chosen_labels(type(self).__name__, nll_target, target)
        statistics, sums, nll, first = self.tokens(head, target, nll_target)
        extra: dict[str, Any] = {}
        if self.loss_type != "orpo":
            extra["length_normalized"] = self.average
        loss, _ = losses.cpo_loss(
            statistics, target, ignore_index=self.ignore_index, **self.loss_options, **extra
        )
        if self.compute_nll_loss:
            loss = loss + getattr(self, "alpha", 1.0) * nll
        return loss, (*first, *self.more_metrics(sums.detach()))

    def more_metrics(self, sums: Tensor) -> tuple[Tensor, ...]:
        chosen, rejected = (self.beta * sums).chunk(2)
        return chosen, rejected


class LigerFusedLinearCPOLoss(_Margins):
    """:func:`liger_multi.losses.cpo_loss`."""

    defaults = defaults_of(
        "ignore_index beta alpha label_smoothing compute_nll_loss compiled average_log_prob "
        "chunk_size",
        bases.LigerFusedLinearPreferenceBase.forward,
        label_smoothing=0.0,
        average_log_prob=False,
    )


class LigerFusedLinearSimPOLoss(_Margins):
    """:func:`liger_multi.losses.cpo_loss` of SimPO."""

    loss_type, average = "simpo", True

    defaults = defaults_of(
        "ignore_index beta alpha label_smoothing compute_nll_loss compiled gamma chunk_size",
        bases.LigerFusedLinearPreferenceBase.forward,
        label_smoothing=0.0,
        gamma=0.5,
    )


class LigerFusedLinearORPOLoss(_Margins):
    """:func:`liger_multi.losses.cpo_loss` of ORPO; after the rewards, log-odds."""

    loss_type, average = "orpo", True

    defaults = defaults_of(
        "ignore_index beta compute_nll_loss compiled chunk_size",
        bases.LigerFusedLinearPreferenceBase.forward,
    )

    def more_metrics(self, sums: Tensor) -> tuple[Tensor, ...]:
        """The rewards, the mean of the log-odds ratio's log-sigmoid, and the mean log-odds."""
        chosen, rejected = _log_odds(sums).chunk(2)
        ratio = torch.nn.functional.logsigmoid(chosen - rejected)
        return (*super().more_metrics(sums), ratio.mean(), (chosen - rejected).mean())


class LigerFusedLinearKTOLoss(Options):
    """:func:`liger_multi.losses.kto_loss`."""

    defaults = defaults_of(
        "ignore_index beta compiled use_ref_model average_log_prob chunk_size",
        bases.LigerFusedLinearUnpairedPreferenceBase.forward,
        beta=0.1,
    )

    def check(self) -> None:
        losses.KTOOptions(beta=self.beta)

    def forward(
        self,
        _input: Tensor,
        lin_weight: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        preference_labels: Tensor | None = None,
        ref_input: Tensor | None = None,
        ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None,
        kl: Tensor | float | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Loss, and sums over chosen and rejected answers: log-probabilities, logits, rewards."""
        if preference_labels is None:
            raise ArgumentError("LigerFusedLinearKTOLoss: needs preference_labels")
        average, ignored = self.average_log_prob, self.ignore_index
        reference = _reference(self, (ref_input, ref_weight, ref_bias), target)
        head = losses.Head(_input, lin_weight, bias)
        tokens = losses.tokens(head, target, ignore_index=ignored).log_prob
        sums = sequences(tokens, target != ignored, None, average)
        liked = preference_labels.bool()
        sign = torch.where(liked, 1.0, -1.0)
        kl = torch.as_tensor(0.0 if kl is None else kl, dtype=sums.dtype, device=sums.device)
        losses_of_answers = 1 - torch.sigmoid(
            self.beta * sign * (sums - reference - kl.reshape(-1))
        )
        logits = every_logit(head, target) * (target.shape[1] * lin_weight.shape[0])
        rewards = self.beta * (sums - reference).detach()
        return losses_of_answers.mean(), by_side(liked, sums.detach(), logits, rewards)


# --- distillation ---


class _Distilled(Options):
    divergence = "jsd"
    defaults = defaults_of(
        "weight_hard_loss weight_soft_loss beta ignore_index temperature compiled chunk_size "
        "return_soft_hard_loss",
        bases.LigerFusedLinearDistillationBase.forward,
    )

    @property
    def factor(self) -> float:
        """What the soft term is multiplied by, before its weight."""
        return 1.0

    def check(self) -> None:
        if not self.temperature:
            raise ArgumentError("Temperature cannot be 0.")
        losses.DistillationOptions(**self.loss_options)

    @property
    def loss_options(self) -> dict[str, Any]:
        options = {"beta": self.beta} if self.divergence == "jsd" else {}
        return {
            "divergence": self.divergence,
            "temperature": self.temperature,
            "soft_weight": self.factor * self.weight_soft_loss,
            "hard_weight": self.weight_hard_loss,
            "vocabulary": "common",
            **options,
        }

    def forward(
        self,
        student_input: Tensor,
        student_weight: Tensor,
        teacher_input: Tensor,
        teacher_weight: Tensor,
        true_labels: Tensor,
        student_bias: Tensor | None = None,
        teacher_bias: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor, Tensor]:
        """The loss, and where asked for its soft and its hard term."""
        labels = true_labels.reshape(student_input.shape[:-1])
        loss, metrics = losses.distillation_loss(
            losses.Head(student_input, student_weight, student_bias),
            losses.Head(teacher_input, teacher_weight, teacher_bias),
            labels,
            ignore_index=self.ignore_index,
            **self.loss_options,
        )
        if not self.return_soft_hard_loss:
            return loss
        hard = metrics.hard
        if hard is None:  # its weight is 0, and it is asked for all the same
            with torch.no_grad():
                hard = ops.fused_linear_cross_entropy(
                    student_input,
                    student_weight,
                    labels,
                    student_bias,
                    ignore_index=self.ignore_index,
                )
        return loss, self.factor * metrics.soft, hard


class LigerFusedLinearJSDLoss(_Distilled):
    """:func:`liger_multi.losses.distillation_loss`; of two vocabularies the common part."""


class LigerFusedLinearCosineSimilarityLoss(_Distilled):
    """:func:`liger_multi.losses.distillation_loss` of the cosine; ``beta`` is its factor."""

    divergence = "cosine"

    @property
    def factor(self) -> float:
        return self.beta  # type: ignore[no-any-return]


# --- ``LigerFusedLinear*Function.apply`` and ``liger_fused_linear_*`` ---

# ``apply`` calls the module of the loss, whose gradients are those of :mod:`liger_multi.losses`.
# Hidden states come before the weight in all of them. A loss of one's own derives from a base
# class.

_HOOKS = ("forward", "preference_loss_fn", "ppo_loss_fn", "distillation_loss_fn")


class _Sealed(torch.autograd.Function):
    """A loss whose ``apply`` would not call what a subclass writes."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        is_internal = cls.__module__ == __name__
        overridden = [name for name in _HOOKS if name in vars(cls)]
        if overridden and not is_internal:
            base = next(b for b in cls.__mro__ if b.__name__.endswith("Base"))
            raise TypeError(
                f"{cls.__name__}: {', '.join(overridden)} of {cls.__bases__[0].__name__} would not "
                f"be called; derive from {base.__name__}"
            )


def _applied(loss: Any, names: str, **defaults: Any) -> Callable[..., Any]:
    """A function whose arguments are options of a loss and what it is called with.

    Args:
        loss: The class of the module.
        names: In the order of ``apply``; ``weight`` is the module's ``lin_weight``.
        defaults: Defaults that are not the module's.
    """
    call = inspect.signature(loss.forward).parameters
    renamed = {"weight": "lin_weight"} if "lin_weight" in call else {}
    order, of = tuple(names.split()), inspect.Parameter
    usual = {
        n: loss.defaults[n] if n in loss.defaults else call[renamed.get(n, n)].default
        for n in order
    } | defaults
    last_required = max((i for i, n in enumerate(order) if usual[n] is of.empty), default=-1)

    def apply(*args: Any, **kwargs: Any) -> Any:
        """The loss, and what the module returns with it."""
        if len(args) > len(order) or not {*kwargs} <= {*order}:
            raise TypeError(f"apply takes {', '.join(order)}")
        arguments = {**defaults, **dict(zip(order, args)), **kwargs}
        module = loss(**{n: v for n, v in arguments.items() if n in loss.defaults})
        return module(
            **{renamed.get(n, n): v for n, v in arguments.items() if n not in loss.defaults}
        )

    signature_parameters = [
        of(n, of.POSITIONAL_OR_KEYWORD, default=of.empty if i <= last_required else usual[n])
        for i, n in enumerate(order)
    ]
    apply.__signature__ = inspect.Signature(signature_parameters)  # type: ignore[attr-defined]
    return apply


_PAIRS = "_input weight target bias"
_REFERENCE = "ref_input ref_weight ref_bias"
_TEACHER = (
    "student_input student_weight teacher_input teacher_weight true_labels student_bias "
    "teacher_bias weight_hard_loss weight_soft_loss beta ignore_index temperature compiled "
    "chunk_size return_soft_hard_loss"
)
liger_fused_linear_dpo = _applied(
    LigerFusedLinearDPOLoss,
    f"{_PAIRS} {_REFERENCE} ignore_index beta compute_nll_loss compiled use_ref_model "
    "average_log_prob chunk_size loss_type label_smoothing discopop_tau alpha",
)
liger_fused_linear_cpo = _applied(
    LigerFusedLinearCPOLoss,
    f"{_PAIRS} ignore_index beta alpha label_smoothing compute_nll_loss compiled "
    "average_log_prob chunk_size",
)
liger_fused_linear_simpo = _applied(
    LigerFusedLinearSimPOLoss,
    f"{_PAIRS} ignore_index beta alpha label_smoothing compute_nll_loss compiled gamma chunk_size",
    compute_nll_loss=False,
)
liger_fused_linear_orpo = _applied(
    LigerFusedLinearORPOLoss,
    f"{_PAIRS} ignore_index beta compute_nll_loss nll_target compiled chunk_size",
)
liger_fused_linear_kto = _applied(
    LigerFusedLinearKTOLoss,
    f"_input weight target preference_labels bias {_REFERENCE} kl ignore_index beta compiled "
    "use_ref_model average_log_prob chunk_size",
    preference_labels=inspect.Parameter.empty,
    use_ref_model=True,
)
liger_fused_linear_grpo = _applied(
    policy.FunctionalGRPOLoss,
    "_input weight selected_token_ids attention_mask advantages bias ref_per_token_logps "
    f"old_per_token_logps {_REFERENCE} beta epsilon_low epsilon_high loss_type "
    "max_completion_length importance_sampling_level sapo_temperature_pos sapo_temperature_neg "
    "temperature compiled use_ref_model chunk_size vllm_is_ratio delta use_bias_correction_kl "
    "vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg num_items_in_batch",
)
liger_fused_linear_jsd = _applied(LigerFusedLinearJSDLoss, _TEACHER)
liger_fused_linear_cosine = _applied(LigerFusedLinearCosineSimilarityLoss, _TEACHER)


_PAIR_BASE = bases.LigerFusedLinearPreferenceBase
_TEACHER_BASE = bases.LigerFusedLinearDistillationBase
_FUNCTIONS: dict[str, tuple[Callable[..., Any], type[torch.autograd.Function]]] = {
    "DPO": (liger_fused_linear_dpo, _PAIR_BASE),
    "CPO": (liger_fused_linear_cpo, _PAIR_BASE),
    "SimPO": (liger_fused_linear_simpo, _PAIR_BASE),
    "ORPO": (liger_fused_linear_orpo, _PAIR_BASE),
    "KTO": (liger_fused_linear_kto, bases.LigerFusedLinearUnpairedPreferenceBase),
    "GRPO": (liger_fused_linear_grpo, bases.LigerFusedLinearPPOBase),
    "JSD": (liger_fused_linear_jsd, _TEACHER_BASE),
    "CosineSimilarity": (liger_fused_linear_cosine, _TEACHER_BASE),
}
"""Name without ``LigerFusedLinear`` and ``Function`` to what ``apply`` is, and the base class."""
for _name, (_apply, _base) in _FUNCTIONS.items():
    _members = {
        "apply": staticmethod(_apply),
        "__doc__": f":class:`LigerFusedLinear{_name}Loss`.",
        "__module__": __name__,
    }
    _class = f"LigerFusedLinear{_name}Function"
    globals()[_class] = type(_class, (_Sealed, _base), _members)
