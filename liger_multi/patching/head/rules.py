"""What lazy logits know about PyTorch's functions and hooks."""

from __future__ import annotations

import contextlib
import inspect
import math
import sys
from collections.abc import Callable, Sequence
from types import CodeType, FrameType, FunctionType
from typing import Any

import torch
from torch import Tensor

from liger_multi._torch_private import without_saved_tensor_hooks
from liger_multi.patching.head.deferred import DeferredLogits
from liger_multi.patching.report import warn_once

_PROPERTIES = (
    "shape dtype device layout ndim requires_grad grad_fn is_leaf is_cuda is_cpu is_meta "
    "is_sparse is_quantized is_nested "
    "is_mkldnn is_xpu is_mps is_xla itemsize nbytes output_nr retains_grad names"
)
_METHODS = (
    "size dim ndimension numel nelement stride is_contiguous is_floating_point is_complex "
    "is_signed is_inference "
    "element_size get_device __len__ __hash__ is_conj is_neg has_names"
)
METADATA: set[Any] = {
    *(getattr(Tensor, name).__get__ for name in _PROPERTIES.split() if hasattr(Tensor, name)),
    *(getattr(Tensor, name) for name in _METHODS.split() if hasattr(Tensor, name)),
    *(torch.numel, torch.is_floating_point, torch.is_complex, torch.is_conj, torch.is_inference),
}
"""Functions that are answered from shape and dtype alone."""

GRADIENT_BY_LOGITS = (
    "the gradient by logits that were not computed was asked for: the loss did not pass by them. "
    "Compute it on logits = liger_multi.patching.real_logits(outputs.logits), and ask for the "
    "gradient by these"
)
"""Why ``torch.autograd.grad`` refuses."""

OBJECT_IN_FUNCTION = (
    "the logits of a compiled model are no tensor, so an autograd.Function gives them no gradient; "
    "pass liger_multi.patching.real_logits(outputs.logits) to it"
)
"""Why logits of a compiled model refuse to be the input of an autograd.Function."""

PRODUCT = (
    "in a compiled function PyTorch does not tell which factor of @ the logits are; write "
    "torch.matmul(logits, w) or torch.matmul(w, logits)"
)
"""Why a product in a graph is refused."""

WRITTEN_BELOW = (
    "C++ makes a view of logits that were not computed, or has written to one; as_subclass and "
    "nn.Parameter do that. Pass liger_multi.patching.real_logits(outputs.logits)"
)
"""Why lazy logits refuse to be viewed below Python's function protocol."""

WRITTEN_SINCE = (
    "an autograd.Function got logits that were not computed, and they were modified in place while "
    "it holds them, or by itself; pass "
    "liger_multi.patching.real_logits(outputs.logits) to it"
)
"""Why a backward refuses."""


def asked_for(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    """What ``torch.autograd.grad`` is to differentiate by."""
    return inputs if isinstance(inputs, (tuple, list)) else (inputs,)


HOOKS: set[Any] = {Tensor.register_hook, Tensor.retain_grad}
"""What shows somebody the gradient by logits."""


def refuse_late_hook(func: Any, args: Sequence[Any]) -> None:
    """Refuse a hook on logits from which something was computed already without them.

    Sharding libraries put theirs on the loss as well, so they miss nothing.

    Raises:
        RuntimeError: It is somebody else's hook, which would see a part of the gradient, or none.
    """
    if len(args) > 1 and is_infrastructure(args[1]):
        return
    raise RuntimeError(
        f"{func.__name__} puts a hook on logits from which something was computed already without "
        "them, such as the fused loss: that gradient does not pass by the logits. Put it on logits "
        "= liger_multi.patching.real_logits(outputs.logits) before the loss is computed from "
        "these, or patch with fused_linear_cross_entropy=False"
    )


_INFRASTRUCTURE = ("torch.distributed.", "deepspeed.")


def is_infrastructure(hook: Any, libraries: tuple[str, ...] = _INFRASTRUCTURE) -> bool:
    """Whether a hook belongs to a library that gathers and shards parameters, not to the user."""
    while hasattr(hook, "func"):
        hook = hook.func
    return str(getattr(hook, "__module__", "")).startswith(libraries)


def warn_above_budget(deferred: DeferredLogits) -> None:
    """Say, once a line, that large logits are being computed whole."""
    fused = deferred.settings.fused
    if fused is not None and deferred.bytes > fused.materialize_bytes:
        warn_once(
            f"{{place}} needs the whole logits {tuple(deferred.shape)}, "
            f"{deferred.bytes / 2**20:.0f} MiB, which the fused loss had avoided. "
            "The loss itself, argmax, max, topk, gather, logsumexp and slices of "
            "rows do without; see materialize_bytes "
            "of fused_linear_cross_entropy to move the threshold"
        )


def asking(func: Any) -> Any:
    """The function that asks, where PyTorch names the wrapper that now stands under its name.

    A function of PyTorch hands over what it finds under its own name. Where somebody's wrapper
    stands there, that is the wrapper, which has run already and would run a second time.
    """
    if not isinstance(func, FunctionType) or _is_of_torch(func.__globals__):
        return func
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_NEAR):
        if frame is None or frame.f_code is torch.overrides.handle_torch_function.__code__:
            break
        frame = frame.f_back
    else:
        return func
    if frame is None or frame.f_back is None:
        return func
    code, names = frame.f_back.f_code, frame.f_back.f_globals
    if code is func.__code__ or code.co_freevars or not _is_of_torch(names):
        return func
    function = _functions.get(code)
    if function is None:
        function = _functions[code] = FunctionType(code, names)
    return function


def _is_of_torch(names: dict[str, Any]) -> bool:
    return str(names.get("__name__")).split(".")[0] == "torch"


_NEAR = 8
"""Frames between a function that asks and ours."""
_functions: dict[CodeType, Any] = {
    f.__code__: f for f in vars(torch.nn.functional).values() if isinstance(f, FunctionType)
}


def called(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
    """``function(*args)``; NotImplemented for None, and for arguments that it does not know."""
    known = _signatures.get(function)
    if known is None:
        known = _signatures[function] = _counted(inspect.signature(function))
    signature, least, most = known
    if kwargs or not least <= len(args) <= most:
        try:
            signature.bind(*args, **kwargs)
        except TypeError:
            return NotImplemented
    result = function(*args, **kwargs)
    return NotImplemented if result is None else result


def _counted(signature: inspect.Signature) -> tuple[inspect.Signature, int, float]:
    """A signature, and how few and how many positional arguments alone fit it for certain."""
    kinds = inspect.Parameter
    parameters = signature.parameters.values()
    named = [p for p in parameters if p.kind is kinds.POSITIONAL_OR_KEYWORD]
    least = sum(p.default is kinds.empty for p in named)
    several = any(p.kind is kinds.VAR_POSITIONAL for p in parameters)
    asks_more = any(p.kind is kinds.KEYWORD_ONLY and p.default is kinds.empty for p in parameters)
    return signature, least, -1 if asks_more else math.inf if several else len(named)


_signatures: dict[Callable[..., Any], tuple[inspect.Signature, int, float]] = {}


def recording() -> contextlib.AbstractContextManager[Any]:
    """Ordinary tensors with a version, also where the caller is in inference mode."""
    if torch.is_inference_mode_enabled():
        return torch.inference_mode(False)
    return contextlib.nullcontext()


def as_saved_by_the_head() -> contextlib.AbstractContextManager[None]:
    """Without hooks on saved tensors: the head's forward, which stands behind, ran outside of them.

    A checkpointed function would count tensors that its recomputation, on real logits, never saves.
    """
    return without_saved_tensor_hooks()
