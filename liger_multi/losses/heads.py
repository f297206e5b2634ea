"""The weight of a head, reached through the head's own call.

Hooks of FSDP and ZeRO-3 gather a sharded weight when the module that owns it is called, and free it
again after the call and after its backward. So a loss that takes a module runs inside of that call.
A LoRA adapter on the head is computed exactly, as columns beside the weight:

    h W^T + s dropout(h) A^T B^T = [h, s dropout(h) A^T] [W, B]^T
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Loss = Callable[[Tensor, Tensor, Tensor | None], Any]


def through(head: nn.Module, hidden: Tensor, loss: Loss) -> Any:
    """``loss(hidden, weight, bias)`` in a call of ``head``.

    Raises:
        TypeError: A head that is not linear, with the reason why it is none.
    """
    copies = getattr(head, "modules_to_save", None)
    if isinstance(copies, nn.ModuleDict):  # a wrapper around copies that train whole
        disabled = getattr(head, "_disable_adapters", False)
        active = [n for n in getattr(head, "active_adapters", ()) if n in copies]
        chosen = head.original_module if disabled or not active else copies[active[0]]
        return through(chosen, hidden, loss)  # type: ignore[arg-type]
    if hasattr(head, "base_layer"):
        return _adapted(head, hidden, loss)
    reason = _refusal(head)
    if reason is not None:
        raise TypeError(f"the weight of this head cannot be used by itself: {reason}")
    if hasattr(head, "stock_forward"):  # the head of a patched model takes jobs
        from liger_multi.patching.lazy_logits.deferred import Job

        return head(hidden, Job(lambda own, h: loss(h, own.weight, own.bias)))
    return _called(head, hidden, lambda h: loss(h, head.weight, head.bias))  # type: ignore[arg-type]


def _called(head: nn.Module, hidden: Tensor, body: Callable[[Tensor], Any]) -> Any:
    """Call ``head`` with another forward, so that its hooks run around ``body``."""
    head.forward = body
    try:
        return head(hidden)
    finally:
        del head.forward


def _refusal(head: nn.Module) -> str | None:
    kind = type(head).__name__
    if "forward" in vars(head):
        return f"somebody replaced the forward of this {kind}"
    if not isinstance(head, nn.Linear):
        return f"it is a {kind}, not a linear layer"
    own = type(head).forward
    if own is not nn.Linear.forward and not hasattr(head, "stock_forward"):
        return f"{kind} has a forward of its own"
    if not head.weight.is_floating_point():
        return f"its weight is quantized ({head.weight.dtype})"
    return None


def _adapted(head: Any, hidden: Tensor, loss: Loss) -> Any:
    kind = type(head).__name__
    if "forward" in vars(head):
        raise TypeError(f"somebody replaced the forward of this adapter ({kind})")
    if getattr(head, "disable_adapters", False) and getattr(head, "merged", False):
        raise TypeError(f"the adapter {kind} is disabled but merged into the weight; unmerge it")
    if getattr(head, "disable_adapters", False) or getattr(head, "merged", False):
        return _called(head, hidden, lambda h: through(head.base_layer, h, loss))
    names = [n for n in head.active_adapters if n in getattr(head, "lora_A", {})]
    variants = getattr(head, "lora_variant", {})
    strange = [n for n in names if n in variants] or not isinstance(
        getattr(head, "lora_A", None), nn.ModuleDict
    )
    if strange or any(n not in names for n in head.active_adapters):
        raise TypeError(
            f"the adapter on the head ({kind}) is no plain LoRA, so its logits are not a product "
            "of hidden states and a weight; give the loss real logits, or keep the head out of "
            "target_modules"
        )
    for name in names:
        if getattr(head.lora_B[name], "bias", None) is not None:
            raise TypeError(f"the adapter {name!r} on the head has a bias; give real logits")

    def body(h: Tensor) -> Any:
        parts = []
        for name in names:
            a = head.lora_A[name]
            low = a(head.lora_dropout[name](h.to(a.weight.dtype))) * head.scaling[name]
            parts.append((low.to(h.dtype), head.lora_B[name].weight))

        def beside(h: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
            wide = torch.cat((h, *[low for low, _ in parts]), -1)
            both = torch.cat((weight, *[up.to(weight.dtype) for _, up in parts]), 1)
            return loss(wide, both, bias)

        return through(head.base_layer, h, beside if parts else loss)

    return _called(head, hidden, body)
