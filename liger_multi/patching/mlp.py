"""Gated MLP instances: recognise them, and run one operator between their own linear layers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_of_torch

from liger_multi.checks import autocast_dtype
from liger_multi.patching.kinds import MLP_KINDS, MLP_NAMES, MlpKind, MlpNames
from liger_multi.patching.loss import run_bound
from liger_multi.patching.options import Options
from liger_multi.patching.probe import laboratory, linear, random, scalars, shell
from liger_multi.patching.swap import Patched, stock_class


@dataclass(frozen=True)
class MlpSettings:
    """The activation, and the names of the layers."""

    kind: MlpKind
    names: MlpNames
    options: Options

    def shown(self, module: nn.Module) -> str:
        """What the report says that runs now."""
        if _bare(module, self.names):
            return f"gated_mlp[{self.kind.activation}]"
        op = self.kind.op if self.names.up else f"{self.kind.op}_packed"
        details = ", ".join(value for _, value in self.kind.options)
        return f"{op}[{details}]" if details else op


class FusedMlp(Patched):
    """``down(act(gate(x)) * up(x))`` as one operator, or with one between layers of other kinds.

    Adapters, hooks, sharded and quantised weights act in the layers' own calls, so these are made.
    """

    def forward(self, hidden_state: Tensor) -> Tensor:
        """The MLP with few activations kept for backward."""
        settings = cast(MlpSettings, type(self)._liger_multi_swap.settings)
        kind, names = settings.kind, settings.names
        ops = ("gated_mlp", kind.op, f"{kind.op}_packed")
        return cast(
            Tensor, run_bound(settings.options, ops, _apply, self, hidden_state, kind, names)
        )


def _apply(module: Any, x: Tensor, kind: MlpKind, names: MlpNames) -> Tensor:
    from liger_multi import ops

    gate, down = getattr(module, names.gate), getattr(module, names.down)
    options = dict(kind.options)
    if names.up is None:
        return cast(Tensor, down(getattr(ops, f"{kind.op}_packed")(gate(x), **options)))
    up = getattr(module, names.up)
    if _bare(module, names) and _one_dtype(x, gate, up, down):
        return ops.gated_mlp(
            x,
            gate.weight,
            up.weight,
            down.weight,
            gate_bias=gate.bias,
            up_bias=up.bias,
            down_bias=down.bias,
            activation=kind.activation,
        )
    return cast(Tensor, down(getattr(ops, kind.op)(gate(x), up(x), **options)))


HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
GLOBAL_HOOKS = tuple(f"_global{hooks}" for hooks in HOOKS)  # of all modules
PLAIN = (Tensor, nn.Parameter)


def _bare(module: nn.Module, names: MlpNames) -> bool:
    """Whether gate, up and down do nothing but multiply, so that their weights are all of them."""
    if names.up is None or any(getattr(module_of_torch, hooks) for hooks in GLOBAL_HOOKS):
        return False
    return all(_is_bare(module._modules[name]) for name in names.all)


def _is_bare(layer: nn.Module | None) -> bool:
    if type(layer) is not nn.Linear or "forward" in layer.__dict__:
        return False
    if any(layer.__dict__[hooks] for hooks in HOOKS):
        return False
    return all(p is None or type(p) in PLAIN for p in (layer.weight, layer.bias))


def _one_dtype(x: Tensor, *layers: nn.Linear) -> bool:
    if type(x) is not Tensor:
        return False
    if autocast_dtype(x.device.type) is not None:
        return True
    return all(layer.weight.dtype == x.dtype for layer in layers)


def mlp_names(module: nn.Module) -> MlpNames | None:
    """The names of the layers of a gated MLP; None when it has more than an activation besides."""
    for names in MLP_NAMES:
        layers = [module._modules.get(name) for name in names.all]
        if all(_is_linear(layer) for layer in layers):
            others = [m for n, m in module._modules.items() if n not in names.all and m is not None]
            plain = not module._parameters and all(
                not list(m.parameters()) and not m._modules for m in others
            )
            return names if plain and len(others) <= 1 else None
    return None


def _is_linear(layer: nn.Module | None) -> bool:
    return isinstance(getattr(layer, "in_features", None), int) and isinstance(
        getattr(layer, "out_features", None), int
    )


_known: dict[Any, MlpKind | str] = {}


def mlp_kind(module: nn.Module, names: MlpNames) -> MlpKind | str:
    """The kind of an instance, or the reason why it stays as it is."""
    layers = [module._modules[name] for name in names.all]
    others = tuple(
        (n, type(m), scalars(m), _functions(m))
        for n, m in module._modules.items()
        if n not in names.all and m is not None
    )
    sizes = tuple(
        (m.in_features, m.out_features, getattr(m, "bias", None) is not None)
        for m in layers
        if m is not None
    )
    kind = stock_class(module)
    key = (kind, kind.forward, names, sizes, others, scalars(module), _functions(module))
    try:
        found = _known.get(key)
    except TypeError:  # an attribute that cannot be hashed
        return _measure(module, names)
    if found is None:
        found = _known[key] = _measure(module, names)
    return found


def _functions(module: nn.Module) -> tuple[tuple[str, Any], ...]:
    """The functions among the attributes of a module, such as its activation."""
    found = {n: v for n, v in vars(module).items() if callable(v)}
    return tuple(
        (n, (v.func, v.args, *sorted(v.keywords.items())) if isinstance(v, partial) else v)
        for n, v in sorted(found.items(), key=lambda pair: pair[0])
    )


def _measure(module: nn.Module, names: MlpNames) -> MlpKind | str:
    """Compare a small stand-in with every formula; the first that agrees, or the reason why not."""
    layers: dict[str, Any] = {name: module._modules[name] for name in names.all}
    hidden, wide = layers[names.gate].in_features, layers[names.gate].out_features
    inner = layers[names.down].in_features
    fits = wide == (2 * inner if names.up is None else inner)
    if names.up is not None:
        fits = fits and (layers[names.up].in_features, layers[names.up].out_features) == (
            hidden,
            wide,
        )
    if not fits or layers[names.down].out_features != hidden:
        return "its layers do not fit together as gate, up and down"
    small_inner = (
        24 if inner == hidden else 12 if 2 * inner == hidden else 48 if inner == 2 * hidden else 40
    )
    sizes = {2 * inner: 2 * small_inner, inner: small_inner, hidden: 24}
    try:
        with laboratory() as generator, torch.no_grad():
            standin = shell(module, sizes)
            for name, m in module._modules.items():
                if name in layers:
                    bias = getattr(m, "bias", None) is not None
                    standin._modules[name] = linear(
                        generator,
                        sizes[layers[name].in_features],
                        sizes[layers[name].out_features],
                        bias,
                    )
                elif m is not None:
                    standin._modules[name] = shell(m)  # the activation, without its hooks
            x = random(generator, 2, 3, 24)
            stock = standin.forward(x)
            if isinstance(stock, Tensor):
                for kind in MLP_KINDS:
                    ours = _apply(standin, x, kind, names)
                    if stock.shape == ours.shape and torch.allclose(
                        stock, ours, rtol=1e-5, atol=1e-5
                    ):
                        return kind
    except (
        Exception
    ) as error:  # somebody's forward: any failure means that it is not this kind of module
        return f"its forward failed on a stand-in: {type(error).__name__}: {error}"
    formulas = " nor ".join(f"down({f})" for f in dict.fromkeys(k.formula for k in MLP_KINDS))
    return f"{stock_class(module).__name__} computes neither {formulas}"
