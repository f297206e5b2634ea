"""``F.linear_cross_entropy`` of a patched head's weight.

PyTorch 2.13 and later compute a loss from hidden states and the weight of a head, which is not
called and has no logits that could be lazy. The function is wrapped while any head is patched; the
wrapper looks for the weight among the patched heads, and calls PyTorch's function for all other
weights. A view of the weight, as :class:`torch.nn.LinearCrossEntropyLoss` makes one, is the weight.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from liger_multi._torch_private import is_tracing
from liger_multi.dispatch.autograd import transforming
from liger_multi.patching.evidence.signature import PLAIN
from liger_multi.patching.head.deferred import DeferredLogits
from liger_multi.patching.head.loss import CrossEntropyCall, LogitsShape, fused
from liger_multi.patching.swap import lock

_MARK = "_liger_multi_looks_for_heads"
_heads: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_inside: ContextVar[bool] = ContextVar("liger_multi_inside_linear_loss", default=False)

OutputDtype = Callable[[Tensor, Tensor], "torch.dtype | None"]
"""The dtype of the logits of hidden states and a weight."""


def follow(head: nn.Module, output_dtype: OutputDtype) -> None:
    """Have ``F.linear_cross_entropy`` recognize the weight of ``head`` while that is patched."""
    with lock:
        _heads.add(head)
        stock = getattr(F, "linear_cross_entropy", None)
        if stock is None or hasattr(stock, _MARK):
            return

        @functools.wraps(stock)
        def linear_cross_entropy(
            input: Any, linear_weight: Any, target: Any, **options: Any
        ) -> Tensor:
            loss = None
            if not torch.compiler.is_compiling() and _heads and not _inside.get():
                loss = _fused(input, linear_weight, target, output_dtype, **options)
            return stock(input, linear_weight, target, **options) if loss is None else loss

        setattr(linear_cross_entropy, _MARK, linear_cross_entropy)
        F.linear_cross_entropy = linear_cross_entropy


def unfollow(head: nn.Module) -> None:
    """PyTorch's function is back with the last head, unless somebody wrapped ours meanwhile."""
    with lock:
        _heads.discard(head)
        ours: Any = getattr(F, "linear_cross_entropy", None)
        if getattr(ours, _MARK, False) is ours and not _heads:
            F.linear_cross_entropy = vars(ours)["__wrapped__"]


def _fused(
    hidden: Any,
    linear_weight: Any,
    target: Any,
    output_dtype: OutputDtype,
    *,
    linear_bias: Any = None,
    weight: Any = None,
    ignore_index: int | None = None,
    options: Any = None,
    **how: Any,
) -> Tensor | None:
    """The loss through the patched head that has the weight, or None for PyTorch's.

    PyTorch 2.13 computes ignored rows where neither ``options`` are there nor the index is -100.
    """
    tensors = [hidden, linear_weight, *(t for t in (linear_bias, weight) if t is not None)]
    if how.keys() - {"reduction", "label_smoothing"}:
        return None
    if any(type(t) not in PLAIN for t in tensors) or linear_weight.ndim != 2 or hidden.ndim != 2:
        return None
    if (options is None and ignore_index not in (None, -100)) or is_tracing() or transforming():
        return None
    head = _head_of(linear_weight, linear_bias)
    dtype = None if head is None else output_dtype(hidden, linear_weight)
    if head is None or dtype is None or hidden.shape[-1] != linear_weight.shape[-1]:
        return None
    grad, settings = torch.is_grad_enabled(), type(head)._liger_multi_swap.settings
    own = (head._parameters["weight"], head._parameters.get("bias"))
    deferred = DeferredLogits(head, own, hidden, settings, dtype, grad)
    ignored = -100 if ignore_index is None else ignore_index
    call = CrossEntropyCall(LogitsShape(deferred), target, weight, ignore_index=ignored, **how)
    token = _inside.set(True)
    try:
        return fused(deferred, call)
    finally:
        _inside.reset(token)


def _head_of(weight: Tensor, bias: Tensor | None) -> Any:
    """The patched head that has both and no adapters, or None."""
    with lock:
        heads = list(_heads)
    for head in heads:
        own, other = head._parameters.get("weight"), head._parameters.get("bias")
        if _is(weight, own) and (_is(bias, other) if bias is not None else other is None):
            patched = hasattr(type(head), "stock_forward") and not hasattr(head, "base_layer")
            return head if patched else None
    return None


def _is(tensor: Any, own: Tensor | None) -> bool:
    """Whether a tensor is a parameter, or a view of all of it in its order."""
    if own is None or tensor is own:
        return own is not None
    same = tensor.shape == own.shape and tensor.stride() == own.stride()
    return same and tensor._base is own
