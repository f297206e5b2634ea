"""Contract of ``lora_update``."""

import math
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_multi import checks
from liger_multi.dispatch.bitwise import BY_OUR_GEMM, bitwise
from liger_multi.dispatch.op import Op
from liger_multi.ops._work import Options, Shapes, Work
from liger_multi.ops.linear_float8 import coded_weights, formula as linear_float8_formula
from liger_multi.testing.samples import Sample, Tensor as T

op = Op(
    "lora_update",
    family="adapters",
    rowwise=True,
    bitwise=bitwise(BY_OUR_GEMM, "x base y low", 1),
)


@op.forward(returns="y", residuals="low")
def forward(base: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    return base.new_empty(base.shape), a.new_empty((*x.shape[:-1], a.shape[0]))


op.backward(reads="dy x a b low scale", returns="dx da db", same_grad_as={"base": "y"})


def lora_update(base: Tensor, x: Tensor, a: Tensor, b: Tensor, *, scale: float = 1.0) -> Tensor:
    """What a LoRA adapter adds to the output of a linear layer.

    Math:
        ``y = base + scale (x @ a.T) @ b.T``, with ``base`` the output of the layer itself, which
        may be of any kind, such as one with quantized weights. Every GEMM has r columns, rows or
        terms.

    Shapes:
        base ``(..., F)``, x ``(..., H)``, of the same leading axes and with any strides, a
        ``(r, H)``, b ``(F, r)``; y ``(..., F)``, contiguous.

    Dtypes:
        In: base and x of one floating dtype, a and b of one, which may be another; under autocast
        x, a and b take its dtype. Inside: the GEMMs are in the dtype of a and b, as PEFT's are,
        sums at least fp32; with two dtypes, some rows are converted at a time. Out: that of base.

    Memory:
        Kept for backward: x, a, b, and ``x @ a.T``, r numbers per token. PEFT keeps x in the dtype
        of a besides, once a layer.

    Raises:
        TypeError: An argument is not a floating-point tensor, or dtypes differ in another way.
        ValueError: Shapes do not fit together, or mixed devices.

    Source:
        Hu et al. 2021 (arXiv:2106.09685); ``peft.tuners.lora.Linear``.
    """
    checks.floating("lora_update", base=base, x=x, a=a, b=b)
    fit("lora_update", x, base.shape, a, b)
    factor = checks.number("lora_update", "scale", scale)
    x, a, b = adapter_dtypes("lora_update", {"base": base, "x": x}, a, b)
    return op(base, x, a, b, factor)  # type: ignore[no-any-return]


def formula(base: Tensor, x: Tensor, a: Tensor, b: Tensor, *, scale: float = 1.0) -> Tensor:
    """``base + scale * (x @ a.T) @ b.T``."""
    update = F.linear(F.linear(x.to(a.dtype), a), b)
    return (base + update * scale).to(base.dtype)


def adapted_layer(
    x: Tensor,
    weight: Tensor,
    a: Tensor | None,
    b: Tensor | None,
    bias: Tensor | None,
    scale: float,
    weight_scale: Tensor | None,
) -> Tensor:
    """A linear layer, its weight in FP8 where it has a scale, and its adapter if it has one."""
    if weight_scale is None:
        base = F.linear(x, weight, bias)
    else:
        base = linear_float8_formula(x, weight, bias, weight_scale=weight_scale)
    return base if a is None or b is None else formula(base, x, a, b, scale=scale)


def work(shapes: Shapes, size: int, options: Options) -> Work:
    inputs, outputs = math.prod(shapes["x"]), math.prod(shapes["base"])
    product = 2.0 * shapes["a"][0] * (inputs + outputs)
    # x and base read, y written; then dy and x read, dx written
    forward = (inputs + 2 * outputs) * size
    return Work(forward, forward + (outputs + 2 * inputs) * size, product, 3 * product)


def fit(op: str, x: Tensor, out: tuple[int, ...], a: Tensor, b: Tensor, prefix: str = "") -> None:
    """``(x @ a.T) @ b.T`` has the shape ``out``."""
    a_name, b_name = f"{prefix}a", f"{prefix}b"
    if x.ndim == 0 or x.shape[:-1] != out[:-1]:
        checks.refuse(
            op, "x and base must have the same leading axes", f"{tuple(x.shape)} and {tuple(out)}"
        )
    if a.ndim != 2 or a.shape[1] != x.shape[-1]:
        checks.refuse(
            op,
            f"{a_name} must have shape (r, {x.shape[-1]}), a column for each of the layer's inputs",
            a,
        )
    if b.shape != (out[-1], a.shape[0]):
        checks.refuse(
            op,
            f"{b_name} must have shape {(out[-1], a.shape[0])}, outputs of the layer "
            f"by rows of {a_name}",
            b,
        )


def adapter_dtypes(
    op: str, base: dict[str, Tensor], a: Tensor, b: Tensor, prefix: str = ""
) -> tuple[Tensor, Tensor, Tensor]:
    """X (the last of ``base``), a and b, in autocast's dtype where it is on.

    Raises:
        TypeError: Outside of autocast, tensors of the base differ among themselves, or a and b.
    """
    x = list(base.values())[-1]
    if checks.autocast_dtype(x.device.type) is not None:
        x, a, b = checks.one_dtype(op, {"x": x, "a": a, "b": b})  # type: ignore[assignment]
        return x, a, b
    checks.one_dtype(op, base)
    checks.one_dtype(op, {f"{prefix}a": a, f"{prefix}b": b})
    if a.dtype.itemsize < x.dtype.itemsize:
        dtypes = [str(t.dtype).removeprefix("torch.") for t in (x, a)]
        raise TypeError(
            f"{op}: adapters must not be narrower than the layer, got a layer of {dtypes[0]} with "
            f"{prefix}a of {dtypes[1]}"
        )
    return x, a, b


def frozen(op: str, weights: dict[str, Tensor | None], alternative: str) -> None:
    """No weight or bias of a layer asks for a gradient, which the operator does not compute."""
    if not torch.is_grad_enabled():
        return
    for name, weight in weights.items():
        if weight is not None and weight.requires_grad:
            checks.refuse(
                op,
                "the layers must be frozen",
                f"a {name} that requires a gradient; call {alternative}",
            )


def case(rows: tuple[int, ...], width: int, out: int, rank: int, **specs: T) -> dict[str, T]:
    """Tensors of a sample; ``specs`` replace some."""
    tensors = {
        "base": T((*rows, out)),
        "x": T((*rows, width)),
        "a": T((rank, width), scale=max(1, width) ** -0.5),
        "b": T((out, rank), scale=max(1, rank) ** -0.5),
    }
    return tensors | specs


def in_float8(tensors: dict[str, T], *names: str) -> dict[str, T]:
    """The same tensors in fp32, of which the weights of some layers are codes with scales.

    Inner rows are rounded to FP8, so a 16-bit rounding before that may change a code.
    """
    wide = {name: replace(t, dtype=torch.float32) for name, t in tensors.items()}
    return coded_weights(wide, *names)


def with_fp32_adapters(tensors: dict[str, T]) -> dict[str, T]:
    """The same tensors, beside a layer in 16 bits."""
    return tensors | {name: replace(tensors[name], wide=True) for name in ("a", "b")}


SAMPLES = (
    Sample("rows", case((2, 5), 16, 24, 4), {"scale": 2.0}),
    Sample("odd-widths", case((7,), 13, 19, 3), {"scale": 0.3}),
    Sample("rank-1", case((5,), 8, 12, 1), {"scale": 4.0}),
    Sample("rank-17", case((9,), 24, 20, 17), {"scale": 0.5}),
    Sample("rank-192", case((5,), 24, 16, 192), {"scale": 0.1}, path="library"),
    Sample(
        "fp32-adapters", with_fp32_adapters(case((7,), 24, 40, 4)), {"scale": 2.0}, path="parts"
    ),
    Sample("fp32-adapters-rank-17", with_fp32_adapters(case((5,), 16, 24, 17))),
    Sample("one-row", case((1,), 16, 24, 4), {"scale": 2.0}),
    Sample("one-axis", case((), 8, 12, 2)),
    Sample("no-rows", case((0,), 8, 12, 2)),
    Sample("sliced-x", case((4,), 8, 12, 2, x=T((4, 8), layout="sliced"))),
    Sample("transposed-x", case((2, 4), 8, 12, 2, x=T((2, 4, 8), layout="transposed"))),
    Sample(
        "gaps-between-rows",
        case((4,), 8, 12, 2, x=T((4, 8), layout="rows"), base=T((4, 12), layout="rows")),
    ),
    Sample("expanded-base", case((4,), 8, 12, 2, base=T((4, 12), layout="expanded"))),
    Sample("frozen-x", case((4,), 8, 12, 2, x=T((4, 8), grad=False))),
    Sample("only-b", case((4,), 8, 12, 2, x=T((4, 8), grad=False), a=T((2, 8), grad=False))),
    Sample("past-65535-rows", case((65537,), 4, 4, 2), {"scale": 2.0}, size="thin"),
    Sample("8192x4096x4096-r16", case((8192,), 4096, 4096, 16), {"scale": 2.0}, size="bench"),
    Sample("8192x4096x14336-r16", case((8192,), 4096, 14336, 16), {"scale": 2.0}, size="bench"),
)
COMPILE_SAMPLES = (
    Sample("8192x4096x4096-r16-fp32", with_fp32_adapters(case((8192,), 4096, 4096, 16))),
    Sample("8192x4096x4096-r128", case((8192,), 4096, 4096, 128)),
)
