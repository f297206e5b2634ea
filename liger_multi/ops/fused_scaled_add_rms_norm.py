"""Contract of ``fused_scaled_add_rms_norm``."""

from typing import Optional

import torch
from torch import Tensor

from liger_multi import checks
from liger_multi.dispatch.op import Op
from liger_multi.ops.fused_add_rms_norm import FusedAddRMSNormOutput
from liger_multi.ops.rms_norm import CASTINGS, numbers
from liger_multi.ops.rms_norm import forward as norm_shapes
from liger_multi.testing.samples import Sample
from liger_multi.testing.samples import Tensor as T

op = Op(
    "fused_scaled_add_rms_norm", rows=("x", "residual", "dy", "new_residual", "rstd"),
    replicated=("weight",),
)  # fmt: skip


@op.forward(returns="y new_residual rstd", residuals="rstd")
def forward(
    x: Tensor,
    residual: Tensor,
    weight: Optional[Tensor],
    eps: float,
    offset: float,
    casting: str,
    x_scale: float,
    residual_scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Shape rule."""
    s = x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, residual.dtype))
    y, rstd = norm_shapes(s, weight, eps, offset, casting)
    return y, s, rstd


@op.backward(returns="dx dresidual dweight")
def backward(
    new_residual: Tensor,
    dy: Optional[Tensor],
    dnew_residual: Optional[Tensor],
    weight: Optional[Tensor],
    rstd: Tensor,
    offset: float,
    casting: str,
    x_scale: float,
    residual_scale: float,
    x_dtype: torch.dtype,
    residual_dtype: torch.dtype,
    needs_x: bool,
    needs_residual: bool,
    needs_weight: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Shape rule."""
    s, none = new_residual, (0,)
    return (
        s.new_empty(s.shape if needs_x else none, dtype=x_dtype),
        s.new_empty(s.shape if needs_residual else none, dtype=residual_dtype),
        s.new_empty(0) if weight is None or not needs_weight else weight.new_empty(weight.shape),
    )


def fused_scaled_add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    x_scale: float = 1.0,
    residual_scale: float = 1.0,
    offset: float = 0.0,
    casting: str = "llama",
) -> FusedAddRMSNormOutput:
    """Add the residual stream, both terms with a factor, and normalize the sum, in one pass.

    Math:
        ``new_residual = x_scale * x + residual_scale * residual``, rounded to its dtype, products
        that are not by 1 to that of their term first; ``y = rms_norm(new_residual)`` with the
        options of ``rms_norm``. Backward: with ``ds = d(norm) + dnew_residual`` as in
        ``fused_add_rms_norm``, ``dx = x_scale * ds`` and ``dresidual = residual_scale * ds``.
        Both factors are run-time numbers.

    Shapes:
        x and residual ``(..., H)`` with any strides, weight ``(H,)`` or None; y and new_residual
        ``(..., H)``, contiguous.

    Dtypes:
        In: any floating dtype. Inside: fp32 (fp64 for fp64). Out: new_residual has the promotion
        of x and residual, y what ``rms_norm`` of it has.

    Memory:
        Kept for backward: new_residual, weight and 4 bytes a row (``rstd``).

    Raises:
        TypeError: An argument is not a floating-point tensor, or a factor no number.
        ValueError: x and residual differ in shape, the width of weight differs from theirs, mixed
            devices, unknown casting.

    Source:
        Zhang and Sennrich 2019 (arXiv:1910.07467); the lines between the blocks of transformers
        ``GraniteDecoderLayer`` (``residual_multiplier``) and ``MiniMaxDecoderLayer``.
    """
    name = "fused_scaled_add_rms_norm"
    checks.floating(name, x=x, residual=residual, weight=weight, optional=("weight",))
    checks.same_shape(name, x=x, residual=residual)
    if x.ndim == 0:
        raise ValueError(f"{name}: x must have at least one axis, got {checks.describe(x)}")
    checks.vector(name, "weight", weight, x.shape[-1], "last axis of x")
    checks.one_of(name, "casting", casting, CASTINGS)
    by = [
        checks.number(name, n, v)
        for n, v in (("x_scale", x_scale), ("residual_scale", residual_scale))
    ]
    made = op(x, residual, weight, *numbers(name, eps, offset), casting, *by)
    return FusedAddRMSNormOutput(*made)


def _terms(*shape: int, **both: object) -> dict[str, T]:
    made = T(shape, **both)  # type: ignore[arg-type]
    return {"x": made, "residual": made}


GRANITE, BOTH = {"x_scale": 0.22}, {"x_scale": 1.4, "residual_scale": -0.6}
SAMPLES = (
    Sample("granite", _terms(2, 5, 64) | {"weight": T((64,))}, GRANITE),
    Sample("both", _terms(2, 5, 64) | {"weight": T((64,))}, BOTH),
    Sample("neither", _terms(2, 5, 64) | {"weight": T((64,))}),
    Sample("residual", _terms(6, 33) | {"weight": T((33,))}, {"residual_scale": 2.5}),
    Sample(
        "fp32-residual",
        {"x": T((7, 96)), "residual": T((7, 96), dtype=torch.float32), "weight": T((96,))},
        GRANITE | {"eps": 1e-5},
    ),
    Sample("olmo", _terms(3, 3, 40) | {"weight": T((40,))}, BOTH | {"casting": "olmo"}),
    Sample("gemma", _terms(6, 72) | {"weight": T((72,), scale=0.2)},
           GRANITE | {"casting": "gemma", "offset": 1.0}),
    Sample("weightless", _terms(4, 128), GRANITE),
    Sample("one-row", _terms(1, 257) | {"weight": T((257,))}, GRANITE),
    Sample("one-axis", _terms(48) | {"weight": T((48,))}, BOTH),
    Sample("one-column", _terms(9, 1) | {"weight": T((1,))}, GRANITE | {"eps": 0.5}),
    Sample("no-rows", _terms(0, 64) | {"weight": T((64,))}, GRANITE),
    Sample("sliced", _terms(6, 32, layout="sliced") | {"weight": T((32,))}, BOTH),
    Sample("row-gaps", {"x": T((3, 4, 64)), "residual": T((3, 4, 64), layout="rows")}, GRANITE),
    Sample("expanded", {"x": T((5, 64), layout="expanded"), "residual": T((5, 64))}, GRANITE),
    Sample("frozen-weight", _terms(6, 64) | {"weight": T((64,), grad=False)}, GRANITE),
    Sample("frozen-x", {"x": T((6, 64), grad=False), "residual": T((6, 64))}, BOTH),
    Sample("frozen-residual", {"x": T((6, 64)), "residual": T((6, 64), grad=False)}, BOTH),
    Sample("frozen-terms", _terms(6, 64, grad=False) | {"weight": T((64,))}, GRANITE),
    Sample("past-65535-rows", _terms(65537, 2) | {"weight": T((2,))},
           GRANITE | {"eps": 0.1}, "thin"),
    Sample("past-65536-columns", _terms(2, 65600) | {"weight": T((65600,))}, GRANITE, "thin"),
    Sample("8192x4096", _terms(8192, 4096) | {"weight": T((4096,))}, GRANITE, "bench"),
)  # fmt: skip
