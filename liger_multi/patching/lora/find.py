"""Linear layers with LoRA adapters, and layers of one input that are computed together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import nn

from liger_multi.patching.head.module import LazyHead
from liger_multi.patching.lora.fused import (
    FusedLora,
    SharedInput,
    adapters,
    looks_like_lora,
    projections,
)
from liger_multi.patching.options import Request
from liger_multi.patching.report import Skipped
from liger_multi.patching.rotary import FusedRotary
from liger_multi.patching.swap import (
    Change,
    Relabel,
    Replace,
    Restore,
    Swap,
    buried,
    conflict_of,
    stock_class,
    swapped,
)


def find_lora(model: nn.Module, request: Request) -> Iterator[Change]:
    """Linear layers with LoRA adapters."""
    for path, module in model.named_modules():
        if not looks_like_lora(module) or isinstance(module, LazyHead):
            continue
        options = request.get("lora")
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


def find_shared_inputs(model: nn.Module, request: Request) -> Iterator[Change]:
    """Layers with adapters that share an input: their module has them computed together."""
    for path, module in model.named_modules():
        layers = [] if request.get("lora") is None else projections(module)
        yield from _shared(path, module, bool(layers) and not conflict_of(module))
        if isinstance(module, SharedInput):
            names = {n for n, m in module.named_children() if any(m is one for one in layers)}
            paths = frozenset(f"{path}.{name}".strip(".") for name in names)
            yield Relabel(paths, "lora", "lora_qkv")


def _shared(path: str, module: nn.Module, together: bool) -> Iterator[Change]:
    """Let a module compute its projections together, or stop doing so."""
    swap = swapped(module)
    if together == isinstance(module, SharedInput) or buried(module):
        return
    if together and swap is None:
        yield Replace(path, module, Swap("lora", type(module), SharedInput, None))
    elif together and swap is not None and swap.behavior is FusedRotary:
        yield Replace(path, module, replace(swap, around=SharedInput, around_settings=None))
    elif swap is not None and swap.around is not None and issubclass(swap.around, SharedInput):
        yield Replace(path, module, replace(swap, around=None, around_settings=None))
    elif not together:
        yield Restore(path, module)
