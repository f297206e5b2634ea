"""What the activations share: shape rules, checks and samples."""

import math

import torch
from torch import Tensor

from liger_multi import checks
from liger_multi.dispatch.bitwise import PER_ROW, bitwise
from liger_multi.dispatch.op import Op
from liger_multi.ops._samples import PIECES, bench, usual
from liger_multi.ops._work import Options, Shapes, Work
from liger_multi.testing.samples import Sample, Tensor as T

# --- elementwise, of one tensor ---


def pointwise(name: str, family: str = "activations") -> Op:
    """An operator ``y = f(x)``; traced by compilers, which fuse it with its neighbors."""
    op = Op(name, family=family, compile="trace", rowwise=True, bitwise=bitwise(PER_ROW, "x y", 1))

    @op.forward(returns="y")
    def forward(x: Tensor) -> Tensor:
        return x.new_empty(x.shape)

    op.backward(reads="dy x", returns="dx")
    return op


def run_pointwise(op: Op, x: Tensor) -> Tensor:
    """Check the argument, and call the operator."""
    if not isinstance(x, Tensor) or not x.is_floating_point() or not x.ndim:
        checks.floating(op.name, x=x)
        checks.refuse(op.name, "x must have at least one axis", x)
    result: Tensor = op(x)
    return result


def pointwise_samples(sizes: str) -> tuple[Sample, ...]:
    """The samples of such an operator, and its real sizes."""

    def x(*shape: int, layout: str = "contiguous", scale: float = 1.0) -> dict[str, T]:
        return {"x": T(shape, layout=layout, scale=scale)}

    return (
        Sample("rows", x(3, 5, 48)),
        *usual(x, PIECES),
        Sample("one-column", x(9, 1)),
        Sample("large-values", x(4, 64, scale=30.0)),
        *bench(x, sizes),
    )


# --- gated, of two tensors or of packed halves ---


def gate_and_up(name: str, gate: Tensor, up: Tensor) -> None:
    """Check the two inputs of a gated activation."""
    checks.floating(name, gate=gate, up=up)
    checks.same_shape(name, gate=gate, up=up)
    if gate.ndim == 0:
        checks.refuse(name, "gate must have at least one axis", gate)


def check_even_width(name: str, gate_up: Tensor) -> None:
    """Check the input of a packed gated activation."""
    checks.floating(name, gate_up=gate_up)
    if gate_up.ndim == 0 or gate_up.shape[-1] % 2:
        checks.refuse(name, "the last axis of gate_up must be even", gate_up)


def multipliers(name: str, gate: float, down: float) -> tuple[float, float]:
    """Two numbers, checked."""
    return (
        checks.number(name, "gate_multiplier", gate),
        checks.number(name, "down_multiplier", down),
    )


def pair(*shape: int, layout: str = "contiguous") -> dict[str, T]:
    """Tensors of a sample."""
    return {"gate": T(shape, layout=layout), "up": T(shape, layout=layout)}


def packed(*shape: int, layout: str = "contiguous") -> dict[str, T]:
    """Tensors of a sample, both halves in a row."""
    return {"gate_up": T(shape, layout=layout)}


LARGE = {"gate": T((4, 64), scale=30.0), "up": T((4, 64))}
FP32_UP = {"gate": T((4, 64)), "up": T((4, 64), dtype=torch.float32)}
BOTH = {"gate_multiplier": 0.4, "down_multiplier": 2.5}
MLPS = "8192x8192 8192x11008 8192x14336 8192x18944"
PACKED_MLPS = [  # by the width of a half
    Sample(f"8192x{n}", packed(8192, 2 * n), size="bench") for n in (8192, 11008, 14336, 18944)
]


def packed_work(shapes: Shapes, size: int, options: Options) -> Work:
    half = math.prod(shapes["gate_up"]) * size / 2
    return Work(3 * half, 8 * half)
