"""Whether a tensor was written since it was looked at.

PyTorch's version counter says so, but for one case: fused optimizers (the default of the Hugging
Face Trainer) write parameters without counting. A hook after every optimizer step counts for the
parameters that are watched.
"""

from __future__ import annotations

import threading
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils.weak import WeakIdKeyDictionary

_steps: Any = WeakIdKeyDictionary()
_last: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
_lock = threading.Lock()
_hooked = False


def start() -> None:
    """Register the hook, once."""
    global _hooked
    with _lock:
        if not _hooked:
            register_optimizer_step_post_hook(_after_step)
            _hooked = True


def watch(parameter: Tensor) -> None:
    """Count the optimizer steps that change ``parameter``."""
    if parameter in _steps:
        return
    start()
    with _lock:
        _steps[parameter] = 0


def stepped_since(parameter: Tensor, made: Tensor) -> bool:
    """Whether an optimizer that holds ``parameter`` has stepped since ``made`` was computed.

    The order is that of autograd's numbers, so ``made`` needs a history.
    """
    if made.grad_fn is None or not parameter.requires_grad:
        return False
    number = made.grad_fn._sequence_nr()
    return any(
        last > number and any(p is parameter for g in optimizer.param_groups for p in g["params"])
        for optimizer, last in list(_last.items())
    )


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    _last[optimizer] = torch._C._autograd._get_sequence_nr()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None and parameter in _steps:
                _steps[parameter] += 1


def of(tensor: Tensor) -> tuple[int, int]:
    """A value that changes when ``tensor`` is written."""
    return (-1 if tensor.is_inference() else tensor._version), _steps.get(tensor, 0)
