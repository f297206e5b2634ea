"""Gated MLPs: one operator between their own linear layers."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from liger_multi import ops
from liger_multi.checks import autocast_dtype
from liger_multi.ops.linear import linear_of_mode
from liger_multi.parameters import dtype_of, stored
from liger_multi.patching.evidence.signature import (
    PLAIN,
    Signature,
    bare_parts,
    code_holds,
    globally_hooked,
    holds,
    is_plain_linear,
    is_watched,
)
from liger_multi.patching.float8.linear import (
    bare_float8,
    bare_frozen_float8,
    handed_out,
    hands_out,
    shared_codes,
    wide_dtype,
    wide_parts,
)
from liger_multi.patching.four_bits.linear import is_four_bit
from liger_multi.patching.lora.fused import Adapter, fits, one_adapter
from liger_multi.patching.mlp.kinds import MlpKind, MlpNames
from liger_multi.patching.options import MlpOptions, run_bound
from liger_multi.patching.swap import Patched, original

# --- gated MLPs ---


@dataclass(frozen=True)
class MlpSettings:
    """How an instance computes, and the names of its attributes.

    Attributes:
        spec: The gated activation.
        names: The layers.
        inner: Dropout between the product and the last layer.
        outer: Dropout after the last layer.
        numbers: Arguments of the operator and the attributes that hold them.
        options: What the patch call asked for.
        lora: Whether adapters on the layers are part of the operator.
        casts: Whether the last layer's input takes the dtype of its weight, as in T5.
        signature: What must not have changed since the probe, or the original forward runs.
    """

    spec: MlpKind
    names: MlpNames
    inner: str | None = None
    outer: str | None = None
    numbers: tuple[tuple[str, str], ...] = ()
    options: MlpOptions = field(default_factory=MlpOptions)
    lora: bool = True
    casts: bool = False
    signature: Signature = field(default_factory=Signature)

    def shown(self, module: nn.Module) -> str:
        """What the report says that runs now."""
        if self.spec.activation and _bare(module, self.names) and self.options.whole:
            return f"gated_mlp[{self.spec.activation}]"
        if self.spec.activation and self.options.whole and _in_float8(module, self.names):
            return f"gated_mlp_float8[{self.spec.activation}]"
        if self.spec.activation and self.lora and _adapted(module, self.names):
            return f"lora_mlp[{self.spec.activation}]"
        op = self.spec.op if self.names.up else f"{self.spec.op}_packed"
        shown_options = [value for _, value in self.spec.options if isinstance(value, str)]
        details = ", ".join([*shown_options, "sparse"] if self.spec.sparse else shown_options)
        return f"{op}[{details}]" if details else op


class FusedMlp(Patched):
    """``down(act(gate(x)) * up(x))`` as one operator, or with one between layers of other kinds.

    Adapters, hooks, sharded and quantized weights act in the layers' own calls, so these are made.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The MLP with few activations kept for backward; what was not probed runs the original."""
        module_class = type(self)
        if not issubclass(module_class, FusedMlp):
            return cast(Tensor, module_class.forward(self, *args, **kwargs))
        settings: MlpSettings = module_class._liger_multi_swap.settings  # type: ignore[assignment]
        known = len(args) == 1 and not kwargs and code_holds(module_class)
        if not known or not serves(self, settings):
            return cast(Tensor, original(module_class)(self, *args, **kwargs))
        op = settings.spec.op
        names = ("gated_mlp", "gated_mlp_float8", "lora_mlp", op, f"{op}_packed")
        return run_bound(settings.options, names, apply_mlp, self, args[0], settings)  # type: ignore[no-any-return]


def serves(module: nn.Module, settings: MlpSettings) -> bool:
    """Whether an instance still computes what its settings say, and nobody looks on."""
    return not globally_hooked() and holds(module, settings.signature)


def apply_mlp(module: Any, x: Tensor, settings: MlpSettings) -> Tensor:
    """Run the operators with the weights of ``module``."""
    spec, names = settings.spec, settings.names
    if names.up is not None and spec.activation and _silent(module, settings.inner):
        result = _by_weights(module, x, settings)
        if result is not None:
            return _dropped(module, result, settings.outer)
    gate, down = getattr(module, names.gate), getattr(module, names.down)
    options = dict(spec.options)
    for name, attribute in settings.numbers:
        options[name] = getattr(module, attribute)
    if names.up is None:
        options.update(spec.packed)
        inner = getattr(ops, f"{spec.op}_packed")(gate(x), **options)
    else:
        first = sparse(gate(x), options.pop("sparsity")) if spec.sparse else gate(x)
        operator, operands = getattr(ops, spec.op), (first, getattr(module, names.up)(x))
        if hands_out(spec.op):
            inner = handed_out(module, spec.op, functools.partial(operator, *operands, **options))
        else:
            inner = operator(*operands, **options)
    inner = _dropped(module, inner, settings.inner)
    inner = _for(down, inner) if settings.casts else inner
    return _dropped(module, cast(Tensor, down(inner)), settings.outer)


def sparse(gate: Tensor, sparsity: float) -> Tensor:
    """``relu(gate - mean - k * deviation)`` by row; of a normal row it leaves 1 - sparsity.

    Source: Gemma 3n's activation sparsity (arXiv:2506.06644); ``k`` is the normal distribution's
    quantile at ``sparsity``, rounded to the dtype of gate as transformers does.
    """
    quantile = (2 * torch.tensor(sparsity, dtype=torch.float32) - 1).erfinv() * 2.0**0.5
    deviation, mean = torch.std_mean(gate, -1, correction=0, keepdim=True)
    return torch.relu(gate - (mean + deviation * quantile.to(gate.dtype)))


