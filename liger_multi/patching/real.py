"""Real logits whose ``F.cross_entropy`` is ours: for ``cross_entropy=True``."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_multi.patching.loss import CrossEntropyCall, on_real
from liger_multi.patching.options import LossOptions
from liger_multi.patching.recipe import Recipe

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
    *(Tensor.detach, torch.detach),
}


def loss_logits(logits: Tensor, recipe: Recipe) -> Tensor:
    """Real logits with our loss, where the head's settings make it differ from PyTorch's."""
    options = recipe.settings.on_real
    if options is None or not recipe.grad or hasattr(logits, "placements"):
        return logits
    return LossLogits.wrap(logits, options)


class LossLogits(Tensor):
    """A tensor like any other but for the loss that is computed from it."""

    _options: LossOptions

    @staticmethod
    def wrap(logits: Tensor, options: LossOptions) -> Tensor:
        """``logits`` with our loss; shares storage and autograd history."""
        made = logits.as_subclass(LossLogits)
        made._options = options
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Our loss for ``F.cross_entropy``; what keeps logits logits keeps this class."""
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func is F.cross_entropy:
                call = CrossEntropyCall(*args, **kwargs)
                if isinstance(call.input, LossLogits):
                    loss = on_real(_plain(call.input), call.input._options, call)
                    if loss is not None:
                        return loss
            if func in _UNWRAP:
                args = tuple(_plain(a) for a in args)
            result = func(*args, **kwargs)
            if (
                func in _KEEP
                and type(result) is Tensor
                and args
                and isinstance(args[0], LossLogits)
            ):
                return LossLogits.wrap(result, args[0]._options)
        return result


def _plain(value: Any) -> Any:
    return value.as_subclass(Tensor) if isinstance(value, LossLogits) else value
