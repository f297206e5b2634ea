"""Contract of ``gated_mlp_float8``."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from liger_multi import checks
from liger_multi.dispatch.bitwise import BY_OUR_GEMM, bitwise
from liger_multi.dispatch.early_save import EarlySave, empty_of
from liger_multi.dispatch.op import Op
from liger_multi.ops._float8 import OUTPUTS, QuantizedOutput
from liger_multi.ops._formulas import gated_product
from liger_multi.ops.gated_mlp import ACTIVATIONS, shapes_fit, shapes_of, unread, work as work
from liger_multi.ops.linear_float8 import (
    CODES,
    Float8Rows,
    coded_weights,
    fitting,
    formula as linear_float8_formula,
    linear_float8_with_codes,
    op as linear_op,
    row_scales,
    weight_scales_fit,
)
from liger_multi.testing.samples import Sample, Tensor as T

LAYERS = ("gate", "up", "down")
_WIDE = tuple(f"{layer}_weight" for layer in LAYERS)
op = Op(
    "gated_mlp_float8",
    family="float8",
    rowwise=True,
    bitwise=bitwise(BY_OUR_GEMM, "x y gate up codes codes_scale", 1),
)


@op.forward(
    returns="y",
    residuals="gate up gate_scale up_scale down_scale",
)
def forward(
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    down_weight: Tensor,
    gate_bias: Tensor | None,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    activation: str,
    gate_weight_scale: Tensor | None,
    up_weight_scale: Tensor | None,
    down_weight_scale: Tensor | None,
    codes: Tensor | None,
    codes_scale: Tensor | None,
    gate_weight_codes: Tensor | None,
    up_weight_codes: Tensor | None,
    down_weight_codes: Tensor | None,
    needs_x: bool,
    needs_gate_weight: bool,
    needs_up_weight: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    row_shape = x.shape[:-1]
    inner = (*row_shape, gate_weight.shape[0])
    pairs = (
        (gate_weight, gate_weight_scale),
        (up_weight, up_weight_scale),
        (down_weight, down_weight_scale),
    )
    new_scales = [
        x.new_empty((weight.shape[0] if scale is None else 0,), dtype=torch.float32)
        for weight, scale in pairs
    ]
    y = x.new_empty((*row_shape, down_weight.shape[0]))
    return y, x.new_empty(inner), x.new_empty(inner), new_scales[0], new_scales[1], new_scales[2]


def _gradients(**kwargs: Any) -> tuple[Tensor, ...]:
    gate, shapes = kwargs["gate"], shapes_of(kwargs)
    dtypes = {n: kwargs[f"{n}_weight_dtype"] for n in ("gate", "up")}
    dtypes["down"] = kwargs["down_weight"].dtype
    return tuple(
        [
            gate.new_empty(
                shape if kwargs[f"needs_{n}"] else (0,),
                dtype=dtypes[n.removesuffix("_weight")] if n.endswith("_weight") else gate.dtype,
            )
            for n, shape in shapes.items()
        ]
    )


op.backward(
    reads="dy x? gate_weight? up_weight? down_weight gate up activation gate_weight_scale "
    "up_weight_scale down_weight_scale gate_weight_codes up_weight_codes down_weight_codes "
    "gate_scale up_scale down_scale gate_weight_dtype up_weight_dtype",
    returns="dx dgate_weight dup_weight ddown_weight dgate_bias dup_bias ddown_bias",
    not_saved=unread,
    shapes=_gradients,
)


def gated_mlp_float8(
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    down_weight: Tensor,
    *,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: str = "silu",
    gate_weight_scale: Tensor | None = None,
    up_weight_scale: Tensor | None = None,
    down_weight_scale: Tensor | None = None,
    gate_weight_codes: Tensor | None = None,
    up_weight_codes: Tensor | None = None,
    down_weight_codes: Tensor | None = None,
    quantized: Float8Rows | None = None,
) -> Tensor:
    """A whole gated MLP whose outputs and input gradients are FP8 GEMMs.

    Math:
        ``gate``, ``up`` and ``y`` of ``gated_mlp``, each layer as ``linear_float8``: x is rounded
        once for both, ``act(gate) * up`` by the kernel that computes it, and so are the gradients
        of gate and up, each times the scales of its layer's weight. The bits are those of three
        ``linear_float8`` around ``swiglu`` or ``geglu``. Weight gradients are GEMMs of unrounded
        numbers.

    Shapes:
        x ``(..., H)`` with any strides, gate_weight and up_weight ``(F, H)``, down_weight
        ``(D, F)``, gate_bias and up_bias ``(F,)``, down_bias ``(D,)``; y ``(..., D)``, contiguous.
        Scales of weights in FP8 ``(F,)`` and ``(D,)``; beside a trained weight that has been
        rounded before, codes of its shape, which are read in its place; quantized, if x has been
        rounded before: codes ``(..., H)`` and scale ``(...)``.

    Dtypes:
        In: x, weights and biases of one floating dtype; under autocast, which sets the dtype of x
        and biases, weights are quantized as they are. With its scale (fp32), a weight holds codes
        (float8_e4m3fn, or float8_e4m3fnuz on AMD's CDNA3) and is frozen, or has codes beside it.
        Inside: as ``linear_float8``; the activation is fp32 (fp64 for fp64), rounded to the dtype
        of gate. Out: that of x.

    Memory:
        Kept for backward: x, gate and up, the weights that backward needs, 4 bytes per row of
        weight; layers around an activation keep ``(..., F)`` once more. Backward holds three of
        ``(..., F)`` and codes of two for a while. Under PyTorch's checkpointing, neither the
        product nor the last GEMM is computed again.

    Raises:
        TypeError: An argument is not a floating-point tensor, dtypes differ without autocast, or
            codes and scales of a weight do not come together.
        ValueError: Shapes do not fit together, mixed devices, unknown activation, or codes that
            require a gradient.

    Source:
        Shazeer 2020 (arXiv:2002.05202); torchao's ``rowwise_with_gw_hp``, with the scales of
        weights in the rows of gradients.
    """
    name = "gated_mlp_float8"
    weights = dict(zip(_WIDE, (gate_weight, up_weight, down_weight), strict=True))
    biases = {"gate_bias": gate_bias, "up_bias": up_bias, "down_bias": down_bias}
    weight_scales = (gate_weight_scale, up_weight_scale, down_weight_scale)
    weight_codes = (gate_weight_codes, up_weight_codes, down_weight_codes)
    checks.floating(name, x=x, **weights, **biases, optional=tuple(biases))
    checks.one_of(name, "activation", activation, ACTIVATIONS)
    shapes_fit(name, x, gate_weight, up_weight, down_weight)
    for bias, tensor in biases.items():
        rows = f"{bias.removesuffix('bias')}weight"
        checks.vector(name, bias, tensor, weights[rows].shape[0], f"rows of {rows}")
    weight_scales_fit(name, weights, weight_scales, weight_codes)
    is_autocast = checks.autocast_dtype(x.device.type) is not None
    plain = {n: w for n, w in weights.items() if w.dtype not in CODES}
    tensors = {"x": x, **biases} if is_autocast else {"x": x, **plain, **biases}
    cast = dict(zip(tensors, checks.one_dtype(name, tensors), strict=True))
    first = cast["x"]
    assert first is not None
    wide = (*weights.values(), *(cast[bias] for bias in biases))
    operands = (
        first,
        *wide,
        activation,
        *weight_scales,
        *fitting(name, x, quantized),
        *weight_codes,
    )
    if not checks.in_checkpoint():
        return op(*operands)  # type: ignore[no-any-return]
    if checks.keeps_products.get():
        return _in_layers(first, wide, weight_scales, weight_codes, activation, quantized)
    return _early(*operands)


# --- under checkpointing ---


def _gate_and_up(
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    down_weight: Tensor,
    gate_bias: Tensor | None,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    activation: str,
    gate_own: Tensor | None,
    up_own: Tensor | None,
    down_own: Tensor | None,
    codes: Tensor | None,
    codes_scale: Tensor | None,
    gate_codes: Tensor | None,
    up_codes: Tensor | None,
    down_codes: Tensor | None,
    *needs: bool,
) -> tuple[tuple[Tensor, ...], tuple[Tensor, Tensor]]:
    """First part: gate, up, the scales of all weights, and an empty result."""
    run, flags = linear_op.fwd.run, (False, False)
    args = (gate_weight, gate_bias, gate_own, codes, codes_scale, gate_codes)
    gate, *output, first = run(x, *args, *flags)
    rows = output if codes is None else (codes, codes_scale)
    up, _, _, second = run(x, up_weight, up_bias, up_own, *rows, up_codes, *flags)
    third = row_scales(down_weight) if down_own is None else first.new_empty(0)
    empty = empty_of(x, *x.shape[:-1], down_weight.shape[0])
    return (empty, gate, up, first, second, third), (gate, up)


def _down(gate_and_up: tuple[Tensor, Tensor], *args: Any) -> Tensor:
    """Second part: the result from gate and up, whose product exists in FP8 only."""
    weight, bias, activation, weight_scale, weight_codes = (args[i] for i in (3, 6, 7, 10, 15))
    _, rows = activated(*gate_and_up, activation, ("quantized",))
    inner = empty_of(gate_and_up[0], *gate_and_up[0].shape)  # only its codes are read
    y, *_ = linear_op(
        inner, weight, bias, weight_scale, rows.codes.view(torch.uint8), rows.scale, weight_codes
    )
    return y  # type: ignore[no-any-return]


_early = EarlySave(op, _gate_and_up, _down)


def _in_layers(
    x: Tensor,
    wide: tuple[Tensor | None, ...],
    weight_scales: tuple[Tensor | None, ...],
    weight_codes: tuple[Tensor | None, ...],
    activation: str,
    rows: Float8Rows | None,
) -> Tensor:
    """The MLP as separate operators, for policies that keep GEMMs and not activations."""

    def layer(i: int, x: Tensor, rows: Float8Rows | None) -> tuple[Tensor, Float8Rows]:
        weight = wide[i]
        assert weight is not None
        return linear_float8_with_codes(
            x,
            weight,
            wide[3 + i],
            weight_scale=weight_scales[i],
            weight_codes=weight_codes[i],
            quantized=rows,
        )

    gate, rows = layer(0, x, rows)
    up, _ = layer(1, x, rows)
    inner, rows = activated(gate, up, activation)
    assert inner is not None
    return layer(2, inner, rows)[0]


def activated(
    gate: Tensor, up: Tensor, activation: str, outputs: tuple[str, ...] = OUTPUTS
) -> QuantizedOutput:
    """``act(gate) * up`` and its codes."""
    from liger_multi.ops.geglu import geglu_quantized
    from liger_multi.ops.swiglu import swiglu_quantized

    approximate = {"gelu": "none", "gelu_tanh": "tanh"}.get(activation)
    if approximate is None:
        return swiglu_quantized(gate, up, outputs=outputs)
    return geglu_quantized(gate, up, approximate, outputs=outputs)


def _case(
    rows: tuple[int, ...],
    hidden: int,
    inner: int,
    outer: int = 0,
    bias: bool = False,
    **frozen: bool,
) -> dict[str, T]:
    """Tensors of a sample; names in ``frozen`` get no gradient.

    Inner rows are rounded to FP8, so a 16-bit rounding before that may change a code.
    """
    outer = outer or hidden
    shapes: dict[str, tuple[int, ...]] = {
        "x": (*rows, hidden),
        "gate_weight": (inner, hidden),
        "up_weight": (inner, hidden),
        "down_weight": (outer, inner),
    }
    if bias:
        shapes |= {"gate_bias": (inner,), "up_bias": (inner,), "down_bias": (outer,)}
    scale = {n: 0.3 if len(s) == 1 else max(1, s[-1]) ** -0.5 for n, s in shapes.items()}
    scale["x"] = 1.0
    return {
        n: T(s, torch.float32, scale[n], grad=not frozen.get(n, False)) for n, s in shapes.items()
    }


def _rounded(tensors: dict[str, T], *names: str) -> dict[str, T]:
    """The tensors, with codes beside trained weights."""
    coded, wide = coded_weights(tensors, *names), [f"{layer}_weight" for layer in names]
    return {**coded, **{n: tensors[n] for n in wide}, **{f"{n}_codes": coded[n] for n in wide}}


_FROZEN: Any = dict.fromkeys(_WIDE, True)


def formula(
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    down_weight: Tensor,
    *,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: str = "silu",
    gate_weight_scale: Tensor | None = None,
    up_weight_scale: Tensor | None = None,
    down_weight_scale: Tensor | None = None,
    gate_weight_codes: Tensor | None = None,
    up_weight_codes: Tensor | None = None,
    down_weight_codes: Tensor | None = None,
    quantized: Any = None,
) -> Tensor:
    """A gated MLP of such layers."""

    def layer(x: Tensor, *parameters: Any) -> Tensor:
        weight, bias, scale, codes = parameters
        return linear_float8_formula(x, weight, bias, weight_scale=scale, weight_codes=codes)

    gate = layer(x, gate_weight, gate_bias, gate_weight_scale, gate_weight_codes)
    up = layer(x, up_weight, up_bias, up_weight_scale, up_weight_codes)
    inner = gated_product(gate, up, activation)
    return layer(inner, down_weight, down_bias, down_weight_scale, down_weight_codes)


SAMPLES = (
    Sample("rows", _case((2, 5), 16, 32)),
    Sample("gelu", _case((6,), 16, 32), {"activation": "gelu"}),
    Sample("gelu-tanh", _case((6,), 16, 32), {"activation": "gelu_tanh"}),
    Sample("biases", _case((3, 4), 16, 32, 48, True)),
    Sample("odd-widths", _case((7,), 13, 19, 11, True)),
    Sample("one-row", _case((1,), 16, 48)),
    Sample("one-axis", _case((), 16, 32)),
    Sample("no-rows", _case((0,), 16, 32, 0, True)),
    Sample("sliced", _case((6,), 16, 32) | {"x": T((6, 16), torch.float32, layout="sliced")}),
    Sample("frozen-x", _case((4,), 16, 32, 0, True, x=True), path="frozen x"),
    Sample("frozen-weights", _case((4,), 16, 32, **_FROZEN)),
    Sample("only-down-trained", _case((4,), 16, 32, gate_weight=True, up_weight=True, x=True)),
    Sample("only-gate-trained", _case((4,), 16, 32, down_weight=True, up_weight=True)),
    Sample("codes", coded_weights(_case((2, 5), 16, 32), *LAYERS)),
    Sample("codes-of-trained", _rounded(_case((2, 5), 16, 32), *LAYERS)),
    Sample("codes-of-trained-down", _rounded(_case((6,), 16, 32, 0, True), "down")),
    Sample("codes-of-up", coded_weights(_case((6,), 16, 32, 0, True), "up")),
    # of so many different rows, fp32 and fp64 would round one to different codes
    Sample(
        "past-65535-rows",
        _case((65537,), 16, 16, **_FROZEN)
        | {"x": T((65537, 16), torch.float32, layout="expanded", grad=False)},
        size="thin",
    ),
    *(
        Sample(name, {n: replace(t, dtype=None) for n, t in _case(*shape).items()}, size="bench")
        for name, shape in {
            "8192x4096x14336": ((8192,), 4096, 14336),
            "16384x2048x8192": ((16384,), 2048, 8192),
        }.items()
    ),
)
