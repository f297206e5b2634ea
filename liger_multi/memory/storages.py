"""Which storages are alive: each counts once, however many views it has, until it is freed."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


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
        if tensor.device.type != self._device_type:
            return None
        storage = tensor.untyped_storage()
        # The C++ identity: a Python wrapper of the same storage may come and go.
        key, size = storage._cdata, storage.nbytes()
        before = self.sizes.get(key)
        if before is None:
            self._references[key] = weakref.ref(storage, lambda _: self._gone(key))
        self.sizes[key] = size
        return key, before, size

    def forget(self) -> None:
        """Stop watching; the storages outlive the region and are none of its business any more."""
        self._references.clear()

    def _gone(self, key: int) -> None:
        self._references.pop(key, None)
        size = self.sizes.pop(key, None)
        if size is not None:
            self._freed(key, size)


class StorageMode(TorchDispatchMode):
    """A dispatch mode that sees the tensors of every operator that PyTorch runs."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run one operator and take stock of its inputs and outputs."""
        # A subclass with its own dispatch goes first; what it runs comes back as plain tensors.
        plain = torch.Tensor.__torch_dispatch__
        if any(getattr(t, "__torch_dispatch__", plain) is not plain for t in types):
            return NotImplemented
        kwargs = kwargs or {}
        for tensor in tensors_in((args, *kwargs.values())):
            self.see(tensor, made=False)
        result = self.run(func, args, kwargs)
        for tensor in tensors_in((result,)):
            self.see(tensor, made=True)
        return result

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The operator itself."""
        return func(*args, **kwargs)

    def see(self, tensor: torch.Tensor, made: bool) -> None:
        """Take note of an input (``made=False``) or an output of an operator."""
        raise NotImplementedError


def tensors_in(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The tensors among operator arguments, also inside lists (foreach operators)."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)
