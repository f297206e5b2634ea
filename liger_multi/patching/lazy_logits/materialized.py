"""Real logits whose ``F.cross_entropy`` is ours: for ``cross_entropy=True``."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_multi.patching.lazy_logits.deferred import DeferredLogits
from liger_multi.patching.lazy_logits.loss import CrossEntropyCall, on_real
from liger_multi.patching.lazy_logits.protocol import (
    GRADIENT_BY_LOGITS,
    HOOKS,
    asked_for,
    refuse_late_hook,
)
from liger_multi.patching.options import LossOptions

# Whether lazy logits that become real change places with the real ones. Older versions lost a
# reference to them: an autograd.Function that had saved them read freed memory, seen up to
# 2.9, not with 2.11 and 2.13. There they remember the real ones instead.
SWAPS = torch.__version__ >= "2.11"

# What stands between a head and its loss; the result is logits still.
_KEEP = {
    *(
        Tensor.__getitem__,
        Tensor.view,
        Tensor.reshape,
        Tensor.flatten,
        Tensor.contiguous,
        Tensor.float,
        Tensor.to,
    ),
    *(
        torch.reshape,
        torch.flatten,
        Tensor.mul,
        Tensor.__mul__,
        Tensor.__rmul__,
        torch.mul,
        Tensor.div,
        torch.div,
    ),
    *(
        Tensor.__truediv__,
        torch.true_divide,
        Tensor.tanh,
        torch.tanh,
        Tensor.squeeze,
        torch.squeeze,
    ),
    *(
        Tensor.add,
        Tensor.__add__,
        Tensor.__radd__,
        torch.add,
        Tensor.sub,
        Tensor.__sub__,
        torch.sub,
    ),
    *(Tensor.masked_fill, torch.masked_fill, Tensor.clamp, torch.clamp),
}
_UNWRAP = {
    *(Tensor.__reduce_ex__, Tensor.__deepcopy__, Tensor.__format__),
}


def loss_logits(logits: Tensor, deferred: DeferredLogits) -> Tensor:
    """Real logits with our loss, where the head's settings make it differ from PyTorch's."""
    options = deferred.settings.on_real
    if options is None or not deferred.grad or hasattr(logits, "placements"):
        return logits
    return LossLogits.wrap(logits, options)


def without_hooks(logits: Tensor) -> Tensor:
    """Real logits that refuse hooks, since a loss was computed before without them."""
    if not logits.requires_grad or type(logits) not in (Tensor, LossLogits):
        return logits
    LossLogits.wrap(logits, getattr(logits, "_options", None))._late = True  # type: ignore[attr-defined]
    return logits


class LossLogits(Tensor):
    """A tensor like any other but for the loss that is computed from it, and perhaps for hooks."""

    _options: LossOptions | None
    _late = False

    @staticmethod
    def wrap(logits: Tensor, options: LossOptions | None) -> Tensor:
        """Give ``logits`` our loss.

        It is the same tensor under another class: autograd refuses in-place operations on some
        views that it allows on what they are views of.
        """
        logits.__class__ = LossLogits
        logits._options = options  # type: ignore[attr-defined]
        return logits

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Our loss for ``F.cross_entropy``; what keeps logits logits keeps this class."""
        kwargs = kwargs or {}
        first = args[0] if args and isinstance(args[0], LossLogits) else None
        if func in HOOKS and first is not None and first._late:
            refuse_late_hook(func, args)
        if func is torch.autograd.grad and any(map(_is_late, asked_for(*args, **kwargs))):
            raise RuntimeError(GRADIENT_BY_LOGITS)
        with torch._C.DisableTorchFunctionSubclass():
            if func is F.cross_entropy:
                loss = _loss(CrossEntropyCall(*args, **kwargs))
                if loss is not None:
                    return loss
            if func in _UNWRAP:
                args = tuple(_plain(a) for a in args)
            result = func(*args, **kwargs)
            if first is None or first._options is None or "out" in kwargs:
                return result
            if func in _KEEP and type(result) is Tensor:
                return LossLogits.wrap(result, first._options)
        return result


def _is_late(value: Any) -> bool:
    return isinstance(value, LossLogits) and value._late


def _loss(call: CrossEntropyCall) -> Tensor | None:
    options = call.input._options if isinstance(call.input, LossLogits) else None
    return None if options is None else on_real(_plain(call.input), options, call)


def _plain(value: Any) -> Any:
    return value.as_subclass(Tensor) if isinstance(value, LossLogits) else value
