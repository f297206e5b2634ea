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
from liger_multi.compat.liger_kernel.signatures import (
    ArgumentError,
    CrossEntropyOutput,
    adapter,
    parameters,
)


def defaults_of(names: str, like: Callable[..., Any], **defaults: Any) -> dict[str, Any]:
    """Options by name, with the defaults of a function."""
    return {name: p.default for name, p in parameters(names, like, **defaults).items()}


class Options(nn.Module):
    """Keeps the options of a function.

    ``defaults`` has them in the order of Liger-Kernel's constructor; ``check`` is called with it.
    """

    defaults: ClassVar[dict[str, Any]] = {}

    def __init_subclass__(cls) -> None:
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
        return {name: getattr(self, name) for name in self.defaults}

    def extra_repr(self) -> str:
        return ", ".join(f"{k}={v!r}" for k, v in self.options.items())


# --- functions whose options a module keeps ---

REDUCTIONS = ("mean", "sum", "none")


def _check_cross_entropy(o: Options) -> None:
    if not 0.0 <= o.label_smoothing <= 1.0:
        raise ArgumentError(
            f"label_smoothing must be between 0.0 and 1.0. Got: {o.label_smoothing}"
        )
    if o.reduction not in REDUCTIONS:
        raise ArgumentError(f"reduction must be one of {REDUCTIONS}. Got: {o.reduction}")
    if o.softcap is not None and o.softcap <= 0:
        raise ArgumentError(f"softcap must be greater than 0.0 or None. Got: {o.softcap}")


def _check_temperature(o: Options) -> None:
    if not o.temperature:
        raise ArgumentError("temperature cannot be 0.")


def _module(
    name: str,
    function: Callable[..., Any],
    arguments: str,
    options: str,
    check: Callable[[Options], None] = lambda o: None,
    **defaults: Any,
) -> type[Any]:
    """A class that is constructed with options of a function, and called with its arguments."""
    call = adapter(function, f"{arguments} {options}")

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs, **self.options)

    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    shown = [own, *parameters(arguments, function).values()]
    forward.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
    members = {
        "defaults": defaults_of(options, function, **defaults),
        "check": check,
        "forward": forward,
        "__doc__": function.__doc__,
        "__module__": __name__,
    }
    return type(name, (Options,), members)


_f, _heads = functional, "student_input student_weight teacher_input teacher_weight shift_labels"
LigerCrossEntropyLoss = _module(
    "LigerCrossEntropyLoss",
    _f.liger_cross_entropy,
    "_input:input target",
    op_functions.OF_LOGITS,
    _check_cross_entropy,
)
LigerFusedLinearCrossEntropyLoss = _module(
    "LigerFusedLinearCrossEntropyLoss",
    _f.liger_fused_linear_cross_entropy,
    "lin_weight:weight _input:input target bias",
    op_functions.OF_HEAD,
    _check_cross_entropy,
)
LigerFusedLinearJSD = _module(
    "LigerFusedLinearJSD",
    _f.liger_fused_linear_jsd,
    _heads,
    "jsd_beta ignore_index temperature accum_dtype",
    _check_temperature,
)
LigerFusedLinearKLDivLoss = _module(
    "LigerFusedLinearKLDivLoss",
    _f.liger_fused_linear_kl_div,
    "student_input student_weight target shift_labels",
    "reduction ignore_index temperature eps accum_dtype",
    _check_temperature,
)
LigerJSD = _module(
    "LigerJSD", _f.liger_jsd, "log_q:input log_p:target shift_labels", "beta ignore_index"
)
LigerTVDLoss = _module(
    "LigerTVDLoss",
    _f.liger_tvd,
    "p:input q:target shift_labels",
    "reduction ignore_index",
    reduction="batchmean",
)
LigerFusedCETVDLoss = _module(
    "LigerFusedCETVDLoss",
    op_functions.cross_entropy_and_distance,
    "student_logits teacher_logits target",
    "ignore_index",
)


class LigerKLDIVLoss(nn.KLDivLoss):
    """:func:`liger_multi.ops.kl_div`."""

    def __init__(self, eps: float = 1e-10, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.eps = eps

    def forward(self, y_pred: Tensor, y_true: Tensor) -> Tensor:
        return functional.liger_kl_div(
            y_pred, y_true, reduction=self.reduction, log_target=self.log_target, eps=self.eps
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
        checks.one_of(type(self).__name__, "reduction", self.reduction, ("none",))
        op_functions.validate_formula_and_mode(
            self.label_smoothing_formula, self.label_smoothing_mode
        )
        if not 0.0 <= self.label_smoothing < 1.0:
            raise ArgumentError(f"label_smoothing must be in [0, 1), got {self.label_smoothing}.")

    def forward(
        self, vocab_parallel_logits: Tensor, target: Tensor, tp_group: Any = None
    ) -> Tensor:
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
