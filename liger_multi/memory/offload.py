"""Activations that wait for backward in the host's memory, copied while the device computes.

What autograd saves inside the stack of layers goes through hooks. On an accelerator a tensor is
copied to pinned memory on a stream of its own and leaves the device once that is done; backward
fetches those that come next while it computes. Under a recompute policy or checkpointing what is
saved are the inputs of layers, and these go.
"""

from __future__ import annotations

import copy
import weakref
from collections import deque
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from liger_multi.memory.recompute import decoder_layers


class _Parked:
    """One stretch of memory that went to the host; all tensors of it share it."""

    def __init__(self, number: int, source: Tensor) -> None:
        self.number, self.nbytes = number, source.nbytes
        self.source: Tensor | None = source  # until it has been copied
        self.fetched: Tensor | None = None
        self.host: Any = None
        self.ready: Any = None

    def __del__(self) -> None:
        # nobody asked for what is on its way: its memory must not be used before it came
        if self.fetched is not None and self.ready is not None:
            torch.accelerator.current_stream(self.fetched.device).wait_event(self.ready)


class _View:
    """A tensor as it was: its stretch of memory, and how it lies there."""

    def __init__(self, parked: _Parked, tensor: Tensor) -> None:
        self.parked, self.size, self.stride = parked, tensor.size(), tensor.stride()


class _Plain:
    """Synchronous copies (a CPU)."""

    asynchronous = False

    def out(self, parked: _Parked, source: Tensor) -> None:
        """To the host."""
        parked.host, parked.source = source.to("cpu", copy=True), None

    def back(self, parked: _Parked) -> Tensor:
        """To the device."""
        tensor: Tensor = parked.host.clone()
        return tensor

    def wait(self, parked: _Parked) -> None:
        """Wait until the last copy of this stretch is done."""


class _Shapes(_Plain):
    """The meta device: sizes only, as of asynchronous copies."""

    asynchronous = True

    def out(self, parked: _Parked, source: Tensor) -> None:
        """Nothing to copy."""
        parked.host = source.shape, source.dtype

    def back(self, parked: _Parked) -> Tensor:
        """What it takes."""
        shape, dtype = parked.host
        return torch.empty(shape, dtype=dtype, device="meta")


class _Streams(_Plain):
    """An accelerator: pinned memory and two streams besides the one that computes."""

    asynchronous = True

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._out, self._back = torch.Stream(device), torch.Stream(device)

    def out(self, parked: _Parked, source: Tensor) -> None:
        """Begin to copy a result of the stream that computes."""
        self._out.wait_stream(torch.accelerator.current_stream(self.device))
        with self._out:
            parked.host = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
            parked.host.copy_(source, non_blocking=True)
            parked.ready = self._out.record_event()

    def back(self, parked: _Parked) -> Tensor:
        """Begin to copy into memory that the stream that computes had before."""
        tensor = torch.empty(parked.host.shape, dtype=parked.host.dtype, device=self.device)
        self._back.wait_stream(torch.accelerator.current_stream(self.device))
        with self._back:
            self._back.wait_event(parked.ready)
            tensor.copy_(parked.host, non_blocking=True)
            parked.ready = self._back.record_event()
        return tensor

    def wait(self, parked: _Parked) -> None:
        """Let the stream that computes wait for the copy."""
        torch.accelerator.current_stream(self.device).wait_event(parked.ready)


class _Step:
    """What one forward parked, in order; the tensors that backward holds keep it alive.

    Args:
        copies: How tensors are copied to the host and back.
        min_bytes: Smaller tensors stay.
        in_flight_bytes: Device memory of tensors on their way out, and of those on their way back.
        parameters: Storages that stay.
    """

    def __init__(
        self, copies: _Plain, min_bytes: int, in_flight_bytes: int, parameters: set[int]
    ) -> None:
        self.copies, self.min_bytes, self.room = copies, min_bytes, in_flight_bytes
        self.parameters = parameters
        self.parked: list[weakref.ref[_Parked]] = []
        self.known: dict[Any, weakref.ref[_Parked]] = {}
        self.watched: dict[int, Any] = {}
        self.leaving: deque[tuple[int, weakref.ref[_Parked]]] = deque()
        self.leaving_bytes = self.offloaded = self.kept = 0

    def pack(self, tensor: Tensor) -> Any:
        """Park a tensor, unless it is small, a parameter, elsewhere, or has gaps."""
        if not self._goes(tensor):
            self.kept += tensor.nbytes if isinstance(tensor, Tensor) else 0
            return tensor
        storage = tensor.untyped_storage()
        mark = storage._cdata
        if mark not in self.watched:  # an address is used again once its storage is gone
            self.watched[mark] = weakref.ref(storage, lambda _: self._forget(mark))
        key = (mark, tensor.storage_offset(), tensor.numel(), tensor.dtype, tensor._version)
        reference = self.known.get(key)
        parked = reference() if reference is not None else None
        if parked is None:
            parked = self._park(tensor)
            self.known[key] = weakref.ref(parked)
        return _View(parked, tensor)

    def _goes(self, tensor: Tensor) -> bool:
        plain = type(tensor) is Tensor and tensor.layout == torch.strided
        weight = isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)
        if not plain or weight or tensor.nbytes < self.min_bytes:
            return False
        if tensor.untyped_storage()._cdata in self.parameters:
            return False
        return bool(torch.ops.aten.is_non_overlapping_and_dense(tensor))

    def _forget(self, mark: int) -> None:
        self.watched.pop(mark, None)
        self.known = {key: parked for key, parked in self.known.items() if key[0] != mark}

    def _park(self, tensor: Tensor) -> _Parked:
        source = _flat(tensor.detach())
        parked = _Parked(len(self.parked), source)
        self.parked.append(weakref.ref(parked))
        self.offloaded += source.nbytes
        self.copies.out(parked, source)
        if self.copies.asynchronous:
            self.leaving.append((source.nbytes, weakref.ref(parked)))
            self.leaving_bytes += source.nbytes
        while self.leaving_bytes > self.room:
            size, reference = self.leaving.popleft()
            self.leaving_bytes -= size
            oldest = reference()
            if oldest is not None and oldest.source is not None:
                self.copies.wait(oldest)  # before its memory is used again
                oldest.source = None
        return parked

    def unpack(self, packed: Any) -> Tensor:
        """The tensor again, with those of the layers before it on their way."""
        if isinstance(packed, Tensor):
            return packed
        parked = packed.parked
        self._fetch(parked)
        if self.copies.asynchronous:
            self._ahead(parked.number)
        flat = parked.source
        if flat is None:
            self.copies.wait(parked)
            flat = parked.fetched
        tensor: Tensor = flat.as_strided(packed.size, packed.stride)
        return tensor

    def _fetch(self, parked: _Parked) -> None:
        if parked.source is None and parked.fetched is None:
            parked.fetched = self.copies.back(parked)

    def _ahead(self, number: int) -> None:
        """Fetch the ones before, as many as may be in flight."""
        taken = 0
        for place in range(number - 1, -1, -1):
            parked = self.parked[place]()
            if parked is None:
                continue
            taken += parked.nbytes
            if taken > self.room:
                break
            self._fetch(parked)


