"""Exact peak memory of a region, on any device.

An accelerator's allocator keeps the peak itself. A CPU has no such statistics, so there a dispatch
mode watches every operator that PyTorch runs and adds up the bytes of the storages that are alive:
each storage counts once, however many views it has, from the operator that made it until it is
freed. A storage older than the region (weights, optimizer states) counts for the whole region as
soon as an operator touches it.

What a dispatch mode cannot see is not counted: scratch memory inside one native kernel, and tensors
that nothing touches. Our own operators are called as plain Python inside a region, otherwise their
temporaries would hide behind one operator (:func:`liger_multi.dispatch.op.inline_ops`).
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from liger_multi._torch_private import DisableTorchFunction, TorchDispatchMode
from liger_multi.dispatch.op import OPS, inline_ops
from liger_multi.dispatch.stored import StoredWeight

# --- storages that are alive ---


class Storages:
    """Sizes of live storages of one device type, by the identity of the storage.

    Args:
        device_type: Storages elsewhere are left out.
        freed: Called with identity and size when a storage is gone.
    """

    def __init__(self, device_type: str, freed: Callable[[int, int], None]) -> None:
        self.sizes: dict[int, int] = {}
        self._device_type, self._freed = device_type, freed
        self._references: dict[int, weakref.ref[Any]] = {}

    def see(self, tensor: torch.Tensor) -> tuple[int, int | None, int] | None:
        """Identity, size when last seen (None: never) and size of a tensor's storage."""
        storage = tensor.untyped_storage()
        # The C++ identity: a Python wrapper of the same storage may come and go.
        key, size = storage._cdata, storage.nbytes()
        previous = self.sizes.get(key)
        if previous == size:
            return key, previous, size
        if previous is None:
            if tensor.device.type != self._device_type:
                return None
            self._references[key] = weakref.ref(storage, lambda _: self._on_free(key))
        self.sizes[key] = size
        return key, previous, size

    def forget(self) -> None:
        """Stop watching: the storages outlive the region."""
        self._references.clear()

    def _on_free(self, key: int) -> None:
        self._references.pop(key, None)
        size = self.sizes.pop(key, None)
        if size is not None:
            self._freed(key, size)


_PLAIN = (torch.Tensor, torch.nn.Parameter)
_OWN = torch.Tensor.__torch_dispatch__


