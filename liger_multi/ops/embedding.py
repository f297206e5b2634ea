"""Contract of ``embedding``."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_multi import checks
from liger_multi.dispatch.bitwise import PER_ROW, bitwise
from liger_multi.dispatch.op import Op
from liger_multi.ops._quantized import QuantizedWeight
from liger_multi.ops._work import Options, Shapes, Work
from liger_multi.testing.samples import Sample, Tensor as T

op = Op("embedding", family="embedding", bitwise=bitwise(PER_ROW, "index y", reference="exact"))
NO_PADDING = -1


@op.forward(returns="y")
def forward(
    weight: Tensor, index: Tensor, classes: int, padding_idx: int, scale: float, validate: bool
) -> Tensor:
    return weight.new_empty(index.shape[0], weight.shape[1])


op.backward(
    reads="dy index classes padding_idx scale",
    returns="dweight",
    shapes={"weight": lambda dy, classes: dy.new_empty((classes, dy.shape[1]))},
)


def embedding(
    index: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    *,
    scale: float = 1.0,
    validate: bool = False,
) -> Tensor:
    """Rows of a table, perhaps scaled; the gradient is summed in a fixed order.

    Math:
        ``y = scale * weight[index]``; ``dweight[v] = scale * sum of dy where index = v``, in the
        order of the index, and 0 for ``padding_idx``. No atomic additions: twice the same call has
        the same bits.

    Shapes:
        index ``(...)``, weight ``(V, H)``; y ``(..., H)``, contiguous.

    Dtypes:
        In: integer index, weight of any floating dtype. Out: that of weight. Inside: products and
        sums fp32 (fp64 for fp64), rounded once; scale is rounded to the dtype of weight first, as
        Hugging Face does.

    Memory:
        Kept for backward: index, not the weight. Backward: 24 bytes an id to sort them, 4 bytes a
        class, and fp32 sums of long runs of one id, a small part of dy.

    Raises:
        TypeError: Wrong kinds of arguments.
        ValueError: Shapes, devices or options that do not fit.
        IndexError: An index outside of ``[0, V)``: always on a CPU, on a device only with
        ``validate=True`` (a sync); there its row of y is NaN and it adds to no gradient.

    Source:
        ``torch.nn.functional.embedding``; scaled: ``Gemma3TextScaledWordEmbedding`` of
        transformers.
    """
    name = op.name
    checks.floating(name, weight=weight)
    if weight.ndim != 2:
        raise ValueError(f"{name}: weight must have shape (V, H), got {checks.describe(weight)}")
    index_shape = index.shape if isinstance(index, Tensor) else torch.Size()
    checks.targets(name, index, index_shape, weight, "index")
    classes, width = weight.shape
    padding = NO_PADDING
    if padding_idx is not None:
        padding = checks.integer(name, "padding_idx", padding_idx)
        if not -classes <= padding < classes:
            raise ValueError(
                f"{name}: padding_idx must name one of the {classes} rows of weight, got {padding}"
            )
        padding %= classes
    factor = checks.number(name, "scale", scale)
    ids = index.reshape(-1).to(torch.int64)
    checks.boolean(name, "validate", validate)
    if isinstance(weight, QuantizedWeight):
        weight, ids = _rows_read(weight, ids, validate)
        classes, padding = len(ids), NO_PADDING
    output: Tensor = op(weight, ids, classes, padding, factor, validate)
    return output.view(*index_shape, width)


def _rows_read(weight: QuantizedWeight, ids: Tensor, validate: bool) -> tuple[Tensor, Tensor]:
    """The rows that ids name, in the order of ids, and the place of each; -1 for no row."""
    from liger_multi.reference.cross_entropy.reduction import check_targets

    check_targets(ids, weight.shape[0], None, validate, "index")
    is_valid = (ids >= 0) & (ids < weight.shape[0])
    rows = torch.arange(len(ids), device=ids.device)
    return weight.numbers_at(torch.where(is_valid, ids, 0)), torch.where(is_valid, rows, -1)


def formula(
    index: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    *,
    scale: float = 1.0,
    validate: bool = False,
) -> Tensor:
    """Rows of a table, times a number in their dtype."""
    y = F.embedding(index, weight, padding_idx)
    return y if scale == 1.0 else y * torch.tensor(scale, dtype=y.dtype, device=y.device)


def work(shapes: Shapes, size: int, options: Options) -> Work:
    rows, width = math.prod(shapes["index"]), shapes["weight"][1]
    gathered, table = rows * width * size, math.prod(shapes["weight"]) * size
    # rows read and written; what arrives read, and the gradient written, most of it zeros
    return Work(2 * gathered, 3 * gathered + table)


def _case(
    rows: int, classes: int, width: int, *, ids: tuple[int, ...] = (), layout: str = "contiguous"
) -> dict[str, T]:
    return {
        "index": T(ids or (rows,), classes=classes),
        "weight": T((classes, width), layout=layout),
    }


SAMPLES = (
    Sample("few-of-many", _case(5, 40, 16)),
    Sample("many-of-few", _case(300, 3, 8), path="windows"),
    Sample("one-class", _case(150, 1, 5)),
    Sample("one-row", _case(1, 9, 12)),
    Sample("no-rows", _case(0, 9, 12)),
    Sample("one-column", _case(7, 9, 1)),
    Sample("odd-width", _case(6, 11, 37)),
    Sample("scaled", _case(9, 12, 16), {"scale": 16**0.5}),
    Sample("scaled-oddly", _case(9, 12, 16), {"scale": -1.2345}),
    # by definition no numeric gradient: too large for the check of that
    Sample("padding", _case(20, 5, 160), {"padding_idx": 2}),
    Sample("padding-from-the-end", _case(20, 5, 160), {"padding_idx": -1, "scale": 3.0}),
    Sample("three-axes", _case(0, 7, 8, ids=(2, 3, 2))),
    Sample("no-axes", {"index": T((), classes=5), "weight": T((5, 8))}),
    Sample("transposed-weight", _case(6, 11, 16, layout="transposed")),
    Sample("sliced-weight", _case(6, 11, 16, layout="sliced")),
    Sample("row-gaps", _case(6, 11, 16, layout="rows")),
    Sample("wide", _case(3, 4, 9001), size="thin"),
    Sample("past-65535-rows", _case(65537, 3, 2), size="thin"),
    Sample("8192x4096 of 128256", _case(8192, 128256, 4096), size="bench"),
    Sample("16384x2048 of 151936", _case(16384, 151936, 2048), size="bench"),
    Sample("8192x2304 of 256000", _case(8192, 256000, 2304), {"scale": 48.0}, size="bench"),
    Sample("16384x4096 of 8", _case(16384, 8, 4096), size="bench"),
)
COMPILE_SAMPLES = tuple(
    Sample(f"8192x{width} of 128256", _case(8192, 128256, width)) for width in (128, 8192)
)
