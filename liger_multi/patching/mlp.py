"""Gated MLP instances: recognise them, and run one operator between their own linear layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import permutations
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from liger_multi.checks import autocast_dtype
from liger_multi.patching import registered
from liger_multi.patching.adapters import Adapter, fits, one_adapter
from liger_multi.patching.bare import PLAIN, bare_parts, globally_hooked, is_bare
from liger_multi.patching.kinds import MLP_KINDS, MlpKind, MlpNames
from liger_multi.patching.loss import run_bound
from liger_multi.patching.options import MlpOptions
from liger_multi.patching.probe import laboratory, linear, random, scalars, shell
from liger_multi.patching.swap import Patched, stock_class


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
    """

    kind: MlpKind
    names: MlpNames
    inner: str | None = None
    outer: str | None = None
    numbers: tuple[tuple[str, str], ...] = ()
    options: MlpOptions = field(default_factory=MlpOptions)
    lora: bool = True

    def shown(self, module: nn.Module) -> str:
        """What the report says that runs now."""
        if self.kind.activation and _bare(module, self.names) and self.options.whole:
            return f"gated_mlp[{self.kind.activation}]"
        if self.kind.activation and self.lora and _adapted(module, self.names):
            return f"lora_mlp[{self.kind.activation}]"
        op = self.kind.op if self.names.up else f"{self.kind.op}_packed"
        details = ", ".join(value for _, value in self.kind.options if isinstance(value, str))
        return f"{op}[{details}]" if details else op


class FusedMlp(Patched):
    """``down(act(gate(x)) * up(x))`` as one operator, or with one between layers of other kinds.

    Adapters, hooks, sharded and quantised weights act in the layers' own calls, so these are made.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The MLP with few activations kept for backward; calls of another form run stock."""
        settings = cast(MlpSettings, type(self)._liger_multi_swap.settings)
        if len(args) != 1 or kwargs:
            return cast(Tensor, super().forward(*args, **kwargs))
        op = settings.kind.op
        ops = ("gated_mlp", "lora_mlp", op, f"{op}_packed")
        return cast(Tensor, run_bound(settings.options, ops, _apply, self, args[0], settings))


def _apply(module: Any, x: Tensor, settings: MlpSettings) -> Tensor:
    from liger_multi import ops

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
        inner = getattr(ops, kind.op)(gate(x), getattr(module, names.up)(x), **options)
    inner = _dropped(module, inner, settings.inner)
    return _dropped(module, cast(Tensor, down(_for(down, inner))), settings.outer)


def _by_weights(module: Any, x: Tensor, settings: MlpSettings) -> Tensor | None:
    """The MLP by the weights of layers that only multiply; None where their calls are needed."""
    from liger_multi import ops

    names = settings.names
    layers = [module._modules[name] for name in names.all]
    parts = [bare_parts(layer) for layer in layers]
    if None in parts:
        thin = _adapted(module, names) if settings.lora else None
        if thin is None:
            return None
        layers = [getattr(layer, "base_layer", layer) for layer in layers]
        if _one_dtype(x, *[layer.weight for layer in layers]) and all(
            a is None or fits(x, a) for a in thin
        ):
            return _with_adapters(x, layers, thin, settings.kind.activation)
        return None
    (gate, gate_bias), (up, up_bias), (down, down_bias) = cast(Any, parts)
    if globally_hooked() or not _one_dtype(x, gate, up, down):
        return None
    if not settings.options.whole:
        wide = functional.linear(x, gate, gate_bias), functional.linear(x, up, up_bias)
        inner = getattr(ops, settings.kind.op)(*wide, **dict(settings.kind.options))
        return functional.linear(inner, down, down_bias)
    return ops.gated_mlp(
        x, gate, up, down, gate_bias=gate_bias, up_bias=up_bias, down_bias=down_bias,
        activation=settings.kind.activation,
    )  # fmt: skip


def _with_adapters(
    x: Tensor, layers: list[Any], thin: list[Adapter | None], activation: str
) -> Tensor:
    from liger_multi.ops import lora_mlp

    pairs = [(None, None) if a is None else (a.a, a.b) for a in thin]
    scales = [1.0 if a is None else a.scale for a in thin]
    return lora_mlp(
        x,
        *(layer.weight for layer in layers),
        *(t for pair in pairs for t in pair),
        gate_bias=layers[0].bias,
        up_bias=layers[1].bias,
        down_bias=layers[2].bias,
        gate_scale=scales[0],
        up_scale=scales[1],
        down_scale=scales[2],
        activation=activation,
    )


