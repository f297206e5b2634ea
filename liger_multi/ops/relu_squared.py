"""Contract of ``relu_squared``."""

from torch import Tensor

from liger_multi import checks
from liger_multi.dispatch.op import Op
from liger_multi.testing.samples import Sample
from liger_multi.testing.samples import Tensor as T

# traced as swiglu, whose traced form was measured; this one's was not
op = Op("relu_squared", compile="trace", rows=("x", "dy"))


@op.forward(returns="y")
def forward(x: Tensor) -> Tensor:
    """Shape rule."""
    return x.new_empty(x.shape)


@op.backward(returns="dx")
def backward(dy: Tensor, x: Tensor) -> Tensor:
    """Shape rule."""
    return x.new_empty(x.shape)


def relu_squared(x: Tensor) -> Tensor:
    """Squared rectifier: ``relu(x) ** 2``.

    Math:
        ``y = max(x, 0)^2``; backward ``dx = 2 max(x, 0) dy``, rounded once.

    Shapes:
        x ``(..., F)`` with any strides; y the same, contiguous.

    Dtypes:
        In and out: any floating dtype. Inside: fp32 (fp64 for fp64).

    Memory:
        Kept for backward: x.

    Raises:
        TypeError: x is not a floating-point tensor.
        ValueError: x has no axis.

    Source:
        So et al. 2021 (arXiv:2109.08668); transformers ``ReLUSquaredActivation``.
    """
    checks.floating("relu_squared", x=x)
    if x.ndim == 0:
        raise ValueError(f"relu_squared: x must have at least one axis, got {checks.describe(x)}")
    result: Tensor = op(x)
    return result


SAMPLES = (
    Sample("rows", {"x": T((3, 5, 48))}),
    Sample("odd-width", {"x": T((4, 37))}),
    Sample("one-row", {"x": T((1, 200))}),
    Sample("one-axis", {"x": T((31,))}),
    Sample("one-column", {"x": T((9, 1))}),
    Sample("no-rows", {"x": T((0, 16))}),
    Sample("sliced", {"x": T((4, 24), layout="sliced")}),
    Sample("transposed", {"x": T((2, 8, 12), layout="transposed")}),
    Sample("row-gaps", {"x": T((2, 3, 64), layout="rows")}),
    Sample("expanded", {"x": T((5, 24), layout="expanded")}),
    Sample("large-values", {"x": T((4, 64), scale=30.0)}),
    Sample("past-65535-rows", {"x": T((65537, 2))}, size="thin"),
    Sample("past-65536-columns", {"x": T((2, 65600))}, size="thin"),
    *[Sample(f"8192x{n}", {"x": T((8192, n))}, size="bench") for n in (16384, 24576)],
)
