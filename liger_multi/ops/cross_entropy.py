"""Contract of ``cross_entropy``, and what it shares with the fused linear form.

Behind ``inplace=True`` stands an operator of its own, whose gradient replaces the logits.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_multi import checks
from liger_multi.dispatch.bitwise import PER_ROW, bitwise
from liger_multi.dispatch.op import Op
from liger_multi.dispatch.resolve import may_overwrite
from liger_multi.ops._work import elementwise
from liger_multi.testing.samples import Sample, Tensor as T

REDUCTIONS = ("mean", "sum", "none")
OUTPUTS = ("z_loss", "token_accuracy", "predicted_tokens", "log_prob", "entropy", "lse")
RETURNS = "loss z_loss token_accuracy predicted_tokens log_prob entropy lse"
op = Op(
    "cross_entropy",
    family="cross_entropy",
    bitwise=bitwise(
        PER_ROW,
        "logits target loss z_loss token_accuracy predicted_tokens log_prob entropy lse lse_low",
    ),
)


class CrossEntropyOutput(NamedTuple):
    """Loss and, where asked for, what was computed with it (detached; None where not asked)."""

    loss: Tensor
    z_loss: Tensor | None = None
    token_accuracy: Tensor | None = None
    predicted_tokens: Tensor | None = None
    log_prob: Tensor | None = None
    entropy: Tensor | None = None
    lse: Tensor | None = None


def shapes(logits: Tensor, rows: int, reduction: str, outputs: str) -> tuple[Tensor, ...]:
    """Shape rule of the seven outputs named in ``RETURNS``."""
    acc_dtype, requested = (
        torch.float64 if logits.dtype == torch.float64 else torch.float32,
        outputs.split(","),
    )
    loss_shape = (rows,) if reduction == "none" else ()

    def empty(name: str, shape: tuple[int, ...], dtype: torch.dtype = acc_dtype) -> Tensor:
        return logits.new_empty(shape if name in requested else (0,), dtype=dtype)

    return (
        logits.new_empty(loss_shape, dtype=acc_dtype),
        empty("z_loss", loss_shape),
        empty("token_accuracy", loss_shape),
        empty("predicted_tokens", (rows,), torch.int64),
        empty("log_prob", (rows,)),
        empty("entropy", (rows,)),
        logits.new_empty(rows, dtype=acc_dtype),
    )


def loss_of(results: tuple[Tensor, ...], shape: torch.Size, reduction: str) -> Tensor:
    """The loss; of rows, in the shape of the targets."""
    return results[0].view(shape) if reduction == "none" else results[0]


def as_output(
    results: tuple[Tensor, ...], shape: torch.Size, reduction: str, outputs: str
) -> CrossEntropyOutput:
    """The loss and the outputs that are asked for, in the shape of the targets."""
    per_row = {"predicted_tokens", "log_prob", "entropy", "lse"} | (
        {"z_loss", "token_accuracy"} if reduction == "none" else set()
    )
    requested = outputs.split(",")
    statistics = {
        n: x.view(shape) if n in per_row else x
        for n, x in zip(OUTPUTS, results[1:], strict=True)
        if n in requested
    }
    return CrossEntropyOutput(loss_of(results, shape, reduction), **statistics)


@op.forward(
    returns=RETURNS,
    residuals="lse_low denominators",
)
def forward(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss_weight: float,
    softcap: float | None,
    reduction: str,
    validate: bool,
    outputs: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    empties = shapes(logits, logits.shape[0], reduction, outputs)
    return (*empties, torch.empty_like(empties[-1]), empties[0].new_empty(2))  # type: ignore[return-value]


op.backward(
    reads="dloss logits target weight lse lse_low denominators ignore_index label_smoothing "
    "z_loss_weight softcap reduction",
    returns="dlogits",
)


inplace_op = Op(
    "cross_entropy_inplace",
    family="cross_entropy",
    inplace="logits",
    bitwise=bitwise(
        PER_ROW,
        "logits target loss z_loss token_accuracy predicted_tokens log_prob entropy lse",
    ),
)


@inplace_op.forward(returns=RETURNS)
def forward_inplace(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss_weight: float,
    softcap: float | None,
    reduction: str,
    validate: bool,
    outputs: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    return shapes(logits, logits.shape[0], reduction, outputs)  # type: ignore[return-value]


inplace_op.backward(reads="dloss logits", returns="")


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: str = "mean",
    inplace: bool = False,
    validate: bool = False,
) -> Tensor:
    """Cross entropy of logits with class ids.

    Math:
        With ``z = softcap * tanh(logits / softcap)`` (or the logits), ``p = softmax(z)``, ``lse =
        logsumexp(z)``, class weights ``w`` and ``eps = label_smoothing``, row i costs
        ``(1 - eps) w[t] (lse - z[t]) + eps / V * sum_j w[j] (lse - z[j]) + z_loss * lse^2``.
        ``mean`` divides the weighted part by the sum of ``w[t]`` and the z-loss by the count of
        valid targets; without any, it is 0. Ignored rows cost nothing and get no gradient.

    Shapes:
        logits ``(..., V)`` with any strides, target ``(...)``, weight ``(V,)``; loss scalar, or
        ``(...)`` for ``none``.

    Dtypes:
        In: any floating dtype, int64 ids. Inside and loss: fp32 (fp64 for fp64). Gradient: that of
        logits.

    Memory:
        Kept for backward: logits and 8 bytes per row (``lse`` in two numbers); the gradient is a
        second tensor of rows x V. ``inplace=True`` permits writing the gradient over the logits,
        which must then have no other reader: no second tensor, no copy. The permission is not used
        under ``torch.compile``.

    Raises:
        TypeError: Wrong kinds of arguments.
        ValueError: Shapes, devices or options that do not fit; ``inplace`` on a leaf or a
        view of one, or on elements that share memory.
        IndexError: A target outside of ``[0, V)`` that is not ``ignore_index``: always on a CPU,
        on a device only
            with ``validate=True`` (a sync); there such a row has a NaN loss and no gradient.

    Source:
        ``torch.nn.functional.cross_entropy``; z-loss: PaLM (arXiv:2204.02311); softcap: Gemma 2
        (arXiv:2408.00118). :func:`cross_entropy_with_outputs` also returns statistics of the pass.
    """
    results, _ = _results(
        logits,
        target,
        weight,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        softcap=softcap,
        reduction=reduction,
        inplace=inplace,
        validate=validate,
        outputs=(),
    )
    return loss_of(results, target.shape, reduction)


def cross_entropy_with_outputs(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: str = "mean",
    inplace: bool = False,
    validate: bool = False,
    outputs: tuple[str, ...] = OUTPUTS,
) -> CrossEntropyOutput:
    """:func:`cross_entropy`, and the statistics of the same pass that ``outputs`` names.

    They are z_loss, token_accuracy, predicted_tokens (-1 where ignored), log_prob, entropy and
    lse. They are detached.
    """
    results, names = _results(
        logits,
        target,
        weight,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        softcap=softcap,
        reduction=reduction,
        inplace=inplace,
        validate=validate,
        outputs=outputs,
    )
    return as_output(results, target.shape, reduction, names)


def _results(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    *,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    reduction: str,
    inplace: bool,
    validate: bool,
    outputs: tuple[str, ...],
) -> tuple[tuple[Tensor, ...], str]:
    """Check the arguments and call the operator: its results, and the names of the outputs."""
    name = "cross_entropy"
    checks.floating(name, logits=logits, weight=weight, optional=("weight",))
    if logits.ndim == 0 or logits.shape[-1] == 0:
        checks.refuse(name, "logits must have shape (..., V) with V >= 1", logits)
    checks.targets(name, target, logits.shape[:-1], logits)
    checks.vector(name, "weight", weight, logits.shape[-1], "number of classes")
    checks.constant(name, "weight", weight)
    smoothing, z, cap, names = options(name, label_smoothing, z_loss, softcap, reduction, outputs)
    ids = target.reshape(-1).to(torch.int64)
    args = (
        ids,
        weight,
        checks.integer(name, "ignore_index", ignore_index),
        smoothing,
        z,
        cap,
        reduction,
        checks.boolean(name, "validate", validate),
        names,
    )
    if (
        checks.boolean(name, "inplace", inplace)
        and logits.requires_grad
        and torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and may_overwrite(inplace_op, logits)
    ):
        rows = writable_rows(name, "logits", logits)
        return inplace_op(rows, *args), names
    return op(logits.reshape(ids.numel(), logits.shape[-1]), *args), names


def formula(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: str = "mean",
    inplace: bool = False,
    validate: bool = False,
    outputs: tuple[str, ...] = (),
) -> Tensor | CrossEntropyOutput:
    """Cross entropy with a z-loss, and what may be reported with it."""
    shape, z, target = target.shape, logits.reshape(-1, logits.shape[-1]), target.reshape(-1)
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    valid = target != ignore_index
    rows = F.cross_entropy(
        z,
        target,
        weight,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction="none",
    )
    lse = torch.logsumexp(z, -1)
    penalty = torch.where(valid, z_loss * lse**2, 0)
    count = valid.sum().clamp(min=1)
    if reduction == "none":
        loss, z_out = (rows + penalty).view(shape), penalty.view(shape)
    elif reduction == "sum":
        z_out = penalty.sum()
        loss = rows.sum() + z_out
    else:
        total = (valid if weight is None else weight[target.clamp(min=0)] * valid).sum()
        z_out = penalty.sum() / count
        loss = rows.sum() / torch.where(total == 0, 1, total) + z_out
    if not outputs:
        return loss
    label, log_p = target.clamp(min=0, max=max(z.shape[-1] - 1, 0)), torch.log_softmax(z, -1)
    hit = torch.where(valid, (z.argmax(-1) == target).to(z.dtype), 0)
    reports = {
        "z_loss": z_out,
        "token_accuracy": hit.view(shape) if reduction == "none" else hit.sum() / count,
        "predicted_tokens": torch.where(valid, z.argmax(-1), -1).view(shape),
        "log_prob": torch.where(valid, log_p.gather(1, label[:, None])[:, 0], 0).view(shape),
        "entropy": torch.where(valid, -(log_p.exp() * log_p).sum(-1), 0).view(shape),
        "lse": torch.where(valid, lse, 0).view(shape),
    }
    return CrossEntropyOutput(loss, **{name: reports[name].detach() for name in outputs})


# logits read; the gradient written, which one pass can do
work = elementwise(1, 2)


def writable_rows(op: str, name: str, x: Tensor) -> Tensor:
    """A view ``(rows, V)`` of the caller's tensor; ValueError where there is none to write to."""
    if x.is_leaf:
        checks.refuse(
            op,
            f"inplace=True overwrites the {name} by their gradient, so they must "
            "come from an operation",
            f"a leaf: {checks.describe(x)}",
        )
    if x._is_view() and x._base is not None and x._base.is_leaf and x._base.requires_grad:
        raise ValueError(
            f"{op}: a view of a leaf Variable that requires grad is being used in an in-place "
            f"operation: inplace=True would overwrite {checks.describe(x._base)} by the gradient "
            f"of the {name}, a view of it"
        )
    if _overlaps_itself(x):
        checks.refuse(
            op,
            f"inplace=True needs {name} whose elements are stored once each",
            f"strides {x.stride()}",
        )
    try:
        return x.view(x.shape[:-1].numel(), x.shape[-1])
    except RuntimeError:
        raise ValueError(
            f"{op}: inplace=True needs {name} that can be viewed as (rows, V), got strides "
            f"{x.stride()}"
        ) from None


