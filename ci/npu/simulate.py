"""A simulated NPU: npu tensors of the real torch_npu, computed on by the CPU.

Over the stub libraries, device memory is host memory. ``Device()`` is a dispatch mode under which
every aten operator on npu tensors runs on CPU tensors over the same memory, and every operator of
torch_npu on its reference in :mod:`ci.npu.fused`, without which it raises. Dispatcher, schemas,
autograd formulas and the allocator are the vendor's own.

pytest runs on it with ``python -m pytest -p ci.npu.simulate --backend npu``: every test under the
simulated device, and Triton kernels through the Ascend lowering on the CPU; with
``ASCEND_GRID=reversed``, the programs of every launch run in the other order, and with
``TRITON_INTERPRET=1`` kernels are interpreted. ``--share 6`` takes every sixth sample,
``--slow-npu`` every form of every kernel through the vendor's compiler.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch_npu  # noqa: F401  registers the device
from torch import Tensor
from torch._C import DispatchKey
from torch._guards import detect_fake_mode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from ci.npu import lowering
from ci.npu.fused import REFERENCES
from liger_multi.dispatch.op import OPS

# --- the device ---

aten = torch.ops.aten
# These allocate or look, which torch_npu does itself.
NATIVE = {
    aten.empty.memory_format,
    aten.empty_strided.default,
    aten.detach.default,
    aten.alias.default,
}
READ = "read by the host"


def is_read(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the host waits for numbers of the device."""
    if func in (aten._local_scalar_dense.default, aten.nonzero.default):
        return True
    if func is aten.copy_.default:
        return not _is_npu(args[0].device)
    return kwargs.get("device") is not None and not _is_npu(kwargs["device"])


def on_host(t: Any) -> Any:
    """A CPU tensor over the memory of an npu tensor."""
    if not isinstance(t, Tensor) or t.device.type != "npu":
        return t
    if t.numel() == 0:
        return aten.empty.memory_format([0], dtype=t.dtype).as_strided(t.size(), t.stride())
    storage = t.untyped_storage()
    memory = (ctypes.c_uint8 * storage.nbytes()).from_address(storage.data_ptr())
    data = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    same: Tensor = aten.empty.memory_format([0], dtype=t.dtype)
    same = same.set_(data, t.storage_offset(), t.size(), t.stride())
    same = same.conj() if t.is_conj() else same
    return torch._neg_view(same) if t.is_neg() else same


def on_device(c: Any) -> Any:
    """An npu tensor with the values and strides of a CPU tensor."""
    if not isinstance(c, Tensor) or c.device.type != "cpu":
        return c
    # the operator itself: the suite fills what torch.empty and its variants return
    output: Tensor = aten.empty_strided(c.size(), c.stride(), dtype=c.dtype, device="npu")
    if c.numel():
        on_host(output).copy_(c)
    return output


def _is_npu(device: Any) -> bool:
    return device is not None and torch.device(device).type == "npu"


