"""The output embedding of a tensor parallel model, whose vocabulary is split over processes.

The layer holds a DTensor, and hooks (PyTorch's styles) or a replaced forward (transformers') hand
it the hidden states and collect what it returns. So it is the call of the module that gives lazy
logits here: of the whole vocabulary, as the stock call returns them. Their loss is that of
``liger_multi.nn.vocab_parallel``, for which no process sees another one's logits; everything else
takes the stock call.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from liger_multi.patching.lazy_logits.deferred import DeferredLogits, Guard, Job
from liger_multi.patching.lazy_logits.lazy_tensor import lazy_logits
from liger_multi.patching.options import HeadSettings
from liger_multi.patching.replace.head import LazyHead, hooks_of, may_be_lazy, output_dtype
from liger_multi.patching.replace.swap import buried, has_own_forward


class ShardedHead(LazyHead):
    """A linear layer with some of the classes, whose call returns lazy logits of all of them."""

    def __call__(self, hidden: Any, job: Job | None = None) -> Any:
        """Lazy logits, or what ``job`` asks for."""
        if job is not None:
            return job.run(self, hidden)
        settings = cast(HeadSettings, type(self)._liger_multi_swap.settings)
        grad = torch.is_grad_enabled()
        if settings.fused is None or torch.compiler.is_compiling() or refusal(self) is not None:
            return self.stock_forward(hidden)
        dtype = output_dtype(hidden, self.weight) if isinstance(hidden, Tensor) else None
        if dtype is None or hidden.ndim < 2 or not may_be_lazy(self, hidden, grad):
            return self.stock_forward(hidden)
        hidden = hidden if hidden.is_contiguous() else hidden.contiguous()
        guard = Guard(self, hidden, settled=False)
        weights = (self.weight, self.bias)
        return lazy_logits(DeferredLogits(self, weights, hidden, settings, dtype, grad, guard))

    def stock_forward(self, hidden: Tensor) -> Tensor:
        """The call with all that collects its result."""
        return cast(Tensor, nn.Module.__call__(self, hidden))

    def forward(self, hidden: Tensor, job: Job | None = None) -> Any:
        """The layer's own product, which the stock call asks for."""
        return LazyHead.stock_forward(self, hidden)


def is_sharded(head: nn.Module, owners: Iterable[nn.Module] = ()) -> bool:
    """Whether a layer is tensor parallel: by its weight, or by transformers' mark and means.

    FSDP, which may stand on the modules around it, has DTensors too, but gathers them before the
    forward.
    """
    kinds = [kind for module in (head, *owners) for kind in type(module).__mro__]
    fsdp = any(kind.__module__.startswith("torch.distributed.fsdp") for kind in kinds)
    if hasattr(getattr(head, "weight", None), "device_mesh"):
        return not fsdp
    collects = bool(hooks_of(head)) or ("forward" in vars(head) and not has_own_forward(head))
    return collects and (hasattr(head, "_hf_tp_plan") or bool(getattr(head, "_is_hooked", False)))


def refusal(head: Any) -> str | None:
    """Why the loss of a tensor parallel layer cannot be computed from its shards, or None."""
    start = "the output embedding is tensor parallel"
    weight, bias = head.weight, head.bias
    if not hasattr(weight, "device_mesh"):
        return f"{start}, but its weight is no DTensor that would tell whose classes it holds"
    if buried(head):
        return f"{start}, and its class is now {type(head).__name__}, on top of the patch"
    for tensor in [weight] if bias is None else [weight, bias]:
        placements: Any = getattr(tensor, "placements", ())
        if len(placements) != 1 or not placements[0].is_shard(0):
            return f"{start} with placements {placements}, which do not split the vocabulary alone"
    found = _layouts(head)
    if found is None:
        return f"{start}: hooks gather its output in a way that is not known"
    inputs, outputs, local = found
    if not inputs.is_replicate():
        return f"{start} on hidden states that are {inputs}: not all processes have all rows"
    if outputs.is_shard() and local:
        return (
            f"{start} and returns this process's part of the logits as a plain tensor; "
            "liger_multi.nn.vocab_parallel has losses of such parts"
        )
    return None


def _layouts(head: nn.Module) -> tuple[Any, Any, bool] | None:
    """Placements of input and output, and whether the output is a plain tensor.

    Both libraries keep them where functions keep what they close over.
    """
    held = _held(vars(head).get("forward"))
    for style in held:
        if hasattr(style, "output_layouts") and hasattr(style, "input_layouts"):
            if hooks_of(head):
                return None
            local = bool(getattr(style, "use_local_output", True))
            return _one(style.input_layouts), _one(style.output_layouts), local
    before, after = list(head._forward_pre_hooks.values()), list(head._forward_hooks.values())
    if len(before) != 1 or len(after) != 1 or len(hooks_of(head)) != 2 or held:
        return None
    inputs = next((c.args for c in _held(before[0]) if isinstance(c, partial)), ())
    outputs = next((c.args for c in _held(after[0]) if isinstance(c, partial)), ())
    if len(inputs) < 2 or len(outputs) != 2 or not isinstance(outputs[1], bool):
        return None
    return _one(inputs[0]), _one(outputs[0]), outputs[1]


def _held(function: Any) -> list[Any]:
    """What a function closes over."""
    return [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]


def _one(layouts: Any) -> Any:
    return layouts[0] if isinstance(layouts, tuple) and len(layouts) == 1 else layouts
