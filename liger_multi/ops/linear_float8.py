"""Contract of ``linear_float8``."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_multi import checks
from liger_multi._torch_private import constant_in_graphs
from liger_multi.dispatch.bitwise import BY_OUR_GEMM, bitwise
from liger_multi.dispatch.op import Op
from liger_multi.ops._formulas import rounded
from liger_multi.ops.linear import work as work
from liger_multi.testing.samples import Sample, Tensor as T

CODES = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
SMALLEST = 2**22 + 1
"""Elements of a weight below which a layer gains nothing in FP8."""
op = Op(
    "linear_float8",
    family="float8",
    rowwise=True,
    bitwise=bitwise(BY_OUR_GEMM, "x y x_codes x_scale codes codes_scale", 1),
)


class Float8Rows(NamedTuple):
    """Rows in FP8, ``codes * scale``: codes ``(..., K)`` in E4M3, scale ``(...)`` in fp32."""

    codes: Tensor
    scale: Tensor


class LinearFloat8Output(NamedTuple):
    """A layer's output, and its rounded input for the next layer that reads it."""

    y: Tensor
    quantized: Float8Rows


@op.forward(returns="y x_codes x_scale", residuals="scale")
def forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    weight_scale: Tensor | None,
    codes: Tensor | None,
    codes_scale: Tensor | None,
    weight_codes: Tensor | None,
    needs_x: bool,
    needs_weight: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    row_shape, outputs, rounds_weight = x.shape[:-1], codes is None, weight_scale is None
    return (
        x.new_empty((*row_shape, weight.shape[0])),
        x.new_empty(x.shape if outputs else (0,), dtype=torch.uint8),
        x.new_empty(row_shape if outputs else (0,), dtype=torch.float32),
        x.new_empty((weight.shape[0] if rounds_weight else 0,), dtype=torch.float32),
    )


def _unread(needs_x: bool, needs_weight: bool) -> tuple[str, ...]:
    weight = () if needs_x else ("weight", "weight_codes")
    return weight if needs_weight else (*weight, "x")


def _gradients(**kwargs: Any) -> tuple[Tensor, ...]:
    """Shape rule of backward; a width is read from the tensor that was saved."""
    dy, x, weight = (kwargs[name] for name in ("dy", "x", "weight"))
    outer, dtype = dy.shape[-1], kwargs["weight_dtype"]
    return (
        dy.new_empty((*dy.shape[:-1], weight.shape[1]) if kwargs["needs_x"] else (0,)),
        dy.new_empty((outer, x.shape[-1]) if kwargs["needs_weight"] else (0,), dtype=dtype),
        dy.new_empty((outer,) if kwargs["needs_bias"] else (0,)),
    )


op.backward(
    reads="dy x? weight? weight_scale weight_codes scale weight_dtype",
    returns="dx dweight dbias",
    not_saved=_unread,
    shapes=_gradients,
)


def linear_float8(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    weight_scale: Tensor | None = None,
    weight_codes: Tensor | None = None,
    quantized: Float8Rows | None = None,
) -> Tensor:
    """A linear layer whose output and input gradient are FP8 GEMMs.

    Math:
        ``y = q(x) @ q(weight).T + bias``, ``dx = q(dy * s) @ codes(weight)`` with the codes and
        row scales ``s`` of forward, ``dweight = dy.T @ x`` unrounded. ``q`` rounds to E4M3 with one
        power-of-two scale per row, the smallest under which nothing overflows. Infinities and NaN
        make their row NaN.

    Shapes: x ``(..., K)`` with any strides, weight ``(N, K)``, bias ``(N,)``, weight_scale
        ``(N,)``; weight_codes ``(N, K)``, if a trained weight has been rounded before: then the
        values of weight are not read, but it gets the gradient and gives its dtype; quantized, if x
        has been rounded before: codes ``(..., K)`` and scale ``(...)``. y ``(..., N)``, contiguous;
        :func:`linear_float8_with_codes` also returns the rounded x, for the next layer that reads
        it.

    Dtypes:
        In: x, weight and bias of one floating dtype; under autocast, which sets the dtype of x and
        bias, weight is quantized as it is. With weight_scale (fp32), weight or weight_codes hold
        codes (float8_e4m3fn, or float8_e4m3fnuz on AMD's CDNA3); those of weight are frozen, and
        never held in another dtype. Inside: FP8 GEMMs for results of 16 bits, whose sums keep fewer
        digits than fp32 on the device (about 14 bits on Hopper); wider results are GEMMs of
        dequantized rows. Out: that of x.

    Memory:
        Kept for backward: x where weight needs a gradient, weight where x needs one, 4 bytes per
        row of weight. Codes live during a GEMM: 1 byte per element of x and weight. Without FP8
        GEMMs (a CPU, NVIDIA before Ada, sizes that are no multiples of 16) codes are dequantized
        for a GEMM in the dtype of x.

    Raises:
        TypeError: An argument is not a floating-point tensor, dtypes differ without autocast, or
            weight holds codes without weight_scale.
        ValueError: Shapes do not fit together, mixed devices, or codes that require
            a gradient.

    Source:
        torchao's ``rowwise_with_gw_hp``, with the scales of weight in the rows of dy.
    """
    return _y_and_codes(x, weight, bias, weight_scale, weight_codes, quantized)[0]