def _overlaps_itself(x: Tensor) -> bool:
    """Whether elements may share memory: an axis steps within what the finer axes span."""
    span = 0
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1:
            if stride <= span:
                return True
            span += stride * (size - 1)
    return False


def options(
    op_name: str,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    reduction: str,
    outputs: tuple[str, ...],
) -> tuple[float, float, float | None, str]:
    """Check the options that all cross entropies share."""
    checks.one_of(op_name, "reduction", reduction, REDUCTIONS)
    smoothing = checks.number(op_name, "label_smoothing", label_smoothing, 0.0, 1.0)
    z = checks.number(op_name, "z_loss", z_loss, 0.0)
    cap = None if softcap is None else checks.number(op_name, "softcap", softcap, 0.0, above=True)
    return smoothing, z, cap, checks.names(op_name, outputs, OUTPUTS)


def _case(
    rows: int,
    classes: int,
    *,
    ignored: float = 0.0,
    weighted: bool = False,
    scale: float = 2.0,
    layout: str = "contiguous",
) -> dict[str, T]:
    tensors = {
        "logits": T((rows, classes), scale=scale, layout=layout),
        "target": T((rows,), classes=classes, ignored=ignored),
    }
    return tensors | ({"weight": T((classes,), positive=True, grad=False)} if weighted else {})


