"""Record a real step: where its memory went, over time.

On an accelerator the history of the allocator is joined with a recorder's blocks. The allocator
knows every block, also those inside native kernels, and nothing about models; a recorder knows
modules and operators. A storage belongs to the block that stood at its address when it was first
recorded.
"""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from liger_multi._torch_private import memory_history
from liger_multi.memory.breakdown import Comparison, Profile, summarize
from liger_multi.memory.measure import resolve_device
from liger_multi.memory.recorder import OTHER, TEMPORARY, Block, Recorder

MOST_ENTRIES = 2_000_000  # of an allocator's history


def profile(
    step_fn: Callable[[], Any],
    *,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    device: torch.device | str | None = None,
    vocabulary: int | None = None,
    warm: int = 1,
    title: str = "a step",
) -> Profile:
    """Run a training step and report what its memory was spent on, when, and by which operators.

    On an accelerator whose PyTorch keeps a history of its allocator, every block is counted, also
    those inside native kernels; elsewhere all storages that operators touch. Operators cost some
    microseconds more while they are recorded, and gradients that meet are added out of place.

    Args:
        step_fn: Forward, backward and, if it belongs to the step, the optimizer's step.
        model: Gives parameters and modules their names.
        optimizer: Tells its states apart from other tensors.
        device: The device to watch; None takes that of the model, else the current accelerator or
            the CPU.
        vocabulary: Tensors with a last axis of this length are logits; None asks the model's
            configuration.
        warm: Steps that run before, unrecorded: the first step has no optimizer states yet.
        title: What the profile is of.

    Raises:
        ValueError: ``warm`` is negative.
    """
    if warm < 0:
        raise ValueError(f"warm must be a number of steps, 0 or more, got {warm!r}")
    where = _device(device, model)
    vocabulary = vocabulary or _vocabulary(model)
    for _ in range(warm):
        step_fn()
    recorder = Recorder(where.type, model, optimizer, vocabulary)
    with _history(where) as history, recorder.recording():
        step_fn()
    if not history:
        report = Profile(title, str(where), "live tensors")
        return summarize(report, recorder.blocks, recorder.events, recorder.phases)
    phases = [(m, name) for m, (_, name) in zip(recorder.moments, recorder.phases, strict=True)]
    joined = join(history["entries"], recorder.blocks, phases, *history["start"])
    report = Profile(title, str(where), "allocator history", allocator=joined.facts)
    return summarize(report, joined.blocks, joined.events, joined.phases)


def compare(first: Profile, second: Profile) -> Comparison:
    """Compare two profiles, such as unpatched and patched."""
    return Comparison(first, second)


def _device(device: torch.device | str | None, model: nn.Module | None) -> torch.device:
    if device is None and model is not None:
        parameter = next(model.parameters(), None)
        if parameter is not None:
            return parameter.device
    return resolve_device(device)


def _vocabulary(model: Any) -> int | None:
    config = getattr(model, "config", None)
    text = getattr(config, "get_text_config", lambda: config)()
    return getattr(text, "vocab_size", None)


@contextlib.contextmanager
def _history(device: torch.device) -> Iterator[dict[str, Any]]:
    """Record what the device's allocator does; the dictionary is filled when the block ends.

    It stays empty where there is no such record.
    """
    captured: dict[str, Any] = {}
    module = None if device.type == "cpu" else torch.get_device_module(device.type)
    memory: Any = getattr(module, "memory", None)
    history = memory_history(memory)
    if module is None or history is None:
        yield captured
        return
    record, snapshot = history
    index = module.current_device() if device.index is None else device.index
    module.synchronize(index)
    start = (module.memory_allocated(index), module.memory_reserved(index))
    record(enabled="all", context=None, max_entries=MOST_ENTRIES)
    try:
        yield captured
        module.synchronize(index)
        entries = snapshot()["device_traces"][index]
        captured.update(entries=entries, start=start)
    finally:
        record(enabled=None)


# --- the allocator's history ---

OLDER, HIDDEN = "older than the step", "inside a kernel"


@dataclass
class Joined:
    """Blocks, events and phases as :func:`liger_multi.memory.breakdown.summarize` takes them."""

    blocks: list[Block] = field(default_factory=list)
    events: list[tuple[int, int]] = field(default_factory=list)
    phases: list[tuple[int, str]] = field(default_factory=list)
    facts: dict[str, int] = field(default_factory=dict)


def join(
    entries: Sequence[Mapping[str, Any]],
    recorded: Sequence[Block],
    phases: Sequence[tuple[float, str]],
    allocated: int,
    reserved: int,
) -> Joined:
    """Allocator events with the modules and operators of a recorder.

    Args:
        entries: Of the device's trace in a snapshot: ``action``, ``addr``, ``size``, ``time_us``.
        recorded: Blocks of the recorder, with address and time.
        phases: ``(time in microseconds, phase)``.
        allocated: Bytes allocated when the history began.
        reserved: Bytes reserved then.
    """
    joined = Joined()
    owners = _owners(entries, [b for b in recorded if b.phase])
    at_start: dict[int, int] = {}
    for block in recorded:
        if not block.phase:
            at_start[block.address] = _open(joined, block, block.size)
    rest = max(0, allocated - sum(b.size for b in joined.blocks))
    older = _open(joined, Block(rest, role=OTHER, op=OLDER), rest)
    live: dict[int, tuple[int, int]] = {}
    now, names = allocated, iter(phases)
    following = next(names, None)
    best, highest_reserved = -1, reserved
    for place, entry in enumerate(entries):
        action, address, size = entry["action"], entry.get("addr", 0), entry.get("size", 0)
        while following is not None and entry.get("time_us", 0) >= following[0]:
            joined.phases.append((len(joined.events), following[1]))
            following = next(names, None)
        if action == "alloc":
            phase = joined.phases[-1][1] if joined.phases else ""
            block = owners.get(place) or Block(size, phase, op=HIDDEN, role=TEMPORARY)
            live[address] = (_open(joined, block, size), size)
            now += size
        elif action == "free_requested":
            index, size = live.pop(address, (at_start.pop(address, older), size))
            joined.events.append((index, -size))
            now -= size
        elif action == "segment_alloc":
            reserved += size
        elif action == "segment_free":
            reserved -= size
        highest_reserved = max(highest_reserved, reserved)
        if now > best:
            best = now
            joined.facts = {"allocated": now, "reserved": reserved, "fragmentation": reserved - now}
            joined.facts["hidden"] = sum(
                size for i, size in live.values() if joined.blocks[i].op == HIDDEN
            )
    joined.facts["largest reserved"] = highest_reserved
    return joined


def _open(joined: Joined, block: Block, size: int) -> int:
    joined.blocks.append(block)
    joined.events.append((len(joined.blocks) - 1, size))
    return len(joined.blocks) - 1


def _owners(entries: Sequence[Mapping[str, Any]], recorded: Sequence[Block]) -> dict[int, Block]:
    """The recorder's block of an entry: the first one at its address before the next entry."""
    places: dict[int, list[int]] = {}
    for place, entry in enumerate(entries):
        if entry["action"] == "alloc":
            places.setdefault(entry["addr"], []).append(place)
    times = {a: [entries[p].get("time_us", 0) for p in numbers] for a, numbers in places.items()}
    owners: dict[int, Block] = {}
    for block in recorded:
        position = bisect.bisect_right(times.get(block.address, []), block.time) - 1
        if position >= 0:
            owners.setdefault(places[block.address][position], block)
    return owners
