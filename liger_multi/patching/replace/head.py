"""The output embedding of a patched model, and which modules may become one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn

from liger_multi.checks import autocast_dtype
from liger_multi.patching.lazy_logits import versions
from liger_multi.patching.lazy_logits.deferred import DeferredLogits, Guard, Job, TracedGuard
from liger_multi.patching.lazy_logits.lazy_tensor import lazy_logits
from liger_multi.patching.lazy_logits.materialized import loss_logits
from liger_multi.patching.lazy_logits.protocol import is_infrastructure, warn_once
from liger_multi.patching.lazy_logits.traced import ReplicaLogits, TracedLogits
from liger_multi.patching.options import HeadSettings
from liger_multi.patching.recognize.plain_linear import is_plain_linear
from liger_multi.patching.replace.adapters import adapters, fits, looks_like_lora
from liger_multi.patching.replace.swap import Patched, buried, has_own_forward, stock_class


class LazyHead(Patched):
    """A linear layer whose output is logits that are computed when something needs them."""

    weight: Tensor
    bias: Tensor | None
    out_features: int

    def __init_subclass__(cls, **keywords: Any) -> None:
        """A class is made in every process that patches or unpickles; graphs run no Python."""
        super().__init_subclass__(**keywords)
        versions.start()

    def stock_forward(self, hidden: Tensor) -> Tensor:
        """The forward that the layer was built with."""
        return cast(Tensor, super().forward(hidden))

    def thin(self) -> tuple[Tensor, ...]:
        """Both factors of every low-rank adapter on the head."""
        return ()

    def scales(self) -> tuple[float, ...]:
        """What multiplies each of them."""
        return ()

    def forward(self, input: Tensor, job: Job | None = None) -> Any:
        """Lazy logits, or what ``job`` asks for."""
        hidden = input  # the name that PyTorch's layer has for callers
        if self.weight.numel() == 0:
            raise RuntimeError(
                "the weight of the output embedding has no elements, shape "
                f"{tuple(self.weight.shape)}: DeepSpeed ZeRO-3 has "
                "partitioned it and its hooks did not gather it for this call. Run the model "
                "through the DeepSpeed engine, or gather "
                "the weight with deepspeed.zero.GatheredParameters"
            )
        if job is not None:
            return job.run(self, hidden)
        settings = cast(HeadSettings, type(self)._liger_multi_swap.settings)
        grad = torch.is_grad_enabled()
        dtype = output_dtype(hidden, self.weight)
        fits = hidden.shape[-1] == self.weight.shape[1] if hidden.ndim > 1 else False
        whole = not hasattr(self.weight, "device_mesh")  # else a part, which nobody gathered
        if dtype is None or not fits or not whole or not may_be_lazy(self, hidden, grad):
            return self.stock_forward(hidden)
        weights = (self.weight, self.bias)
        # their rows lie in memory as those of the logits would (DeferredLogits.packed)
        hidden = hidden if hidden.is_contiguous() else hidden.contiguous()
        if torch.compiler.is_compiling():
            traced = TracedGuard(self.weight, hidden)
            return TracedLogits(
                DeferredLogits(self, weights, hidden, settings, dtype, grad, traced)
            )
        settled = not any(is_infrastructure(hook) for hook in hooks_of(self))
        guard = Guard(self, hidden, settled)
        thin, scales = self.thin(), self.scales()
        deferred = DeferredLogits(
            self, (*weights, *thin), hidden, settings, dtype, grad, guard, scales=scales
        )
        if settings.fused is None or _conflicting_hook(self) or _detached(self):
            return loss_logits(self.stock_forward(hidden), deferred)
        if getattr(self, "_is_replica", False):
            return ReplicaLogits(deferred) if grad else self.stock_forward(hidden)
        return lazy_logits(deferred)


class LazyAdaptedHead(LazyHead):
    """The same for a linear layer with LoRA adapters, which are part of every chunk of logits."""

    def thin(self) -> tuple[Tensor, ...]:
        """Both factors of every adapter that acts; none of those that are left to PEFT."""
        found = adapters(self)
        return () if isinstance(found, str) else tuple(t for one in found for t in (one.a, one.b))

    def scales(self) -> tuple[float, ...]:
        """Their scales."""
        found = adapters(self)
        return () if isinstance(found, str) else tuple(float(one.scale) for one in found)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Lazy logits, or what a job asks for; calls of another form run PEFT's forward."""
        job = args[1] if len(args) == 2 and isinstance(args[1], Job) else None
        if job is not None:
            return super().forward(args[0], job)
        plain = len(args) == 1 and not kwargs and not torch.compiler.is_compiling()
        if not plain or adapted_head_refusal(self) or not _all_fit(self, args[0]):
            return super(LazyHead, self).forward(*args, **kwargs)
        return super().forward(args[0])


def _all_fit(head: Any, hidden: Tensor) -> bool:
    return all(fits(hidden, one) for one in adapters(head))  # type: ignore[arg-type]


def adapted_head_refusal(head: Any) -> str | None:
    """Why the logits of a head with adapters are computed whole, or None."""
    kind = type(head).__name__
    stay = "its logits stay real, so that the adapter trains"
    if not looks_like_lora(head):
        return f"an adapter ({kind}) sits on the output embedding; {stay}"
    if not is_plain_linear(head.base_layer):
        return f"under the adapter on the output embedding is no plain linear layer; {stay}"
    found = adapters(head)
    return f"the output embedding: {found}; {stay}" if isinstance(found, str) else None


