"""Ranges of keys that say no more than ``causal``: looked at once, marked, and believed.

A compiler does not know what a mask's ranges will hold, so its graph has ranges even where an eager
model has none, and kernels for plain causal masks would be out of reach. The mark is an attribute
of a tensor that nobody writes to: lost, a backend takes the ranges as they are.
"""

import torch
from torch import Tensor

MARK = "_liger_multi_causal"


def _on_main_stream(device: torch.device) -> bool:
    """Whether nothing here is a graph that is recorded, or its rehearsal: both have a stream.

    A recording may not wait for the device, and what it takes, it would take for all masks later.
    """
    if device.type == "cpu":
        return True
    module = torch.get_device_module(device)
    if not hasattr(module, "default_stream"):
        return False
    return bool(module.current_stream(device) == module.default_stream(device))


def looked_at(ranges: Tensor, keys: int) -> Tensor:
    """A copy, marked where it is a causal mask of as many queries as keys. Waits for the device."""
    copy, queries = ranges.clone(), ranges.shape[1]
    if queries == keys and ranges.shape[2] == 2 and _on_main_stream(ranges.device):
        ends = torch.arange(1, keys + 1, device=ranges.device, dtype=ranges.dtype)
        plain = (ranges[..., 0] == 0).all() & (ranges[..., 1] == ends).all()
        setattr(copy, MARK, bool(plain))
    return copy


def unless_causal(ranges: Tensor | None, causal: bool) -> tuple[Tensor | None, bool]:
    """What to compute with: a mark stands for ``causal``."""
    if ranges is not None and getattr(ranges, MARK, False) and _on_main_stream(ranges.device):
        return None, True
    return ranges, causal
