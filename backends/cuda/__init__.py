"""NVIDIA: launch tables over the shared Triton kernels."""

import importlib.util
import re
import subprocess
from pathlib import Path

import torch

from liger_multi.dispatch.backend import Backend, DeviceInfo


def _probe() -> str | None:
    if torch.version.cuda is None:
        return "needs a CUDA build of PyTorch"
    return None if torch.cuda.is_available() else "PyTorch sees no CUDA device"


def _supports(device: torch.device, dtype: torch.dtype) -> str | None:
    if (
        device.type == "cuda"
        and dtype is torch.bfloat16
        and torch.cuda.get_device_capability(device) < (8, 0)
    ):
        return "bfloat16 needs compute capability 8.0 or later"
    return None


# Multiprocessors of the full card: A100, H100 SXM and H200, B200; a usual number elsewhere. The
# programs that share a sum over rows follow it, so that every card of an architecture, and every
# part of one, adds in the same order.
FULL_CARD, USUAL_CARD = {"sm80": 108, "sm90": 132, "sm100": 148}, 128


def _device_info(device: torch.device) -> DeviceInfo:
    facts = torch.cuda.get_device_properties(device)
    shared = getattr(facts, "shared_memory_per_block_optin", 49152)
    arch = f"sm{facts.major}{facts.minor}"
    cores = FULL_CARD.get(arch, USUAL_CARD)
    return DeviceInfo("cuda", arch, 32, 1024, shared, cores)


DRIVER = Path("/proc/driver/nvidia/version")
MODULE = r"Kernel Module(?: for \S+)?\s+([\d.]+)"  # the open module names a machine before it


def _describe() -> dict[str, str]:
    facts = {"CUDA of PyTorch": torch.version.cuda or "none"}
    if DRIVER.exists():
        facts["driver"] = _first_group(MODULE, DRIVER.read_text(encoding="utf-8"))
    spec = importlib.util.find_spec("triton")
    for folder in spec.submodule_search_locations or () if spec else ():
        tool = Path(folder) / "backends" / "nvidia" / "bin" / "ptxas"
        if tool.exists():
            version_text = subprocess.run(
                [tool, "--version"], capture_output=True, text=True
            ).stdout
            facts["ptxas"] = _first_group(r"V([\d.]+)", version_text)
    return facts


def _first_group(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    return match[1] if match else "unknown"


BACKEND = Backend(
    "cuda",
    device_type="cuda",
    parents=("triton",),
    probe=_probe,
    supports=_supports,
    device_info=_device_info,
    describe=_describe,
    aliases=("gpu", "nvidia"),
)
