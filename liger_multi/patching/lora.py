"""LoRA layers of PEFT.

:func:`find_lora` yields a patch for each layer (:class:`FusedLora`), which adds its adapters to the
output of its base layer by ``ops.lora_update``. :func:`find_shared_inputs` yields one for modules
whose projections share an input (:class:`SharedInput`), which compute q, k and v with their
adapters by ``ops.lora_qkv``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from liger_multi import ops
from liger_multi._torch_private import constant_in_graphs
from liger_multi.checks import autocast_dtype
from liger_multi.patching.evidence.facts import ModelFacts, home_of
from liger_multi.patching.evidence.signature import (
    code_holds,
    globally_hooked,
    is_plain_linear,
    is_watched,
)
from liger_multi.patching.float8.linear import (
    bare_frozen_float8,
    shared_codes,
    wide_dtype,
    wide_parts,
)
from liger_multi.patching.four_bits import bias_of, is_four_bit
from liger_multi.patching.options import Options, Request, run_bound
from liger_multi.patching.report import Skipped
from liger_multi.patching.rotary import FusedRotary
from liger_multi.patching.swap import (
    Change,
    Patched,
    Relabel,
    Replace,
    Restore,
    Swap,
    buried,
    conflict_of,
    original,
    stock_class,
    stock_of,
    swapped,
)

PROJECTIONS = (
    ("q_proj", "k_proj", "v_proj"),
    ("q", "k", "v"),
    ("query", "key", "value"),
    ("to_q", "to_k", "to_v"),
)
"""Names of layers of an attention module that may share an input."""

# --- one layer ---

FORWARDS = {
    ("peft.tuners.lora.layer", "Linear.forward"),
    ("peft.tuners.lora.bnb", "Linear4bit.forward"),
    ("peft.tuners.lora.bnb", "Linear8bitLt.forward"),
    ("peft.tuners.lora.gptq", "GPTQLoraLinear.forward"),
    ("peft.tuners.lora.awq", "AwqLoraLinear.forward"),
}
"""Forwards of PEFT, by module and name, that add adapters to the output of the base layer."""


active_group: ContextVar[Any] = ContextVar("liger_multi_together", default=None)
"""The projections (:class:`SharedCall`) of the running module."""


class Adapter(NamedTuple):
    """``scale (x a') b'``."""

    a: Tensor
    b: Tensor
    scale: float


def looks_like_lora(module: nn.Module) -> bool:
    """Whether a module is a linear layer of PEFT with LoRA adapters."""
    return _is_lora(type(module))


@constant_in_graphs
def _is_lora(module_class: Any) -> bool:
    return home_of(stock_of(module_class)) in FORWARDS


def matrices(layer: Any) -> list[nn.Module]:
    """The low-rank layers of all adapters of a LoRA layer."""
    return [*layer.lora_A.values(), *layer.lora_B.values()]


def adapters(layer: Any) -> list[Adapter] | str:
    """The active adapters of a LoRA layer, or why PEFT must run them."""
    if layer.disable_adapters or layer.merged:
        return "its adapters are disabled or merged"
    low_rank = []
    for name in layer.active_adapters:
        if name not in layer.lora_A:
            continue
        a, b, drop = layer.lora_A[name], layer.lora_B[name], layer.lora_dropout[name]
        if name in layer.lora_variant:
            return (
                f"its adapter {name!r} is no plain LoRA ({type(layer.lora_variant[name]).__name__})"
            )
        if type(drop) is not nn.Identity and not (
            type(drop) is nn.Dropout and not (drop.training and drop.p)
        ):
            return f"its adapter {name!r} has a dropout, whose numbers PEFT draws"
        if not is_plain_linear(a) or not is_plain_linear(b) or is_watched(drop):
            return f"something stands around the adapter {name!r}"
        if a.bias is not None or b.bias is not None:
            return f"its adapter {name!r} has a bias"
        scale = layer.scaling[name]
        if not isinstance(scale, (int, float)):
            return f"the scale of its adapter {name!r} is a {type(scale).__name__}"
        low_rank.append(Adapter(a.weight, b.weight, scale))
    return low_rank


def one_adapter(layer: Any) -> Adapter | None:
    """The only adapter of a LoRA layer with a plain frozen base layer; None for other layers."""
    base = getattr(layer, "base_layer", None)
    if base is None or not looks_like_lora(layer) or is_watched(layer):
        return None
    if not is_plain_linear(base) and not bare_frozen_float8(base) and not is_four_bit(base):
        return None
    # under FSDP and nn.DataParallel these are tensors, not parameters
    if any(p is not None and p.requires_grad for p in (getattr(base, "weight", None), base.bias)):
        return None
    low_rank = adapters(layer)
    return low_rank[0] if not isinstance(low_rank, str) and len(low_rank) == 1 else None


def fits(x: Tensor, adapter: Adapter) -> bool:
    """Whether operators accept the dtypes of an input and an adapter."""
    if autocast_dtype(x.device.type) is not None:
        return True
    a, b = adapter.a.dtype, adapter.b.dtype
    return a == b and a.itemsize >= x.dtype.itemsize


class FusedLora(Patched):
    """A linear layer with LoRA adapters that saves only its input for backward."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The base layer's output plus all adapters; PEFT's forward for other forms of a call."""
        module_class = type(self)
        if not issubclass(module_class, FusedLora):
            return cast(Tensor, module_class.forward(self, x, *args, **kwargs))
        if not code_holds(module_class):
            return cast(Tensor, original(module_class)(self, x, *args, **kwargs))
        group = None if torch.compiler.is_compiling() else active_group.get()
        if group is not None and not (args or kwargs):
            output = group.output(self, x)
            if output is not None:
                return cast(Tensor, output)
        is_other_form = args or kwargs or type(x) is not Tensor or globally_hooked()
        low_rank = "called in another form" if is_other_form else adapters(self)
        if isinstance(low_rank, str) or not all(fits(x, adapter) for adapter in low_rank):
            return cast(Tensor, original(module_class)(self, x, *args, **kwargs))
        options = cast(Options, module_class._liger_multi_swap.settings)
        base_output = cast(Any, self).base_layer(x)
        if autocast_dtype(x.device.type) is None and base_output.dtype != x.dtype:
            x = x.to(base_output.dtype)  # the dtype of a quantized layer

        def updated(base: Tensor) -> Tensor:
            for a, b, scale in low_rank:
                base = ops.lora_update(base, x, a, b, scale=scale)
            return base

        return cast(Tensor, run_bound(options, ("lora_update",), updated, base_output))


# --- layers that share an input ---

_SLOTS = ("q", "k", "v")  # of the operator


def projections(module: nn.Module) -> list[Any]:
    """The patched LoRA projections of a module, if there are at least two."""
    for names in PROJECTIONS:
        layers = [module._modules.get(name) for name in names]
        adapted = [layer for layer in layers if isinstance(layer, FusedLora)]
        if len(adapted) > 1:
            return adapted
    return []


class SharedCall:
    """The projections in one call of their module, whose outputs are computed at once."""

    def __init__(self, layers: Sequence[Any], x: Tensor) -> None:
        self.layers = layers
        self.x: Tensor | None = x
        self.outputs: dict[nn.Module, Tensor] | None = None
        self.state: tuple[Any, ...] = ()

    def output(self, layer: nn.Module, x: Any) -> Tensor | None:
        """The output of a layer for the module's input, once; None for other calls."""
        shared = self.x
        if shared is None or x is not shared or not any(layer is member for member in self.layers):
            return None
        state = (shared._version, torch.is_grad_enabled(), autocast_dtype(shared.device.type))
        if self.outputs is None:
            self.outputs, self.state = _outputs_of(self.layers, shared), state
        return self.outputs.pop(layer, None) if state == self.state else None


class SharedInput(Patched):
    """A module that computes its projections with their adapters at once."""

    reported = False  # its layers have lines

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The original forward; compiled graphs and other forms of a call run layer by layer."""
        module_class = type(self)
        if not issubclass(module_class, SharedInput):
            return module_class.forward(self, *args, **kwargs)
        inner = functools.partial(module_class._liger_multi_inner.forward, self, *args, **kwargs)
        return in_one(self, inner, args, kwargs)


def in_one(
    module: nn.Module, inner: Callable[[], Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """``inner()`` with the projections of a module computed at once."""
    group = None if torch.compiler.is_compiling() else _group(module, args, kwargs)
    if group is None:
        return inner()
    token = active_group.set(group)
    try:
        return inner()
    finally:
        active_group.reset(token)
        group.outputs = group.x = None  # a traceback may keep this frame alive


def _group(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> SharedCall | None:
    layers = [] if globally_hooked() else projections(module)
    if not layers:
        return None
    width = layers[0].in_features
    inputs = [t for t in (*args, *kwargs.values()) if _may_be_input(t, width)]
    # a second input of that shape may be the source of keys and values
    if not inputs or any(t is not inputs[0] and t.ndim == inputs[0].ndim for t in inputs):
        return None
    return SharedCall(layers, inputs[0])


def _may_be_input(x: Any, width: int) -> bool:
    plain = type(x) is Tensor and x.is_floating_point() and not x.is_inference()
    return plain and x.ndim > 1 and x.shape[-1] == width


def _outputs_of(layers: Sequence[Any], x: Tensor) -> dict[nn.Module, Tensor]:
    """The outputs of the layers with a plain frozen base and one adapter."""
    adapted = [(layer, adapter) for layer in layers if (adapter := _usable(layer, x)) is not None]
    cast_to = autocast_dtype(x.device.type)
    if len(adapted) < 2 or (cast_to is None and len({a.a.dtype for _, a in adapted}) > 1):
        return {}
    swap = swapped(layers[0])
    if swap is None:  # another thread has just unpatched the layer
        return {}
    outputs = run_bound(cast(Options, swap.settings), ("lora_qkv",), _run, adapted, x)
    return {layer: y for (layer, _), y in zip(adapted, outputs, strict=False)}


def _usable(layer: Any, x: Tensor) -> Adapter | None:
    adapter = one_adapter(layer)
    if adapter is None or not fits(x, adapter):
        return None
    same_dtype = wide_dtype(layer.base_layer, x.dtype) == x.dtype
    return adapter if same_dtype or autocast_dtype(x.device.type) is not None else None


def _run(adapted: Sequence[tuple[Any, Adapter]], x: Tensor) -> Sequence[Tensor]:
    operands: dict[str, Any] = {}
    scales = []
    for slot, (layer, adapter) in zip(_SLOTS, adapted, strict=False):
        weight, scale, _ = wide_parts(layer.base_layer, x.dtype)
        scales.append(scale)
        operands |= {f"{slot}_weight": weight, f"{slot}_bias": bias_of(layer.base_layer, x.dtype)}
        operands |= {f"{slot}_weight_scale": scale}
        operands[f"{slot}_lora"] = ops.LoRA(adapter.a, adapter.b, adapter.scale)
    codes = None if all(scale is None for scale in scales) else shared_codes(x)
    return ops.lora_qkv(x, **operands, quantized=codes)  # type: ignore[return-value]


# --- which layers ---


def find_lora(model: ModelFacts, request: Request) -> Iterator[Change]:
    """Linear layers with LoRA adapters."""
    options = request.get("lora")
    for path, module in model.of_class(lambda facts: home_of(facts.module_class) in FORWARDS):
        if buried(module) or hasattr(type(module), "stock_forward"):  # a patched head
            continue
        if options is None:
            yield Restore(path, module)
            continue
        verdict = conflict_of(module) or adapters(module)
        if isinstance(verdict, str):
            yield Restore(path, module)
            yield Skipped(path, "lora", verdict)
        else:
            swap = Swap("lora", stock_class(module), FusedLora, options)
            yield Replace(path, module, swap, "lora_update", options.shown())


def find_shared_inputs(model: ModelFacts, request: Request) -> Iterator[Change]:
    """Modules whose layers with adapters share an input."""
    sharing = (model.with_children({*names}, 2) for names in PROJECTIONS)
    for path, module in model.merged(*sharing, model.instances(SharedInput)):
        layers = [] if request.get("lora") is None else projections(module)
        yield from _shared(path, module, bool(layers) and not conflict_of(module))
        if isinstance(module, SharedInput):
            names = {n for n, m in module.named_children() if any(m is layer for layer in layers)}
            paths = frozenset(f"{path}.{name}".strip(".") for name in names)
            yield Relabel(paths, "lora", "lora_qkv")


def _shared(path: str, module: nn.Module, is_shared: bool) -> Iterator[Change]:
    """Patch a module to compute its projections at once, or undo that."""
    swap = swapped(module)
    if is_shared == isinstance(module, SharedInput) or buried(module):
        return
    if is_shared and swap is None:
        yield Replace(path, module, Swap("lora", type(module), SharedInput, None))
    elif is_shared and swap is not None and swap.behavior is FusedRotary:
        yield Replace(path, module, replace(swap, around=SharedInput, around_settings=None))
    elif swap is not None and swap.around is not None and issubclass(swap.around, SharedInput):
        yield Replace(path, module, replace(swap, around=None, around_settings=None))
    elif not is_shared:
        yield Restore(path, module)
