"""Gated MLPs and experts: one operator between their own linear layers."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from liger_multi import ops
from liger_multi.checks import autocast_dtype
from liger_multi.ops.linear import linear_of_mode
from liger_multi.parameters import dtype_of, stored
from liger_multi.patching.lazy_logits.loss import run_bound
from liger_multi.patching.options import MlpOptions, Options
from liger_multi.patching.recognize.kinds import MlpKind, MlpNames
from liger_multi.patching.recognize.signature import (
    PLAIN,
    Signature,
    bare_parts,
    code_holds,
    globally_hooked,
    holds,
    is_plain_linear,
    is_watched,
)
from liger_multi.patching.replace.adapters import Adapter, fits, one_adapter
from liger_multi.patching.replace.experts_choice import (
    autocast_of,
    computes_in_weight_dtype,
    selected,
)
from liger_multi.patching.replace.float8 import (
    bare_float8,
    bare_frozen_float8,
    handed_out,
    hands_out,
    shared_codes,
    wide_parts,
)
from liger_multi.patching.replace.quantized_experts import (
    Stack,
    in_groups,
    stack_declared,
    stacked,
)
from liger_multi.patching.replace.swap import Patched, original

# --- gated MLPs ---


@dataclass(frozen=True)
class MlpSettings:
    """How an instance computes, and the names of its attributes.

    Attributes:
        kind: The gated activation.
        names: The layers.
        inner: Dropout between the product and the last layer.
        outer: Dropout after the last layer.
        numbers: Arguments of the operator and the attributes that hold them.
        options: What the patch call asked for.
        lora: Whether adapters on the layers are part of the operator.
        casts: Whether the last layer's input takes the dtype of its weight, as in T5.
        signature: What must not have changed since the probe, or the original forward runs.
    """

    kind: MlpKind
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
        if self.kind.activation and _bare(module, self.names) and self.options.whole:
            return f"gated_mlp[{self.kind.activation}]"
        if self.kind.activation and self.options.whole and _in_float8(module, self.names):
            return f"gated_mlp_float8[{self.kind.activation}]"
        if self.kind.activation and self.lora and _adapted(module, self.names):
            return f"lora_mlp[{self.kind.activation}]"
        op = self.kind.op if self.names.up else f"{self.kind.op}_packed"
        said = [value for _, value in self.kind.options if isinstance(value, str)]
        details = ", ".join([*said, "sparse"] if self.kind.sparse else said)
        return f"{op}[{details}]" if details else op


class FusedMlp(Patched):
    """``down(act(gate(x)) * up(x))`` as one operator, or with one between layers of other kinds.

    Adapters, hooks, sharded and quantized weights act in the layers' own calls, so these are made.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The MLP with few activations kept for backward; what was not probed runs the original."""
        kind = type(self)
        if not issubclass(kind, FusedMlp):
            return cast(Tensor, kind.forward(self, *args, **kwargs))
        settings: MlpSettings = kind._liger_multi_swap.settings  # type: ignore[assignment]
        known = len(args) == 1 and not kwargs and code_holds(kind)
        if not known or not serves(self, settings):
            return cast(Tensor, original(kind)(self, *args, **kwargs))
        op = settings.kind.op
        names = ("gated_mlp", "gated_mlp_float8", "lora_mlp", op, f"{op}_packed")
        return run_bound(settings.options, names, apply_mlp, self, args[0], settings)  # type: ignore[no-any-return]


def serves(module: nn.Module, settings: MlpSettings) -> bool:
    """Whether an instance still computes what its settings say, and nobody looks on."""
    return not globally_hooked() and holds(module, settings.signature)


