"""Contract of ``lora_qkv``."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_multi import checks
from liger_multi.dispatch.bitwise import BY_OUR_GEMM, bitwise
from liger_multi.dispatch.op import Op
from liger_multi.ops._adapters import LoRA, adapters, factors, scales
from liger_multi.ops._work import Options, Shapes, Work
from liger_multi.ops.linear_float8 import (
    Float8Rows,
    fitting,
    one_dtype_but_codes,
    weight_scales_fit,
)
from liger_multi.ops.lora_update import adapted_layer, adapter_dtypes, fit, frozen, in_float8
from liger_multi.testing.samples import Sample, Tensor as T

LAYERS = ("q", "k", "v")
_OPTIONAL = tuple(f"{layer}_{part}" for layer in LAYERS for part in ("weight", "bias"))
op = Op(
    "lora_qkv",
    family="adapters",
    rowwise=True,
    bitwise=bitwise(BY_OUR_GEMM, "x q k v low codes codes_scale", 1),
    opens=True,
)


class LoraQKVOutput(NamedTuple):
    """The outputs of the layers; None for absent ones."""

    q: Tensor | None
    k: Tensor | None
    v: Tensor | None


@op.forward(returns="q k v", residuals="low")
def forward(
    x: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    v_weight: Tensor | None,
    q_a: Tensor | None,
    q_b: Tensor | None,
    k_a: Tensor | None,
    k_b: Tensor | None,
    v_a: Tensor | None,
    v_b: Tensor | None,
    q_bias: Tensor | None,
    k_bias: Tensor | None,
    v_bias: Tensor | None,
    q_scale: float,
    k_scale: float,
    v_scale: float,
    q_weight_scale: Tensor | None,
    k_weight_scale: Tensor | None,
    v_weight_scale: Tensor | None,
    codes: Tensor | None,
    codes_scale: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:

    def build(weight: Tensor | None) -> Tensor:
        return x.new_empty((0,) if weight is None else (*x.shape[:-1], weight.shape[0]))

    factors = [a for a in (q_a, k_a, v_a) if a is not None]
    low_rank = (factors[0] if factors else x).new_empty(
        (*x.shape[:-1], sum(a.shape[0] for a in factors))
    )
    return build(q_weight), build(k_weight), build(v_weight), low_rank


def _gradients(**kwargs: Any) -> tuple[Tensor, ...]:
    """Gradients; empty for adapters of layers whose output was not used."""
    x, outputs = kwargs["x"], []
    for name in [f"{layer}_{part}" for layer in LAYERS for part in "ab"]:
        factor, is_needed = (
            kwargs[name],
            kwargs[f"needs_{name}"] and kwargs[f"d{name[0]}"] is not None,
        )
        shaped_as = x if factor is None else factor
        outputs.append(
            shaped_as.new_empty(factor.shape if factor is not None and is_needed else (0,))
        )
    return x.new_empty(x.shape if kwargs["needs_x"] else (0,)), *outputs


op.backward(
    reads="dq dk dv x q_weight k_weight v_weight q_a q_b k_a k_b v_a v_b low q_scale k_scale "
    "v_scale q_weight_scale k_weight_scale v_weight_scale",
    returns="dx dq_a dq_b dk_a dk_b dv_a dv_b",
    shapes=_gradients,
)


def lora_qkv(
    x: Tensor,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    v_weight: Tensor | None = None,
    q_lora: LoRA | None = None,
    k_lora: LoRA | None = None,
    v_lora: LoRA | None = None,
    *,
    q_bias: Tensor | None = None,
    k_bias: Tensor | None = None,
    v_bias: Tensor | None = None,
    q_weight_scale: Tensor | None = None,
    k_weight_scale: Tensor | None = None,
    v_weight_scale: Tensor | None = None,
    quantized: Float8Rows | None = None,
) -> LoraQKVOutput:
    """Up to three linear layers of one input, with LoRA adapters, whose backward is one.

    Math:
        Each of q, k and v is ``x @ weight.T + bias + scale (x @ a.T) @ b.T``, with a, b and scale
        from ``LoRA(a, b, scale)`` and without the last term for a layer without an adapter; a layer
        without a weight is absent. The weights and biases are frozen. Backward sums the gradient of
        x in one buffer, ``dq @ q_weight + dk @ k_weight + dv @ v_weight`` and, as one GEMM, ``scale
        (dy @ b) @ a`` of all layers; the gradients of all a are one GEMM as well, ``(dy @ b).T @
        x``. A weight in FP8 is multiplied as in ``linear_float8``, with x rounded once for all.

    Shapes:
        x ``(..., H)`` with any strides; of each layer, with an F and an r of its own, weight
        ``(F, H)``, bias ``(F,)``, a ``(r, H)``, b ``(F, r)``, and ``(F,)`` of a weight in FP8 its
        scale; quantized, if x has been rounded before: codes ``(..., H)`` and scale ``(...)``. q,
        k and v ``(..., F)``, contiguous.

    Dtypes:
        In: x, weights and biases of one floating dtype, all adapters of one, which may be wider;
        any under autocast, which then sets the dtype of all. With its scale (fp32), a weight holds
        codes (float8_e4m3fn, or float8_e4m3fnuz on AMD's CDNA3). Inside: as ``linear_float8`` and
        ``lora_update``. Out: that of x.

    Memory:
        Kept for backward: x, once, and ``x @ a.T`` of all layers, in the dtype of a. PEFT's layers
        keep a copy of x in the dtype of a each.

    Raises:
        TypeError: An argument is not a floating-point tensor, an adapter has no a or b, dtypes
            differ in another way, or codes and scales of a weight do not come together.
        ValueError: Shapes do not fit together, mixed devices, no weight, a bias or an adapter of an
            absent layer, or a weight that requires a gradient.

    Source:
        Hu et al. 2021 (arXiv:2106.09685); ``peft.tuners.lora.Linear`` around the projections of
        transformers ``LlamaAttention``.
    """
    weights = {"q_weight": q_weight, "k_weight": k_weight, "v_weight": v_weight}
    biases = {"q_bias": q_bias, "k_bias": k_bias, "v_bias": v_bias}
    loras = adapters("lora_qkv", q=q_lora, k=k_lora, v=v_lora)
    checks.floating("lora_qkv", x=x, **weights, **biases, **factors(loras), optional=_OPTIONAL)
    adapted: dict[str, Tensor | None] = {f"{name}_lora.{p}": None for name in LAYERS for p in "ab"}
    for name, lora in loras.items():
        weight, bias = weights[f"{name}_weight"], biases[f"{name}_bias"]
        if weight is None:
            _check_omitted(name, {f"{name}_bias": bias, f"{name}_lora": lora})
            continue
        _check_layer(name, x, weight, bias)
        if lora is not None:
            prefix = f"{name}_lora."
            fit("lora_qkv", x, (*x.shape[:-1], weight.shape[0]), lora.a, lora.b, prefix)
            _, a, b = adapter_dtypes("lora_qkv", {"x": x}, lora.a, lora.b, prefix)
            adapted |= {f"{prefix}a": a, f"{prefix}b": b}
    if all(weight is None for weight in weights.values()):
        raise ValueError("lora_qkv: at least one of q_weight, k_weight and v_weight is needed")
    weight_scales = (q_weight_scale, k_weight_scale, v_weight_scale)
    weight_scales_fit("lora_qkv", weights, weight_scales)
    frozen("lora_qkv", {**weights, **biases}, "the layers themselves with lora_update")
    rows = fitting("lora_qkv", x, quantized)
    x, wide = one_dtype_but_codes("lora_qkv", x, weights, biases)
    if any(a is not None for a in adapted.values()):
        checks.one_dtype("lora_qkv", {n: a for n, a in adapted.items() if a is not None})
    outputs = op(x, *wide[:3], *adapted.values(), *wide[3:], *scales(loras), *weight_scales, *rows)
    present = [weight is not None for weight in weights.values()]
    return LoraQKVOutput(
        *(y if is_present else None for y, is_present in zip(outputs, present, strict=True))
    )


def formula(
    x: Tensor,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    v_weight: Tensor | None = None,
    q_a: Tensor | None = None,
    q_b: Tensor | None = None,
    k_a: Tensor | None = None,
    k_b: Tensor | None = None,
    v_a: Tensor | None = None,
    v_b: Tensor | None = None,
    *,
    q_bias: Tensor | None = None,
    k_bias: Tensor | None = None,
    v_bias: Tensor | None = None,
    q_scale: float = 1.0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    q_weight_scale: Tensor | None = None,
    k_weight_scale: Tensor | None = None,
    v_weight_scale: Tensor | None = None,
    quantized: Any = None,
) -> LoraQKVOutput:
    """The projections of attention; None for one without a weight."""
    return LoraQKVOutput(
        None
        if q_weight is None
        else adapted_layer(x, q_weight, q_a, q_b, q_bias, q_scale, q_weight_scale),
        None
        if k_weight is None
        else adapted_layer(x, k_weight, k_a, k_b, k_bias, k_scale, k_weight_scale),
        None
        if v_weight is None
        else adapted_layer(x, v_weight, v_a, v_b, v_bias, v_scale, v_weight_scale),
    )


def work(shapes: Shapes, size: int, options: Options) -> Work:
    rows, width = math.prod(shapes["x"][:-1]), shapes["x"][-1]
    outputs = sum(shapes[name][0] for name in shapes if name.endswith("_weight"))
    product = 2.0 * rows * width * outputs
    # x read, outputs written; then these gradients and x read, dx written; frozen as lora_mlp's
    forward = rows * (width + outputs) * size
    return Work(forward, 2 * forward + rows * width * size, product, 2 * product)


def _check_omitted(name: str, parts: dict[str, Tensor | LoRA | None]) -> None:
    for part, value in parts.items():
        if value is not None:
            raise ValueError(f"lora_qkv: {part} needs {name}_weight beside it, got None")


def _check_layer(name: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    if x.ndim == 0 or weight.ndim != 2 or weight.shape[1] != x.shape[-1]:
        checks.refuse(
            "lora_qkv",
            f"{name}_weight must have shape (F, H) for x (..., H)",
            f"{tuple(weight.shape)} for {tuple(x.shape)}",
        )
    checks.vector("lora_qkv", f"{name}_bias", bias, weight.shape[0], f"rows of {name}_weight")


_SIZES = {"q": 12, "k": 6, "v": 5}


def _case(
    rows: tuple[int, ...],
    width: int,
    ranks: Mapping[str, int],
    sizes: Mapping[str, int] = _SIZES,
    dtype: torch.dtype | None = None,
    frozen: Sequence[str] = (),
) -> dict[str, T]:
    """Tensors of a sample; layers of rank 0 have no adapter, those ``frozen`` no gradient."""
    tensors = {"x": T((*rows, width), grad="x" not in frozen)}
    for name, rank in ranks.items():
        tensors[f"{name}_weight"] = T((sizes[name], width), scale=width**-0.5, grad=False)
        for part, shape in {"a": (rank, width), "b": (sizes[name], rank)}.items():
            if rank:
                key, scale = f"{name}_{part}", shape[1] ** -0.5
                tensors[key] = T(shape, dtype, scale, grad=key not in frozen)
    return tensors


def _bias(*names: str) -> dict[str, T]:
    return {f"{name}_bias": T((_SIZES[name],), scale=0.3, grad=False) for name in names}


_SCALES = {"q_scale": 2.0, "k_scale": 0.5, "v_scale": 1.5}
_EQUAL = dict.fromkeys(_SCALES, 2.0)
_RANK_2, _RANK_4, _RANK_16 = (dict.fromkeys(LAYERS, rank) for rank in (2, 4, 16))
_THIN = [f"{layer}_{part}" for layer in LAYERS for part in "ab"]
_LLAMA = {"q": 4096, "k": 1024, "v": 1024}
SAMPLES = (
    Sample("rows", _case((2, 3), 8, _RANK_4), _EQUAL),
    Sample("scales-and-ranks", _case((6,), 8, {"q": 4, "k": 1, "v": 3}) | _bias("q"), _SCALES),
    Sample("k-without-adapter", _case((5,), 8, {"q": 2, "k": 0, "v": 3}) | _bias("k"), _EQUAL),
    Sample("k-and-v", _case((5,), 8, {"k": 2, "v": 2}), _SCALES),
    Sample("no-adapter", _case((5,), 8, {"q": 0, "v": 0})),
    Sample("odd-widths", _case((7,), 13, _RANK_4, {"q": 19, "k": 5, "v": 5})),
    Sample("one-axis", _case((), 8, _RANK_4)),
    Sample("no-rows", _case((0,), 8, _RANK_4)),
    Sample("sliced", _case((6,), 8, _RANK_4) | {"x": T((6, 8), layout="sliced")}),
    Sample("frozen-x", _case((6,), 8, _RANK_4, frozen=["x"])),
    Sample("only-b-of-k", _case((6,), 8, _RANK_4, frozen=["x", "q_a", "q_b", "k_a"])),
    Sample(
        "fp32-adapters",  # beside layers in 16 bits
        {
            name: replace(t, wide=name.endswith(("_a", "_b")))
            for name, t in _case((6,), 8, _RANK_4).items()
        },
        _EQUAL,
        path="parts",
    ),
    Sample("float8", in_float8(_case((2, 3), 16, _RANK_4), *LAYERS), _EQUAL, path="float8"),
    Sample("float8-k-plain", in_float8(_case((6,), 8, _RANK_2) | _bias("q", "k"), "q", "v")),
    Sample("past-65535-rows", _case((65537,), 4, _RANK_2, frozen=_THIN), size="thin"),
    Sample("8192x4096-r16", _case((8192,), 4096, _RANK_16, _LLAMA), _EQUAL, size="bench"),
    Sample(
        "8192x4096-r16-fp32",
        _case((8192,), 4096, _RANK_16, _LLAMA, torch.float32),
        _EQUAL,
        size="bench",
    ),
    Sample(
        "8192x4096-r16-float8",
        in_float8(_case((8192,), 4096, _RANK_16, _LLAMA), *LAYERS),
        _EQUAL,
        size="bench",
    ),
)
