"""Contract of ``fused_scaled_add_rms_norm``."""

import torch
from torch import Tensor

from liger_multi import checks
from liger_multi.dispatch.bitwise import PER_ROW, bitwise
from liger_multi.dispatch.op import Op
from liger_multi.ops._formulas import weighted_rms_norm
from liger_multi.ops._samples import ROWS, bench, each_frozen, usual
from liger_multi.ops._work import elementwise
from liger_multi.ops.fused_add_rms_norm import FusedAddRMSNormOutput, fp32_residual, terms
from liger_multi.ops.rms_norm import CASTINGS, GEMMA, forward as norm_shapes, numbers
from liger_multi.testing.samples import Sample, Tensor as T

op = Op(
    "fused_scaled_add_rms_norm",
    family="norms",
    rowwise=True,
    bitwise=bitwise(PER_ROW, "x residual y new_residual rstd", 1),
)


@op.forward(returns="y new_residual", residuals="rstd")
def forward(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float,
    offset: float,
    casting: str,
    x_scale: float,
    residual_scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    s = x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, residual.dtype))
    y, rstd = norm_shapes(s, weight, eps, offset, casting)
    return y, s, rstd


op.backward(
    reads="new_residual dy dnew_residual weight rstd offset casting x_scale residual_scale "
    "x_dtype residual_dtype",
    returns="dx dresidual dweight",
    shapes={"x": "new_residual", "residual": "new_residual"},
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
    factors = [
        checks.number(name, n, v)
        for n, v in (("x_scale", x_scale), ("residual_scale", residual_scale))
    ]
    output = op(x, residual, weight, *numbers(name, eps, offset), casting, *factors)
    return FusedAddRMSNormOutput(*output)


def formula(
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
    """The norm of ``x_scale * x + residual_scale * residual``, and that sum."""
    scaled_residual = residual if residual_scale == 1.0 else residual * residual_scale
    total = scaled_residual + x * x_scale
    y = weighted_rms_norm(total, weight, eps, offset)
    return FusedAddRMSNormOutput(y, total)


# as that, with two gradients written
work = elementwise(4, 9)


GRANITE, BOTH = {"x_scale": 0.22}, {"x_scale": 1.4, "residual_scale": -0.6}
SAMPLES = (
    Sample("granite", terms(2, 5, 64), GRANITE),
    *usual(
        terms,
        ROWS,
        GRANITE,
        omitted="sliced transposed row-gaps expanded many-tiny-rows",
        but={
            "one-axis": BOTH,
            "one-column": GRANITE | {"eps": 0.5},
            "past-65535-rows": GRANITE | {"eps": 0.1},
        },
    ),
    Sample("both", terms(2, 5, 64), BOTH),
    Sample("neither", terms(2, 5, 64)),
    Sample("residual", terms(6, 33), {"residual_scale": 2.5}),
    Sample("fp32-residual", fp32_residual(), GRANITE | {"eps": 1e-5}),
    Sample("olmo", terms(3, 3, 40), BOTH | {"casting": "olmo"}),
    Sample("gemma", terms(6, 72) | {"weight": T((72,), scale=0.2)}, GRANITE | GEMMA),
    Sample("weightless", terms(4, 128, weight=False), GRANITE),
    Sample("sliced", terms(6, 32, layout="sliced") | {"weight": T((32,))}, BOTH),
    Sample("row-gaps", terms(3, 4, 64, layout="rows", weight=False), GRANITE),
    Sample("expanded", terms(5, 64, layout="expanded", weight=False), GRANITE),
    *each_frozen(terms(6, 64), "weight", GRANITE),
    *each_frozen(terms(6, 64, weight=False), "x residual", BOTH),
    Sample("frozen-terms", terms(6, 64, grad=False), GRANITE),
    *bench(terms, "8192x4096", GRANITE),
)
COMPILE_SAMPLES = (*bench(terms, "2048x16384 1024x65536", GRANITE),)
