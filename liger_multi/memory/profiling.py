"""Record a real step: where its memory went, over time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from liger_multi.memory.breakdown import Comparison, Profile, summarize
from liger_multi.memory.history import join
from liger_multi.memory.measure import resolve_device
from liger_multi.memory.recorder import Recorder

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
    """Run a training step and say what its memory was spent on, when, and by whom.

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
        made = Profile(title, str(where), "live tensors")
        return summarize(made, recorder.blocks, recorder.events, recorder.phases)
    phases = [(m, name) for m, (_, name) in zip(recorder.moments, recorder.phases, strict=True)]
    joined = join(history["entries"], recorder.blocks, phases, *history["start"])
    made = Profile(title, str(where), "allocator history", allocator=joined.facts)
    return summarize(made, joined.blocks, joined.events, joined.phases)


def compare(first: Profile, second: Profile) -> Comparison:
    """Two profiles beside each other, such as stock and patched."""
    return Comparison(first, second)


def _device(given: torch.device | str | None, model: nn.Module | None) -> torch.device:
    if given is None and model is not None:
        parameter = next(model.parameters(), None)
        if parameter is not None:
            return parameter.device
    return resolve_device(given)


def _vocabulary(model: Any) -> int | None:
    config = getattr(model, "config", None)
    text = getattr(config, "get_text_config", lambda: config)()
    return getattr(text, "vocab_size", None)


@contextlib.contextmanager
def _history(device: torch.device) -> Iterator[dict[str, Any]]:
    """Record what the device's allocator does; the dictionary is filled when the block ends.

    It stays empty where there is no such record.
    """
    found: dict[str, Any] = {}
    module = None if device.type == "cpu" else torch.get_device_module(device.type)
    memory: Any = getattr(module, "memory", None)
    if module is None or not hasattr(memory, "_record_memory_history"):
        yield found
        return
    index = module.current_device() if device.index is None else device.index
    module.synchronize(index)
    start = (module.memory_allocated(index), module.memory_reserved(index))
    memory._record_memory_history(enabled="all", context=None, max_entries=MOST_ENTRIES)
    try:
        yield found
        module.synchronize(index)
        entries = memory._snapshot()["device_traces"][index]
        found.update(entries=entries, start=start)
    finally:
        memory._record_memory_history(enabled=None)
