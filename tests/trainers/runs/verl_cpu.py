"""The CPU as a platform of verl: ``VERL_USE_EXTERNAL_MODULES=tests.trainers.runs.verl_cpu``.

verl asks its platform for everything that depends on the device, and has none for CPUs.
``VERL_PLATFORM=cpu`` chooses this one, and ``VERL_ENGINE_DEVICE=cuda`` the engines that verl has
registered for GPUs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from types import ModuleType
from typing import Any

import torch
import torch.distributed
from verl.plugin.platform import PlatformBase, PlatformRegistry

from tests.trainers.runs.cpu import accelerator


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):  # type: ignore[misc]
    """What verl asks of a device."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module: ModuleType = accelerator()

    def is_available(self) -> bool:
        """There is always one."""
        return True

    def current_device(self) -> str:
        """An argument for ``Tensor.to``."""
        return "cpu"

    def device_count(self) -> int:
        """One a process."""
        return 1

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        """A CPU has none."""
        return (None, None)

    def communication_backend_name(self) -> str:
        """What ``torch.distributed`` has for CPUs."""
        return "gloo"

    def visible_devices_envvar(self) -> str:
        """Nothing reads it."""
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        """No profiler."""
        yield

    def ray_resource_name(self) -> str:
        """A worker takes a CPU."""
        return "CPU"

    def ray_noset_envvars(self) -> list[str]:
        """Nothing to keep from Ray."""
        return []

    def is_ipc_supported(self) -> bool:
        """No memory of a device to share."""
        return False

    def cudart(self) -> None:
        """No runtime."""

    def manual_seed(self, seed: int) -> None:
        """Seed."""
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def nothing(self, *_: Any) -> None:
        """What a CPU has nothing to do for."""

    set_device = synchronize = set_allocator_settings = empty_cache = nothing
    profiler_start = profiler_stop = nothing


_init = torch.distributed.init_process_group


@wraps(_init)
def init_process_group(backend: str | None = None, **kwargs: Any) -> None:
    """Verl adds its backend to ``cpu:gloo``, and PyTorch refuses two for one device."""
    _init("gloo" if backend == "cpu:gloo,cpu:gloo" else backend, **kwargs)


torch.distributed.init_process_group = init_process_group  # type: ignore[assignment]
