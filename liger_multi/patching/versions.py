"""Whether a tensor was written since it was looked at.

PyTorch's version counter says so, but for one case: fused optimizers (the default of the Hugging
Face Trainer) write parameters without counting. A hook after every optimizer step counts for the
parameters that are watched.
"""

from __future__ import annotations

import threading
from typing import Any

from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils.weak import WeakIdKeyDictionary

_steps: Any = WeakIdKeyDictionary()
_lock = threading.Lock()
_hooked = False


def watch(parameter: Tensor) -> None:
    """Count the optimizer steps that change ``parameter``; the first call registers the hook."""
    global _hooked
    if parameter in _steps:
        return
    with _lock:
        _steps[parameter] = 0
        if not _hooked:
            register_optimizer_step_post_hook(_after_step)
            _hooked = True


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None and parameter in _steps:
                _steps[parameter] += 1


def of(tensor: Tensor) -> tuple[int, int]:
    """A value that changes when ``tensor`` is written."""
    return (-1 if tensor.is_inference() else tensor._version), _steps.get(tensor, 0)
