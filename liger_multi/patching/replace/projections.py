"""Projections of one input, such as q, k and v: their LoRA layers as one operator.

An attention module calls its layers one after the other. While it runs, the first of them that is
called with the module's own input has the outputs of all computed, and the others hand theirs out
when they are called with the very same tensor; what nobody came for is dropped when the module
returns. So layers that are called with something else, once more, or not at all, are what they
were: an output without a gradient adds nothing to that of the input.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from liger_multi.checks import autocast_dtype
from liger_multi.patching.lazy_logits.loss import run_bound
from liger_multi.patching.options import Options
from liger_multi.patching.recognize.kinds import PROJECTIONS
from liger_multi.patching.recognize.plain_linear import globally_hooked
from liger_multi.patching.recognize.rotary import FusedRotary
from liger_multi.patching.replace.adapters import Adapter, FusedLora, fits, one_adapter, together
from liger_multi.patching.replace.swap import Patched, Swap, apply, buried, restore, swapped

_SLOTS = ("q", "k", "v")  # of the operator


def projections(module: nn.Module) -> list[Any]:
    """The projections of a module that have adapters which we add, where there are several."""
    for names in PROJECTIONS:
        layers = [module._modules.get(name) for name in names]
        found = [layer for layer in layers if isinstance(layer, FusedLora)]
        if len(found) > 1:
            return found
    return []


class Together:
    """The projections in one call of their module."""

    def __init__(self, layers: Sequence[Any], x: Tensor) -> None:
        self.layers = layers
        self.x: Tensor | None = x
        self.made: dict[nn.Module, Tensor] | None = None
        self.state: tuple[Any, ...] = ()

    def output(self, layer: nn.Module, x: Any) -> Tensor | None:
        """What a layer gives of the module's input, once; None leaves it to the layer."""
        mine = self.x
        if mine is None or x is not mine or not any(layer is one for one in self.layers):
            return None
        now = (mine._version, torch.is_grad_enabled(), autocast_dtype(mine.device.type))
        if self.made is None:
            self.made, self.state = _made(self.layers, mine), now
        return self.made.pop(layer, None) if now == self.state else None


class SharedInput(Patched):
    """A module that computes its projections with adapters together."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The stock forward; compiled graphs and unknown forms of a call have layer by layer."""
        if not isinstance(self, SharedInput):
            return type(self).forward(self, *args, **kwargs)
        group = None if torch.compiler.is_compiling() else _group(self, args, kwargs)
        if group is None:
            return super().forward(*args, **kwargs)
        token = together.set(group)
        try:
            return super().forward(*args, **kwargs)
        finally:
            together.reset(token)
            group.made = group.x = None  # a traceback may hold this frame


def _group(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Together | None:
    layers = [] if globally_hooked() else projections(module)
    if not layers:
        return None
    width = layers[0].in_features
    given = [t for t in (*args, *kwargs.values()) if _may_be_input(t, width)]
    # a second one of that form may be what keys and values are made of
    if not given or any(t is not given[0] and t.ndim == given[0].ndim for t in given):
        return None
    return Together(layers, given[0])


def _may_be_input(x: Any, width: int) -> bool:
    plain = type(x) is Tensor and x.is_floating_point() and not x.is_inference()
    return plain and x.ndim > 1 and x.shape[-1] == width


def _made(layers: Sequence[Any], x: Tensor) -> dict[nn.Module, Tensor]:
    """The outputs of those layers that are frozen and bare but for one adapter."""
    found = [(layer, adapter) for layer in layers if (adapter := _usable(layer, x)) is not None]
    cast_to = autocast_dtype(x.device.type)
    if len(found) < 2 or (cast_to is None and len({a.a.dtype for _, a in found}) > 1):
        return {}
    options = cast(Options, type(layers[0])._liger_multi_swap.settings)
    outputs = run_bound(options, ("lora_qkv",), _run, found, x)
    return {layer: y for (layer, _), y in zip(found, outputs, strict=False)}


def _usable(layer: Any, x: Tensor) -> Adapter | None:
    adapter = one_adapter(layer)
    if adapter is None or not fits(x, adapter):
        return None
    same = layer.base_layer.weight.dtype == x.dtype
    return adapter if same or autocast_dtype(x.device.type) is not None else None


def _run(found: Sequence[tuple[Any, Adapter]], x: Tensor) -> Sequence[Tensor]:
    from liger_multi.ops import lora_qkv

    given: dict[str, Any] = {}
    for slot, (layer, adapter) in zip(_SLOTS, found, strict=False):
        base = layer.base_layer
        given |= {f"{slot}_weight": base.weight, f"{slot}_bias": base.bias}
        given |= {f"{slot}_a": adapter.a, f"{slot}_b": adapter.b, f"{slot}_scale": adapter.scale}
    return lora_qkv(x, **given)  # type: ignore[return-value]


def share(module: nn.Module, wanted: bool) -> bool:
    """Let a module compute its projections together, or no more; return whether it does."""
    held, shares = swapped(module), isinstance(module, SharedInput)
    if wanted == shares or buried(module):
        return shares
    if wanted and held is None:
        apply(module, Swap("lora", type(module), SharedInput, None))
    elif wanted and held is not None and held.behavior is FusedRotary:
        apply(module, replace(held, around=SharedInput))
    elif held is not None and held.around is SharedInput:
        apply(module, replace(held, around=None))
    elif not wanted:
        restore(module)
    return isinstance(module, SharedInput)
