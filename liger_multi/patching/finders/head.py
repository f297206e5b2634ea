"""The output embedding, whose loss is fused; it stays so when a vocabulary is resized."""

from __future__ import annotations

import functools
import sys
from typing import Any

from torch import nn

from liger_multi.patching.finders.changes import apply_swap, restore_class
from liger_multi.patching.options import Request
from liger_multi.patching.recognize import conflicts
from liger_multi.patching.recognize.heads import (
    behavior,
    find_heads,
    head_refusal,
    inner_heads,
    with_heads,
)
from liger_multi.patching.replace.adapters import FusedLora
from liger_multi.patching.replace.head import LazyHead
from liger_multi.patching.replace.linear import LinearByRows
from liger_multi.patching.replace.swap import Swap, apply, restore, stock_class, swapped
from liger_multi.patching.report import PatchReport, Skipped

_LOSSES = ("fused_linear_cross_entropy", "cross_entropy")


def find_loss_head(report: PatchReport, request: Request, model: nn.Module, needed: bool) -> None:
    """The output embedding; ``needed``: whether a model without one is worth a line."""
    settings = request.head
    heads, missing = find_heads(model)
    if settings is None:
        for path, module in heads:
            if not isinstance(module, LinearByRows):
                restore_class(report, path, module)
        return
    op = _LOSSES[0] if settings.fused else _LOSSES[1]
    if missing:
        report.skipped.append(Skipped("", op, missing, strict=needed))
    theirs = next((why for m in with_heads(model) if (why := conflicts.of_model(m))), None)
    for path, module in heads:
        if settings.fused and hasattr(module, "base_layer"):
            _unwrapped(report, path, module)
        if isinstance(module, FusedLora) and not head_refusal(module):  # it is more than that
            restore(module)
            report.entries = [e for e in report.entries if (e.path, e.op) != (path, "lora")]
        around = [m for p, m in model.named_modules() if not p or path.startswith(f"{p}.")]
        refusal = theirs or head_refusal(module, around)
        if refusal:
            for name, inner in module.named_modules():  # patched before an adapter came on top
                if not isinstance(inner, (FusedLora, LinearByRows)):
                    restore_class(report, f"{path}.{name}".strip("."), inner)
            report.skipped.append(Skipped(path, op, refusal))
            continue
        swap = Swap(op, stock_class(module), behavior(module, around), settings)
        apply_swap(report, path, module, swap, op, settings.shown)
        follow()
    for path, owner in inner_heads(model, [head for _, head in heads]):
        call = f"liger_multi.patch(model.{owner})"
        reason = f"it is the output embedding of a model within the model: {call} patches it"
        report.skipped.append(Skipped(path, op, reason, strict=False))


def _unwrapped(report: PatchReport, path: str, module: nn.Module) -> None:
    """A head that was patched before an adapter came on top of it is its plain base again."""
    for name, inner in module.named_modules():
        if isinstance(inner, LazyHead) and inner is not module:
            restore_class(report, f"{path}.{name}", inner)


_MARK = "_liger_multi_resizes"


def follow() -> None:
    """Wrap ``PreTrainedModel.resize_token_embeddings``, once; models without a patch see no change.

    A method of the class, since nothing is written into models: copies would hold the original's.
    """
    library = sys.modules.get("transformers.modeling_utils")
    kind = getattr(library, "PreTrainedModel", None)
    if kind is None or hasattr(kind.resize_token_embeddings, _MARK):
        return
    stock = kind.resize_token_embeddings

    @functools.wraps(stock)
    def resize_token_embeddings(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        before = [swapped(head) for _, head in find_heads(self)[0] if isinstance(head, LazyHead)]
        result = stock(self, *args, **kwargs)
        for _, head in find_heads(self)[0] if any(before) else ():
            swap = before[0]
            if swap is None or stock_class(head) is not swap.stock or head_refusal(head):
                continue
            if behavior(head) is swap.behavior:
                apply(head, swap)
        return result

    setattr(resize_token_embeddings, _MARK, True)
    kind.resize_token_embeddings = resize_token_embeddings
