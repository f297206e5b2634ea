"""Contract of ``lora_mlp``."""

import math
from typing import Any

import torch
from torch import Tensor

from liger_multi import checks
from liger_multi.dispatch.bitwise import BY_OUR_GEMM, bitwise
from liger_multi.dispatch.early_save import EarlySave, empty_of
from liger_multi.dispatch.op import Op
from liger_multi.ops._adapters import LoRA, adapters, factors, scales
from liger_multi.ops._float8 import OUTPUTS
from liger_multi.ops._formulas import gated_product
from liger_multi.ops._work import Options, Shapes, Work
from liger_multi.ops.gated_mlp import ACTIVATIONS, shapes_fit
from liger_multi.ops.gated_mlp_float8 import activated
from liger_multi.ops.linear import linear_of_mode
from liger_multi.ops.linear_float8 import (
    Float8Rows,
    fitting,
    linear_float8_with_codes,
    one_dtype_but_codes,
    weight_scales_fit,
)
from liger_multi.ops.lora_qkv import op as qkv_op
from liger_multi.ops.lora_update import (
    adapted_layer,
    adapter_dtypes,
    fit,
    frozen,
    in_float8,
    lora_update,
)
from liger_multi.testing.samples import Sample, Tensor as T

LAYERS = ("gate", "up", "down")
_BIASES = tuple(f"{layer}_bias" for layer in LAYERS)
op = Op(
    "lora_mlp",
    family="adapters",
    rowwise=True,
    bitwise=bitwise(BY_OUR_GEMM, "x y gate up codes codes_scale", 1),
    opens=True,
)


