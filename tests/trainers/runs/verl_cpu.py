"""The CPU as a platform of verl: ``VERL_USE_EXTERNAL_MODULES=tests.trainers.runs.verl_cpu``.

verl asks its platform for everything that depends on the device, and has none for CPUs.
``VERL_PLATFORM=cpu`` chooses this one, and ``VERL_ENGINE_DEVICE=cuda`` the engines that verl has
registered for GPUs.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from types import ModuleType
from typing import Any

import torch
import torch.distributed
from verl.plugin.platform import PlatformBase, PlatformRegistry

from tests.trainers.runs.setting import accelerator


def answer(value: Any = None) -> Callable[..., Any]:
    """A method that answers the same whatever it is asked; None where a CPU has nothing to do."""
    return lambda self, *args, **kwargs: value


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):  # type: ignore[misc]
    """What verl asks of a device."""

    device_name = vendor_name = "cpu"
    device_module: ModuleType = accelerator()
    is_available = answer(True)
    current_device = answer("cpu")
    device_count = answer(1)
    get_device_capability = answer((None, None))
    communication_backend_name = answer("gloo")
    visible_devices_envvar = answer("CUDA_VISIBLE_DEVICES")
    ray_resource_name = answer("CPU")
    ray_noset_envvars = answer([])
    is_ipc_supported = answer(False)
    set_device = synchronize = set_allocator_settings = empty_cache = answer()
    profiler_start = profiler_stop = cudart = answer()

    def nvtx_range(self, msg: str) -> AbstractContextManager[None]:
        """No profiler."""
        return nullcontext()

    def manual_seed(self, seed: int) -> None:
        """Seed."""
        torch.manual_seed(seed)

    manual_seed_all = manual_seed


_init = torch.distributed.init_process_group


@wraps(_init)
def init_process_group(backend: str | None = None, **kwargs: Any) -> None:
    """Verl adds its backend to ``cpu:gloo``, and PyTorch refuses two for one device."""
    _init("gloo" if backend == "cpu:gloo,cpu:gloo" else backend, **kwargs)


torch.distributed.init_process_group = init_process_group  # type: ignore[assignment]
