"""Contract of ``token_log_prob``."""

from typing import Any

import torch
from torch import Tensor

from liger_multi import checks
from liger_multi.dispatch.bitwise import PER_ROW, bitwise
from liger_multi.dispatch.op import Op
from liger_multi.ops._work import elementwise
from liger_multi.ops.fused_linear_log_prob import (
    OUTPUTS,
    LogProbOutput,
    as_output,
    formula_of_logits,
)
from liger_multi.testing.samples import Sample, Tensor as T

op = Op(
    "token_log_prob",
    family="cross_entropy",
    bitwise=bitwise(PER_ROW, "logits target log_prob entropy lse argmax lse_low"),
)


@op.forward(returns=" ".join((*OUTPUTS, "lse_low")))
def forward(
    logits: Tensor,
    target: Tensor,
    ignore_index: int,
    softcap: float | None,
    logit_scale: float,
    validate: bool,
    outputs: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Shape rule; ``lse`` and ``lse_low``, its second part, are kept for backward in any case."""
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    rows, requested = target.numel(), outputs.split(",")
    return (
        logits.new_empty(rows if "log_prob" in requested else 0, dtype=wide),
        logits.new_empty(rows if "entropy" in requested else 0, dtype=wide),
        logits.new_empty(rows, dtype=wide),
        logits.new_empty(rows if "argmax" in requested else 0, dtype=torch.int64),
        logits.new_empty(rows, dtype=wide),
    )


op.backward(
    reads="dlog_prob dentropy dlse logits target entropy lse lse_low ignore_index softcap "
    "logit_scale",
    returns="dlogits",
)


def token_log_prob(
    logits: Tensor,
    target: Tensor,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    ignore_index: int = -100,
    validate: bool = False,
    outputs: tuple[str, ...] = OUTPUTS,
) -> LogProbOutput:
    """Log-probabilities of tokens under given logits, and the rows' entropy.

    :func:`fused_linear_log_prob` for logits that exist already: no copy of them in fp32.

    Math:
        With ``z = softcap * tanh(logit_scale * logits / softcap) / temperature`` (without softcap
        ``logit_scale * logits / temperature``) and ``p = softmax(z)``: ``lse = logsumexp(z)``,
        ``log_prob = z[t] - lse``, ``entropy = -sum_j p[j] log p[j]``, ``argmax`` the first largest
        ``z``. Gradients by ``z[j]``: ``[j = t] - p[j]`` of log_prob, ``p[j]`` of lse,
        ``-p[j] (log p[j] + entropy)`` of entropy. Rows with an ignored target are 0, ``argmax`` -1,
        and have no gradient.

    Shapes:
        logits ``(..., V)``, target ``(...)``; every output ``(...)``. ``outputs`` names those to
        compute, the others are None.

    Dtypes:
        In: logits of any floating dtype. Inside: fp32 (fp64 for fp64). Out: fp32 (fp64 for fp64),
        argmax int64; the gradient has the dtype of the logits.

    Memory:
        Kept for backward: logits, 8 bytes per row for lse in two numbers, and 4 for entropy.
        Backward makes one tensor of the logits' size.

    Raises:
        TypeError: Wrong kinds of arguments.
        ValueError: Shapes, devices or options that do not fit. IndexError: A target outside of
        ``[0, V)``: always on a CPU, on a device with ``validate=True`` (a sync); without, such a
        row's log_prob is NaN and it gets no gradient.

    Source:
        ``log_softmax`` and ``gather`` of PyTorch.
    """
    arguments = prepared(
        logits,
        target,
        temperature=temperature,
        softcap=softcap,
        logit_scale=logit_scale,
        ignore_index=ignore_index,
        validate=validate,
        outputs=outputs,
    )
    return as_output(op(*arguments), target, arguments[-1])


formula = formula_of_logits

# logits read; read again, and the gradient written
work = elementwise(1, 3)


def prepared(
    logits: Tensor,
    target: Tensor,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    ignore_index: int = -100,
    validate: bool = False,
    outputs: tuple[str, ...] = OUTPUTS,
) -> tuple[Any, ...]:
    """The checked arguments of the operator."""
    name = "token_log_prob"
    checks.floating(name, logits=logits)
    if logits.ndim == 0:
        raise ValueError(f"{name}: logits must have shape (..., V), got {checks.describe(logits)}")
    checks.targets(name, target, logits.shape[:-1], logits)
    requested = checks.names(name, outputs, OUTPUTS)
    if not requested:
        raise ValueError(f"{name}: outputs must name at least one of {', '.join(OUTPUTS)}, got ()")
    cool = checks.number(name, "temperature", temperature, 0.0, above=True)
    cap = None if softcap is None else checks.number(name, "softcap", softcap, 0.0, above=True)
    scale = checks.number(name, "logit_scale", logit_scale)
    return (
        logits.reshape(target.numel(), logits.shape[-1]),
        target.reshape(-1).to(torch.int64),
        checks.integer(name, "ignore_index", ignore_index),
        None if cap is None else cap / cool,
        scale / cool,
        checks.boolean(name, "validate", validate),
        requested,
    )


def _case(
    rows: int, classes: int, ignored: float = 0.0, layout: str = "contiguous"
) -> dict[str, T]:
    logits = T((rows, classes), scale=2.0, layout=layout)
    return {"logits": logits, "target": T((rows,), classes=classes, ignored=ignored)}


_EVERY = {"temperature": 0.7, "softcap": 2.0, "logit_scale": 1.5}
SAMPLES = (
    Sample("all", _case(9, 50)),
    Sample("log-prob", _case(9, 50), {"outputs": ("log_prob",)}),
    Sample("entropy", _case(9, 50), {"outputs": ("entropy",)}),
    Sample("lse", _case(9, 50, ignored=0.3), {"outputs": ("lse",)}),
    Sample("argmax", _case(9, 50, ignored=0.3), {"outputs": ("lse", "argmax")}),
    Sample("cold", _case(8, 50), {"temperature": 0.5}),
    Sample("everything", _case(11, 61, ignored=0.3), _EVERY),
    Sample("all-ignored", _case(6, 50, ignored=1.0)),
    Sample(
        "three-axes", {"logits": T((2, 3, 20)), "target": T((2, 3), classes=20)}, {"logit_scale": 2}
    ),
    Sample("transposed", _case(6, 24, layout="transposed")),
    Sample("sliced", _case(6, 24, layout="sliced")),
    Sample("expanded", _case(6, 24, layout="expanded")),
    Sample("one-class", _case(5, 1)),
    Sample("one-row", _case(1, 33)),
    Sample("no-rows", _case(0, 33)),
    Sample("odd-vocabulary", _case(3, 32777), size="thin"),
    Sample("large-vocabulary", _case(2, 262144), size="thin"),
    Sample("past-65535-rows", _case(65537, 3), size="thin"),
    Sample("8192x128256", _case(8192, 128256), {"outputs": ("log_prob",)}, size="bench"),
    Sample("8192x128256-entropy", _case(8192, 128256), {"outputs": OUTPUTS[:2]}, size="bench"),
)
