"""Whether a tensor was written since it was looked at.

PyTorch's version counter says so, but for one case: fused optimizers (the default of the Hugging
Face Trainer) write parameters without counting. A hook after every optimizer step counts for the
parameters that are watched, and notes autograd's number of that moment for all: compiled graphs run
no Python that could watch. The numbers are those of one thread.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils.weak import WeakIdKeyDictionary

_steps: Any = WeakIdKeyDictionary()
_last: Any = WeakIdKeyDictionary()
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
    """Whether an optimizer has changed ``parameter`` since ``made`` was computed.

    The order is that of autograd's numbers, so ``made`` needs a history.
    """
    number = None if made.grad_fn is None else made.grad_fn._sequence_nr()
    return number is not None and _last.get(parameter, -1) > number


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    number = torch._C._autograd._get_sequence_nr()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                _last[parameter] = number
                if parameter in _steps:
                    _steps[parameter] += 1


def of(tensor: Tensor) -> tuple[int, int]:
    """A value that changes when ``tensor`` is written."""
    return (-1 if tensor.is_inference() else tensor._version), _steps.get(tensor, 0)
