"""Linear layers with a weight in 4 bits, before the parts that make operators of several layers."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from liger_multi.patching.changes import Change, Replace, Restore
from liger_multi.patching.four_bits.linear import FourBitLinear
from liger_multi.patching.four_bits.weights import in_four_bits, quantized_weight, shown
from liger_multi.patching.linear import FORWARDS as LINEAR
from liger_multi.patching.options import Request
from liger_multi.patching.report import Skipped
from liger_multi.patching.swap import Patched, Swap, conflict_of, stock_class, unpatched_class

FORWARDS = {*LINEAR, ("bitsandbytes.nn.modules", "Linear4bit.forward")}
"""Forwards that are a GEMM with the weight, and nothing else."""


def find_four_bits(model: nn.Module, request: Request) -> Iterator[Change]:
    """Layers of bitsandbytes and torchao; others are named with the reason."""
    options = request.get("four_bits")
    for path, module in model.named_modules():
        ours = isinstance(module, FourBitLinear)
        if not ours and (isinstance(module, Patched) or not in_four_bits(module)):
            continue
        if options is None:
            yield Restore(path, module)
            continue
        forward = unpatched_class(module).forward
        known = (forward.__module__, getattr(forward, "__qualname__", "")) in FORWARDS
        weight = quantized_weight(module)
        reason = conflict_of(module)
        if reason is None and isinstance(weight, str):
            reason = weight
        if reason is None and not known:
            reason = f"it has a forward of its own ({unpatched_class(module).__name__})"
        if reason is not None or isinstance(weight, str):
            yield Restore(path, module)
            yield Skipped(path, "four_bits", f"{reason}", strict="four_bits" in request.named)
            continue
        swap = Swap("four_bits", stock_class(module), FourBitLinear, options)
        yield Replace(path, module, swap, f"linear[{shown(weight)}]", options.shown())