def apply_mlp(module: Any, x: Tensor, settings: MlpSettings) -> Tensor:
    """Run the operators with the weights of ``module``."""
    kind, names = settings.kind, settings.names
    if names.up is not None and kind.activation and _silent(module, settings.inner):
        result = _by_weights(module, x, settings)
        if result is not None:
            return _dropped(module, result, settings.outer)
    gate, down = getattr(module, names.gate), getattr(module, names.down)
    options = dict(kind.options)
    for name, held in settings.numbers:
        options[name] = getattr(module, held)
    if names.up is None:
        options.update(kind.packed)
        inner = getattr(ops, f"{kind.op}_packed")(gate(x), **options)
    else:
        first = sparse(gate(x), options.pop("sparsity")) if kind.sparse else gate(x)
        operator, given = getattr(ops, kind.op), (first, getattr(module, names.up)(x))
        if hands_out(kind.op):
            inner = handed_out(module, kind.op, functools.partial(operator, *given, **options))
        else:
            inner = operator(*given, **options)
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
            return _float8(x, layers, settings.kind.activation)
        thin = _adapted(module, names) if settings.lora else None
        if thin is None:
            return None
        layers = [getattr(layer, "base_layer", layer) for layer in layers]
        if _one_dtype(x, *[layer.weight for layer in layers]) and all(
            a is None or fits(x, a) for a in thin
        ):
            return _with_adapters(x, layers, thin, settings.kind.activation)
        return None
    given: Any = parts
    (gate, gate_bias), (up, up_bias), (down, down_bias) = given
    if globally_hooked() or not _one_dtype(x, gate, up, down):
        return None
    if not settings.options.whole:
        wide = linear_of_mode(x, gate, gate_bias), linear_of_mode(x, up, up_bias)
        inner = getattr(ops, settings.kind.op)(*wide, **dict(settings.kind.options))
        return linear_of_mode(inner, down, down_bias)
    return ops.gated_mlp(
        x, gate, up, down, gate_bias=gate_bias, up_bias=up_bias, down_bias=down_bias,
        activation=settings.kind.activation,
    )  # fmt: skip


def _float8(x: Tensor, layers: Sequence[Any], activation: str) -> Tensor | None:
    """The MLP by layers that multiply in FP8; None for an input that they do not take."""
    if not _one_dtype(x, *[layer.weight for layer in layers]):
        return None
    weights, own, beside = zip(*map(wide_parts, layers), strict=True)
    biases = [layer.bias for layer in layers]
    return ops.gated_mlp_float8(
        x, *weights, gate_bias=biases[0], up_bias=biases[1], down_bias=biases[2],
        activation=activation, gate_weight_scale=own[0], up_weight_scale=own[1],
        down_weight_scale=own[2], gate_weight_codes=beside[0], up_weight_codes=beside[1],
        down_weight_codes=beside[2], quantized=shared_codes(x),
    )  # fmt: skip


