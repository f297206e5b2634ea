"""Contract of ``linear``."""

import math
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.nn import functional

from liger_multi import checks
from liger_multi.dispatch.bitwise import BY_OUR_GEMM, bitwise
from liger_multi.dispatch.op import Op
from liger_multi.dispatch.resolve import by_rows
from liger_multi.dispatch.stored import has_stored
from liger_multi.ops._work import Options, Shapes, Work
from liger_multi.testing.samples import Sample, Tensor as T

# traced: a compiled graph has the same GEMMs as without the operator
op = Op(
    "linear",
    family="activations",
    compile="trace",
    rowwise=True,
    bitwise=bitwise(BY_OUR_GEMM, "x y", 1),
    opens=True,
)


@op.forward(returns="y")
def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, needs_x: bool, needs_weight: bool
) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _unread(needs_x: bool, needs_weight: bool) -> tuple[str, ...]:
    weight = () if needs_x else ("weight",)
    return weight if needs_weight else (*weight, "x")


def _gradients(**kwargs: Any) -> tuple[Tensor, ...]:
    """Shape rule of backward; a width is read from the tensor that was saved."""
    dy, x, weight = (kwargs[name] for name in ("dy", "x", "weight"))
    outer = dy.shape[-1]
    return (
        dy.new_empty((*dy.shape[:-1], weight.shape[1]) if kwargs["needs_x"] else (0,)),
        dy.new_empty((outer, x.shape[-1]) if kwargs["needs_weight"] else (0,)),
        dy.new_empty((outer,) if kwargs["needs_bias"] else (0,)),
    )


op.backward(reads="dy x? weight?", returns="dx dweight dbias", not_saved=_unread, shapes=_gradients)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A linear layer whose rows can be independent of each other.

    By default this is PyTorch's linear layer, to the bit, for inputs without gaps. Under
    ``deterministic="rows"`` the tiles of the GEMMs of y and of the gradient of x have equal bits:
    the result of a row does not depend on the number, content or order of other rows.

    Math:
        ``y = x @ weight.T + bias``.

    Shapes:
        x ``(..., K)`` with any strides, weight ``(N, K)``, bias ``(N,)``; y ``(..., N)``,
        contiguous.

    Dtypes:
        In: one floating dtype, or any under autocast, which then sets the dtype of all. Inside:
        that of the GEMM is the library's for linear layers; under ``deterministic="rows"`` fp32
        sums, and no TF32. Out: that of the GEMM.

    Memory:
        Kept for backward: x where weight needs a gradient, weight where x needs one.

    Raises:
        TypeError: An argument is not a floating-point tensor, or dtypes differ without autocast.
        ValueError: Shapes do not fit together, or mixed devices.

    Source:
        ``torch.nn.functional.linear``.
    """
    tensors: dict[str, Tensor | None] = {"x": x, "weight": weight, "bias": bias}
    checks.floating("linear", **tensors, optional=("bias",))
    if weight.ndim != 2:
        checks.refuse("linear", "weight must have shape (N, K)", weight)
    if x.ndim == 0 or x.shape[-1] != weight.shape[1]:
        checks.refuse(
            "linear",
            f"the last axis of x must be K = {weight.shape[1]} of weight {tuple(weight.shape)}",
            x,
        )
    checks.vector("linear", "bias", bias, weight.shape[0], "rows of weight")
    return op(*checks.one_dtype("linear", tensors))  # type: ignore[no-any-return]


def formula(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias``."""
    return F.linear(x, weight, bias)


def work(shapes: Shapes, size: int, options: Options) -> Work:
    rows, (outer, width) = math.prod(shapes["x"][:-1]), shapes["weight"]
    x, weight, y = rows * width * size, outer * width * size, rows * outer * size
    product = 2.0 * rows * width * outer
    # x and weight read, y written; then dy, x and weight read, two gradients written
    return Work(x + weight + y, 3 * (x + weight) + 2 * y, product, 3 * product)


def linear_of_mode(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """PyTorch's linear layer; the operator where rows must be independent here and now.

    The operator also bounds the memory of a weight that is stored in another form.
    """
    run = linear if by_rows() or has_stored((weight,)) else functional.linear
    return run(x, weight, bias)


def _case(
    rows: tuple[int, ...], width: int, out: int, bias: bool = False, **specs: T
) -> dict[str, T]:
    """Tensors of a sample; ``specs`` replace some."""
    tensors = {"x": T((*rows, width)), "weight": T((out, width), scale=max(1, width) ** -0.5)}
    return tensors | ({"bias": T((out,), scale=0.3)} if bias else {}) | specs


def _frozen(*shape: int) -> T:
    return T(shape, grad=False)


SAMPLES = (
    Sample("rows", _case((2, 5), 16, 24)),
    Sample("bias", _case((2, 5), 16, 24, True)),
    Sample("odd-widths", _case((7,), 13, 19, True)),
    Sample("one-row", _case((1,), 16, 40, True)),
    Sample("one-axis", _case((), 8, 12, True)),
    Sample("no-rows", _case((0,), 8, 12, True)),
    Sample("no-columns", _case((3,), 0, 4, True)),
    Sample("sliced", _case((4,), 8, 12, True, x=T((4, 8), layout="sliced"))),
    Sample("transposed", _case((2, 4), 8, 12, True, x=T((2, 4, 8), layout="transposed"))),
    Sample("transposed-weight", _case((4,), 8, 12, weight=T((12, 8), layout="transposed"))),
    Sample("expanded", _case((4,), 8, 12, x=T((4, 8), layout="expanded"))),
    Sample("frozen-x", _case((4,), 8, 12, True, x=_frozen(4, 8))),
    Sample("frozen-weight", _case((4,), 8, 12, True, weight=_frozen(12, 8))),
    Sample("frozen-bias", _case((4,), 8, 12) | {"bias": _frozen(12)}),
    Sample("only-bias", _case((4,), 8, 12, True, x=_frozen(4, 8), weight=_frozen(12, 8))),
    Sample("past-65535-rows", _case((65537,), 4, 4, weight=_frozen(4, 4)), size="thin"),
    Sample("8192x4096x4096", _case((8192,), 4096, 4096), size="bench"),
    Sample("8192x4096x14336", _case((8192,), 4096, 14336), size="bench"),
    Sample("8192x896x4864", _case((8192,), 896, 4864, True), size="bench"),
)
