"""AMD: launch tables over the shared Triton kernels; limits are asked of the device."""

import torch

from liger_multi.backend import Backend, DeviceInfo


def _probe() -> str | None:
    if torch.version.hip is None:
        return "needs a ROCm build of PyTorch"
    return None if torch.cuda.is_available() else "PyTorch sees no ROCm device"


def _device_info(device: torch.device) -> DeviceInfo:
    facts = torch.cuda.get_device_properties(device)
    arch = facts.gcnArchName.partition(":")[0]
    shared = getattr(facts, "shared_memory_per_block", 65536)
    return DeviceInfo("rocm", arch, facts.warp_size, 1024, shared, facts.multi_processor_count)


def _describe() -> dict[str, str]:
    return {"ROCm of PyTorch": torch.version.hip or "none"}


BACKEND = Backend(
    "rocm",
    device_type="cuda",
    parents=("triton",),
    probe=_probe,
    device_info=_device_info,
    describe=_describe,
)
