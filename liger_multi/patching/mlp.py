"""Gated MLP instances: recognise them, and run ``swiglu`` between their own linear layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from liger_multi.patching.kinds import MLP_NAMES, MlpNames
from liger_multi.patching.loss import run_bound
from liger_multi.patching.options import Options
from liger_multi.patching.probe import laboratory, linear, random, scalars, shell
from liger_multi.patching.swap import Patched, stock_class


@dataclass(frozen=True)
class MlpSettings:
    """The names of the layers."""

    names: MlpNames
    options: Options


class FusedMlp(Patched):
    """``down(silu(gate(x)) * up(x))`` through the module's own layers: adapters and hooks hold."""

    def forward(self, hidden_state: Tensor) -> Tensor:
        """The MLP with the activation and product as one operator."""
        settings = cast(MlpSettings, type(self)._liger_multi_swap.settings)
        names, ops = settings.names, ("swiglu", "swiglu_packed")
        return cast(Tensor, run_bound(settings.options, ops, _apply, self, hidden_state, names))


def _apply(module: Any, x: Tensor, names: MlpNames) -> Tensor:
    from liger_multi.ops import swiglu, swiglu_packed

    gate, down = getattr(module, names.gate), getattr(module, names.down)
    if names.up is None:
        return cast(Tensor, down(swiglu_packed(gate(x))))
    return cast(Tensor, down(swiglu(gate(x), getattr(module, names.up)(x))))


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


_known: dict[Any, str] = {}


def mlp_settings(module: nn.Module, names: MlpNames, options: Options) -> MlpSettings | str:
    """The settings for an instance, or the reason why it stays as it is."""
    layers = [module._modules[name] for name in names.all]
    others = tuple(
        (n, type(m), scalars(m))
        for n, m in module._modules.items()
        if n not in names.all and m is not None
    )
    functions = tuple(
        (n, v)
        for n, v in sorted(vars(module).items())
        if callable(v) and not isinstance(v, nn.Module)
    )
    sizes = tuple(
        (m.in_features, m.out_features, getattr(m, "bias", None) is not None)
        for m in layers
        if m is not None
    )
    key = (stock_class(module), names, sizes, others, functions, scalars(module))
    try:
        refusal = _known.get(key)
    except TypeError:  # an attribute that cannot be hashed
        return _measure(module, names) or MlpSettings(names, options)
    if refusal is None:
        refusal = _known[key] = _measure(module, names)
    return refusal or MlpSettings(names, options)


def _measure(module: nn.Module, names: MlpNames) -> str:
    """Compare a small stand-in with the formula; the reason why they differ, or an empty string."""
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
            stock, ours = standin.forward(x), _apply(standin, x, names)
            same = (
                isinstance(stock, Tensor)
                and stock.shape == ours.shape
                and torch.allclose(stock, ours, rtol=1e-5, atol=1e-5)
            )
    except (
        Exception
    ) as error:  # somebody's forward: any failure means that it is not this kind of module
        return f"its forward failed on a stand-in: {type(error).__name__}: {error}"
    return "" if same else f"{stock_class(module).__name__} does not compute down(silu(gate) * up)"
