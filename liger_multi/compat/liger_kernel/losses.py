"""The losses of ``liger_kernel.transformers``, with Liger's constructors and argument order."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from liger_multi import checks
from liger_multi.compat.liger_kernel import functional, op_functions
from liger_multi.compat.liger_kernel.outputs import ArgumentError, CrossEntropyOutput
from liger_multi.compat.liger_kernel.signatures import parameters


def defaults_of(names: str, like: Callable[..., Any], **defaults: Any) -> dict[str, Any]:
    """Options by name, with the defaults of a function."""
    return {name: p.default for name, p in parameters(names, like, **defaults).items()}


class Options(nn.Module):
    """Keeps the options of a function.

    ``defaults`` has them in the order of Liger-Kernel's constructor; ``check`` is called with it.
    """

    defaults: ClassVar[dict[str, Any]] = {}

    def __init_subclass__(cls) -> None:
        """Show the options in the signature."""
        super().__init_subclass__()
        of = inspect.Parameter
        shown = [of(n, of.POSITIONAL_OR_KEYWORD, default=v) for n, v in cls.defaults.items()]
        cls.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        if len(args) > len(self.defaults) or not {*kwargs} <= {*self.defaults}:
            raise TypeError(f"{type(self).__name__} takes {', '.join(self.defaults)}")
        arguments = {**self.defaults, **dict(zip(self.defaults, args)), **kwargs}
        for name, value in arguments.items():
            setattr(self, name, value)
        self.check()

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Options are no parameters."""

    def check(self) -> None:
        """Check that the options are in range."""

    @property
    def options(self) -> dict[str, Any]:
        """The options as they are now."""
        return {name: getattr(self, name) for name in self.defaults}

    def extra_repr(self) -> str:
        """What was chosen."""
        return ", ".join(f"{k}={v!r}" for k, v in self.options.items())


REDUCTIONS = ("mean", "sum", "none")


def check_cross_entropy(label_smoothing: float, reduction: str, softcap: float | None) -> None:
    """Check that the options of a cross entropy are in range."""
    if not 0.0 <= label_smoothing <= 1.0:
        raise ArgumentError(f"label_smoothing must be between 0.0 and 1.0. Got: {label_smoothing}")
    if reduction not in REDUCTIONS:
        raise ArgumentError(f"reduction must be one of {REDUCTIONS}. Got: {reduction}")
    if softcap is not None and softcap <= 0:
        raise ArgumentError(f"softcap must be greater than 0.0 or None. Got: {softcap}")


class LigerCrossEntropyLoss(Options):
    """:func:`liger_multi.ops.cross_entropy`."""

    defaults = defaults_of(
        op_functions.OF_LOGITS,
        functional.liger_cross_entropy,
    )

    def check(self) -> None:
        """Check that the options are in range."""
        check_cross_entropy(self.label_smoothing, self.reduction, self.softcap)

    def forward(self, _input: Tensor, target: Tensor) -> Tensor | CrossEntropyOutput:
        """The loss of logits."""
        return functional.liger_cross_entropy(_input, target, **self.options)


class LigerFusedLinearCrossEntropyLoss(Options):
    """:func:`liger_multi.ops.fused_linear_cross_entropy`; the weight comes first."""

    defaults = defaults_of(
        op_functions.OF_HEAD,
        functional.liger_fused_linear_cross_entropy,
    )

    def check(self) -> None:
        """Check that the options are in range."""
        check_cross_entropy(self.label_smoothing, self.reduction, self.softcap)

    def forward(
        self, lin_weight: Tensor, _input: Tensor, target: Tensor, bias: Tensor | None = None
    ) -> Tensor | CrossEntropyOutput:
        """The loss of ``_input @ lin_weight.T + bias``."""
        return functional.liger_fused_linear_cross_entropy(
            _input, lin_weight, target, bias, **self.options
        )


class LigerFusedLinearJSD(Options):
    """:func:`liger_multi.ops.fused_linear_jsd`."""

    defaults = defaults_of(
        "jsd_beta ignore_index temperature accum_dtype", functional.liger_fused_linear_jsd
    )

    def check(self) -> None:
        """Check that the options are in range."""
        if not self.temperature:
            raise ArgumentError("temperature cannot be 0.")

    def forward(
        self,
        student_input: Tensor,
        student_weight: Tensor,
        teacher_input: Tensor,
        teacher_weight: Tensor,
        shift_labels: Tensor | None = None,
    ) -> Tensor:
        """The divergence of two heads."""
        return functional.liger_fused_linear_jsd(
            student_input,
            student_weight,
            teacher_input,
            teacher_weight,
            shift_labels,
            **self.options,
        )


class LigerJSD(Options):
    """:func:`liger_multi.ops.jsd`."""

    defaults = defaults_of("beta ignore_index", functional.liger_jsd)

    def forward(self, log_q: Tensor, log_p: Tensor, shift_labels: Tensor | None = None) -> Tensor:
        """The divergence of log-probabilities, the student's first."""
        return functional.liger_jsd(log_q, log_p, shift_labels, **self.options)