def linear_float8_with_codes(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    weight_scale: Tensor | None = None,
    weight_codes: Tensor | None = None,
    quantized: Float8Rows | None = None,
) -> LinearFloat8Output:
    """:func:`linear_float8`, and the rounded x for the next layer that reads it."""
    y, codes, scale = _y_and_codes(x, weight, bias, weight_scale, weight_codes, quantized)
    return LinearFloat8Output(y, typed(codes, scale) if quantized is None else quantized)


def _y_and_codes(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    weight_scale: Tensor | None,
    weight_codes: Tensor | None,
    quantized: Float8Rows | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Check the arguments and call the operator: y, and codes and scales where it rounded x."""
    name = "linear_float8"
    tensors: dict[str, Tensor | None] = {"x": x, "weight": weight, "bias": bias}
    checks.floating(name, **tensors, weight_scale=weight_scale, optional=("bias", "weight_scale"))
    if weight.ndim != 2:
        checks.refuse(name, "weight must have shape (N, K)", weight)
    if x.ndim == 0 or x.shape[-1] != weight.shape[1]:
        checks.refuse(
            name,
            f"the last axis of x must be K = {weight.shape[1]} of weight {tuple(weight.shape)}",
            x,
        )
    checks.vector(name, "bias", bias, weight.shape[0], "rows of weight")
    checks.vector(name, "weight_scale", weight_scale, weight.shape[0], "rows of weight")
    trained_codes_fit(name, "weight", weight, weight_scale, weight_codes)
    codes, scale = fitting(name, x, quantized)
    mixed_dtypes = weight_scale is not None or checks.autocast_dtype(x.device.type) is not None
    wide = {"x": x, "bias": bias} if mixed_dtypes else tensors
    cast = dict(zip(wide, checks.one_dtype(name, wide), strict=True))
    return op(  # type: ignore[no-any-return]
        cast["x"], weight, cast["bias"], weight_scale, codes, scale, weight_codes
    )


def codes_fit(op: str, name: str, weight: Tensor, scale: Tensor | None, scales: str = "") -> None:
    """Codes and scales of a weight come together, and have no gradient."""
    coded, scales = weight.dtype in CODES, scales or f"{name}_scale"
    if coded != (scale is not None):
        expected = f"{scales} beside codes" if coded else f"codes (float8_e4m3fn) for {scales}"
        raise TypeError(f"{op}: {expected} needed, got {name} {checks.describe(weight)}")
    if scale is None:
        return
    if scale.dtype != torch.float32:
        raise TypeError(f"{op}: {scales} must be float32, got {checks.describe(scale)}")
    if weight.requires_grad or scale.requires_grad:
        raise ValueError(f"{op}: codes and {scales} are frozen, got one that requires a gradient")


def trained_codes_fit(
    op: str, name: str, weight: Tensor, scale: Tensor | None, codes: Tensor | None
) -> None:
    """A weight holds codes or numbers, and codes may stand beside numbers."""
    if codes is None:
        codes_fit(op, name, weight, scale)
        return
    checks.floating(op, optional=(), **{name: weight, f"{name}_codes": codes})
    if weight.dtype in CODES or codes.dtype not in CODES or codes.shape != weight.shape:
        expected = f"{name}_codes must hold E4M3 codes of {name}, which is in another dtype"
        checks.refuse(op, expected, f"{checks.describe(codes)} and {checks.describe(weight)}")
    codes_fit(op, f"{name}_codes", codes, scale, f"{name}_scale")


def rounded_rows(x: Tensor) -> Float8Rows:
    """The rows of a matrix in FP8, by the backend that serves ``linear_float8``.

    For weights that are rounded apart from their GEMMs; it is a layer without outputs.
    """
    with torch.no_grad():
        _, *output = op(x, x.new_empty(0, x.shape[1]), None, None, None, None, None)
    return typed(*output)


def weight_scales_fit(
    op: str,
    weights: Mapping[str, Tensor | None],
    scales: Sequence[Tensor | None],
    weight_codes: Sequence[Tensor | None] = (None, None, None),
) -> None:
    """Every weight of several layers holds numbers, or has codes with scales of its rows."""
    for (name, weight), scale, codes in zip(weights.items(), scales, weight_codes, strict=True):
        if weight is None:
            if scale is not None:
                raise ValueError(f"{op}: {name}_scale needs {name} beside it, got None")
            continue
        if scale is not None:
            checks.floating(op, optional=(), **{name: weight, f"{name}_scale": scale})
        checks.vector(op, f"{name}_scale", scale, weight.shape[0], f"rows of {name}")
        trained_codes_fit(op, name, weight, scale, codes)


def one_dtype_but_codes(
    op: str, x: Tensor, weights: Mapping[str, Tensor | None], biases: Mapping[str, Tensor | None]
) -> tuple[Tensor, list[Tensor | None]]:
    """x, and weights and biases, in one dtype; weights that hold codes as they are."""
    tensors = {"x": x, **weights, **biases}
    coded = {n: t for n, t in weights.items() if t is not None and t.dtype in CODES}
    plain = {n: t for n, t in tensors.items() if n not in coded}
    cast = dict(zip(plain, checks.one_dtype(op, plain), strict=True)) | coded
    first = cast["x"]
    assert first is not None
    return first, [cast[n] for n in (*weights, *biases)]


def row_scales(weight: Tensor) -> Tensor:
    """The scales that the rows of a weight will be rounded with."""
    from liger_multi.reference.float8.rows import format_of, scale_of

    rows, columns = weight.shape
    if columns:
        largest = torch.linalg.vector_norm(weight, math.inf, dim=1).float()
    else:
        largest = weight.new_zeros(rows, dtype=torch.float32)
    return scale_of(largest.view(torch.int32) & 0x7FFFFFFF, format_of(weight.device))


def typed(codes: Tensor, scale: Tensor) -> Float8Rows:
    """Codes leave the operator as bytes: the format is the device's, which no shape rule knows."""
    return Float8Rows(codes.view(_format(codes.device)), scale)


@constant_in_graphs
def _format(device: torch.device) -> torch.dtype:
    from liger_multi.reference.float8.rows import format_of

    return format_of(device)


def fitting(
    op: str, x: Tensor, quantized: Float8Rows | None
) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """Codes of x as bytes, and scales; or neither."""
    if quantized is None:
        return None, None
    if not isinstance(quantized, Float8Rows):
        raise TypeError(f"{op}: quantized must be Float8Rows, got {checks.describe(quantized)}")
    codes, scale = quantized
    if codes.dtype not in CODES or codes.shape != x.shape or scale.shape != x.shape[:-1]:
        checks.refuse(
            op,
            f"quantized must hold E4M3 codes {tuple(x.shape)} and scales {tuple(x.shape[:-1])}",
            f"{checks.describe(codes)} and {checks.describe(scale)}",
        )
    return codes.view(torch.uint8), scale


def _case(
    rows: tuple[int, ...], width: int, out: int, bias: bool = False, **specs: T
) -> dict[str, T]:
    """Tensors of a sample; ``specs`` replace some."""
    tensors = {"x": T((*rows, width)), "weight": T((out, width), scale=max(1, width) ** -0.5)}
    return tensors | ({"bias": T((out,), scale=0.3)} if bias else {}) | specs


def coded_weights(tensors: dict[str, T], *names: str) -> dict[str, T]:
    """The tensors of a sample, with the weights of some layers as codes with scales."""
    coded = dict(tensors)
    for name in (f"{layer}_weight" for layer in names):
        rows, columns = coded[name].shape
        coded[name] = T((rows, columns), CODES[0], columns**-0.5, grad=False)
        coded[f"{name}_scale"] = T((rows,), torch.float32, positive=True, grad=False)
    return coded


def _coded(rows: tuple[int, ...], width: int, out: int, bias: bool = False) -> dict[str, T]:
    """The tensors, with a frozen weight as codes."""
    codes = T((out, width), CODES[0], 32.0, grad=False)
    scale = T((out,), torch.float32, positive=True, grad=False)
    return _case(rows, width, out, bias, weight=codes, weight_scale=scale)


def _rounded(rows: tuple[int, ...], width: int, out: int, bias: bool = False) -> dict[str, T]:
    """The tensors, with codes beside a trained weight."""
    coded = _coded(rows, width, out, bias)
    weight = _case(rows, width, out)["weight"]
    return {**coded, "weight": weight, "weight_codes": coded["weight"]}


def _frozen(*shape: int) -> T:
    return T(shape, grad=False)


class _LinearFloat8(torch.autograd.Function):
    """Both GEMMs of rounded factors; rounding itself has no gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, scale: Tensor | None, codes_or_weight: Tensor | None
    ) -> Tensor:
        stored = weight if codes_or_weight is None else codes_or_weight
        codes, weight_scale = (
            rounded(weight) if scale is None else (stored.to(x.dtype), scale[:, None])
        )
        ctx.save_for_backward(x, codes, weight_scale)
        rows, rows_scale = rounded(x)
        return F.linear(rows, codes) * rows_scale * weight_scale.squeeze(1)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (dy,), (x, codes, scale) = upstream, ctx.saved_tensors
        rows, rows_scale = rounded(dy * scale.squeeze(1))
        dweight = torch.atleast_2d(dy).flatten(0, -2).t() @ torch.atleast_2d(x).flatten(0, -2)
        return (rows @ codes) * rows_scale, dweight, None, None


def formula(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    weight_scale: Tensor | None = None,
    weight_codes: Tensor | None = None,
    quantized: Any = None,
    return_quantized: bool = False,
) -> Tensor:
    """``q(x) @ q(weight).T + bias``, and the input gradient from the same codes of weight."""
    y: Tensor = _LinearFloat8.apply(x, weight, weight_scale, weight_codes)  # type: ignore[no-untyped-call]
    return y if bias is None else y + bias


SAMPLES = (
    Sample("rows", _case((2, 5), 16, 32)),
    Sample("bias", _case((2, 5), 16, 32, True)),
    Sample("odd-widths", _case((7,), 13, 19, True)),
    Sample("one-row", _case((1,), 16, 48, True)),
    Sample("one-axis", _case((), 16, 32, True)),
    Sample("no-rows", _case((0,), 16, 16, True)),
    Sample("no-columns", _case((3,), 0, 16, True)),
    Sample("wide", _case((3,), 18000, 16), path="rows in steps"),
    Sample("large-numbers", _case((5,), 32, 16, x=T((5, 32), scale=2e3))),
    Sample("sliced", _case((4,), 16, 32, True, x=T((4, 16), layout="sliced"))),
    Sample("transposed", _case((2, 4), 16, 32, True, x=T((2, 4, 16), layout="transposed"))),
    Sample("transposed-weight", _case((4,), 16, 32, weight=T((32, 16), layout="transposed"))),
    Sample("expanded", _case((4,), 16, 32, x=T((4, 16), layout="expanded"))),
    Sample("frozen-x", _case((4,), 16, 32, True, x=_frozen(4, 16))),
    Sample("frozen-weight", _case((4,), 16, 32, True, weight=_frozen(32, 16))),
    Sample("only-bias", _case((4,), 16, 32, True, x=_frozen(4, 16), weight=_frozen(32, 16))),
    Sample("codes", _coded((2, 5), 16, 32)),
    Sample("codes-bias", _coded((6,), 48, 16, True)),
    Sample("codes-of-trained", _rounded((2, 5), 16, 32)),
    Sample("codes-of-trained-bias", _rounded((6,), 13, 19, True)),
    Sample("past-65535-rows", _case((65537,), 16, 16, weight=_frozen(16, 16)), size="thin"),
    Sample("8192x4096x14336", _case((8192,), 4096, 14336), size="bench"),
    Sample("16384x2048x8192", _case((16384,), 2048, 8192), size="bench"),
    Sample("8192x4096x4096", _case((8192,), 4096, 4096), size="bench"),
    Sample("8192x4096x14336-codes", _coded((8192,), 4096, 14336), size="bench"),
)
COMPILE_SAMPLES = (Sample("8192x28672x4096", _case((8192,), 28672, 4096)),)
