"""LoRA layers of PEFT: what an adapter adds is one operator, on a base layer of any kind.

The base layer is called as it is, so that its hooks, its quantized weights and its sharding hold.
Adapters that are no plain product, and layers whose adapters are merged or disabled, run PEFT's
forward.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from liger_multi.checks import autocast_dtype
from liger_multi.dispatch.primitive import constant_in_graphs
from liger_multi.patching.lazy_logits.loss import run_bound
from liger_multi.patching.options import Options
from liger_multi.patching.recognize.plain_linear import globally_hooked, is_plain_linear, is_watched
from liger_multi.patching.recognize.signature import code_holds
from liger_multi.patching.replace.swap import Patched, stock_of

FORWARDS = {
    ("peft.tuners.lora.layer", "Linear.forward"),
    ("peft.tuners.lora.bnb", "Linear4bit.forward"),
    ("peft.tuners.lora.bnb", "Linear8bitLt.forward"),
}
"""Where a forward of PEFT's stands whose adapters are added to what the base layer gives."""


together: ContextVar[Any] = ContextVar("liger_multi_together", default=None)
"""The projections of the module that runs, which has them computed together."""


class Adapter(NamedTuple):
    """``scale (x a') b'``."""

    a: Tensor
    b: Tensor
    scale: float


def looks_like_lora(module: nn.Module) -> bool:
    """Whether a module is a linear layer of PEFT's with LoRA adapters."""
    return _is_lora(type(module))


@constant_in_graphs
def _is_lora(kind: Any) -> bool:
    own = stock_of(kind).forward
    return (own.__module__, own.__qualname__) in FORWARDS


def adapters(layer: Any) -> list[Adapter] | str:
    """The adapters of a LoRA layer that act now, or why they are left to PEFT."""
    if layer.disable_adapters or layer.merged:
        return "its adapters are disabled or merged"
    found = []
    for name in layer.active_adapters:
        if name not in layer.lora_A:
            continue
        a, b, drop = layer.lora_A[name], layer.lora_B[name], layer.lora_dropout[name]
        if name in layer.lora_variant:
            return f"its adapter {name!r} is no plain LoRA ({_variant(layer, name)})"
        if type(drop) is not nn.Identity and not (type(drop) is nn.Dropout and _rests(drop)):
            return f"its adapter {name!r} has a dropout, whose numbers PEFT draws"
        if not is_plain_linear(a) or not is_plain_linear(b) or is_watched(drop):
            return f"something stands around the adapter {name!r}"
        if a.bias is not None or b.bias is not None:
            return f"its adapter {name!r} has a bias"
        scale = layer.scaling[name]
        if not isinstance(scale, (int, float)):
            return f"the scale of its adapter {name!r} is a {type(scale).__name__}"
        found.append(Adapter(a.weight, b.weight, scale))
    return found


def _variant(layer: Any, name: str) -> str:
    return type(layer.lora_variant[name]).__name__


def _rests(drop: nn.Dropout) -> bool:
    return not (drop.training and drop.p)


def one_adapter(layer: Any) -> Adapter | None:
    """The adapter of a LoRA layer whose base is bare and frozen; None for any other layer."""
    base = getattr(layer, "base_layer", None)
    if base is None or not looks_like_lora(layer) or is_watched(layer) or not is_plain_linear(base):
        return None
    # FSDP and nn.DataParallel put tensors that are no parameters there
    if any(p is not None and p.requires_grad for p in (base.weight, base.bias)):
        return None
    found = adapters(layer)
    return found[0] if not isinstance(found, str) and len(found) == 1 else None


def fits(x: Tensor, adapter: Adapter) -> bool:
    """Whether the operators take the dtypes."""
    if autocast_dtype(x.device.type) is not None:
        return True
    a, b = adapter.a.dtype, adapter.b.dtype
    return a == b and a.itemsize >= x.dtype.itemsize


class FusedLora(Patched):
    """A linear layer with LoRA adapters that keeps nothing but its input."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The base layer's output and what every adapter adds; PEFT's forward where it must."""
        if not isinstance(self, FusedLora):
            return cast(Tensor, type(self).forward(self, x, *args, **kwargs))
        if not code_holds(type(self)):
            return cast(Tensor, super().forward(x, *args, **kwargs))
        group = None if torch.compiler.is_compiling() else together.get()
        if group is not None and not (args or kwargs):
            handed = group.output(self, x)
            if handed is not None:
                return cast(Tensor, handed)
        other = args or kwargs or type(x) is not Tensor or globally_hooked()
        found = "called in another form" if other else adapters(self)
        if isinstance(found, str) or not all(fits(x, one) for one in found):
            return cast(Tensor, super().forward(x, *args, **kwargs))
        from liger_multi.ops import lora_update

        options = cast(Options, type(self)._liger_multi_swap.settings)
        made = cast(Any, self).base_layer(x)
        if autocast_dtype(x.device.type) is None and made.dtype != x.dtype:
            x = x.to(made.dtype)  # a quantized layer's own choice

        def updated(base: Tensor) -> Tensor:
            for a, b, scale in found:
                base = lora_update(base, x, a, b, scale=scale)
            return base

        return cast(Tensor, run_bound(options, ("lora_update",), updated, made))
