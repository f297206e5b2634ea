"""Losses whose options and arguments are those of an operator.

Options are checked when the module is made, tensors when it is called.
"""
# written by `python -m ci.stubs`

import torch
from torch import Tensor, nn

from liger_multi import ops
from liger_multi.ops.fused_linear_log_prob import OUTPUTS

class KLDivLoss(nn.Module):
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
        reduction: mean (over rows), sum or none (a number a row).
    """

    form: str
    teacher_form: str
    temperature: float
    ignore_index: int
    reduction: str

    def __init__(
        self,
        *,
        form: str = "log_prob",
        teacher_form: str = "prob",
        temperature: float = 1.0,
        ignore_index: int = -100,
        reduction: str = "mean",
    ) -> None: ...
    def forward(self, student: Tensor, teacher: Tensor, target: Tensor | None = None) -> Tensor:
        """The loss of rows of the student against the teacher's."""

    def extra_repr(self) -> str: ...

class JSDLoss(nn.Module):
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
        reduction: mean (over rows), sum or none (a number a row).
    """

    beta: float
    form: str
    teacher_form: str | None
    temperature: float
    ignore_index: int
    reduction: str

    def __init__(
        self,
        beta: float = 0.5,
        *,
        form: str = "log_prob",
        teacher_form: str | None = None,
        temperature: float = 1.0,
        ignore_index: int = -100,
        reduction: str = "mean",
    ) -> None: ...
    def forward(self, student: Tensor, teacher: Tensor, target: Tensor | None = None) -> Tensor:
        """The loss of rows of the student against the teacher's."""

    def extra_repr(self) -> str: ...

class TVDLoss(nn.Module):
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
        reduction: mean (over rows), sum or none (a number a row).
    """

    form: str
    teacher_form: str | None
    temperature: float
    ignore_index: int
    reduction: str

    def __init__(
        self,
        *,
        form: str = "prob",
        teacher_form: str | None = None,
        temperature: float = 1.0,
        ignore_index: int = -100,
        reduction: str = "mean",
    ) -> None: ...
    def forward(self, student: Tensor, teacher: Tensor, target: Tensor | None = None) -> Tensor:
        """The loss of rows of the student against the teacher's."""

    def extra_repr(self) -> str: ...

class FusedLinearKLDivLoss(nn.Module):
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
        reduction: mean (over rows), sum or none (a number a row).
        chunk: Rows of logits at a time, a byte budget such as "512MiB", or auto.
        accumulate: Dtype in which the gradient of the weight is summed.
        compact: Drop ignored rows before the products; on a device, of more than 512 rows.
    """

    temperature: float
    square_temperature: bool
    vocabulary: str
    ignore_index: int
    reduction: str
    chunk: int | str
    accumulate: torch.dtype
    compact: bool

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
    ) -> None: ...
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

    def extra_repr(self) -> str: ...

class FusedLinearJSDLoss(nn.Module):
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
        reduction: mean (over rows), sum or none (a number a row).
        chunk: Rows of logits at a time, a byte budget such as "512MiB", or auto.
        accumulate: Dtype in which the gradient of the weight is summed.
        compact: Drop ignored rows before the products; on a device, of more than 512 rows.
    """

    beta: float
    temperature: float
    square_temperature: bool
    vocabulary: str
    ignore_index: int
    reduction: str
    chunk: int | str
    accumulate: torch.dtype
    compact: bool

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
    ) -> None: ...
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

    def extra_repr(self) -> str: ...

class FusedLinearTVDLoss(nn.Module):
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
        reduction: mean (over rows), sum or none (a number a row).
        chunk: Rows of logits at a time, a byte budget such as "512MiB", or auto.
        accumulate: Dtype in which the gradient of the weight is summed.
        compact: Drop ignored rows before the products; on a device, of more than 512 rows.
    """

    temperature: float
    square_temperature: bool
    vocabulary: str
    ignore_index: int
    reduction: str
    chunk: int | str
    accumulate: torch.dtype
    compact: bool

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
    ) -> None: ...
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

    def extra_repr(self) -> str: ...

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
        compact: Drop ignored rows before the product; on a device, of more than 512 rows.
        validate: Raise for targets out of range on a device too (a sync).
        outputs: Names of what to return beside the loss, in a ``CrossEntropyOutput``.
    """

    class_weight: Tensor | None
    ignore_index: int
    reduction: str
    label_smoothing: float
    z_loss: float
    softcap: float | None
    logit_scale: float
    chunk: int | str
    accumulate: torch.dtype
    compact: bool
    validate: bool
    outputs: tuple[str, ...]

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
    ) -> None: ...
    def forward(
        self,
        hidden: Tensor,
        weight: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
    ) -> Tensor | ops.CrossEntropyOutput:
        """The loss of ``hidden @ weight.T + bias``."""

    def extra_repr(self) -> str: ...

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
        compact: Drop ignored rows before the product; on a device, of more than 512 rows.
        validate: Raise for targets out of range on a device too (a sync).
        outputs: Names of what to compute: log_prob, entropy, lse, argmax.
    """

    temperature: float
    softcap: float | None
    logit_scale: float
    ignore_index: int
    chunk: int | str
    accumulate: torch.dtype
    compact: bool
    validate: bool
    outputs: tuple[str, ...]

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
    ) -> None: ...
    def forward(
        self,
        hidden: Tensor,
        weight: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
    ) -> ops.LogProbOutput:
        """Statistics of ``hidden @ weight.T + bias`` at the targets."""

    def extra_repr(self) -> str: ...