class Device(TorchDispatchMode):
    """The mode; ``calls`` counts what ran by name, and ``READ`` what the host waited for."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # as CANN sets it for these chips; complex tensors want it
        torch.get_device_module("npu").set_compile_mode(jit_compile=False)
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run one operator."""
        kwargs = dict(kwargs or {})
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        fake = any(t.is_meta or type(t).__name__ == "FakeTensor" for t in tensors)
        here = any(t.device.type == "npu" for t in tensors) or _is_npu(kwargs.get("device"))
        if fake or not here or detect_fake_mode() is not None:
            return func(*args, **kwargs)
        self.calls[func._schema.name] += 1
        if func.namespace == "liger_multi":
            name, _, direction = func._schema.name.partition("::")[2].rpartition("_")
            with self:
                return OPS[name].primitives[direction == "backward"].call(*args, **kwargs)
        if func.has_kernel_for_dispatch_key(DispatchKey.CompositeImplicitAutograd):
            with self:  # torch_npu has kernels of its own for some, which return views
                return func.decompose(*args, **kwargs)
        self.calls[READ] += is_read(func, args, kwargs)
        if func is aten._local_scalar_dense.default:
            return on_host(args[0]).item()
        if func in NATIVE or func.is_view:
            return func(*args, **kwargs)
        if func.namespace == "npu" or func is aten.matmul_backward.default:
            return self._fused(func, args, kwargs)
        return self._aten(func, args, kwargs)

    def _fused(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        reference = REFERENCES.get(func._schema.name.partition("::")[2])
        if reference is None:
            raise NotImplementedError(f"the simulated NPU has no reference for {func}")
        host_args, host_kwargs = tree_map_only(Tensor, on_host, (args, kwargs))
        output = reference(*host_args, **host_kwargs)
        return args[0] if func._schema.is_mutable else tree_map_only(Tensor, on_device, output)

    def _aten(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        host_args, host_kwargs = tree_map_only(Tensor, on_host, (args, kwargs))
        device = kwargs.get("device")
        if device is not None:
            host_kwargs["device"] = torch.device("cpu")
        counted = host_args[0] if func is aten.histc.default else None
        if counted is not None:  # of integers on an accelerator only
            host_args = (counted.double(), *host_args[1:])
        out = func(*host_args, **host_kwargs)
        out = out if counted is None else out.to(counted.dtype)
        if device is not None and not _is_npu(device):
            return out
        declared = func._schema.arguments
        written = [i for i, a in enumerate(declared) if a.alias_info and a.alias_info.is_write]
        if not written:
            return tree_map_only(Tensor, on_device, out)
        inputs = [args[i] if i < len(args) else kwargs.get(declared[i].name) for i in written]
        for room in inputs:
            resized(room, host_args, host_kwargs, declared)
        if not func._schema.returns:
            return None
        return inputs[0] if len(inputs) == 1 else tuple(inputs)


def resized(room: Any, args: Any, kwargs: Any, declared: Any) -> None:
    """Refuse an ``out=`` that the CPU's operator had to give another size: its memory is lost."""
    if not isinstance(room, Tensor) or room.device.type != "npu":
        return
    hosts = [*args, *kwargs.values()]
    for host in hosts:
        if isinstance(host, Tensor) and host.data_ptr() == room.data_ptr():
            return
    if room.numel() and math.prod(room.shape):
        raise NotImplementedError(f"an operator replaced the memory of its output {room.shape}")


# --- pytest on it ---

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
REVERSED = os.environ.get("ASCEND_GRID") == "reversed"
DEVICE = Device()


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options."""
    parser.addoption("--slow-npu", action="store_true", help="every form of every kernel")
    parser.addoption("--share", type=int, default=1, metavar="N", help="every Nth sample")


def parameters(item: pytest.Item) -> dict[str, Any]:
    """The parameters of a test."""
    return getattr(getattr(item, "callspec", None), "params", {})


def is_repeated(item: pytest.Item) -> bool:
    """Whether a run with programs in the other order, or of interpreted kernels, has a test.

    Of operators it has their kernels in float32. The interpreter gathers a view that has gaps, and
    then reads it by the strides that it had: samples with such views run elsewhere.
    """
    values = parameters(item)
    if "sample" not in values:
        return True
    if INTERPRETED and any(view in item.name for view in ("packed", "gaps", "sliced", "expanded")):
        return False
    kernel = values["backend"] == "npu" and values.get("dtype") is torch.float32
    return kernel and "forward_and_backward" in item.name


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep a share of the samples, and leave what another run on this device has tested."""
    share = config.getoption("--share")
    again = INTERPRETED or REVERSED
    chosen = [
        item
        for number, item in enumerate(items)
        if (number % share == 0 or "sample" not in parameters(item))
        and (is_repeated(item) or not again)
    ]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(chosen)])
    items[:] = chosen


@pytest.fixture
def simulated() -> Device:
    """The device under the test, which counts what runs."""
    return DEVICE


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """One test, its fixtures included."""
    with DEVICE, contextlib.nullcontext() if INTERPRETED else lowering.launches():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """What tests make as they are collected."""
    with DEVICE:
        return (yield)