def _dropped(module: Any, x: Tensor, name: str | None) -> Tensor:
    return x if name is None else cast(Tensor, getattr(module, name)(x))


def _silent(module: Any, name: str | None) -> bool:
    """Whether a dropout does nothing now."""
    drop = None if name is None else getattr(module, name)
    return drop is None or (type(drop) is nn.Dropout and not (drop.training and drop.p))


def _for(down: Any, x: Tensor) -> Tensor:
    """``x`` in the dtype of a layer that is kept in a wider one, as T5 does."""
    weight: Any = getattr(down, "weight", None)
    if type(weight) not in PLAIN or not weight.is_floating_point() or weight.itemsize < 2:
        return x
    return x if autocast_dtype(x.device.type) is not None else x.to(weight.dtype)


def _bare(module: nn.Module, names: MlpNames) -> bool:
    """Whether gate, up and down do nothing but multiply, so that their weights are all of them."""
    if names.up is None or globally_hooked():
        return False
    return all(is_bare(module._modules[name]) for name in names.all)


def _adapted(module: nn.Module, names: MlpNames) -> list[Adapter | None] | None:
    """The adapters of layers that are frozen and otherwise bare; None where not all are."""
    if names.up is None or globally_hooked():
        return None
    found = []
    for name in names.all:
        layer: Any = module._modules[name]
        adapter = None if is_bare(layer) else one_adapter(layer)
        if adapter is None and not (is_bare(layer) and _frozen(layer)):
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


def mlp_names(module: nn.Module) -> tuple[list[MlpNames], bool]:
    """Which layers may be gate, up and down, and whether their names say so.

    Nothing when the module has more than an activation and dropouts besides.
    """
    linears = {n: m for n, m in module._modules.items() if _is_linear(m)}
    if len(linears) not in (2, 3) or module._parameters:
        return [], False
    others = [m for n, m in module._modules.items() if n not in linears and m is not None]
    acts = [m for m in others if not isinstance(m, (nn.Dropout, nn.Identity))]
    if len(acts) > 1 or any(list(m.parameters()) or m._modules for m in acts):
        return [], False
    known = [n for n in registered.mlp_names() if set(n.all) == set(linears)]
    if known:
        return known, True
    found = []
    for order in permutations(linears):
        gate, up, down = order if len(order) == 3 else (order[0], None, order[1])
        names = MlpNames(gate, up, down)
        if _fit(module, names):
            found.append(names)
    return found, False


def _fit(module: nn.Module, names: MlpNames) -> bool:
    layers: Any = module._modules
    gate, down = layers[names.gate], layers[names.down]
    wide = 2 * down.in_features if names.up is None else down.in_features
    same = names.up is None or (
        (layers[names.up].in_features, layers[names.up].out_features)
        == (gate.in_features, gate.out_features)
    )
    return bool(gate.out_features == wide and same and down.out_features == gate.in_features)


def _is_linear(layer: nn.Module | None) -> bool:
    return isinstance(getattr(layer, "in_features", None), int) and isinstance(
        getattr(layer, "out_features", None), int
    )


_known: dict[Any, MlpSettings | str] = {}


def mlp_kind(module: nn.Module, candidates: list[MlpNames]) -> MlpSettings | str:
    """The kind of an instance, or the reason why it stays as it is."""
    linears = candidates[0].all
    layers = [module._modules[name] for name in linears]
    others = tuple(
        (n, type(m), scalars(m), _functions(m))
        for n, m in module._modules.items()
        if n not in linears and m is not None
    )
    sizes = tuple(
        (m.in_features, m.out_features, getattr(m, "bias", None) is not None)
        for m in layers
        if m is not None
    )
    kind = stock_class(module)
    beside = (scalars(module), _functions(module), registered.generation())
    key = (kind, kind.forward, tuple(candidates), sizes, others, *beside)
    try:
        found = _known.get(key)
    except TypeError:  # an attribute that cannot be hashed
        return _measure(module, candidates)
    if found is None:
        found = _known[key] = _measure(module, candidates)
    return found


