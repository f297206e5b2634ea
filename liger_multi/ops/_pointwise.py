"""What the elementwise operators of one tensor share: both shape rules, the checks, the samples."""

from torch import Tensor

from liger_multi import checks
from liger_multi.dispatch.op import Op
from liger_multi.ops._samples import PIECES, bench, usual
from liger_multi.testing.samples import Sample
from liger_multi.testing.samples import Tensor as T


def pointwise(name: str, family: str = "activations") -> Op:
    """An operator ``y = f(x)``; traced by compilers, which fuse it with its neighbors."""
    op = Op(name, family=family, compile="trace", rows=("x", "dy"))

    @op.forward(returns="y")
    def forward(x: Tensor) -> Tensor:
        """Shape rule."""
        return x.new_empty(x.shape)

    op.backward(reads="dy x", returns="dx")
    return op


def run(op: Op, x: Tensor) -> Tensor:
    """Check the argument, and call the operator."""
    if not isinstance(x, Tensor) or not x.is_floating_point() or not x.ndim:
        checks.floating(op.name, x=x)
        checks.refuse(op.name, "x must have at least one axis", x)
    result: Tensor = op(x)
    return result


def samples_of(sizes: str) -> tuple[Sample, ...]:
    """The samples of such an operator, and its real sizes."""

    def x(*shape: int, layout: str = "contiguous", scale: float = 1.0) -> dict[str, T]:
        return {"x": T(shape, layout=layout, scale=scale)}

    return (
        Sample("rows", x(3, 5, 48)), *usual(x, PIECES), Sample("one-column", x(9, 1)),
        Sample("large-values", x(4, 64, scale=30.0)), *bench(x, sizes),
    )  # fmt: skip
