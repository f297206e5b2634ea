"""Contract of ``fused_add_rms_norm``."""

from typing import NamedTuple, Optional

import torch
from torch import Tensor

from liger_multi import checks
from liger_multi.dispatch.op import Op
from liger_multi.ops.rms_norm import CASTINGS, numbers
from liger_multi.ops.rms_norm import forward as norm_shapes
from liger_multi.testing.samples import Sample
from liger_multi.testing.samples import Tensor as T

op = Op(
    "fused_add_rms_norm", rows=("x", "residual", "dy", "new_residual", "rstd"),
    replicated=("weight",),
)  # fmt: skip


class FusedAddRMSNormOutput(NamedTuple):
    """What :func:`fused_add_rms_norm` returns; both have gradients.

    Attributes:
        y: The normalized sum.
        new_residual: The sum, which the next layer adds to.
    """

    y: Tensor
    new_residual: Tensor


@op.forward(returns="y new_residual rstd", residuals="rstd")
def forward(
    x: Tensor, residual: Tensor, weight: Optional[Tensor], eps: float, offset: float, casting: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Shape rule."""
    s = x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, residual.dtype))
    y, rstd = norm_shapes(s, weight, eps, offset, casting)
    return y, s, rstd


@op.backward(returns="dx dweight", shared={"residual": "x"})
def backward(
    new_residual: Tensor,
    dy: Optional[Tensor],
    dnew_residual: Optional[Tensor],
    weight: Optional[Tensor],
    rstd: Tensor,
    offset: float,
    casting: str,
    needs_x: bool,
    needs_residual: bool,
    needs_weight: bool,
) -> tuple[Tensor, Tensor]:
    """Shape rule."""
    s, needs_sum = new_residual, needs_x or needs_residual
    dweight = (
        s.new_empty(0) if weight is None or not needs_weight else weight.new_empty(weight.shape)
    )
    return s.new_empty(s.shape if needs_sum else (0,)), dweight


def fused_add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    casting: str = "llama",
) -> FusedAddRMSNormOutput:
    """Add the residual stream and normalize the sum over the last axis, in one pass.

    Math:
        ``new_residual = x + residual``, rounded to its dtype, and ``y = rms_norm(new_residual)``
        with the options of ``rms_norm``. Backward: both terms have the gradient
        ``d(norm) + dnew_residual``, added in fp32 and rounded once.

    Shapes:
        x and residual ``(..., H)`` with any strides, weight ``(H,)`` or None; y and new_residual
        ``(..., H)``, contiguous.

    Dtypes:
        In: any floating dtype. Inside: fp32 (fp64 for fp64). Out: new_residual has the promotion
        of x and residual, y what ``rms_norm`` of it has.

    Memory:
        Kept for backward: new_residual, weight and 4 bytes a row (``rstd``); neither x nor
        residual.

    Raises:
        TypeError: An argument is not a floating-point tensor.
        ValueError: x and residual differ in shape, the width of weight differs from theirs, mixed
            devices, unknown casting.

    Source:
        Zhang and Sennrich 2019 (arXiv:1910.07467); the two lines between the blocks of
        transformers ``LlamaDecoderLayer``.
    """
    name = "fused_add_rms_norm"
    checks.floating(name, x=x, residual=residual, weight=weight, optional=("weight",))
    checks.same_shape(name, x=x, residual=residual)
    if x.ndim == 0:
        raise ValueError(f"{name}: x must have at least one axis, got {checks.describe(x)}")
    checks.vector(name, "weight", weight, x.shape[-1], "last axis of x")
    checks.one_of(name, "casting", casting, CASTINGS)
    by = numbers(name, eps, offset)
    return FusedAddRMSNormOutput(*op(x, residual, weight, *by, casting))


def _terms(*shape: int, **both: object) -> dict[str, T]:
    made = T(shape, **both)  # type: ignore[arg-type]
    return {"x": made, "residual": made}


SAMPLES = (
    Sample("llama", _terms(2, 5, 64) | {"weight": T((64,))}),
    Sample(
        "fp32-residual",
        {"x": T((7, 96)), "residual": T((7, 96), dtype=torch.float32), "weight": T((96,))},
        {"eps": 1e-5},
    ),
    Sample("fp32-weight", _terms(3, 24) | {"weight": T((24,), dtype=torch.float32)}),
    Sample("olmo", _terms(3, 3, 40) | {"weight": T((40,))}, {"casting": "olmo"}),
    Sample(
        "gemma", _terms(6, 72) | {"weight": T((72,), scale=0.2)},
        {"casting": "gemma", "offset": 1.0},
    ),
    Sample("llama-offset", _terms(6, 33) | {"weight": T((33,))}, {"offset": 1.0}),
    Sample("weightless", _terms(4, 128)),
    Sample("one-row", _terms(1, 257) | {"weight": T((257,))}),
    Sample("one-axis", _terms(48) | {"weight": T((48,))}),
    Sample("one-column", _terms(9, 1) | {"weight": T((1,))}, {"eps": 0.5}),
    Sample("no-rows", _terms(0, 64) | {"weight": T((64,))}),
    Sample("no-columns", _terms(3, 0) | {"weight": T((0,))}),
    Sample("sliced", _terms(6, 32, layout="sliced") | {"weight": T((32,), layout="sliced")}),
    Sample(
        "transposed", {"x": T((2, 16, 24), layout="transposed"), "residual": T((2, 16, 24))}
        | {"weight": T((24,))},
    ),
    Sample(
        "row-gaps", {"x": T((3, 4, 64)), "residual": T((3, 4, 64), layout="rows")}
        | {"weight": T((64,))},
    ),
    Sample(
        "expanded", {"x": T((5, 64), layout="expanded"), "residual": T((5, 64))}
        | {"weight": T((64,))},
    ),
    Sample("frozen-weight", _terms(6, 64) | {"weight": T((64,), grad=False)}),
    Sample("frozen-x", {"x": T((6, 64), grad=False), "residual": T((6, 64)), "weight": T((64,))}),
    Sample("frozen-residual", {"x": T((6, 64)), "residual": T((6, 64), grad=False)}),
    Sample("frozen-terms", _terms(6, 64, grad=False) | {"weight": T((64,))}),
    Sample("many-tiny-rows", _terms(1100, 8) | {"weight": T((8,))}),
    Sample("past-65535-rows", _terms(65537, 2) | {"weight": T((2,))}, size="thin"),
    Sample("past-65536-columns", _terms(2, 65600) | {"weight": T((65600,))}, size="thin"),
    Sample("8192x4096", _terms(8192, 4096) | {"weight": T((4096,))}, size="bench"),
)  # fmt: skip
