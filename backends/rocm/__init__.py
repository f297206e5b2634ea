"""AMD: launch tables over the shared Triton kernels; limits are read from the device."""

import torch

from liger_multi.dispatch.backend import Backend, DeviceInfo

# Architectures that the launch table of another one serves: they have the same registers a SIMD,
# the same wave and the same LDS (features of LLVM's AMDGPU back end). Others run on the formulas.
SIBLINGS = {
    "gfx940": "gfx942",
    "gfx941": "gfx942",
    "gfx1101": "gfx1100",
    "gfx1151": "gfx1100",
    "gfx1200": "gfx1201",
}

# Compute units of the full card: a die of MI250X, MI300X and MI325X, MI355X; a usual number
# elsewhere. The programs that share a sum over rows follow it, so that every card of an
# architecture, and every part of one, adds in the same order.
FULL_CARD, USUAL_CARD = {"gfx90a": 110, "gfx942": 304, "gfx950": 256}, 64


def _probe() -> str | None:
    if torch.version.hip is None:
        return "needs a ROCm build of PyTorch"
    return None if torch.cuda.is_available() else "PyTorch sees no ROCm device"


def _device_info(device: torch.device) -> DeviceInfo:
    """Limits, by the architecture's name: capability numbers mean another vendor's cards."""
    facts = torch.cuda.get_device_properties(device)
    arch = facts.gcnArchName.partition(":")[0]  # gfx942:sramecc+:xnack-
    lds = getattr(facts, "shared_memory_per_block", 65536)
    cores = FULL_CARD.get(arch, USUAL_CARD)
    return DeviceInfo("rocm", arch, facts.warp_size, 1024, lds, cores, SIBLINGS.get(arch, arch))


def _describe() -> dict[str, str]:
    facts = {"ROCm of PyTorch": torch.version.hip or "none"}
    if _probe() is None:
        for index in range(torch.cuda.device_count()):
            info = _device_info(torch.device("cuda", index))
            limits = f"{info.arch}, waves of {info.warp_size}, {info.shared_bytes} bytes of LDS"
            facts[f"cuda:{index}"] = f"{limits}, launch table of {info.table}"
    return facts


BACKEND = Backend(
    "rocm",
    device_type="cuda",
    parents=("triton",),
    probe=_probe,
    device_info=_device_info,
    describe=_describe,
    aliases=("amd",),
)