def _functions(module: nn.Module) -> tuple[tuple[str, Any], ...]:
    """The functions among the attributes of a module, such as its activation."""
    found = {n: v for n, v in vars(module).items() if callable(v)}
    return tuple(
        (n, (v.func, v.args, *sorted(v.keywords.items())) if isinstance(v, partial) else v)
        for n, v in sorted(found.items(), key=lambda pair: pair[0])
    )


class _Marker(nn.Module):
    """Stands where a dropout stands: what comes out shows where it acted."""

    def forward(self, x: Tensor) -> Tensor:
        return 1.25 * x + 0.5


def _measure(module: nn.Module, candidates: list[MlpNames]) -> MlpSettings | str:
    """Compare a small stand-in with every formula; the first that agrees, or the reason why not."""
    fitting = [names for names in candidates if _fit(module, names)]
    if not fitting:
        return "its layers do not fit together as gate, up and down"
    try:
        with laboratory() as generator, torch.no_grad():
            standin, x = _standin(module, fitting[0], generator)
            stock = standin.forward(x)
            if isinstance(stock, Tensor):
                for settings in _settings(module, fitting):
                    ours = _apply(standin, x, settings)
                    if stock.shape == ours.shape and _close(stock, ours):
                        return settings
    except Exception as error:  # somebody's forward: failing, it is not this kind of module
        return f"its forward failed on a stand-in: {type(error).__name__}: {error}"
    formulas = " nor ".join(f"down({f})" for f in dict.fromkeys(k.formula for k in MLP_KINDS))
    return f"{stock_class(module).__name__} computes neither {formulas}"


def _close(stock: Tensor, ours: Tensor) -> bool:
    """Every row for itself: in a large one the forms of gelu agree."""
    bound = 1e-5 * stock.abs().amax(-1, keepdim=True) + 1e-6
    return bool(((stock - ours).abs() <= bound).all())


def _standin(
    module: nn.Module, names: MlpNames, generator: torch.Generator
) -> tuple[nn.Module, Tensor]:
    """A small copy and an input, of which some rows are large enough to be clamped."""
    layers: dict[str, Any] = {name: module._modules[name] for name in names.all}
    hidden, inner = layers[names.gate].in_features, layers[names.down].in_features
    small_inner = (
        24 if inner == hidden else 12 if 2 * inner == hidden else 48 if inner == 2 * hidden else 40
    )
    sizes = {2 * inner: 2 * small_inner, inner: small_inner, hidden: 24}
    standin = shell(module, sizes)
    for name, m in module._modules.items():
        if name in layers:
            bias = getattr(m, "bias", None) is not None
            inputs, outputs = (sizes[getattr(layers[name], f)] for f in _FEATURES)
            standin._modules[name] = linear(generator, inputs, outputs, bias)
        elif isinstance(m, nn.Dropout):
            standin._modules[name] = _Marker()
        elif m is not None:
            standin._modules[name] = shell(m)  # the activation, without its hooks
    return standin, random(generator, 2, 3, 24) * torch.tensor([[1.0], [0.3], [12.0]], device="cpu")


_FEATURES = ("in_features", "out_features")


def _settings(module: nn.Module, candidates: list[MlpNames]) -> Iterator[MlpSettings]:
    """What the module may compute: every formula, by the layers' roles and places of dropouts."""
    drops = [n for n, m in module._modules.items() if isinstance(m, nn.Dropout)]
    places: dict[int, list[tuple[str | None, str | None]]] = {
        0: [(None, None)],
        1: [(drops[0], None), (None, drops[0])] if drops else [],
        2: [(drops[0], drops[1]), (drops[1], drops[0])] if len(drops) == 2 else [],
    }
    floats = [n for n, v in vars(module).items() if isinstance(v, float)]
    for names in candidates:
        for kind in registered.mlp_kinds():
            numbers = tuple(
                (number, next((n for n in floats if number in n), "")) for number in kind.numbers
            )
            if all(held for _, held in numbers):
                for inner, outer in places.get(len(drops), []):
                    yield MlpSettings(kind, names, inner, outer, numbers)
