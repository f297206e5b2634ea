"""Contract of ``modulated_rms_norm``."""

import math

import torch
from torch import Tensor

from liger_multi import checks
from liger_multi.dispatch.bitwise import PER_ROW, bitwise, promise
from liger_multi.dispatch.op import Op
from liger_multi.ops._formulas import weighted_rms_norm
from liger_multi.ops._samples import each_frozen
from liger_multi.ops._work import Options, Shapes, Work
from liger_multi.ops.rms_norm import CASTINGS, forward as norm_shapes, numbers
from liger_multi.testing.samples import Sample, Tensor as T

_SUMS = "gradients of scale and shift are sums that the number of modulations splits"
op = Op(
    "modulated_rms_norm",
    family="norms",
    bitwise=bitwise(
        PER_ROW,
        "x scale shift y rstd",
        2,
        backward=promise("repeat recompute cards", because={"rows": _SUMS}),
        reference="itself",
    ),
)


@op.forward(returns="y", residuals="rstd")
def forward(
    x: Tensor,
    scale: Tensor,
    shift: Tensor | None,
    weight: Tensor | None,
    eps: float,
    offset: float,
    casting: str,
) -> tuple[Tensor, Tensor]:
    """Shape rule; scale and shift have a row for so many consecutive rows of x."""
    n, rstd = norm_shapes(x, weight, eps, offset, casting)
    dtype = torch.promote_types(n.dtype, scale.dtype)
    dtype = dtype if shift is None else torch.promote_types(dtype, shift.dtype)
    return x.new_empty(x.shape, dtype=dtype), rstd


op.backward(
    reads="dy x scale shift_dtype weight rstd offset casting",
    returns="dx dscale dshift dweight",
    shapes={"shift": "scale"},
    additive=("shift",),
)


def modulated_rms_norm(
    x: Tensor,
    scale: Tensor,
    shift: Tensor | None = None,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    casting: str = "llama",
) -> Tensor:
    """Root-mean-square norm modulated by a condition (AdaLN): ``norm(x) * (1 + scale) + shift``.

    Math:
        ``y = rms_norm(x, weight) * (1 + scale) + shift`` with the options of ``rms_norm``. The
        gradients of scale and shift are sums over the rows that they serve, in fp32 and in a fixed
        order.

    Shapes:
        x ``(..., H)`` with any strides. scale ``(H,)`` serves all rows; otherwise its leading axes
        are the first ones of x, perhaps followed by axes of 1: ``(B, H)``, ``(B, 1, H)`` or ``(B,
        S, H)`` for x ``(B, S, H)``. For x ``(N, H)``, each row of scale ``(R, H)`` serves N / R
        neighbors. shift has the shape of scale; weight ``(H,)`` or None. y ``(..., H)``,
        contiguous.

    Dtypes:
        In: any floating dtypes. Inside: fp32 (fp64 for fp64). Out: the promotion of what
        ``rms_norm`` returns, scale and shift. The reference rounds every step as plain PyTorch
        does, kernels round the norm, the result, and the products that the
        gradient of scale adds up.

    Memory:
        Kept for backward: x, scale, weight and 4 bytes a row (``rstd``).

    Raises:
        TypeError: An argument is not a floating-point tensor.
        ValueError: Shapes that do not fit, mixed devices, unknown casting.

    Source:
        Peebles and Xie 2022 (arXiv:2212.09748), with the norm of Zhang and Sennrich 2019
        (arXiv:1910.07467).
    """
    name = "modulated_rms_norm"
    checks.floating(
        name, x=x, scale=scale, shift=shift, weight=weight, optional=("shift", "weight")
    )
    if x.ndim == 0:
        raise ValueError(f"{name}: x must have at least one axis, got {checks.describe(x)}")
    if not _fits(x.shape, scale.shape):
        checks.refuse(
            name,
            "scale must have the last axis of x and some of its first axes",
            f"{tuple(scale.shape)} for x of shape {tuple(x.shape)}",
        )
    if shift is not None:
        checks.same_shape(name, scale=scale, shift=shift)
    checks.vector(name, "weight", weight, x.shape[-1], "last axis of x")
    checks.one_of(name, "casting", casting, CASTINGS)
    result: Tensor = op(x, scale, shift, weight, *numbers(name, eps, offset), casting)
    return result


def formula(
    x: Tensor,
    scale: Tensor,
    shift: Tensor | None = None,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    casting: str = "llama",
) -> Tensor:
    """``rms_norm(x) * (1 + scale) + shift``; a row of scale serves equally many rows of x."""
    scale = _per_row(x, scale)
    y = weighted_rms_norm(x, weight, eps, offset) * (1 + scale)
    return y if shift is None else y + _per_row(x, shift)