@op.forward(returns="y", residuals="gate up")
def forward(
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    down_weight: Tensor,
    gate_a: Tensor | None,
    gate_b: Tensor | None,
    up_a: Tensor | None,
    up_b: Tensor | None,
    down_a: Tensor | None,
    down_b: Tensor | None,
    gate_bias: Tensor | None,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    gate_scale: float,
    up_scale: float,
    down_scale: float,
    activation: str,
    gate_weight_scale: Tensor | None,
    up_weight_scale: Tensor | None,
    down_weight_scale: Tensor | None,
    codes: Tensor | None,
    codes_scale: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    row_shape = x.shape[:-1]
    inner = (*row_shape, gate_weight.shape[0])
    return x.new_empty((*row_shape, down_weight.shape[0])), x.new_empty(inner), x.new_empty(inner)


op.backward(
    reads="dy x gate_weight up_weight down_weight gate_a gate_b up_a up_b down_a down_b gate up "
    "gate_scale up_scale down_scale activation gate_weight_scale up_weight_scale "
    "down_weight_scale",
    returns="dx dgate_a dgate_b dup_a dup_b ddown_a ddown_b",
)


def lora_mlp(
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    down_weight: Tensor,
    gate_lora: LoRA | None = None,
    up_lora: LoRA | None = None,
    down_lora: LoRA | None = None,
    *,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: str = "silu",
    gate_weight_scale: Tensor | None = None,
    up_weight_scale: Tensor | None = None,
    down_weight_scale: Tensor | None = None,
    quantized: Float8Rows | None = None,
) -> Tensor:
    """A gated MLP with LoRA adapters that keeps no activation but the outputs of gate and up.

    Math:
        With ``layer(x) = x @ weight.T + bias + scale (x @ a.T) @ b.T`` and a, b and scale from
        ``LoRA(a, b, scale)``, where a layer without an adapter has none of the last term: ``y =
        down(act(gate(x)) * up(x))``. The weights and biases are frozen: backward makes the
        gradients of a and b by GEMMs with r columns or rows, and of x in one buffer; it computes
        ``x @ a.T`` and ``act(gate) * up`` again. A weight in FP8 is multiplied as in
        ``linear_float8``, with x (and the product) rounded once for all.

    Shapes:
        x ``(..., H)`` with any strides, gate_weight and up_weight ``(F, H)``, down_weight
        ``(D, F)``, biases as in ``gated_mlp``; of gate_lora and up_lora a ``(r, H)`` and b
        ``(F, r)``, of down_lora a ``(r, F)`` and b ``(D, r)``, each with an r of its own; y
        ``(..., D)``, contiguous. Scales of weights in FP8 ``(F,)`` and ``(D,)``; quantized, if x
        has been rounded before: codes ``(..., H)`` and scale ``(...)``.

    Dtypes:
        In: x, weights and biases of one floating dtype, adapters of one, which may be wider; any
        under autocast, which then sets the dtype of all. With its scale (fp32), a weight holds
        codes (float8_e4m3fn, or float8_e4m3fnuz on AMD's CDNA3). Inside: as ``gated_mlp``,
        ``linear_float8`` and ``lora_update``. Out: that of x.

    Memory:
        Kept for backward: x, gate and up. PEFT's layers around an activation keep the activation
        and the product besides, each ``(..., F)``, and copies of x and of the product in the dtype
        of the adapters.

    Raises:
        TypeError: An argument is not a floating-point tensor, an adapter has no a or b, dtypes
            differ in another way, or codes and scales of a weight do not come together.
        ValueError: Shapes do not fit together, mixed devices, unknown activation, or a weight that
            requires a gradient.

    Source:
        Hu et al. 2021 (arXiv:2106.09685) in Shazeer 2020 (arXiv:2002.05202); ``peft`` around
        transformers ``LlamaMLP``.
    """
    weights = {"gate_weight": gate_weight, "up_weight": up_weight, "down_weight": down_weight}
    biases = {"gate_bias": gate_bias, "up_bias": up_bias, "down_bias": down_bias}
    weight_scales = (gate_weight_scale, up_weight_scale, down_weight_scale)
    loras = adapters("lora_mlp", gate=gate_lora, up=up_lora, down=down_lora)
    checks.floating("lora_mlp", x=x, **weights, **biases, **factors(loras), optional=_BIASES)
    checks.one_of("lora_mlp", "activation", activation, ACTIVATIONS)
    shapes_fit("lora_mlp", x, gate_weight, up_weight, down_weight)
    for name, bias in biases.items():
        rows = f"{name.removesuffix('bias')}weight"
        checks.vector("lora_mlp", name, bias, weights[rows].shape[0], f"rows of {rows}")
    weight_scales_fit("lora_mlp", weights, weight_scales)
    alternative = "gated_mlp, or the layers themselves with lora_update"
    frozen("lora_mlp", {**weights, **biases}, alternative)
    adapted: list[Tensor | None] = []
    inner = x.shape[:-1] + gate_weight.shape[:1]
    for name, lora in loras.items():
        if lora is None:
            adapted += [None, None]
            continue
        source = x.new_empty(inner, device="meta") if name == "down" else x
        out = (*x.shape[:-1], weights[f"{name}_weight"].shape[0])
        fit("lora_mlp", source, out, lora.a, lora.b, f"{name}_lora.")
        adapted += adapter_dtypes("lora_mlp", {"x": x}, lora.a, lora.b, f"{name}_lora.")[1:]
    x, wide = one_dtype_but_codes("lora_mlp", x, weights, biases)
    lora_scales = scales(loras)
    coded = fitting("lora_mlp", x, quantized)
    operands = (x, *wide[:3], *adapted, *wide[3:], *lora_scales, activation, *weight_scales, *coded)
    if not checks.in_checkpoint():
        return op(*operands)  # type: ignore[no-any-return]
    if checks.keeps_products.get():
        return _in_layers(x, wide, adapted, lora_scales, activation, weight_scales, quantized)
    return _early(*operands)


def formula(
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    down_weight: Tensor,
    gate_a: Tensor | None = None,
    gate_b: Tensor | None = None,
    up_a: Tensor | None = None,
    up_b: Tensor | None = None,
    down_a: Tensor | None = None,
    down_b: Tensor | None = None,
    *,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    gate_scale: float = 1.0,
    up_scale: float = 1.0,
    down_scale: float = 1.0,
    activation: str = "silu",
    gate_weight_scale: Tensor | None = None,
    up_weight_scale: Tensor | None = None,
    down_weight_scale: Tensor | None = None,
    quantized: Any = None,
) -> Tensor:
    """A gated MLP, each of whose layers may have an adapter, and a weight in FP8."""
    gate = adapted_layer(x, gate_weight, gate_a, gate_b, gate_bias, gate_scale, gate_weight_scale)
    up = adapted_layer(x, up_weight, up_a, up_b, up_bias, up_scale, up_weight_scale)
    inner = gated_product(gate, up, activation)
    return adapted_layer(
        inner, down_weight, down_a, down_b, down_bias, down_scale, down_weight_scale
    )


def work(shapes: Shapes, size: int, options: Options) -> Work:
    rows, inner = math.prod(shapes["x"][:-1]), shapes["gate_weight"][0]
    width, outer = shapes["x"][-1], shapes["down_weight"][0]
    product = 2.0 * rows * inner * (2 * width + outer)
    # frozen layers have no gradient, so backward has as many GEMMs as forward
    return Work(3 * rows * inner * size, 9 * rows * inner * size, product, 2 * product)


# --- under checkpointing ---


def _in_layers(
    x: Tensor,
    wide: list[Tensor | None],
    factors: list[Tensor | None],
    lora_scales: list[float],
    activation: str,
    weight_scales: tuple[Tensor | None, ...],
    rows: Float8Rows | None,
) -> Tensor:
    """The MLP as separate operators, for policies that keep GEMMs and not activations."""
    from liger_multi.ops import geglu, swiglu

    def layer(i: int, x: Tensor, rows: Float8Rows | None) -> tuple[Tensor, Float8Rows | None]:
        weight = wide[i]
        assert weight is not None
        if weight_scales[i] is None:
            y = linear_of_mode(x, weight, wide[3 + i])
        else:
            y, rows = linear_float8_with_codes(
                x, weight, wide[3 + i], weight_scale=weight_scales[i], quantized=rows
            )
        a, b = factors[2 * i], factors[2 * i + 1]
        return y if a is None or b is None else lora_update(y, x, a, b, scale=lora_scales[i]), rows

    gate, rows = layer(0, x, rows)
    up, _ = layer(1, x, rows)
    if weight_scales[2] is not None:
        inner, rows = activated(gate, up, activation)
        assert inner is not None
        return layer(2, inner, rows)[0]
    approximate = {"gelu": "none", "gelu_tanh": "tanh"}.get(activation)
    inner = swiglu(gate, up) if approximate is None else geglu(gate, up, approximate)
    return layer(2, inner, None)[0]


def _layers(x: Tensor, args: Any, slots: tuple[int, ...], *codes: Tensor | None) -> list[Tensor]:
    """Some layers of one input, as ``lora_qkv``; ``args`` are the arguments of the operator."""

    def part(start: int, step: int = 1, count: int = 1) -> list[Any]:
        tensors = [t for i in slots for t in args[start + step * i : start + step * i + count]]
        return [*tensors, *[None] * count * (3 - len(slots))]

    scales = [args[13 + i] for i in slots] + [1.0] * (3 - len(slots))
    return qkv_op.fwd.run(  # type: ignore[no-any-return]
        x, *part(1), *part(4, 2, 2), *part(10), *scales, *part(17), *codes
    )[: len(slots)]


def _gate_and_up(*args: Any) -> tuple[tuple[Tensor, ...], tuple[Tensor, Tensor]]:
    """First part: gate, up, and an empty result."""
    x, down = args[0], args[3]
    dtypes = {t.dtype for t in (args[4], args[6]) if t is not None}
    if len(dtypes) < 2:
        gate, up = _layers(x, args, (0, 1), *args[20:22])
    else:
        gate, up = (_layers(x, args, (i,), *args[20:22])[0] for i in (0, 1))
    return (empty_of(x, *x.shape[:-1], down.shape[0]), gate, up), (gate, up)


def _down(gate_and_up: tuple[Tensor, Tensor], *args: Any) -> Tensor:
    """Second part: the result; without an adapter, the product of gate and up is FP8 only."""
    from liger_multi.ops import geglu, swiglu

    activation, coded = args[16], args[19] is not None
    if coded:
        outputs = OUTPUTS if args[8] is not None else ("quantized",)
        inner, rows = activated(*gate_and_up, activation, outputs)
        inner = empty_of(gate_and_up[0], *gate_and_up[0].shape) if inner is None else inner
        return _layers(inner, args, (2,), rows.codes.view(torch.uint8), rows.scale)[0]
    approximate = {"gelu": "none", "gelu_tanh": "tanh"}.get(activation)
    inner = swiglu(*gate_and_up) if approximate is None else geglu(*gate_and_up, approximate)
    return _layers(inner, args, (2,), None, None)[0]


_early = EarlySave(op, _gate_and_up, _down)


def _case(
    rows: tuple[int, ...],
    hidden: int,
    inner: int,
    rank: int,
    layers: tuple[str, ...] = LAYERS,
    out: int = 0,
    dtype: torch.dtype | None = None,
    **frozen: bool,
) -> dict[str, T]:
    """Tensors of a sample; adapters stand on ``layers``, names in ``frozen`` get no gradient."""
    sizes = {"gate": (inner, hidden), "up": (inner, hidden), "down": (out or hidden, inner)}
    tensors = {"x": T((*rows, hidden), grad=not frozen.get("x", False))}
    for name, size in sizes.items():
        tensors[f"{name}_weight"] = T(size, scale=size[1] ** -0.5, grad=False)
    for name in layers:
        wide, narrow = sizes[name]
        shapes = {"a": (rank, narrow), "b": (wide, rank)}
        for part, shape in shapes.items():
            key = f"{name}_{part}"
            scale = shape[1] ** -0.5
            tensors[key] = T(shape, dtype, scale, grad=not frozen.get(key, False))
    return tensors


def _bias(inner: int, out: int) -> dict[str, T]:
    sizes = {"gate_bias": inner, "up_bias": inner, "down_bias": out}
    return {name: T((size,), scale=0.3, grad=False) for name, size in sizes.items()}


_FROZEN: Any = {f"{layer}_{part}": True for layer in LAYERS for part in "ab"}
_SCALES = {"gate_scale": 2.0, "up_scale": 0.5, "down_scale": 1.5}
SAMPLES = (
    Sample("rows", _case((2, 5), 16, 24, 4), _SCALES),
    Sample("gelu", _case((6,), 16, 24, 4), {"activation": "gelu"}),
    Sample("gelu-tanh", _case((6,), 16, 24, 4), {"activation": "gelu_tanh"}),
    Sample("biases", _case((3, 4), 8, 12, 2, out=6) | _bias(12, 6), _SCALES),
    Sample("gate-and-down", _case((5,), 8, 12, 2, ("gate", "down")), _SCALES),
    Sample("only-down", _case((5,), 8, 12, 2, ("down",)), _SCALES),
    Sample("odd-widths-rank-1", _case((7,), 13, 19, 1)),
    Sample("one-axis", _case((), 8, 12, 2)),
    Sample("no-rows", _case((0,), 8, 12, 2)),
    Sample("sliced", _case((6,), 16, 24, 4) | {"x": T((6, 16), layout="sliced")}),
    Sample("frozen-x", _case((6,), 16, 24, 4, x=True)),
    Sample("frozen-a", _case((6,), 16, 24, 4, gate_a=True, up_a=True, down_a=True)),
    Sample("float8", in_float8(_case((2, 5), 16, 32, 4), *LAYERS), _SCALES, path="float8"),
    Sample("float8-biases", in_float8(_case((6,), 16, 24, 2) | _bias(24, 16), *LAYERS)),
    Sample("float8-only-up", in_float8(_case((6,), 16, 24, 4), "up"), {"activation": "gelu"}),
    Sample("float8-only-gate-adapted", in_float8(_case((6,), 16, 24, 4, ("gate",)), "down")),
    Sample("past-65535-rows", _case((65537,), 4, 4, 2, **_FROZEN), size="thin"),
    Sample("8192x4096x14336-r16", _case((8192,), 4096, 14336, 16), _SCALES, size="bench"),
    Sample(
        "8192x4096x14336-r16-fp32",
        _case((8192,), 4096, 14336, 16, dtype=torch.float32),
        _SCALES,
        size="bench",
    ),
    Sample(
        "8192x4096x14336-r16-float8",
        in_float8(_case((8192,), 4096, 14336, 16), *LAYERS),
        _SCALES,
        size="bench",
    ),
)