def _flat(tensor: Tensor) -> Tensor:
    """The stretch of memory of a tensor without gaps, as one row."""
    return tensor.as_strided((tensor.numel(),), (1,))


class Offload:
    """What :func:`offload_activations` did; a context manager that takes it back at its end.

    Attributes:
        offloaded_bytes: What the last forward with gradients sent to the host.
        offloaded_tensors: How many that were.
        kept_bytes: What it left on the device: small tensors, parameters, tensors with gaps.
    """

    offloaded_bytes = 0
    offloaded_tensors = 0
    kept_bytes = 0

    def __init__(self, stack: nn.Module, min_bytes: int, in_flight_bytes: int) -> None:
        self._stack, self._options = stack, (min_bytes, in_flight_bytes)
        self._open: list[tuple[_Step, Any] | None] = []
        self._streams: _Streams | None = None
        self._handles = [
            stack.register_forward_pre_hook(self._enter, prepend=True),
            stack.register_forward_hook(self._leave, always_call=True),
        ]

    def remove(self) -> None:
        """Let the model keep its activations on the device again; what is parked still returns."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def __enter__(self) -> Offload:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()

    def _enter(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            raise RuntimeError(
                "offload_activations works on eager models: a compiler decides itself what it "
                "keeps; remove() it, or compile the layers (model.layers[i].compile())"
            )
        if not torch.is_grad_enabled():
            self._open.append(None)
            return
        parameters = {
            t.untyped_storage()._cdata
            for tensors in (module.parameters(), module.buffers())
            for t in tensors
            if type(t) in (Tensor, nn.Parameter)
        }
        step = _Step(self._how(module), *self._options, parameters)
        hooks = saved_tensors_hooks(step.pack, step.unpack)
        self._open.append((step, hooks))
        hooks.__enter__()

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        opened = self._open.pop()
        if opened is not None:
            step, hooks = opened
            hooks.__exit__()
            self.offloaded_bytes, self.kept_bytes = step.offloaded, step.kept
            self.offloaded_tensors = len(step.parked)

    def _how(self, module: nn.Module) -> _Plain:
        device = next(module.parameters()).device
        if device.type in ("cpu", "meta"):
            return _Plain() if device.type == "cpu" else _Shapes()
        if self._streams is None or self._streams.device != device:
            self._streams = _Streams(device)
        return self._streams

    def __deepcopy__(self, memo: dict[int, Any]) -> Offload:
        """The same for a copy of the model, without what runs."""
        copied = object.__new__(type(self))
        memo[id(self)] = copied
        copied._options, copied._open, copied._streams = self._options, [], None
        copied._stack, copied._handles = copy.deepcopy(self._stack, memo), []
        return copied


def offload_activations(
    model: nn.Module, *, min_bytes: int = 2**20, in_flight_bytes: int = 2**30
) -> Offload:
    """Copy what layers keep for backward to the host, and back in time.

    Loss and gradients are the same to the bit. On an accelerator copies run on streams of their
    own, to and from pinned memory. The last tensors of forward, whose copies are still running
    when backward asks for them, stay on the device.

    Args:
        model: With its layers in a ``ModuleList``; the module that holds it is watched, so heads
            and losses are not. With a recompute policy or checkpointing, inputs of layers go.
        min_bytes: Tensors smaller than this stay; so do parameters.
        in_flight_bytes: Of device memory for tensors on their way, in each direction.

    Returns:
        A handle; ``remove()``, or the end of ``with``, undoes it.

    Raises:
        ValueError: A model without layers, or a size that is negative.
    """
    for name, value in (("min_bytes", min_bytes), ("in_flight_bytes", in_flight_bytes)):
        if value < 0:
            raise ValueError(f"{name} must not be negative, got {value!r}")
    layers = decoder_layers(model)
    if not layers:
        raise ValueError(f"{type(model).__name__} has no list of layers (torch.nn.ModuleList)")
    parents = {path.rpartition(".")[0].rpartition(".")[0] for path, _ in layers}
    outermost = min(parents, key=len) if len(parents) == 1 else ""
    return Offload(model.get_submodule(outermost), min_bytes, in_flight_bytes)
