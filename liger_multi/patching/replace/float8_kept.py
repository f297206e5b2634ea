"""Codes of trained weights that are kept until an optimizer has stepped.

They serve the micro-batches of a step and the recomputation of checkpointing, for as long as a
weight is the same storage, shape and version. An optimizer may be written in C and count no
version, so a step of any drops all codes. Those of weights that no optimizer of PyTorch's kind has
stepped are not kept, as nothing would tell of a change.

Code that writes through ``.data`` changes a weight without its version too. So the bits of every
row are summed when its weight is rounded, and again before the next step of an optimizer. Where
sums differ, gradients were computed with codes of old weights, which is an error. A device has the
answer later: it is read without a wait, before the next rounding or step. Passes without gradients,
such as an evaluation with other weights, round for themselves.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from liger_multi.errors import PatchError


@dataclass(frozen=True)
class _Kept:
    """Codes of a weight.

    Attributes:
        key: What a weight must still be.
        rows: Codes and scales.
        sums: Of the bits of each row.
    """

    key: tuple[Any, ...]
    rows: Any
    sums: Tensor


@dataclass
class _Weight:
    """A weight that an optimizer has, which is held so that its ``id`` is no other's."""

    weight: Tensor
    kept: _Kept | None = None


# Optimizers that have stepped. Each has its weights as an attribute, by id, which go with it; no
# weak reference is made, for PyTorch swaps no tensor that has one.
_stepped: WeakSet[Any] = WeakSet()
_WEIGHTS = "_liger_multi_weights"
_answers: list[tuple[Tensor, Any]] = []  # whether sums agree, on the host, and when that is known


def _key(weight: Tensor) -> tuple[Any, ...]:
    return weight.data_ptr(), weight.shape, weight.stride(), weight.dtype, weight._version


def _ordered(weight: Tensor) -> bool:
    """Whether what runs now follows what ran before on the device of a weight.

    A graph that is captured runs later, and another stream at any time.
    """
    from liger_multi.reference.common.chunking import capturing

    device = weight.device
    if device.type == "cpu":
        return True
    module: Any = torch.get_device_module(device)
    usual: bool = module.current_stream(device) == module.default_stream(device)
    return usual and not capturing(device)


def kept_rows(weight: Tensor) -> Any:
    """Codes and scales of a weight, made at its first use after a step; None before the first."""
    place = next((held[id(weight)] for held in _held() if id(weight) in held), None)
    if place is None or not _ordered(weight):
        return None
    key = _key(weight)
    if place.kept is None or place.kept.key != key:
        from liger_multi.ops.linear_float8 import rounded_rows

        _read_answers()
        with torch.no_grad():
            place.kept = _Kept(key, rounded_rows(weight), bit_sums(weight))
    return place.kept.rows


_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


def bit_sums(weight: Tensor) -> Tensor:
    """A number per row, of all of its bits."""
    rows, width = weight.detach().contiguous(), weight.shape[1] * weight.itemsize
    kind = next(kind for kind in _WORDS if width % kind.itemsize == 0)
    return rows.view(torch.uint8).view(kind).sum(1, dtype=torch.int64)


# --- steps of optimizers ---


@functools.cache
def follow_optimizers() -> None:
    """Watch the steps of all optimizers."""
    from torch.optim.optimizer import (
        register_optimizer_step_post_hook,
        register_optimizer_step_pre_hook,
    )

    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


def _before_step(optimizer: Any, *_: Any) -> None:
    """Sum again what codes were made of."""
    _read_answers()
    same: dict[torch.device, list[Tensor]] = {}
    with torch.no_grad():
        for place in _places():
            weight, kept = place.weight, place.kept
            if kept is not None and kept.key == _key(weight):
                same.setdefault(weight.device, []).append((bit_sums(weight) == kept.sums).all())
    _answers.extend(_on_host(torch.stack(found).all(), device) for device, found in same.items())
    if all(event is None for _, event in _answers):
        _read_answers()


def _after_step(optimizer: Any, *_: Any) -> None:
    weights = [p for group in optimizer.param_groups for p in group["params"]]
    setattr(optimizer, _WEIGHTS, {id(p): _Weight(p) for p in weights})
    _stepped.add(optimizer)
    _drop()


def _held() -> list[dict[int, _Weight]]:
    return [getattr(optimizer, _WEIGHTS) for optimizer in _stepped]


def _places() -> list[_Weight]:
    return [place for held in _held() for place in held.values()]


def _drop() -> None:
    for place in _places():
        place.kept = None


def _on_host(result: Tensor, device: torch.device) -> tuple[Tensor, Any]:
    """A result that comes to the host beside what follows, and the event of its arrival."""
    if device.type == "cpu":
        return result, None
    module = torch.get_device_module(device)
    made = torch.empty((), dtype=result.dtype, pin_memory=True)
    made.copy_(result, non_blocking=True)
    event = module.Event()
    event.record(module.current_stream(device))
    return made, event


def _read_answers() -> None:
    for _, event in _answers:
        if event is not None:
            event.synchronize()  # it was recorded a step ago
    agree = all(result.item() for result, _ in _answers)
    _answers.clear()
    if not agree:
        _drop()
        raise PatchError(
            "a weight was written through .data, or by code that counts no version, after its "
            "codes were made: gradients were computed with codes of old weights; leave cache=True "
            "of linear_float8 out of the patch"
        )