def _per_row(x: Tensor, modulation: Tensor) -> Tensor:
    """A modulation that broadcasts over x: by the leading axes that both have, or row by row."""
    leading = list(modulation.shape[:-1])
    while leading and leading[-1] == 1:
        leading.pop()
    if leading != [*x.shape[: len(leading)]]:
        return modulation.repeat_interleave(x.shape[0] // leading[0], 0)
    shape = (*leading, *[1] * (x.ndim - 1 - len(leading)), modulation.shape[-1])
    return modulation if modulation.shape == shape else modulation.reshape(shape)


def work(shapes: Shapes, size: int, options: Options) -> Work:
    tensor_bytes, modulation_bytes = (
        math.prod(shapes["x"]) * size,
        math.prod(shapes["scale"]) * size,
    )
    # x, scale and shift read, y written; dy, x and scale read, three gradients written
    return Work(2 * tensor_bytes + 2 * modulation_bytes, 5 * tensor_bytes + 5 * modulation_bytes)


def _fits(x: torch.Size, scale: torch.Size) -> bool:
    if not scale or scale[-1] != x[-1] or len(scale) > max(len(x), 2):
        return False
    leading = list(scale[:-1])
    while leading and leading[-1] == 1:
        leading.pop()
    if tuple(leading) == tuple(x[: len(leading)]):
        return True
    return (
        len(x) == 2 and len(leading) == 1 and leading[0] > 0 and math.prod(x[:-1]) % leading[0] == 0
    )


def _case(
    shape: tuple[int, ...],
    modulation_shape: tuple[int, ...],
    layout: str = "contiguous",
    weight: bool = True,
) -> dict[str, T]:
    tensors = {
        "x": T(shape, layout=layout),
        "scale": T(modulation_shape, scale=0.5),
        "shift": T(modulation_shape),
    }
    return tensors | ({"weight": T(shape[-1:])} if weight else {})


SAMPLES = (
    Sample("a-sequence", _case((2, 5, 64), (2, 64))),
    Sample("a-sequence-kept-axis", _case((3, 4, 40), (3, 1, 40))),
    Sample("weightless", _case((2, 5, 64), (2, 64), weight=False)),
    Sample("all-rows", _case((2, 5, 72), (72,))),
    Sample("one-for-all", _case((2, 5, 72), (1, 72), weight=False)),
    Sample("every-row", _case((3, 4, 48), (3, 4, 48))),
    Sample("every-row-of-many", _case((300, 16), (300, 16))),
    Sample("neighbors", _case((12, 33), (4, 33))),
    Sample("three-leading-axes", _case((2, 3, 4, 16), (2, 3, 16))),
    Sample("without-shift", {"x": T((2, 5, 64)), "scale": T((2, 64)), "weight": T((64,))}),
    Sample("olmo", _case((2, 3, 40), (2, 40)), {"casting": "olmo"}),
    Sample("gemma", _case((2, 3, 40), (2, 40)), {"casting": "gemma", "offset": 1.0}),
    Sample(
        "fp32-modulation",
        {
            **_case((2, 5, 96), (2, 96)),
            "scale": T((2, 96), dtype=torch.float32),
            "shift": T((2, 96), dtype=torch.float32),
        },
        {"eps": 1e-5},
    ),
    Sample("fp32-weight", {**_case((2, 5, 96), (2, 96)), "weight": T((96,), dtype=torch.float32)}),
    Sample("one-row", _case((1, 257), (1, 257))),
    Sample("one-axis", _case((48,), (48,))),
    Sample("one-column", _case((9, 1), (3, 1)), {"eps": 0.5}),
    Sample("no-rows", _case((2, 0, 64), (2, 64))),
    Sample("sliced", {**_case((6, 32), (2, 32), "sliced"), "scale": T((2, 32), layout="sliced")}),
    Sample("transposed", _case((2, 16, 24), (2, 24), "transposed")),
    Sample("row-gaps", {**_case((3, 4, 64), (3, 64), "rows"), "shift": T((3, 64), layout="rows")}),
    Sample("expanded", _case((5, 64), (5, 64), "expanded")),
    Sample("frozen-scale", {**_case((2, 5, 64), (2, 64)), "scale": T((2, 64), grad=False)}),
    *each_frozen(_case((2, 5, 64), (2, 64)), "shift weight x"),
    Sample("many-tiny-rows", _case((2, 550, 8), (2, 8))),
    Sample("past-65535-rows", _case((65537, 2), (1, 2)), size="thin"),
    Sample("past-65536-columns", _case((2, 65600), (2, 65600)), size="thin", path="wide rows"),
    Sample("8x1024x1152", _case((8, 1024, 1152), (8, 1, 1152), weight=False), size="bench"),
    Sample("2x4096x3072", _case((2, 4096, 3072), (2, 1, 3072), weight=False), size="bench"),
    Sample("8192x4096 every row", _case((8192, 4096), (8192, 4096), weight=False), size="bench"),
)
COMPILE_SAMPLES = (
    Sample("8x128x65536", _case((8, 128, 65536), (8, 1, 65536))),
    Sample("1024x65536 every row", _case((1024, 65536), (1024, 65536))),
)