class StorageMode(TorchDispatchMode):
    """A dispatch mode that sees the tensors of every operator that PyTorch runs."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run one operator and record its inputs and outputs."""
        return self._dispatched(func, types, args, kwargs or {})

    def _dispatched(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        # A subclass with its own dispatch goes first; what it runs comes back as plain tensors.
        # Operators of ours that open stored weights themselves get them as they are.
        is_operator = func.namespace == "liger_multi"
        for tensor_class in types:
            if is_operator and issubclass(tensor_class, StoredWeight) and opens(func):
                continue
            handler = getattr(tensor_class, "__torch_dispatch__", _OWN)
            if tensor_class not in _PLAIN and handler is not _OWN:
                return NotImplemented
        if is_operator:  # Python of ours, where function modes have a say
            return self._watch(func, args, kwargs)
        # Function modes ran already. PyTorch's own Python (decompositions, shapes) would call
        # them at every attribute of a tensor.
        with DisableTorchFunction():
            return self._watch(func, args, kwargs)

    def _watch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for tensor in tensors_in((args, *kwargs.values())):
            self.see(tensor, is_output=False)
        result = self.run(func, args, kwargs)
        for tensor in tensors_in((result,)):
            self.see(tensor, is_output=True)
        return result

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The operator itself."""
        return func(*args, **kwargs)

    def see(self, tensor: torch.Tensor, is_output: bool) -> None:
        """Take note of a tensor that an operator reads or writes."""
        raise NotImplementedError


def tensors_in(values: Iterable[Any]) -> list[torch.Tensor]:
    """The tensors among operator arguments, also inside lists (foreach operators) and weights."""
    tensors: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, StoredWeight):
            tensors += value.tensors
        elif isinstance(value, torch.Tensor):
            tensors.append(value)
        elif isinstance(value, list | tuple):
            tensors += tensors_in(value)
    return tensors


def primitive_of(func: Any) -> Any:
    """The forward or backward of our operator that an operator of PyTorch stands for."""
    name, _, direction = func.name().partition("::")[2].rpartition("_")
    return OPS[name].fwd if direction == "forward" else OPS[name].bwd


def opens(func: Any) -> bool:
    """Whether one of our operators takes weights that are stored in another form."""
    return bool(primitive_of(func).op.opens)


# --- the peak of a region ---

Result = TypeVar("Result")


@dataclass
class Peak:
    """What a region held at its peak; complete once the region has ended.

    Attributes:
        device: The device that was watched.
        method: ``"allocator"`` (the device's own statistics) or ``"live tensors"`` (CPU).
        start_bytes: Bytes alive when the region began.
        peak_bytes: Largest number of bytes alive at once, those alive at the start included.
        end_bytes: Bytes alive when the region ended.
        widest_bytes: Largest single tensor made in the region with an axis of length ``width``; 0
            when there was none, None when no width was asked for.
        widest_shape: Its shape.
        widest_dtype: Its dtype.
    """

    device: torch.device
    method: str
    start_bytes: int = 0
    peak_bytes: int = 0
    end_bytes: int = 0
    widest_bytes: int | None = None
    widest_shape: tuple[int, ...] | None = None
    widest_dtype: torch.dtype | None = None

    @property
    def added_bytes(self) -> int:
        """Bytes at the peak beyond those alive at the start."""
        return self.peak_bytes - self.start_bytes


@contextlib.contextmanager
def measure(
    device: torch.device | str | None = None,
    *,
    width: int | None = None,
    known: Iterable[torch.Tensor] = (),
) -> Iterator[Peak]:
    """Measure the peak memory of a block: ``with`` this, ``as peak``.

    On an accelerator the block runs at full speed unless ``width`` is given; on a CPU every
    operator costs some microseconds more. The peak counters of an accelerator are reset.

    Args:
        device: Device to watch; None takes the current accelerator, or the CPU where there is none.
        width: Also find the largest tensor that has an axis of this length, e.g. the vocabulary.
        known: Tensors that are alive already and shall count even if nothing touches them (CPU).

    Yields:
        The :class:`Peak`, filled in when the block ends, also when it raises.
    """
    if width is not None and width < 1:
        raise ValueError(f"width must be a positive length of an axis or None, got {width!r}")
    target = resolve_device(device)
    on_cpu = target.type in ("cpu", "meta")  # which have no allocator that counts
    peak = Peak(target, "live tensors" if on_cpu else "allocator")
    with contextlib.ExitStack() as stack:
        if on_cpu or width is not None:
            watch = _Watch(target, width, known if on_cpu else ())
            stack.callback(watch.report, peak, on_cpu)
            stack.enter_context(inline_ops())  # as plain Python, so that the watch sees them
            stack.enter_context(watch)
        if not on_cpu:
            stack.enter_context(_allocator(target, peak))
        yield peak


def peak_memory(
    function: Callable[..., Result],
    *args: Any,
    device: torch.device | str | None = None,
    width: int | None = None,
    **kwargs: Any,
) -> tuple[Result, Peak]:
    """Call ``function(*args, **kwargs)`` and return its result with the peak memory of the call."""
    with measure(device, width=width) as peak:
        result = function(*args, **kwargs)
    return result, peak


def resolve_device(device: torch.device | str | None = None) -> torch.device:
    """The device asked for; None is the current accelerator, or the CPU where there is none."""
    if device is not None:
        return torch.device(device)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return torch.device("cpu") if accelerator is None else accelerator


def format_bytes(count: int) -> str:
    """``count`` bytes in the unit that people read: ``812.5 MiB``."""
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"


@contextlib.contextmanager
def _allocator(device: torch.device, peak: Peak) -> Iterator[None]:
    """Fill ``peak`` from the statistics of the device's caching allocator."""
    module = torch.get_device_module(device)
    if not hasattr(module, "max_memory_allocated"):
        raise ValueError(f"devices of type {device.type!r} keep no allocator statistics to measure")
    module.synchronize(device)
    module.reset_peak_memory_stats(device)
    peak.start_bytes = module.memory_allocated(device)
    try:
        yield
    finally:
        module.synchronize(device)
        peak.peak_bytes = module.max_memory_allocated(device)
        peak.end_bytes = module.memory_allocated(device)


class _Watch(StorageMode):
    """Add up the bytes of live storages around every operator."""

    def __init__(
        self, device: torch.device, width: int | None, known: Iterable[torch.Tensor]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._width = width
        self._storages = Storages(device.type, self._on_free)
        self._born: set[int] = set()
        self._start = self._live = self._peak = 0
        self._widest: tuple[int, torch.Size, torch.dtype] | None = None
        for tensor in known:
            self.see(tensor, is_output=False)

    def report(self, peak: Peak, with_bytes: bool) -> None:
        """Copy what was seen into ``peak``."""
        if with_bytes:
            peak.start_bytes, peak.peak_bytes, peak.end_bytes = self._start, self._peak, self._live
        if self._width is not None:
            peak.widest_bytes = 0
            if self._widest is not None:
                peak.widest_bytes, shape, peak.widest_dtype = self._widest
                peak.widest_shape = tuple(shape)
        self._storages.forget()

    def see(self, tensor: torch.Tensor, is_output: bool) -> None:
        """Count a storage that is new or has another size."""
        entry = self._storages.see(tensor)
        if entry is None:
            return
        key, previous, size = entry
        if previous is None and is_output:
            self._born.add(key)
        elif previous is None:
            self._start += size
            self._peak += size
        if previous != size:
            self._live += size - (previous or 0)
            self._peak = max(self._peak, self._live)
        if self._width is not None and self._width in tensor.shape and key in self._born:
            # An expanded view is wide without holding anything.
            extent = min(tensor.numel() * tensor.element_size(), size)
            if self._widest is None or extent > self._widest[0]:
                self._widest = (extent, tensor.shape, tensor.dtype)

    def _on_free(self, key: int, size: int) -> None:
        self._live -= size
        self._born.discard(key)
