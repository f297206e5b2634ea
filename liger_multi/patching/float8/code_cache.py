"""FP8 codes of trained weights, cached until an optimizer has stepped.

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
class _CachedCodes:
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
    """A weight of an optimizer; the reference keeps its ``id`` from being reused.

    Attributes:
        weight: The tensor.
        cached: Its codes, since the last step of any optimizer.
        uses: Sums of some rows, as they were and at a use, which were not compared yet.
    """

    weight: Tensor
    cached: _CachedCodes | None = None
    uses: list[tuple[Tensor, Tensor]] = field(default_factory=list)


@dataclass
class _Followed:
    """The weights of an optimizer that has stepped; an attribute of the optimizer holds it.

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


def cached_rows(weight: Tensor) -> Any:
    """Codes and scales of a weight, made at its first use after a step; None before the first."""
    followed = next((f for f in _followed() if id(weight) in f.weights), None)
    if followed is None or not _ordered(weight):
        return None
    place, key = followed.weights[id(weight)], _key(weight)
    cached = place.cached
    if cached is None or cached.key != key:
        from liger_multi.ops.linear_float8 import rounded_rows

        _read(followed)
        with torch.no_grad():
            sums = bit_sums(weight)
            cached = place.cached = _CachedCodes(
                key, rounded_rows(weight), sums, sums[::EVERY].sum()
            )
    else:
        place.uses.append((cached.some, bit_sums(weight.detach()[::EVERY]).sum()))
        if len(place.uses) == USES:
            _read(followed)
            _compare(followed, {weight.device: _compared(place)})
    return cached.rows


_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


def bit_sums(weight: Tensor) -> Tensor:
    """A number per row, of all of its bits."""
    rows, width = weight.detach().contiguous(), weight.shape[1] * weight.itemsize
    word = next(word for word in _WORDS if width % word.itemsize == 0)
    return rows.view(torch.uint8).view(word).sum(1, dtype=torch.int64)


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
    return [getattr(followed, _NAME) for one in list(_stepped) if (followed := one()) is not None]


def _before_step(optimizer: Any, *_: Any) -> None:
    """Sum the weights again from which codes were computed."""
    followed = getattr(optimizer, _NAME, None)
    if followed is None:
        return
    _read(followed)
    same: dict[torch.device, list[Tensor]] = {}
    with torch.no_grad():
        for place in followed.weights.values():
            answers = same.setdefault(place.weight.device, [])
            answers += _compared(place)
            cached = place.cached
            if cached is not None and cached.key == _key(place.weight):
                answers.append((bit_sums(place.weight) == cached.sums).all())
    _compare(followed, same)


def _compared(place: _Weight) -> list[Tensor]:
    """Whether sums of some rows were at each use what they had been."""
    answers = [before == at_use for before, at_use in place.uses]
    place.uses.clear()
    return answers


def _compare(followed: _Followed, same: Mapping[torch.device, list[Tensor]]) -> None:
    """Ask whether sums agree, by device; a CPU knows at once."""
    followed.answers += [_on_host(torch.stack(s).all(), device) for device, s in same.items() if s]
    if all(event is None for _, event in followed.answers):
        _read(followed)


def _after_step(optimizer: Any, *_: Any) -> None:
    """Drop all codes: an optimizer may write where another has its weights."""
    followed = getattr(optimizer, _NAME, None)
    if followed is None:
        followed = _Followed()
        setattr(optimizer, _NAME, followed)
        _stepped.append(ref(optimizer, _stepped.remove))
    weights = [p for group in optimizer.param_groups for p in group["params"]]
    followed.weights = {id(p): _Weight(p) for p in weights}
    for other in _followed():
        _drop(other)


def _drop(followed: _Followed) -> None:
    for place in list(followed.weights.values()):
        place.cached = None


def _on_host(result: Tensor, device: torch.device) -> tuple[Tensor, Any]:
    """A result that is copied to the host asynchronously, and the event of its arrival."""
    if device.type == "cpu":
        return result, None
    module = torch.get_device_module(device)
    copied = torch.empty((), dtype=result.dtype, pin_memory=True)
    copied.copy_(result, non_blocking=True)
    event = module.Event()
    event.record(module.current_stream(device))
    return copied, event


def _read(followed: _Followed) -> None:
    for _, event in followed.answers:
        if event is not None:
            event.synchronize()  # it was recorded a step ago, or some uses
    agree = all(result.item() for result, _ in followed.answers)
    followed.answers.clear()
    if not agree:
        _drop(followed)
        for place in followed.weights.values():
            place.uses.clear()  # one error for all of them
        raise PatchError(
            "a weight was written through .data, or by code that counts no version, after its "
            "codes were made: gradients were computed with codes of old weights; leave cache=True "
            "of linear_float8 out of the patch"
        )
