"""Cross entropy as PyTorch has it, and losses of whole methods.

Options are checked when the module is made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import Tensor, nn

from liger_multi import checks, losses, ops
from liger_multi.losses.shared import Options
from liger_multi.nn._shared import changed
from liger_multi.ops import _head as head
from liger_multi.ops._divergence import FORMS, REDUCTIONS
from liger_multi.ops._divergence_head import VOCABULARIES
from liger_multi.ops.cross_entropy import OUTPUTS as CROSS_ENTROPY_OUTPUTS, options
from liger_multi.ops.fused_linear_log_prob import OUTPUTS

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

    extra_repr = changed


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


# --- losses whose options and arguments are those of an operator ---


def _above_zero(module: str, name: str, value: Any) -> None:
    checks.number(module, name, value, 0.0, above=True)


# by the name of an option; None passes where its type allows it
CHECKS: dict[str, Callable[[str, str, Any], object]] = {
    "accumulate": lambda module, _, value: head.accumulator(module, value),
    "beta": lambda module, name, value: checks.number(module, name, value, 0.0, 1.0),
    "chunk": lambda module, _, value: head.rows_and_budget(module, value),
    "class_weight": lambda module, name, value: checks.floating(module, **{name: value}),
    "compact": checks.boolean,
    "form": lambda module, name, value: checks.one_of(module, name, value, FORMS),
    "ignore_index": checks.integer,
    "label_smoothing": lambda module, name, value: checks.number(module, name, value, 0.0, 1.0),
    "logit_scale": checks.number,
    "reduction": lambda module, name, value: checks.one_of(module, name, value, REDUCTIONS),
    "softcap": _above_zero,
    "square_temperature": checks.boolean,
    "teacher_form": lambda module, name, value: checks.one_of(module, name, value, FORMS),
    "temperature": _above_zero,
    "validate": checks.boolean,
    "vocabulary": lambda module, name, value: checks.one_of(module, name, value, VOCABULARIES),
    "z_loss": lambda module, name, value: checks.number(module, name, value, 0.0),
}


def _options_in(arguments: dict[str, Any]) -> dict[str, Any]:
    """The options among the local variables of a constructor: all of them but the module."""
    return {name: value for name, value in arguments.items() if name not in ("self", "__class__")}


class OperatorLoss(nn.Module):
    """A loss whose options are the arguments of its constructor.

    Attributes:
        _names: What ``outputs`` may name.
        _operator: The name of the operator.
    """

    _names: ClassVar[tuple[str, ...]] = ()
    _operator: ClassVar[str]

    def __init__(self, *, optional: str = "", **options: Any) -> None:
        """Check options, and make them attributes; a tensor is a buffer.

        Args:
            optional: Names of the options that may be None.
            options: By name.
        """
        super().__init__()
        module, self._option_names = type(self).__name__, tuple(options)
        for name, value in options.items():
            if name == "outputs":
                checks.names(module, value, self._names)
            elif value is not None or name not in optional.split():
                CHECKS[name](module, name, value)
            if name == "class_weight":
                self.register_buffer(name, value)
            else:
                setattr(self, name, tuple(value) if name == "outputs" else value)

    def _options(self) -> dict[str, Any]:
        """The options as they are now, by the names that the operator has for them."""
        return {name: getattr(self, name) for name in self._option_names}

    def _run(self, *tensors: Tensor | None) -> Tensor:
        """The operator with the options."""
        return cast(Tensor, getattr(ops, self._operator)(*tensors, **self._options()))

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Options are attributes."""

    extra_repr = changed


class _RowsLoss(OperatorLoss):
    """A divergence of rows."""

    def forward(self, student: Tensor, teacher: Tensor, target: Tensor | None = None) -> Tensor:
        """The loss of rows of the student against the teacher's."""
        return self._run(student, teacher, target)


class _HeadsLoss(OperatorLoss):
    """A divergence of two linear heads."""

    def forward(
        self,
        hidden: Tensor,
        weight: Tensor,
        teacher_hidden: Tensor,
        teacher_weight: Tensor,
        target: Tensor | None = None,
        bias: Tensor | None = None,
        teacher_bias: Tensor | None = None,
    ) -> Tensor:
        """The loss of the student's head against the teacher's."""
        heads = (hidden, weight, teacher_hidden, teacher_weight, target, bias, teacher_bias)
        return self._run(*heads)


class KLDivLoss(_RowsLoss):
    """KL divergence.

    Like:
        ``torch.nn.KLDivLoss``: its ``batchmean`` is ``mean`` here, its ``log_target`` a form.

    Operator:
        kl_div

    Args:
        form: What the student's rows are: log_prob, prob or logits.
        teacher_form: What the teacher's are.
        temperature: Logits are divided by it.
        ignore_index: Rows with this target cost nothing.
        reduction: mean (over rows), sum or none (a number per row).
    """

    _operator = "kl_div"

    def __init__(
        self,
        *,
        form: str = "log_prob",
        teacher_form: str = "prob",
        temperature: float = 1.0,
        ignore_index: int = -100,
        reduction: str = "mean",
    ) -> None:
        super().__init__(**_options_in(locals()))


