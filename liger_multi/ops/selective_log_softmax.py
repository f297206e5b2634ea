"""Contract of ``selective_log_softmax``."""

import torch
from torch import Tensor

from liger_multi import checks
from liger_multi.dispatch.bitwise import PER_ROW, bitwise
from liger_multi.dispatch.op import Op
from liger_multi.ops._work import elementwise
from liger_multi.testing.samples import Sample, Tensor as T

op = Op(
    "selective_log_softmax",
    family="cross_entropy",
    bitwise=bitwise(PER_ROW, "logits index log_prob lse lse_low"),
)


@op.forward(returns="log_prob", residuals="lse lse_low")
def forward(
    logits: Tensor, index: Tensor, scale: float, ignore_index: int, validate: bool
) -> tuple[Tensor, Tensor, Tensor]:
    acc_dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    rows = index.shape[0]
    return (
        logits.new_empty(index.shape, dtype=acc_dtype),
        logits.new_empty(rows, dtype=acc_dtype),
        logits.new_empty(rows, dtype=acc_dtype),
    )


op.backward(reads="dlog_prob logits index lse lse_low scale ignore_index", returns="dlogits")


def selective_log_softmax(
    logits: Tensor,
    index: Tensor,
    *,
    temperature: float = 1.0,
    ignore_index: int = -100,
    validate: bool = False,
) -> Tensor:
    """Log-probabilities of chosen classes, without those of the others.

    Math:
        With ``z = logits / temperature``: ``z[index] - logsumexp(z)``; the gradient by ``z[j]`` is
        ``sum_k d[k] ([j = index[k]] - softmax(z)[j])``. Where the index is ``ignore_index``, the
        result is 0 and there is no gradient.

    Shapes:
        logits ``(..., V)`` with any strides; index ``(...)`` for one class a row or ``(..., k)``
        for k, which may repeat. The result has the shape of index.

    Dtypes:
        In: any floating dtype, int64 ids. Inside and result: fp32 (fp64 for fp64). Gradient: that
        of logits.

    Memory:
        Kept for backward: logits, index, and 8 bytes per row (``lse`` in two numbers).

    Raises:
        TypeError: Wrong kinds of arguments.
        ValueError: Shapes, devices or options that do not fit.
        IndexError: An index outside of ``[0, V)``: always on a CPU, on a device only with
        ``validate=True`` (a sync); there its result is NaN and it has no gradient.

    Source:
        ``log_softmax`` and ``gather``, as trainers of policies have it.
    """
    name = op.name
    checks.floating(name, logits=logits)
    if logits.ndim == 0 or logits.shape[-1] == 0:
        checks.refuse(name, "logits must have shape (..., V) with V >= 1", logits)
    row_shape, has_class_axis = (
        logits.shape[:-1],
        isinstance(index, Tensor) and index.ndim == logits.ndim,
    )
    shape = (*row_shape, index.shape[-1]) if has_class_axis else row_shape
    checks.targets(name, index, torch.Size(shape), logits, "index")
    rows = row_shape.numel()
    output: Tensor = op(
        logits.reshape(rows, logits.shape[-1]),
        index.reshape(rows, index.shape[-1] if has_class_axis else 1).to(torch.int64),
        1 / checks.number(name, "temperature", temperature, 0.0, above=True),
        checks.integer(name, "ignore_index", ignore_index),
        checks.boolean(name, "validate", validate),
    )
    return output.view(index.shape)


def formula(
    logits: Tensor,
    index: Tensor,
    *,
    temperature: float = 1.0,
    ignore_index: int = -100,
    validate: bool = False,
) -> Tensor:
    """Log-probabilities of one class or of several classes per row."""
    log_p = torch.log_softmax(logits / temperature, -1)
    has_class_axis = index.ndim == logits.ndim
    classes = index if has_class_axis else index.unsqueeze(-1)
    valid = classes != ignore_index
    log_prob = torch.where(valid, log_p.gather(-1, torch.where(valid, classes, 0)), 0)
    return log_prob if has_class_axis else log_prob.squeeze(-1)


# logits read; the gradient written, which one pass can do
work = elementwise(1, 2)


def _case(
    rows: int,
    classes: int,
    k: int = 0,
    *,
    scale: float = 2.0,
    ignored: float = 0.0,
    layout: str = "contiguous",
) -> dict[str, T]:
    shape = (rows, k) if k else (rows,)
    return {
        "logits": T((rows, classes), scale=scale, layout=layout),
        "index": T(shape, classes=classes, ignored=ignored),
    }


SAMPLES = (
    Sample("one", _case(7, 50)),
    Sample("ignored", _case(7, 50, ignored=0.3)),
    Sample("all-ignored", _case(4, 50, ignored=1.0)),
    Sample("several", _case(7, 50, 3)),
    Sample("repeated", _case(6, 4, 9)),
    Sample("several-ignored", _case(6, 40, 4, ignored=0.4)),
    Sample("none-of-several", {"logits": T((3, 8)), "index": T((3, 0), classes=8)}),
    Sample("cold", _case(5, 40, 2), {"temperature": 0.5}),
    Sample("hot", _case(5, 40), {"temperature": 3.0}),
    Sample("three-axes", {"logits": T((2, 3, 20)), "index": T((2, 3), classes=20)}),
    Sample("three-axes-several", {"logits": T((2, 3, 20)), "index": T((2, 3, 2), classes=20)}),
    Sample("one-class", _case(5, 1)),
    Sample("one-row", _case(1, 129)),
    Sample("no-rows", _case(0, 12)),
    Sample("sliced", _case(5, 24, layout="sliced")),
    Sample("row-gaps", _case(5, 64, 2, layout="rows")),
    Sample("extreme-logits", _case(6, 40, scale=1e4)),
    Sample("odd-vocabulary", _case(2, 32777, 2), size="thin"),
    Sample("large-vocabulary", _case(2, 262144), size="thin"),
    Sample("past-65535-rows", _case(65537, 2), size="thin"),
    Sample("8192x32000", _case(8192, 32000), size="bench"),
    Sample("8192x128256", _case(8192, 128256), size="bench"),
    Sample("4096x151936 of 16", _case(4096, 151936, 16), {"temperature": 0.9}, size="bench"),
)
