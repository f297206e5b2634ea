"""Cross entropy as PyTorch has it, and losses of whole methods.

Options are checked when the module is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor, nn

from liger_multi import checks, losses, ops
from liger_multi.losses.shared import Options
from liger_multi.nn._shared import changed
from liger_multi.ops.cross_entropy import options

# --- cross entropy ---

_OPTIONS = (
    "ignore_index",
    "label_smoothing",
    "z_loss",
    "softcap",
    "reduction",
    "inplace",
    "validate",
)
"""What the operator takes of the module."""


class CrossEntropyLoss(nn.CrossEntropyLoss):
    """Cross entropy of logits with class ids.

    Like:
        ``torch.nn.CrossEntropyLoss``, of which it is a subclass; without any valid target the mean
        is 0, not NaN, and the loss is fp32.

    Operator:
        cross_entropy

    Args:
        weight: One factor a class.
        size_average: Deprecated, as in PyTorch.
        ignore_index: Targets that cost nothing.
        reduce: Deprecated, as in PyTorch.
        reduction: mean, sum or none.
        label_smoothing: Share of the target that is spread over all classes.
        z_loss: Factor of ``lse^2``.
        softcap: Logits become ``softcap * tanh(logits / softcap)``.
        inplace: Permit that the gradient is written over the logits.
        validate: Raise for targets out of range on a device too (a sync).
        outputs: Names of what to return with the loss, in a ``CrossEntropyOutput``.
    """

    def __init__(
        self,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        *,
        z_loss: float = 0.0,
        softcap: float | None = None,
        inplace: bool = False,
        validate: bool = False,
        outputs: tuple[str, ...] = (),
    ) -> None:
        name = type(self).__name__
        checks.floating(name, weight=weight, optional=("weight",))
        for word, value in (("size_average", size_average), ("reduce", reduce)):
            if value is not None:
                checks.boolean(name, word, value)
        super().__init__(weight, size_average, ignore_index, reduce, reduction, label_smoothing)
        options(name, label_smoothing, z_loss, softcap, self.reduction, outputs)
        checks.integer(name, "ignore_index", ignore_index)
        checks.boolean(name, "inplace", inplace)
        checks.boolean(name, "validate", validate)
        self.z_loss, self.softcap, self.inplace = z_loss, softcap, inplace
        self.validate, self.outputs = validate, tuple(outputs)

    def forward(  # type: ignore[override]
        self, input: Tensor, target: Tensor
    ) -> Tensor | ops.CrossEntropyOutput:
        """The loss; classes are axis 1 of more than two, as in PyTorch."""
        if input.ndim > 2:
            rows = (*input.shape[:1], *input.shape[2:])
            if target.shape != rows:
                raise ValueError(
                    f"{type(self).__name__}: classes are axis 1, as in PyTorch: an input of shape "
                    f"{tuple(input.shape)} needs a target of shape {rows}, got "
                    f"{tuple(target.shape)}; flatten the rows, or use ops.cross_entropy, whose "
                    "classes are the last axis"
                )
            input = input.movedim(1, -1)
        options: dict[str, Any] = {name: getattr(self, name) for name in _OPTIONS}
        if self.outputs:
            options["outputs"] = self.outputs
            return ops.cross_entropy_with_outputs(input, target, self.weight, **options)
        return ops.cross_entropy(input, target, self.weight, **options)

    def extra_repr(self) -> str:
        """What was chosen."""
        return changed(self)


# --- whole methods ---


class _Objective(nn.Module):
    options_class: ClassVar[type[Options]]
    defaults: ClassVar[dict[str, Any]] = {}

    def __init__(self, *, ignore_index: int = -100, **options: Any) -> None:
        super().__init__()
        self.ignore_index = checks.integer(type(self).__name__, "ignore_index", ignore_index)
        self.options = {**self.defaults, **options}
        self.options_class.of(**self.options)

    def extra_repr(self) -> str:
        """What was chosen."""
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items())


class DPOLoss(_Objective):
    """Direct preference optimization of pairs, with every loss type of its family.

    Like:
        The losses of TRL's ``DPOTrainer``.

    Operator:
        fused_linear_log_prob

    Args:
        ignore_index: Targets that cost nothing.
        options: As :class:`~liger_multi.losses.DPOOptions`.
    """

    options_class = losses.DPOOptions

    def forward(
        self, policy: losses.Source, target: Tensor, reference: losses.Source | None = None
    ) -> tuple[Tensor, losses.PreferenceMetrics]:
        """As :func:`~liger_multi.losses.dpo_loss`."""
        return losses.dpo_loss(
            policy, target, reference, ignore_index=self.ignore_index, **self.options
        )


class CPOLoss(_Objective):
    """Preferences of pairs without a reference: CPO, SLiC, IPO, SimPO, ORPO, AlphaPO.

    Like:
        The losses of TRL's ``CPOTrainer``.

    Operator:
        fused_linear_log_prob

    Args:
        ignore_index: Targets that cost nothing.
        options: As :class:`~liger_multi.losses.CPOOptions`.
    """

    options_class = losses.CPOOptions

    def forward(
        self, policy: losses.Source, target: Tensor, nll_target: Tensor | None = None
    ) -> tuple[Tensor, losses.PreferenceMetrics]:
        """As :func:`~liger_multi.losses.cpo_loss`."""
        return losses.cpo_loss(
            policy, target, nll_target, ignore_index=self.ignore_index, **self.options
        )


class SimPOLoss(CPOLoss):
    """SimPO: a margin between mean log-probabilities, without a likelihood term.

    Like:
        :class:`CPOLoss` with ``loss_type="simpo"``, ``beta=2.0`` and ``nll_weight=0.0``.

    Operator:
        fused_linear_log_prob

    Args:
        ignore_index: Targets that cost nothing.
        options: As :class:`~liger_multi.losses.CPOOptions`.
    """

    defaults: ClassVar[dict[str, Any]] = {"loss_type": "simpo", "beta": 2.0, "nll_weight": 0.0}


class ORPOLoss(CPOLoss):
    """ORPO: odds of the chosen answer over the rejected one, beside its likelihood.

    Like:
        The loss of TRL's ``ORPOTrainer``.

    Operator:
        fused_linear_log_prob

    Args:
        ignore_index: Targets that cost nothing.
        options: As :class:`~liger_multi.losses.CPOOptions`.
    """

    defaults: ClassVar[dict[str, Any]] = {"loss_type": "orpo"}


class KTOLoss(_Objective):
    """Single answers that are desirable or not: KTO, unpaired APO.

    Like:
        The losses of TRL's ``KTOTrainer``.

    Operator:
        fused_linear_log_prob

    Args:
        ignore_index: Targets that cost nothing.
        options: As :class:`~liger_multi.losses.KTOOptions`.
    """

    options_class = losses.KTOOptions

    def forward(
        self,
        policy: losses.Source,
        target: Tensor,
        desirable: Tensor,
        reference: losses.Source | None = None,
        kl: Tensor | float | None = None,
    ) -> tuple[Tensor, losses.KTOMetrics]:
        """As :func:`~liger_multi.losses.kto_loss`."""
        return losses.kto_loss(
            policy,
            target,
            desirable,
            reference,
            kl,
            ignore_index=self.ignore_index,
            **self.options,
        )


class PolicyLoss(_Objective):
    """Policy gradients of sampled answers: GRPO and its relatives.

    Like:
        The losses of TRL's ``GRPOTrainer``.

    Operator:
        fused_linear_log_prob

    Args:
        ignore_index: Targets that cost nothing.
        options: As :class:`~liger_multi.losses.PolicyOptions`.
    """

    options_class = losses.PolicyOptions

    def forward(
        self, policy: losses.Source, target: Tensor, advantages: Tensor, **kwargs: Any
    ) -> tuple[Tensor, losses.PolicyMetrics]:
        """As :func:`~liger_multi.losses.policy_loss`, with its arguments that are no options."""
        return losses.policy_loss(
            policy, target, advantages, ignore_index=self.ignore_index, **kwargs, **self.options
        )


class SequenceLoss(_Objective):
    """The likelihood of given tokens, with weights, DFT, z-loss and packed rows.

    Like:
        The losses of TRL's ``SFTTrainer``.

    Operator:
        fused_linear_log_prob

    Args:
        ignore_index: Targets that cost nothing.
        options: As :class:`~liger_multi.losses.SequenceOptions`.
    """

    options_class = losses.SequenceOptions

    def forward(
        self,
        policy: losses.Source,
        target: Tensor,
        token_weight: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, losses.SequenceMetrics]:
        """As :func:`~liger_multi.losses.sequence_loss`, with its arguments that are no options."""
        return losses.sequence_loss(
            policy, target, token_weight, ignore_index=self.ignore_index, **kwargs, **self.options
        )


class MTPLoss(_Objective):
    """The next token, and tokens further ahead by more heads.

    Like:
        Multi-token prediction of DeepSeek-V3.

    Operator:
        fused_linear_log_prob

    Args:
        ahead_weight: Factor of the mean over the heads ahead.
        ignore_index: Targets that cost nothing.
        options: As :class:`~liger_multi.losses.SequenceOptions`.
    """

    options_class = losses.SequenceOptions

    def __init__(
        self, ahead_weight: float = 0.3, *, ignore_index: int = -100, **options: Any
    ) -> None:
        super().__init__(ignore_index=ignore_index, **options)
        self.ahead_weight = checks.number(type(self).__name__, "ahead_weight", ahead_weight, 0.0)

    def forward(
        self, heads: Sequence[losses.Source], target: Tensor, **kwargs: Any
    ) -> tuple[Tensor, losses.MTPMetrics]:
        """As :func:`~liger_multi.losses.mtp_loss`, with its arguments that are no options."""
        return losses.mtp_loss(
            heads,
            target,
            ahead_weight=self.ahead_weight,
            ignore_index=self.ignore_index,
            **kwargs,
            **self.options,
        )


class DistillationLoss(_Objective):
    """A student that learns from a teacher's distributions, and from labels.

    Like:
        The losses of TRL's ``GKDTrainer`` and ``DistillationTrainer``.

    Operator:
        fused_linear_jsd

    Args:
        ignore_index: Targets that cost nothing.
        options: As :class:`~liger_multi.losses.DistillationOptions`.
    """

    options_class = losses.DistillationOptions

    def forward(
        self, student: losses.Source, teacher: losses.Teacher, target: Tensor, **kwargs: Any
    ) -> tuple[Tensor, losses.DistillationMetrics]:
        """As :func:`~liger_multi.losses.distillation_loss`, with arguments that are no options."""
        return losses.distillation_loss(
            student, teacher, target, ignore_index=self.ignore_index, **kwargs, **self.options
        )
