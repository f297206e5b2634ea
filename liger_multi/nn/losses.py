"""Losses; options are checked when the module is made, tensors when it is called."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from liger_multi import checks, ops
from liger_multi.nn._shared import changed
from liger_multi.ops import _head as head
from liger_multi.ops.cross_entropy import options
from liger_multi.ops.fused_linear_log_prob import OUTPUTS


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
        outputs: Names of what to return beside the loss, in a ``CrossEntropyOutput``.
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
        return ops.cross_entropy(
            input,
            target,
            self.weight,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            z_loss=self.z_loss,
            softcap=self.softcap,
            reduction=self.reduction,
            inplace=self.inplace,
            validate=self.validate,
            outputs=self.outputs,
        )

    def extra_repr(self) -> str:
        """What was chosen."""
        return changed(self)


class FusedLinearCrossEntropyLoss(nn.Module):
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
        chunk: Rows of logits at a time, a byte budget such as "512MiB", or auto.
        accumulate: Dtype in which the gradient of the weight is summed.
        compact: Drop ignored rows before the product.
        validate: Raise for targets out of range on a device too (a sync).
        outputs: Names of what to return beside the loss, in a ``CrossEntropyOutput``.
    """

    class_weight: Tensor | None

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
        super().__init__()
        name = type(self).__name__
        options(name, label_smoothing, z_loss, softcap, reduction, outputs)
        _head_options(name, ignore_index, logit_scale, chunk, accumulate)
        checks.boolean(name, "compact", compact)
        checks.boolean(name, "validate", validate)
        checks.floating(name, class_weight=class_weight, optional=("class_weight",))
        self.register_buffer("class_weight", class_weight)
        self.ignore_index, self.reduction = ignore_index, reduction
        self.label_smoothing, self.z_loss, self.softcap = label_smoothing, z_loss, softcap
        self.logit_scale, self.chunk, self.accumulate = logit_scale, chunk, accumulate
        self.compact, self.validate, self.outputs = compact, validate, tuple(outputs)

    def forward(
        self, hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None
    ) -> Tensor | ops.CrossEntropyOutput:
        """The loss of ``hidden @ weight.T + bias``."""
        return ops.fused_linear_cross_entropy(
            hidden,
            weight,
            target,
            bias,
            class_weight=self.class_weight,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            z_loss=self.z_loss,
            softcap=self.softcap,
            reduction=self.reduction,
            logit_scale=self.logit_scale,
            chunk=self.chunk,
            accumulate=self.accumulate,
            compact=self.compact,
            validate=self.validate,
            outputs=self.outputs,
        )

    def extra_repr(self) -> str:
        """What was chosen."""
        return changed(self)


class FusedLinearLogProb(nn.Module):
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
        chunk: Rows of logits at a time, a byte budget such as "512MiB", or auto.
        accumulate: Dtype in which the gradient of the weight is summed.
        compact: Drop ignored rows before the product.
        validate: Raise for targets out of range on a device too (a sync).
        outputs: Names of what to compute: log_prob, entropy, lse, argmax.
    """

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
        super().__init__()
        name = type(self).__name__
        checks.number(name, "temperature", temperature, 0.0, above=True)
        if softcap is not None:
            checks.number(name, "softcap", softcap, 0.0, above=True)
        _head_options(name, ignore_index, logit_scale, chunk, accumulate)
        checks.boolean(name, "compact", compact)
        checks.boolean(name, "validate", validate)
        checks.names(name, outputs, OUTPUTS)
        self.temperature, self.softcap, self.logit_scale = temperature, softcap, logit_scale
        self.ignore_index, self.chunk, self.accumulate = ignore_index, chunk, accumulate
        self.compact, self.validate, self.outputs = compact, validate, tuple(outputs)

    def forward(
        self, hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None
    ) -> ops.LogProbOutput:
        """Statistics of ``hidden @ weight.T + bias`` at the targets."""
        return ops.fused_linear_log_prob(
            hidden,
            weight,
            target,
            bias,
            temperature=self.temperature,
            softcap=self.softcap,
            logit_scale=self.logit_scale,
            ignore_index=self.ignore_index,
            chunk=self.chunk,
            accumulate=self.accumulate,
            compact=self.compact,
            validate=self.validate,
            outputs=self.outputs,
        )

    def extra_repr(self) -> str:
        """What was chosen."""
        return changed(self)


def _head_options(
    name: str, ignore_index: int, logit_scale: float, chunk: int | str, accumulate: torch.dtype
) -> None:
    checks.integer(name, "ignore_index", ignore_index)
    checks.number(name, "logit_scale", logit_scale)
    head.rows_and_budget(name, chunk)
    head.accumulator(name, accumulate)
