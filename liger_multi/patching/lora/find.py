"""Linear layers with LoRA adapters, and layers of one input that are computed together."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from liger_multi.patching import conflicts
from liger_multi.patching.changes import apply_swap, restore_class
from liger_multi.patching.head.module import LazyHead
from liger_multi.patching.lora.fused import FusedLora, adapters, looks_like_lora, projections, share
from liger_multi.patching.options import Request
from liger_multi.patching.report import PatchReport, Skipped
from liger_multi.patching.swap import Swap, stock_class


def find_lora(report: PatchReport, request: Request, path: str, module: nn.Module) -> None:
    """Linear layers with LoRA adapters."""
    if not looks_like_lora(module) or isinstance(module, LazyHead):
        return
    options = request.get("lora")
    if options is None:
        restore_class(report, path, module)
        return
    found = conflicts.of_module(module) or adapters(module)
    if isinstance(found, str):
        restore_class(report, path, module)
        report.skipped.append(Skipped(path, "lora", found))
    else:
        swap = Swap("lora", stock_class(module), FusedLora, options)
        apply_swap(report, path, module, swap, "lora_update", options.shown())


def find_shared(report: PatchReport, request: Request, model: nn.Module) -> None:
    """Layers with adapters that share an input: their module has them computed together."""
    for path, module in model.named_modules():
        layers = [] if request.get("lora") is None else projections(module)
        if share(module, bool(layers) and not conflicts.of_module(module)):
            names = {n for n, m in module.named_children() if any(m is one for one in layers)}
            paths = {f"{path}.{name}".strip(".") for name in names}
            report.entries = [
                replace(e, replaced_by="lora_qkv") if e.op == "lora" and e.path in paths else e
                for e in report.entries
            ]