EVERYTHING = {"label_smoothing": 0.1, "z_loss": 1e-2, "softcap": 3.0, "outputs": OUTPUTS}
SAMPLES = (
    Sample("mean", _case(7, 50), path="a mean"),
    Sample("sum", _case(7, 50), {"reduction": "sum"}),
    Sample("none", _case(7, 50, ignored=0.3), {"reduction": "none"}),
    Sample("quarter-ignored", _case(8, 33, ignored=0.25)),
    Sample("all-ignored", _case(4, 33, ignored=1.0), {"outputs": OUTPUTS}),
    Sample("smoothing", _case(6, 40, ignored=0.2), {"label_smoothing": 0.1}),
    Sample("z-loss", _case(6, 40, ignored=0.2), {"z_loss": 1e-2}),
    Sample("softcap", _case(6, 40, scale=8.0), {"softcap": 5.0}),
    Sample("class-weights", _case(6, 40, ignored=0.2, weighted=True)),
    Sample("everything-mean", _case(9, 61, ignored=0.3, weighted=True), EVERYTHING),
    Sample(
        "everything-sum",
        _case(9, 61, ignored=0.3, weighted=True),
        {**EVERYTHING, "reduction": "sum"},
    ),
    Sample(
        "everything-none",
        _case(9, 61, ignored=0.3, weighted=True),
        {**EVERYTHING, "reduction": "none"},
        path="a sum of weights",
    ),
    Sample("extreme-logits", _case(6, 40, scale=1e4), {"outputs": ("lse", "log_prob")}),
    Sample("large-logits", _case(8, 40, scale=20.0), {"outputs": OUTPUTS}),
    Sample("one-class", _case(5, 1), {"outputs": OUTPUTS}),
    Sample("one-row", _case(1, 129)),
    Sample("no-rows", _case(0, 12), {"outputs": OUTPUTS}, path="nothing to sum"),
    Sample(
        "three-axes",
        {"logits": T((2, 3, 20)), "target": T((2, 3), classes=20)},
        {"outputs": OUTPUTS},
    ),
    Sample("sliced", _case(5, 24, layout="sliced")),
    Sample("row-gaps", _case(5, 64, layout="rows")),
    Sample("odd-vocabulary", _case(2, 32777), {"outputs": OUTPUTS}, size="thin"),
    Sample("large-vocabulary", _case(2, 262144), {"label_smoothing": 0.1}, size="thin"),
    Sample("past-65535-rows", _case(65537, 2), {"reduction": "none"}, size="thin"),
    Sample("8192x32000", _case(8192, 32000), size="bench"),
    Sample("8192x128256", _case(8192, 128256), size="bench"),
    Sample("4096x262144", _case(4096, 262144), size="bench"),
)
INPLACE_SAMPLES = tuple(
    Sample(s.name, s.tensors, {**s.options, "inplace": True}, s.size, s.path)
    for s in SAMPLES
    if s.name not in ("no-rows",)
)
COMPILE_SAMPLES = (
    Sample("4096x128256 everything", _case(4096, 128256, weighted=True), EVERYTHING),
)