def output_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype | None:
    """The dtype of real logits; None where the stock forward would raise."""
    kind = hidden.device.type
    asked = autocast_dtype(kind)
    if asked is not None and hidden.dtype != torch.float64:
        return asked
    return hidden.dtype if hidden.dtype == weight.dtype else None


def may_be_lazy(head: LazyHead, hidden: Tensor, grad: bool) -> bool:
    """Whether logits of these hidden states, here and now, can be computed later."""
    if torch.compiler.is_compiling():
        # the flag behind is_exporting(), to which Dynamo of torch < 2.12 answers True in any graph
        exporting = torch.compiler._is_exporting_flag
        return grad and not exporting and not hooks_of(head)
    if not grad and (hidden.ndim < 3 or hidden.shape[1] == 1 or torch.is_inference_mode_enabled()):
        return False  # one position a sequence is a step of generation, which reads its logits
    plain = type(hidden) in (Tensor, nn.Parameter) and hidden.is_floating_point()
    return plain and not torch._C._is_tracing() and not torch._C._are_functorch_transforms_active()


def hooks_of(head: nn.Module) -> list[Any]:
    """Every hook that a call of the head runs."""
    every = (
        head._forward_hooks,
        head._forward_pre_hooks,
        head._backward_hooks,
        head._backward_pre_hooks,
    )
    return [hook for hooks in every for hook in hooks.values()]


def _conflicting_hook(head: nn.Module) -> bool:
    """Whether somebody else's hook looks at what the head returns; it gets real logits, once."""
    for hook in hooks_of(head):
        if not is_infrastructure(hook):
            name = getattr(hook, "__qualname__", type(hook).__name__)
            warn_once(
                f"the output embedding has a hook ({name}), so its logits are computed and the "
                "loss is not fused",
                "hook",
            )
            return True
    return False


def with_heads(model: nn.Module) -> Iterator[nn.Module]:
    """The modules of a model that may have an output embedding."""
    for module in model.modules():
        if callable(getattr(module, "get_output_embeddings", None)):
            yield module


def _detached(head: nn.Module) -> bool:
    """Whether DeepSpeed's hooks stand on the head: ZeRO-3 returns its output detached.

    A node of its own then joins the output to the graph, which a loss of hidden states passes by.
    """
    found = any(is_infrastructure(hook, ("deepspeed.",)) for hook in hooks_of(head))
    if found:
        warn_once(
            "DeepSpeed ZeRO-3 puts its hooks on the output embedding, so its logits are computed "
            "and the loss is not fused",
            "deepspeed",
        )
    return found


def find_heads(model: nn.Module) -> tuple[list[tuple[str, nn.Module]], str]:
    """The output embeddings of a model with their paths, or the reason why there is none."""
    for module in with_heads(model):
        try:
            head = cast(Any, module).get_output_embeddings()
        except (AttributeError, NotImplementedError):
            continue
        if isinstance(head, nn.Module):
            paths = {id(m): path for path, m in model.named_modules()}
            return [(paths.get(id(h), ""), h) for h in _inside(head)], ""
    return [], "the model has no output embedding (get_output_embeddings gives none)"


def _inside(head: nn.Module) -> list[nn.Module]:
    """A head itself, or the copies and the original in a wrapper of ``modules_to_save``."""
    copies = getattr(head, "modules_to_save", None)
    if isinstance(copies, nn.ModuleDict):
        original = getattr(head, "original_module", None)
        return [*copies.values(), *([original] if isinstance(original, nn.Module) else [])]
    return [head]


def head_refusal(head: nn.Module, owners: Iterable[nn.Module] = ()) -> str | None:
    """Why a module cannot be a lazy head, or None; ``owners`` are the modules around it."""
    kind = type(head).__name__
    if hasattr(head, "base_layer"):
        if "forward" in vars(head) and not has_own_forward(head):
            return f"somebody else replaced the forward of this {kind}"
        return adapted_head_refusal(head)
    from liger_multi.patching.replace import sharded_head

    parallel = sharded_head.is_sharded(head, owners)
    if parallel and (reason := sharded_head.refusal(head)):
        return reason
    if "forward" in vars(head) and not has_own_forward(head) and not parallel:
        return f"somebody else replaced the forward of this {kind}"
    if not isinstance(head, nn.Linear) and _holds_codes(head):
        return (
            f"the output embedding is a {kind} with quantized storage ({head.weight.dtype}); its "
            "logits come from its own call"
        )
    if not isinstance(head, nn.Linear) or (
        not buried(head) and stock_class(head).forward is not nn.Linear.forward
    ):
        return f"the output embedding is a {kind}, not a plain linear layer"
    if _holds_codes(head):
        return (
            f"the weight of the output embedding is stored as {head.weight.dtype}, "
            "which only its own call can turn into numbers"
        )
    if type(head.weight).__module__.startswith("torchao."):
        return (
            f"the weight of the output embedding is a {type(head.weight).__name__}, "
            "whose products are its own"
        )
    return None


def _holds_codes(head: nn.Module) -> bool:
    """Whether a weight is integers or eight bits of floating point."""
    weight = getattr(head, "weight", None)
    if not isinstance(weight, Tensor):
        return False
    return weight.dtype.itemsize < 2 or not weight.is_floating_point()


def behavior(head: nn.Module, owners: Iterable[nn.Module] = ()) -> type[LazyHead]:
    """The class of lazy heads that fits a module which is not refused."""
    from liger_multi.patching.replace import sharded_head

    if hasattr(head, "base_layer"):
        return LazyAdaptedHead
    return sharded_head.ShardedHead if sharded_head.is_sharded(head, owners) else LazyHead
