"""Codes of trained weights that are kept until an optimizer has stepped.

They serve the micro-batches of a step and the recomputation of checkpointing, for as long as a
weight is the same storage, shape and version. An optimizer may be written in C and count no
version, so a step of any drops all codes. Those of weights that no optimizer of PyTorch's kind has
stepped are not kept, as nothing would tell of a change.

Code that writes through ``.data`` changes a weight without its version too. So the bits of every
row are summed when its weight is rounded, and again before the next step of an optimizer. Such a
write may be undone before that, as by methods that take a gradient elsewhere; so each use sums some
rows. Where sums differ, gradients were computed with codes of other weights, which is an error. A
device has the answer later: it is read without a wait, before the next rounding or step. There may
be neither, where a loop of one's own takes over from an optimizer; so sums of a weight are compared
after some uses, too. Passes without gradients, such as an evaluation with other weights, round for
themselves.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

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
        some: The sum of those of every :data:`EVERY`-th row.
    """

    key: tuple[Any, ...]
    rows: Any
    sums: Tensor
    some: Tensor


@dataclass
class _Weight:
    """A weight that an optimizer has, which is held so that its ``id`` is no other's.

    Attributes:
        weight: The tensor.
        kept: Its codes, since the last step of any optimizer.
        uses: Sums of some rows, as they were and at a use, which were not compared yet.
    """

    weight: Tensor
    kept: _Kept | None = None
    uses: list[tuple[Tensor, Tensor]] = field(default_factory=list)


@dataclass
class _Followed:
    """Of an optimizer that has stepped, and an attribute of it, which goes with it.

    Attributes:
        weights: By ``id``; nothing refers to them weakly, for PyTorch swaps no tensor then.
        answers: Whether sums agree, on the host, and when that is known.
    """

    weights: dict[int, _Weight] = field(default_factory=dict)
    answers: list[tuple[Tensor, Any]] = field(default_factory=list)


_stepped: list[ref[Any]] = []  # optimizers; copied at once where it is read, for threads add to it
_NAME = "_liger_multi_followed"
EVERY = 32
USES = 8
"""Uses of codes, after which their sums are compared."""


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
    found = next((f for f in _followed() if id(weight) in f.weights), None)
    if found is None or not _ordered(weight):
        return None
    place, key = found.weights[id(weight)], _key(weight)
    kept = place.kept
    if kept is None or kept.key != key:
        from liger_multi.ops.linear_float8 import rounded_rows

        _read(found)
        with torch.no_grad():
            sums = bit_sums(weight)
            kept = place.kept = _Kept(key, rounded_rows(weight), sums, sums[::EVERY].sum())
    else:
        place.uses.append((kept.some, bit_sums(weight.detach()[::EVERY]).sum()))
        if len(place.uses) == USES:
            _read(found)
            _compare(found, {weight.device: _compared(place)})
    return kept.rows


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


def _followed() -> list[_Followed]:
    return [getattr(found, _NAME) for one in list(_stepped) if (found := one()) is not None]


def _before_step(optimizer: Any, *_: Any) -> None:
    """Sum again what codes were made of."""
    found = getattr(optimizer, _NAME, None)
    if found is None:
        return
    _read(found)
    same: dict[torch.device, list[Tensor]] = {}
    with torch.no_grad():
        for place in found.weights.values():
            made = same.setdefault(place.weight.device, [])
            made += _compared(place)
            kept = place.kept
            if kept is not None and kept.key == _key(place.weight):
                made.append((bit_sums(place.weight) == kept.sums).all())
    _compare(found, same)


def _compared(place: _Weight) -> list[Tensor]:
    """Whether sums of some rows were at each use what they had been."""
    made = [before == at_use for before, at_use in place.uses]
    place.uses.clear()
    return made


def _compare(found: _Followed, same: Mapping[torch.device, list[Tensor]]) -> None:
    """Ask whether sums agree, by device; a CPU knows at once."""
    found.answers += [_on_host(torch.stack(s).all(), device) for device, s in same.items() if s]
    if all(event is None for _, event in found.answers):
        _read(found)


def _after_step(optimizer: Any, *_: Any) -> None:
    """Drop all codes: an optimizer may write where another has its weights."""
    found = getattr(optimizer, _NAME, None)
    if found is None:
        found = _Followed()
        setattr(optimizer, _NAME, found)
        _stepped.append(ref(optimizer, _stepped.remove))
    weights = [p for group in optimizer.param_groups for p in group["params"]]
    found.weights = {id(p): _Weight(p) for p in weights}
    for other in _followed():
        _drop(other)


def _drop(found: _Followed) -> None:
    for place in list(found.weights.values()):
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


def _read(found: _Followed) -> None:
    for _, event in found.answers:
        if event is not None:
            event.synchronize()  # it was recorded a step ago, or some uses
    agree = all(result.item() for result, _ in found.answers)
    found.answers.clear()
    if not agree:
        _drop(found)
        for place in found.weights.values():
            place.uses.clear()  # one error for all of them
        raise PatchError(
            "a weight was written through .data, or by code that counts no version, after its "
            "codes were made: gradients were computed with codes of old weights; leave cache=True "
            "of linear_float8 out of the patch"
        )
