"""Contract of ``lora_moe``."""

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from liger_multi import checks
from liger_multi.dispatch.bitwise import BY_GEMM, BY_OUR_GEMM, bitwise
from liger_multi.dispatch.op import Op
from liger_multi.ops._adapters import LoRA, adapters, factors, scales
from liger_multi.ops._work import Options, Shapes, Work
from liger_multi.ops.fused_moe import (
    _GPT_OSS as GPT_OSS,
    ACTIVATIONS,
    UNGATED,
    _case as experts_case,
    _count as count,
    _shapes_fit as shapes_fit,
    formula as fused_moe_formula,
    work as moe_work,
)
from liger_multi.ops.lora_update import adapter_dtypes, frozen
from liger_multi.ops.swiglu_clamped import numbers
from liger_multi.testing.samples import Sample, Tensor as T

LAYERS = ("gate_up", "down")
_FACTORS = tuple(f"{layer}_{part}" for layer in LAYERS for part in "ab")
_BIASES = tuple(f"{layer}_bias" for layer in LAYERS)
op = Op(
    "lora_moe",
    family="experts",
    bitwise=bitwise(BY_OUR_GEMM, "x index routing y", backward=BY_GEMM),
    opens=True,
)


@op.forward(returns="y", residuals="gate_up order offsets")
def forward(
    x: Tensor,
    gate_up_weight: Tensor,
    down_weight: Tensor,
    index: Tensor,
    routing: Tensor,
    gate_up_a: Tensor | None,
    gate_up_b: Tensor | None,
    down_a: Tensor | None,
    down_b: Tensor | None,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    gate_up_scale: float,
    down_scale: float,
    activation: str,
    limit: float,
    alpha: float,
    up_offset: float,
    interleaved: bool,
    transposed: bool,
    y_dtype: torch.dtype,
    needs_x: bool,
    needs_routing: bool,
    needs_gate_up_a: bool,
    needs_gate_up_b: bool,
    needs_down_a: bool,
    needs_down_b: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Shape rule; without gradients no row of gate_up is kept."""
    requested = needs_x or needs_routing or needs_gate_up_a or needs_gate_up_b
    pairs = index.shape[0] * index.shape[1]
    return (
        x.new_empty(x.shape, dtype=y_dtype),
        x.new_empty(
            pairs if requested or needs_down_a or needs_down_b else 0,
            gate_up_weight.shape[2 if transposed else 1],
        ),
        index.new_empty(pairs, dtype=torch.int32),
        index.new_empty(gate_up_weight.shape[0] + 1, dtype=torch.int32),
    )


def _unread(needs_x: bool, needs_gate_up_a: bool, needs_gate_up_b: bool) -> tuple[str, ...]:
    weight = () if needs_x else ("gate_up_weight",)
    return weight if needs_gate_up_a or needs_gate_up_b else (*weight, "x")


def _gradients(**kwargs: Any) -> tuple[Tensor, ...]:
    dy, gate_up, routing = (kwargs[n] for n in ("dy", "gate_up", "routing"))

    def gradient(name: str, tensor: Tensor | None, shape: Any) -> Tensor:
        if tensor is None:
            return gate_up.new_empty(0)  # type: ignore[no-any-return]
        return tensor.new_empty(shape if kwargs[f"needs_{name}"] else (0,))

    factor_gradients = [
        gradient(n, kwargs[n], () if kwargs[n] is None else kwargs[n].shape) for n in _FACTORS
    ]
    return (
        gradient("x", gate_up, dy.shape),
        gradient("routing", routing, routing.shape),
        *factor_gradients,
    )


op.backward(
    reads="dy x? gate_up_weight? down_weight index routing gate_up_a gate_up_b down_a down_b "
    "down_bias gate_up order offsets gate_up_scale down_scale activation limit alpha up_offset "
    "interleaved transposed",
    returns="dx drouting dgate_up_a dgate_up_b ddown_a ddown_b",
    not_saved=_unread,
    shapes=_gradients,
)


def lora_moe(
    x: Tensor,
    gate_up_weight: Tensor,
    down_weight: Tensor,
    index: Tensor,
    routing: Tensor,
    gate_up_lora: LoRA | None = None,
    down_lora: LoRA | None = None,
    *,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: str = "silu",
    limit: float = 7.0,
    alpha: float = 1.702,
    up_offset: float = 1.0,
    interleaved: bool = False,
    transposed: bool = False,
) -> Tensor:
    """A mixture of gated experts, frozen, with a LoRA adapter for each expert.

    Math:
        That of ``fused_moe``, with ``gate_up_weight[e] + scale * b[e] @ a[e]`` of ``gate_up_lora =
        LoRA(a, b, scale)`` in the place of ``gate_up_weight[e]``, and the same for
        ``down_weight``. These sums are never made: what an adapter adds to a GEMM are two GEMMs
        with r columns and r terms, on the rows of its expert. The weights and biases are frozen:
        backward makes the gradients of a and b by GEMMs with r columns or rows. ``x @ a.T`` and the
        activation's product are computed again. An expert without tokens has a zero gradient.

    Shapes:
        As ``fused_moe``, and of gate_up_lora a ``(E, r, H)`` and b ``(E, 2 I, r)``, or
        ``(E, I, r)`` without a gate, of down_lora a ``(E, r, I)`` and b ``(E, H, r)``, whatever
        ``transposed`` says of the weights, each adapter with an r of its own; any strides.

    Dtypes:
        In: x, weights and biases of one floating dtype, factors of one, which may be wider; any
        under autocast, which then sets the dtype of all. Routing of any. Inside: as ``fused_moe``;
        what has rank r is fp32 (fp64 for fp64). Out: that of x.

    Memory:
        Kept for backward: as ``fused_moe``, and the factors. Nothing has the size of a weight.
        PEFT's ``target_parameters`` makes the sums of weights and adapters twice in forward, keeps
        one, and makes a gradient of that size in backward.

    Raises:
        TypeError: Wrong kinds of arguments, or dtypes that differ in another way.
        ValueError: Shapes do not fit together, mixed devices, unknown activation, limit <= 0, or a
            weight that requires a gradient.

    Source:
        Hu et al. 2021 (arXiv:2106.09685) in Shazeer et al. 2017 (arXiv:1701.06538);
        ``peft.LoraConfig(target_parameters=...)`` around transformers ``Qwen3MoeExperts``.
    """
    name = op.name
    wide: dict[str, Tensor | None] = {
        "x": x,
        "gate_up_weight": gate_up_weight,
        "down_weight": down_weight,
        "gate_up_bias": gate_up_bias,
        "down_bias": down_bias,
    }
    loras = adapters(name, gate_up=gate_up_lora, down=down_lora)
    checks.floating(name, **wide, routing=routing, **factors(loras), optional=_BIASES)
    checks.one_of(name, "activation", activation, ACTIVATIONS)
    clamps = numbers(name, limit, alpha, up_offset)
    checks.boolean(name, "interleaved", interleaved)
    checks.boolean(name, "transposed", transposed)
    shapes_fit(wide, index, routing, transposed, activation, name)
    frozen(name, {n: t for n, t in wide.items() if n != "x"}, "fused_moe of their sums")
    adapted = _fitting(x, gate_up_weight, loras, transposed, activation)
    rows, first, second, *biases = checks.one_dtype(name, wide)
    assert rows is not None
    pairs = index.shape[-1]
    result: Tensor = op(
        rows.reshape(count(rows), rows.shape[-1]),
        first,
        second,
        index.reshape(count(index), pairs).to(torch.int64),
        routing.reshape(count(routing), pairs),
        *adapted,
        *biases,
        *scales(loras),
        activation,
        *clamps,
        interleaved,
        transposed,
        x.dtype,
    )
    return result.view(x.shape)


def _adapted(weight: Tensor, a: Tensor | None, b: Tensor | None, scale: float) -> Tensor:
    return weight if a is None or b is None else (weight + scale * (b @ a)).to(weight.dtype)


def formula(
    x: Tensor,
    gate_up_weight: Tensor,
    down_weight: Tensor,
    index: Tensor,
    routing: Tensor,
    gate_up_a: Tensor | None = None,
    gate_up_b: Tensor | None = None,
    down_a: Tensor | None = None,
    down_b: Tensor | None = None,
    *,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    gate_up_scale: float = 1.0,
    down_scale: float = 1.0,
    activation: str = "silu",
    limit: float = 7.0,
    alpha: float = 1.702,
    up_offset: float = 1.0,
    interleaved: bool = False,
    transposed: bool = False,
) -> Tensor:
    """:func:`fused_moe` of weights to which the adapters are added first, as PEFT does."""
    first, second = (w.mT if transposed else w for w in (gate_up_weight, down_weight))
    return fused_moe_formula(
        x,
        _adapted(first, gate_up_a, gate_up_b, gate_up_scale),
        _adapted(second, down_a, down_b, down_scale),
        index,
        routing,
        gate_up_bias=gate_up_bias,
        down_bias=down_bias,
        activation=activation,
        limit=limit,
        alpha=alpha,
        up_offset=up_offset,
        interleaved=interleaved,
    )


def work(shapes: Shapes, size: int, options: Options) -> Work:
    moe = moe_work(shapes, size, options)
    weights = math.prod(shapes["gate_up_weight"]) + math.prod(shapes["down_weight"])
    # frozen weights have no gradient, so backward has as many GEMMs as forward
    total_bytes = moe.both_bytes - weights * size
    return replace(moe, both_bytes=total_bytes, both_operations=2 * moe.forward_operations)


def _fitting(
    x: Tensor, first: Tensor, loras: dict[str, LoRA | None], transposed: bool, activation: str
) -> list[Tensor | None]:
    """The factors of adapters, which fit their layers, in the dtype of their GEMMs."""
    experts, *sizes = first.shape
    wide, hidden = sizes[::-1] if transposed else sizes
    adapted: list[Tensor | None] = []
    inner = wide if activation == UNGATED else wide // 2
    for layer, (out, inputs) in {"gate_up": (wide, hidden), "down": (hidden, inner)}.items():
        lora, prefix = loras[layer], f"{layer}_lora."
        if lora is None:
            adapted += [None, None]
            continue
        a, b, _ = lora
        if a.ndim != 3 or (a.shape[0], a.shape[2]) != (experts, inputs):
            checks.refuse(
                "lora_moe",
                f"{prefix}a must have shape ({experts}, r, {inputs}), "
                "an expert's rank by its inputs",
                a,
            )
        if b.shape != (experts, out, a.shape[1]):
            checks.refuse(
                "lora_moe",
                f"{prefix}b must have shape {(experts, out, a.shape[1])}, an expert's outputs by "
                f"rows of {prefix}a",
                b,
            )
        adapted += adapter_dtypes("lora_moe", {"x": x}, a, b, prefix)[1:]
    return adapted


def _case(
    rows: tuple[int, ...],
    top_k: int,
    experts: int,
    hidden: int,
    inner: int,
    rank: int,
    *,
    layers: tuple[str, ...] = LAYERS,
    dtype: torch.dtype | None = None,
    frozen: tuple[str, ...] = (),
    parts: int = 2,
    **options: Any,
) -> dict[str, T]:
    """Tensors of a sample; adapters stand on ``layers``, names in ``frozen`` get no gradient."""
    base = ("gate_up_weight", "down_weight", *_BIASES)
    tensors = experts_case(
        rows, top_k, experts, hidden, inner, frozen=(*base, *frozen), parts=parts, **options
    )
    sizes = {"gate_up": (parts * inner, hidden), "down": (hidden, inner)}
    for layer in layers:
        out, inputs = sizes[layer]
        for part, shape in (("a", (experts, rank, inputs)), ("b", (experts, out, rank))):
            key = f"{layer}_{part}"
            tensors[key] = T(shape, dtype, shape[2] ** -0.5, grad=key not in frozen)
    return tensors


_SCALES = {"gate_up_scale": 2.0, "down_scale": 0.5}
SAMPLES = (
    Sample("rows", _case((5,), 2, 3, 8, 6, 2), _SCALES),
    Sample("two-axes", _case((2, 3), 2, 4, 8, 6, 3), _SCALES),
    Sample("gelu", _case((6,), 2, 3, 8, 4, 2), {"activation": "gelu"}),
    Sample(
        "gpt-oss",
        _case((6,), 2, 3, 8, 4, 2, transposed=True, bias=True),
        GPT_OSS | _SCALES,
        path="biases",
    ),
    Sample("no-gate", _case((6,), 2, 3, 8, 6, 2, parts=1), {"activation": UNGATED} | _SCALES),
    Sample("interleaved-rank-1", _case((5,), 3, 4, 8, 4, 1), {"interleaved": True} | _SCALES),
    Sample("only-gate-up", _case((5,), 2, 3, 8, 6, 2, layers=("gate_up",)), _SCALES),
    Sample("only-down", _case((5,), 2, 3, 8, 6, 2, layers=("down",)), _SCALES, path="only down"),
    Sample("sentinels", _case((6,), 2, 3, 8, 4, 2, bias=True, sentinels=0.4, ignore_index=3)),
    Sample("nobody-here", _case((4,), 2, 3, 8, 4, 2, sentinels=1.0)),
    Sample("unused-experts", _case((3,), 1, 40, 8, 4, 2)),
    Sample("one-expert", _case((37,), 1, 1, 16, 8, 4), path="whole blocks"),
    Sample("no-rows", _case((0,), 2, 3, 8, 4, 2)),
    Sample("odd-widths", _case((13,), 2, 2, 37, 21, 3, bias=True), _SCALES),
    Sample("wider-rank-40", _case((9,), 2, 2, 144, 136, 40)),
    Sample(
        "strided-factors",
        _case((6,), 2, 4, 8, 8, 4) | {"gate_up_b": T((4, 16, 4), layout="transposed")},
    ),
    Sample("frozen-x", _case((4,), 2, 3, 8, 4, 2, frozen=("x", "routing"))),
    Sample("only-b", _case((4,), 2, 3, 8, 4, 2, frozen=("x", "gate_up_a", "down_a"))),
    Sample("only-x", _case((4,), 2, 3, 8, 4, 2, frozen=("routing", *_FACTORS))),
    Sample("past-65535-rows", _case((33000,), 2, 3, 2, 2, 1), size="thin"),
    Sample(
        "8192x2048 768 of 128 r16", _case((8192,), 8, 128, 2048, 768, 16), _SCALES, size="bench"
    ),
    Sample(
        "8192x2048 768 of 128 r16-fp32",
        _case((8192,), 8, 128, 2048, 768, 16, dtype=torch.float32),
        _SCALES,
        size="bench",
    ),
)
COMPILE_SAMPLES = (
    Sample("8192x4096 14336 of 8 r64", _case((8192,), 2, 8, 4096, 14336, 64), _SCALES),
    Sample(
        "8192x4096 14336 of 8 r64-fp32",
        _case((8192,), 2, 8, 4096, 14336, 64, dtype=torch.float32),
        _SCALES,
    ),
)
