"""Linear layers with a weight in 4 bits, before the parts that make operators of several layers."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from torch import nn

from liger_multi.patching.changes import Change, Replace, Restore
from liger_multi.patching.four_bits.linear import CompressedLinear, FourBitLinear, decompress_others
from liger_multi.patching.four_bits.weights import (
    PACKINGS,
    in_four_bits,
    is_compressed,
    quantized_weight,
    shown,
)
from liger_multi.patching.linear import FORWARDS as LINEAR
from liger_multi.patching.options import Request
from liger_multi.patching.report import Skipped
from liger_multi.patching.swap import Patched, Swap, conflict_of, stock_class, unpatched_class

FORWARDS = {
    *LINEAR,
    ("bitsandbytes.nn.modules", "Linear4bit.forward"),
    *((module, f"{name}.forward") for module, name in PACKINGS),
    ("modelopt.torch.quantization.nn.modules.quant_linear", "RealQuantLinear.forward"),
}
"""Forwards that are a GEMM with the weight, and nothing else."""


def find_four_bits(model: nn.Module, request: Request) -> Iterator[Change]:
    """Layers of bitsandbytes, torchao and compressed-tensors; others are named with the reason."""
    options = request.get("four_bits")
    for path, module in model.named_modules():
        _spare(module)
        ours = isinstance(module, FourBitLinear)
        if not ours and (isinstance(module, Patched) or not in_four_bits(module)):
            continue
        if options is None:
            yield Restore(path, module)
            continue
        forward = unpatched_class(module).forward
        known = (forward.__module__, getattr(forward, "__qualname__", "")) in FORWARDS
        weight = quantized_weight(module)
        reason = None if _compressed_forward(module) else conflict_of(module)
        if reason is None and isinstance(weight, str):
            reason = weight
        if reason is None and not known:
            reason = f"it has a forward of its own ({unpatched_class(module).__name__})"
        if reason is not None or isinstance(weight, str):
            yield Restore(path, module)
            yield Skipped(path, "four_bits", f"{reason}", strict="four_bits" in request.named)
            continue
        behavior = CompressedLinear if is_compressed(module) else FourBitLinear
        swap = Swap("four_bits", stock_class(module), behavior, options)
        yield Replace(path, module, swap, f"linear[{shown(weight)}]", options.shown())


def _compressed_forward(module: nn.Module) -> bool:
    """Whether compressed-tensors wrote the forward of an instance, which rounds and multiplies."""
    function: Any = getattr(vars(module).get("forward"), "__func__", None)
    written_in = str(getattr(function, "__globals__", {}).get("__name__"))
    return is_compressed(module) and written_in.startswith("compressed_tensors.")


def _spare(model: nn.Module) -> None:
    """Let the hook that decompresses a whole model ask at every forward which layers are ours."""
    handle: Any = vars(model).get("ct_decompress_hook")
    hook = None if handle is None else model._forward_pre_hooks.get(handle.id)
    if hook is not None and not isinstance(hook, functools.partial):
        model._forward_pre_hooks[handle.id] = functools.partial(decompress_others, hook)
