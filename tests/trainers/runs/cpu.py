"""A CPU in place of the accelerator that a trainer asks for."""

from __future__ import annotations

from collections import defaultdict
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

ALONE = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "0",
}
"""What ``torchrun`` sets, for one process."""


def _none(*_: Any) -> int:
    """Bytes of a device without memory of its own."""
    return 0


LACKING = {
    "get_device_name": lambda _=None: "CPU",
    "get_device_properties": lambda _=None: SimpleNamespace(total_memory=2**30),
    "mem_get_info": lambda _=None: (2**30, 2**30),
    "memory_stats": lambda _=None: defaultdict(int),
    "memory_allocated": _none,
    "max_memory_allocated": _none,
    "memory_reserved": _none,
    "max_memory_reserved": _none,
    "reset_peak_memory_stats": _none,
    "empty_cache": _none,
    "get_rng_state": torch.get_rng_state,
    "set_rng_state": torch.set_rng_state,
}
"""Functions of ``torch.cuda`` that trainers call."""


def accelerator(**more: Any) -> ModuleType:
    """``torch.cpu`` with the functions that it lacks beside ``torch.cuda``, and others."""
    module = ModuleType("cpu")
    vars(module).update(vars(torch.cpu) | LACKING | more)
    return module