class JSDLoss(_RowsLoss):
    """Jensen-Shannon divergence, of weight ``beta``.

    Like:
        The generalized divergence of knowledge distillation (arXiv:2306.13649).

    Operator:
        jsd

    Args:
        beta: Share of the teacher in the mixture; the ends are one-sided.
        form: What the student's rows are: log_prob, prob or logits.
        teacher_form: What the teacher's are; None: the same.
        temperature: Logits are divided by it.
        ignore_index: Rows with this target cost nothing.
        reduction: mean (over rows), sum or none (a number per row).
    """

    _operator = "jsd"

    def __init__(
        self,
        beta: float = 0.5,
        *,
        form: str = "log_prob",
        teacher_form: str | None = None,
        temperature: float = 1.0,
        ignore_index: int = -100,
        reduction: str = "mean",
    ) -> None:
        super().__init__(**_options_in(locals()), optional="teacher_form")


class TVDLoss(_RowsLoss):
    """Total variation distance.

    Like:
        Half of ``torch.nn.L1Loss`` with sums over classes.

    Operator:
        tvd

    Args:
        form: What the student's rows are: log_prob, prob or logits.
        teacher_form: What the teacher's are; None: the same.
        temperature: Logits are divided by it.
        ignore_index: Rows with this target cost nothing.
        reduction: mean (over rows), sum or none (a number per row).
    """

    _operator = "tvd"

    def __init__(
        self,
        *,
        form: str = "prob",
        teacher_form: str | None = None,
        temperature: float = 1.0,
        ignore_index: int = -100,
        reduction: str = "mean",
    ) -> None:
        super().__init__(**_options_in(locals()), optional="teacher_form")


class FusedLinearKLDivLoss(_HeadsLoss):
    """KL divergence of two linear heads.

    Like:
        Two ``torch.nn.Linear`` and a divergence of their softmax; the heads' parameters are
        arguments of the call.

    Operator:
        fused_linear_kl_div

    Args:
        temperature: Logits of both are divided by it.
        square_temperature: Multiply the loss by its square.
        vocabulary: equal, or common to compare the first classes that both have.
        ignore_index: Rows with this target are dropped.
        reduction: mean (over rows), sum or none (a number per row).
        chunk: Rows of logits at a time, a byte budget such as "512MiB", auto, or lean: 128 MiB,
            and the gradient of the weight is summed in the dtype of the weight.
        accumulate: Dtype in which the gradient of the weight is summed.
        compact: Drop ignored rows before the products; on a device, of more than 512 rows.
    """

    _operator = "fused_linear_kl_div"

    def __init__(
        self,
        *,
        temperature: float = 1.0,
        square_temperature: bool = False,
        vocabulary: str = "equal",
        ignore_index: int = -100,
        reduction: str = "mean",
        chunk: int | str = "auto",
        accumulate: torch.dtype = torch.float32,
        compact: bool = True,
    ) -> None:
        super().__init__(**_options_in(locals()))


class FusedLinearJSDLoss(_HeadsLoss):
    """Jensen-Shannon divergence of two linear heads.

    Like:
        Two ``torch.nn.Linear`` and a divergence of their softmax; the heads' parameters are
        arguments of the call.

    Operator:
        fused_linear_jsd

    Args:
        beta: Share of the teacher in the mixture; the ends are one-sided.
        temperature: Logits of both are divided by it.
        square_temperature: Multiply the loss by its square.
        vocabulary: equal, or common to compare the first classes that both have.
        ignore_index: Rows with this target are dropped.
        reduction: mean (over rows), sum or none (a number per row).
        chunk: Rows of logits at a time, a byte budget such as "512MiB", auto, or lean: 128 MiB,
            and the gradient of the weight is summed in the dtype of the weight.
        accumulate: Dtype in which the gradient of the weight is summed.
        compact: Drop ignored rows before the products; on a device, of more than 512 rows.
    """

    _operator = "fused_linear_jsd"

    def __init__(
        self,
        beta: float = 0.5,
        *,
        temperature: float = 1.0,
        square_temperature: bool = False,
        vocabulary: str = "equal",
        ignore_index: int = -100,
        reduction: str = "mean",
        chunk: int | str = "auto",
        accumulate: torch.dtype = torch.float32,
        compact: bool = True,
    ) -> None:
        super().__init__(**_options_in(locals()))