def _by_weights(module: Any, x: Tensor, settings: MlpSettings) -> Tensor | None:
    """The MLP by the weights of layers that only multiply; None where their calls are needed."""
    names = settings.names
    layers = [module._modules[name] for name in names.all]
    parts = [bare_parts(layer) for layer in layers]
    if None in parts:
        if settings.options.whole and _in_float8(module, names):
            return _float8(x, layers, settings.spec.activation)
        thin = _adapted(module, names) if settings.lora else None
        if thin is None:
            return None
        layers = [getattr(layer, "base_layer", layer) for layer in layers]
        if _one_dtype(x, *map(wide_dtype, layers)) and all(a is None or fits(x, a) for a in thin):
            return _with_adapters(x, layers, thin, settings.spec.activation)
        return None
    layer_parts: Any = parts
    (gate, gate_bias), (up, up_bias), (down, down_bias) = layer_parts
    if globally_hooked() or not _one_dtype(x, gate.dtype, up.dtype, down.dtype):
        return None
    if not settings.options.whole:
        wide = linear_of_mode(x, gate, gate_bias), linear_of_mode(x, up, up_bias)
        inner = getattr(ops, settings.spec.op)(*wide, **dict(settings.spec.options))
        return linear_of_mode(inner, down, down_bias)
    return ops.gated_mlp(
        x,
        gate,
        up,
        down,
        gate_bias=gate_bias,
        up_bias=up_bias,
        down_bias=down_bias,
        activation=settings.spec.activation,
    )


def _float8(x: Tensor, layers: Sequence[Any], activation: str) -> Tensor | None:
    """The MLP by layers that multiply in FP8; None for an input that they do not take."""
    if not _one_dtype(x, *[layer.weight.dtype for layer in layers]):
        return None
    weights, own, codes = zip(*map(wide_parts, layers), strict=True)
    biases = [layer.bias for layer in layers]
    return ops.gated_mlp_float8(
        x,
        *weights,
        gate_bias=biases[0],
        up_bias=biases[1],
        down_bias=biases[2],
        activation=activation,
        gate_weight_scale=own[0],
        up_weight_scale=own[1],
        down_weight_scale=own[2],
        gate_weight_codes=codes[0],
        up_weight_codes=codes[1],
        down_weight_codes=codes[2],
        quantized=shared_codes(x),
    )


def _with_adapters(
    x: Tensor, layers: list[Any], thin: list[Adapter | None], activation: str
) -> Tensor:
    loras = [None if a is None else ops.LoRA(a.a, a.b, a.scale) for a in thin]
    weights, own, _ = zip(*map(wide_parts, layers), strict=True)
    return ops.lora_mlp(
        x,
        *weights,
        *loras,
        gate_bias=layers[0].bias,
        up_bias=layers[1].bias,
        down_bias=layers[2].bias,
        activation=activation,
        gate_weight_scale=own[0],
        up_weight_scale=own[1],
        down_weight_scale=own[2],
        quantized=shared_codes(x) if any(scale is not None for scale in own[:2]) else None,
    )


def _dropped(module: Any, x: Tensor, name: str | None) -> Tensor:
    return x if name is None else cast(Tensor, getattr(module, name)(x))


def _silent(module: Any, name: str | None) -> bool:
    """Whether a dropout does nothing now, and nobody looks at it."""
    if name is None:
        return True
    drop = getattr(module, name)
    rests = type(drop) is nn.Dropout and not (drop.training and drop.p)
    return rests and not is_watched(drop)


def _for(down: Any, x: Tensor) -> Tensor:
    """``x`` in the dtype of a layer that is kept in a wider one, as T5 does."""
    weight, dtype = stored(down), dtype_of(down)
    if weight is not None and type(weight) not in PLAIN:
        return x
    if dtype is None or not dtype.is_floating_point or dtype.itemsize < 2:
        return x
    return x if autocast_dtype(x.device.type) is not None else x.to(dtype)


def _bare(module: nn.Module, names: MlpNames) -> bool:
    """Whether gate, up and down do nothing but multiply, so that their weights are all of them."""
    if names.up is None or globally_hooked():
        return False
    return all(is_plain_linear(module._modules[name]) for name in names.all)


def _in_float8(module: nn.Module, names: MlpNames) -> bool:
    """Whether gate, up and down do nothing but multiply in FP8."""
    if names.up is None or globally_hooked():
        return False
    return all(bare_float8(module._modules[name]) for name in names.all)


def _adapted(module: nn.Module, names: MlpNames) -> list[Adapter | None] | None:
    """The adapters of layers that are frozen and otherwise bare; None where not all are."""
    if names.up is None or globally_hooked():
        return None
    low_rank = []
    for name in names.all:
        layer: Any = module._modules[name]
        bare = is_plain_linear(layer) or bare_frozen_float8(layer) or is_four_bit(layer)
        adapter = None if bare else one_adapter(layer)
        if adapter is None and not (bare and _frozen(layer)):
            return None
        low_rank.append(adapter)
    return low_rank if any(low_rank) else None


def _frozen(layer: nn.Module) -> bool:
    return not any(
        p is not None and p.requires_grad for p in (getattr(layer, "weight", None), layer.bias)
    )


def _one_dtype(x: Tensor, *dtypes: torch.dtype) -> bool:
    if type(x) is not Tensor:
        return False
    if autocast_dtype(x.device.type) is not None:
        return True
    return {x.dtype, *dtypes} == {x.dtype}