def _with_adapters(
    x: Tensor, layers: list[Any], thin: list[Adapter | None], activation: str
) -> Tensor:
    pairs = [(None, None) if a is None else (a.a, a.b) for a in thin]
    scales = [1.0 if a is None else a.scale for a in thin]
    weights, own, _ = zip(*map(wide_parts, layers), strict=True)
    return ops.lora_mlp(
        x,
        *weights,
        *(t for pair in pairs for t in pair),
        gate_bias=layers[0].bias,
        up_bias=layers[1].bias,
        down_bias=layers[2].bias,
        gate_scale=scales[0],
        up_scale=scales[1],
        down_scale=scales[2],
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
    found = []
    for name in names.all:
        layer: Any = module._modules[name]
        bare = is_plain_linear(layer) or bare_frozen_float8(layer)
        adapter = None if bare else one_adapter(layer)
        if adapter is None and not (bare and _frozen(layer)):
            return None
        found.append(adapter)
    return found if any(found) else None


def _frozen(layer: nn.Module) -> bool:
    return not any(p is not None and p.requires_grad for p in (layer.weight, layer.bias))


def _one_dtype(x: Tensor, *weights: Tensor) -> bool:
    if type(x) is not Tensor:
        return False
    if autocast_dtype(x.device.type) is not None:
        return True
    return {x.dtype, *[weight.dtype for weight in weights]} == {x.dtype}


# --- experts ---

WEIGHTS = {True: ("gate_up_proj", "down_proj"), False: ("up_proj", "down_proj")}
"""Names of the stacks of experts, with and without a gate; those of biases follow them."""
SHARED = ("gate_proj", "up_proj", "down_proj")
"""Names of the stacks of experts that every token goes to."""
NO_GATE = "relu_squared"
"""The activation of experts without a gate."""


def bias_names(weights: tuple[str, ...]) -> tuple[str, str]:
    """Names of the biases beside stacks of such names."""
    return (f"{weights[0]}_bias", f"{weights[1]}_bias")


WEIGHT_TYPES = (Tensor, nn.Parameter)


FORMS = ("routed", "identity", "blocks", "shared")
"""What a call of experts brings: hidden states, experts and weights; the same, where an index past
the last expert stands for the hidden states themselves; equally many rows for each expert; or
hidden states and a weight for every expert, all of which every token goes to."""


@dataclass(frozen=True)
class ExpertsKind:
    """What the operator needs to know of a module: its gate, how its weights lie, and its form.

    ``norm`` is the name of a module that the outputs of experts go through before they are summed.
    """

    activation: str
    interleaved: bool
    transposed: bool
    bias: bool
    clamps: tuple[tuple[str, float], ...] = ()
    form: str = "routed"
    norm: str = ""
    signature: Signature = field(default_factory=Signature)

    @property
    def weights(self) -> tuple[str, ...]:
        """Names of the stacks."""
        return SHARED if self.form == "shared" else WEIGHTS[self.activation != NO_GATE]

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the stacks, and of the biases where there are any."""
        return (*self.weights, *bias_names(self.weights)) if self.bias else self.weights

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of ``fused_moe``."""
        how = {"interleaved": self.interleaved, "transposed": self.transposed}
        return {"activation": self.activation, **how, **dict(self.clamps)}


@dataclass(frozen=True)
class ExpertsSettings:
    """The kind, and the options of the patch."""

    kind: ExpertsKind
    options: Options

    @property
    def signature(self) -> Signature:
        """What must not have changed since the probe, or the original forward runs."""
        return self.kind.signature

    @property
    def shown(self) -> str:
        """What the report says that runs now."""
        op = "gated_mlp" if self.kind.form == "shared" else "fused_moe"
        return f"{op}[{self.kind.activation}{', norm' if self.kind.norm else ''}]"


class FusedExperts(Patched):
    """All experts of a layer as one operator."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The experts with nothing kept but gate and up; what was not probed runs the original."""
        kind = type(self)
        if not issubclass(kind, FusedExperts):
            return cast(Tensor, kind.forward(self, hidden_states, *args, **kwargs))
        settings = cast(ExpertsSettings, kind._liger_multi_swap.settings)
        given = (*args, *kwargs.values())  # the index first, whatever a model calls it
        known = code_holds(kind) and is_probed_call(self, settings.kind, hidden_states)
        routes = routes_of(self, settings.kind, hidden_states, given) if known else None
        if routes is None:
            return cast(Tensor, original(kind)(self, hidden_states, *args, **kwargs))
        bound = (self, settings.kind, hidden_states, *routes)
        names = ("fused_moe", "gated_mlp")
        return cast(Tensor, run_bound(settings.options, names, apply_experts, *bound))


def routes_of(
    module: Any, kind: ExpertsKind, x: Tensor, given: Sequence[Any]
) -> tuple[Tensor, Tensor] | None:
    """Experts of every token and their weights, or None where a call has another form.

    transformers 5.0 hands phimoe's experts a routing of all experts, and reads two of them.
    """
    if kind.form == "blocks":
        experts = stack_declared(module, "down_proj").shape[0]
        # under autocast the dtype of the result is that of a product
        known = not given and x.ndim == 2 and autocast_dtype(x.device.type) is None
        if not known or x.shape[0] % experts:
            return None
        index = torch.arange(experts, device=x.device)
        index = index.repeat_interleave(x.shape[0] // experts).unsqueeze(1)
        return index, x.new_ones(index.shape)
    if kind.form == "shared":
        experts = stack_declared(module, "down_proj").shape[0]
        rows = x.shape[:-1].numel()
        known = len(given) == 1 and given[0].numel() == rows * experts
        if not known or given[0].dtype != x.dtype or autocast_dtype(x.device.type) is not None:
            return None
        index = torch.arange(experts, device=x.device).expand(rows, experts)
        return index, given[0].reshape(rows, experts)
    alike = len(given) == 2 and given[0].shape == given[1].shape
    return (given[0], given[1]) if alike and not given[0].is_floating_point() else None


def is_probed_call(module: Any, kind: ExpertsKind, hidden: Tensor) -> bool:
    """Whether a call is one of those that were probed, with ordinary weights."""
    if globally_hooked() or not holds(module, kind.signature) or selected(module) is None:
        return False
    return type(hidden) is Tensor and all(
        isinstance(t, Stack)
        or (type(t) in WEIGHT_TYPES and t.is_floating_point() and t.itemsize > 1)
        for t in (stack_declared(module, name) for name in kind.parameters)
    )


def apply_experts(
    module: Any,
    kind: ExpertsKind,
    x: Tensor,
    index: Tensor,
    routing: Tensor,
    factors: Mapping[str, Any] | None = None,
) -> Tensor:
    """Run the operator with the weights of ``module``, and with what adapters add to them."""
    if kind.form == "shared":
        return _shared(module, kind, x, routing)
    if not kind.norm:
        return _summed(module, kind, x, index, routing, factors or {})
    # every pair is a token of its own, since the norm is that of one expert's output
    pairs = x.unsqueeze(1).expand(-1, index.shape[1], -1).reshape(-1, x.shape[1])
    ones = routing.new_ones(index.numel(), 1)
    y = _summed(module, kind, pairs, index.reshape(-1, 1), ones, factors or {})
    y = getattr(module, kind.norm)(y) * routing.reshape(-1, 1)
    wide = torch.promote_types(y.dtype, torch.float32)
    return cast(Tensor, y.view(*index.shape, y.shape[-1]).sum(1, dtype=wide).to(x.dtype))


def _shared(module: Any, kind: ExpertsKind, x: Tensor, routing: Tensor) -> Tensor:
    """The weighted sum of MLPs that all tokens go through."""
    rows, total = x.reshape(-1, x.shape[-1]), None
    stacks = [getattr(module, name).unbind(0) for name in kind.weights]
    for weight, parts in zip(routing.split(1, 1), zip(*stacks, strict=True), strict=True):
        y = ops.gated_mlp(rows, *parts, activation=kind.activation) * weight
        y = y.to(torch.promote_types(y.dtype, torch.float32))
        total = y if total is None else total + y
    return cast(Tensor, total).to(x.dtype).view(x.shape)


def _summed(
    module: Any,
    kind: ExpertsKind,
    x: Tensor,
    index: Tensor,
    routing: Tensor,
    factors: Mapping[str, Any],
) -> Tensor:
    """The weighted sum of the experts that every token goes to."""
    parts, given = [stacked(module, name) for name in kind.parameters], x.dtype
    experts = parts[1].shape[0]
    if autocast_dtype(x.device.type) is None or computes_in_weight_dtype(module, x.device.type):
        x = x.to(parts[1].dtype)
    if kind.form == "identity":
        parts[0] = parts[0][:experts]
    run = functools.partial(_run, kind)
    whole = not any(isinstance(part, Stack) for part in parts)
    with autocast_of(module, x.device.type):
        y = (run if whole else functools.partial(in_groups, run))(parts, x, index, routing, factors)
    if kind.form == "identity":
        y = y + torch.where(index < experts, 0, routing).sum(-1, keepdim=True).to(y.dtype) * x
    return y.to(given)


def _run(
    kind: ExpertsKind,
    parts: Sequence[Tensor],
    x: Tensor,
    index: Tensor,
    routing: Tensor,
    factors: Mapping[str, Any],
) -> Tensor:
    weight, down, *biases = parts
    options: dict[str, Any] = kind.options
    if biases:
        options |= {"gate_up_bias": biases[0], "down_bias": biases[1]}
    op = ops.lora_moe if factors else ops.fused_moe
    return op(x, weight, down, index, routing, **options, **factors)
