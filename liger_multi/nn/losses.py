"""Cross entropy as PyTorch has it."""

from __future__ import annotations

from torch import Tensor, nn

from liger_multi import checks, ops
from liger_multi.nn._shared import changed
from liger_multi.ops.cross_entropy import options


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