class FusedLinearTVDLoss(_HeadsLoss):
    """Total variation distance of two linear heads.

    Like:
        Two ``torch.nn.Linear`` and a divergence of their softmax; the heads' parameters are
        arguments of the call.

    Operator:
        fused_linear_tvd

    Args:
        temperature: Logits of both are divided by it.
        square_temperature: Multiply the loss by its square.
        vocabulary: equal, or common to compare the first classes that both have.
        ignore_index: Rows with this target are dropped.
        reduction: mean (over rows), sum or none (a number per row).
        chunk: Rows of logits at a time, a byte budget such as "512MiB", auto, or lean: 128 MiB,
            and the gradient of the weight is summed in the dtype of the weight.
        accumulate: Dtype in which the gradient of the weight is summed.
        compact: Drop ignored rows before the products; on a device, of more than 512 rows.
    """

    _operator = "fused_linear_tvd"

    def __init__(
        self,
        *,
        temperature: float = 1.0,
        square_temperature: bool = False,
        vocabulary: str = "equal",
        ignore_index: int = -100,
        reduction: str = "mean",
        chunk: int | str = "auto",
        accumulate: torch.dtype = torch.float32,
        compact: bool = True,
    ) -> None:
        super().__init__(**_options_in(locals()))


class FusedLinearCrossEntropyLoss(OperatorLoss):
    """Cross entropy of a linear head, without holding the logits of all rows.

    Like:
        ``torch.nn.Linear`` and ``torch.nn.CrossEntropyLoss`` behind it; the head's parameters are
        arguments of the call, ``loss(hidden, head.weight, target, head.bias)``.

    Operator:
        fused_linear_cross_entropy

    Args:
        class_weight: One factor a class.
        ignore_index: Targets that cost nothing.
        reduction: mean, sum or none.
        label_smoothing: Share of the target that is spread over all classes.
        z_loss: Factor of ``lse^2``.
        softcap: Logits become ``softcap * tanh(logits / softcap)``.
        logit_scale: Factor of the logits, before the softcap.
        chunk: Rows of logits at a time, a byte budget such as "512MiB", auto, or lean: 128 MiB,
            and the gradient of the weight is summed in the dtype of the weight.
        accumulate: Dtype in which the gradient of the weight is summed.
        compact: Drop ignored rows before the product; on a device, of more than 512 rows.
        validate: Raise for targets out of range on a device too (a sync).
        outputs: Names of what to return with the loss, in a ``CrossEntropyOutput``.
    """

    _names = CROSS_ENTROPY_OUTPUTS

    def __init__(
        self,
        class_weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        *,
        z_loss: float = 0.0,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        chunk: int | str = "auto",
        accumulate: torch.dtype = torch.float32,
        compact: bool = True,
        validate: bool = False,
        outputs: tuple[str, ...] = (),
    ) -> None:
        super().__init__(**_options_in(locals()), optional="class_weight softcap")

    def forward(
        self,
        hidden: Tensor,
        weight: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
    ) -> Tensor | ops.CrossEntropyOutput:
        """The loss of ``hidden @ weight.T + bias``."""
        options = self._options()
        if options.pop("outputs"):
            return ops.fused_linear_cross_entropy_with_outputs(
                hidden, weight, target, bias, **options, outputs=self.outputs
            )
        return ops.fused_linear_cross_entropy(hidden, weight, target, bias, **options)


class FusedLinearLogProb(OperatorLoss):
    """Log-probabilities of tokens under a linear head, and the entropy of its rows.

    Like:
        ``log_softmax`` and ``gather`` of the logits of ``torch.nn.Linear``; the head's parameters
        are arguments of the call.

    Operator:
        fused_linear_log_prob

    Args:
        temperature: Logits are divided by it, after the softcap.
        softcap: Logits become ``softcap * tanh(logits / softcap)``.
        logit_scale: Factor of the logits, before the softcap.
        ignore_index: Targets whose rows are dropped.
        chunk: Rows of logits at a time, a byte budget such as "512MiB", auto, or lean: 128 MiB,
            and the gradient of the weight is summed in the dtype of the weight.
        accumulate: Dtype in which the gradient of the weight is summed.
        compact: Drop ignored rows before the product; on a device, of more than 512 rows.
        validate: Raise for targets out of range on a device too (a sync).
        outputs: Names of what to compute: log_prob, entropy, lse, argmax.
    """

    _names = OUTPUTS

    def __init__(
        self,
        *,
        temperature: float = 1.0,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        ignore_index: int = -100,
        chunk: int | str = "auto",
        accumulate: torch.dtype = torch.float32,
        compact: bool = True,
        validate: bool = False,
        outputs: tuple[str, ...] = OUTPUTS,
    ) -> None:
        super().__init__(**_options_in(locals()), optional="softcap")

    def forward(
        self,
        hidden: Tensor,
        weight: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
    ) -> ops.LogProbOutput:
        """Statistics of ``hidden @ weight.T + bias`` at the targets."""
        return ops.fused_linear_log_prob(
            hidden,
            weight,
            target,
            bias,
            **self._options(),
        )