class LigerKLDIVLoss(nn.KLDivLoss):
    """:func:`liger_multi.ops.kl_div`."""

    def __init__(self, eps: float = 1e-10, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.eps = eps

    def forward(self, y_pred: Tensor, y_true: Tensor) -> Tensor:
        """The divergence of log-probabilities from a distribution."""
        return functional.liger_kl_div(
            y_pred, y_true, reduction=self.reduction, log_target=self.log_target, eps=self.eps
        )


class LigerTVDLoss(Options):
    """:func:`liger_multi.ops.tvd`."""

    defaults = defaults_of("reduction ignore_index", functional.liger_tvd, reduction="batchmean")

    def forward(self, p: Tensor, q: Tensor, shift_labels: Tensor | None = None) -> Tensor:
        """The distance of two distributions."""
        return functional.liger_tvd(p, q, shift_labels, **self.options)


class LigerFusedLinearKLDivLoss(Options):
    """:func:`functional.liger_fused_linear_kl_div`."""

    defaults = defaults_of(
        "reduction ignore_index temperature eps accum_dtype", functional.liger_fused_linear_kl_div
    )

    def check(self) -> None:
        """Check that the options are in range."""
        if not self.temperature:
            raise ArgumentError("temperature cannot be 0.")

    def forward(
        self,
        student_input: Tensor,
        student_weight: Tensor,
        target: Tensor,
        shift_labels: Tensor | None = None,
    ) -> Tensor:
        """The divergence of a head's tokens from given distributions."""
        return functional.liger_fused_linear_kl_div(
            student_input, student_weight, target, shift_labels, **self.options
        )


class LigerFusedCETVDLoss(Options):
    """Cross entropy and total variation distance of every token."""

    defaults: ClassVar[dict[str, Any]] = {"ignore_index": -100}

    def forward(
        self, student_logits: Tensor, teacher_logits: Tensor, target: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Both, in fp32."""
        return op_functions.cross_entropy_and_distance(
            student_logits, teacher_logits, target, self.ignore_index
        )


class LigerVocabParallelCrossEntropy(Options):
    """The loss of every token, of logits whose classes are split over processes."""

    defaults: ClassVar[dict[str, Any]] = {
        "ignore_index": -100,
        "label_smoothing": 0.0,
        "reduction": "none",
        "label_smoothing_formula": "pytorch",
        "label_smoothing_mode": "global",
    }

    def check(self) -> None:
        """Check that the options are in range."""
        checks.one_of(type(self).__name__, "reduction", self.reduction, ("none",))
        op_functions.validate_formula_and_mode(
            self.label_smoothing_formula, self.label_smoothing_mode
        )
        if not 0.0 <= self.label_smoothing < 1.0:
            raise ArgumentError(f"label_smoothing must be in [0, 1), got {self.label_smoothing}.")

    def forward(
        self, vocab_parallel_logits: Tensor, target: Tensor, tp_group: Any = None
    ) -> Tensor:
        """The loss of every token, in fp32."""
        return op_functions.vocab_parallel(
            vocab_parallel_logits,
            target,
            tp_group,
            self.ignore_index,
            self.label_smoothing,
            self.label_smoothing_formula,
            self.label_smoothing_mode,
        )


def fixed_fused_linear_cross_entropy(
    hidden_states: Tensor,
    lm_head_weight: Tensor,
    target: Tensor,
    num_items_in_batch: Tensor | float | None = None,
    ignore_index: int = -100,
    final_logit_softcapping: float | None = None,
    accum_dtype: torch.dtype | None = None,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
    **kwargs: Any,
) -> Tensor | CrossEntropyOutput:
    """The loss of rows and their targets, over the number of items where one is given.

    Keywords that the fused loss does not have, such as a model passes on, are left out.
    """
    names = LigerFusedLinearCrossEntropyLoss().options
    more = {k: v for k, v in kwargs.items() if k in names and k != "reduction"}
    public = sys.modules.get("liger_kernel.transformers.functional", functional)
    output: Any = public.liger_fused_linear_cross_entropy(  # where trainers put their own
        hidden_states,
        lm_head_weight,
        target,
        reduction="mean" if num_items_in_batch is None else "sum",
        ignore_index=ignore_index,
        softcap=final_logit_softcapping,
        accum_dtype=accum_dtype,
        return_token_accuracy=return_token_accuracy,
        return_predicted_tokens=return_predicted_tokens,
        **more,
    )
    if num_items_in_batch is None:
        return output  # type: ignore[no-any-return]
    if isinstance(output, CrossEntropyOutput):
        return replace(output, loss=output.loss / num_items_in_batch)
    return output / num_items_in_batch  # type: ignore[no-any-return]


def LigerForCausalLMLoss(
    hidden_states: Tensor,
    lm_head_weight: Tensor,
    labels: Tensor | None,
    hidden_size: int,
    num_items_in_batch: Tensor | float | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    final_logit_softcapping: float | None = None,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
    **kwargs: Any,
) -> Tensor | CrossEntropyOutput:
    """The loss of a causal model by its last hidden states; labels are shifted here."""
    if shift_labels is None:
        if labels is None:
            raise ValueError("LigerForCausalLMLoss: needs labels or shift_labels, got neither")
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    return fixed_fused_linear_cross_entropy(
        hidden_states.reshape(-1, hidden_size),
        lm_head_weight,
        shift_labels.reshape(-1).to(hidden_states.device),
        num_items_in_batch,
        ignore_index,
        final_logit_softcapping,
        return_token_accuracy=return_token_accuracy,
        return_predicted_tokens=return_predicted_tokens,
        **kwargs,
    )
