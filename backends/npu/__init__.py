"""Ascend: fused operators of torch_npu within their limits, Ascend kernels, and the reference."""

import importlib.metadata
import importlib.util
from typing import Any

import torch

from liger_multi.dispatch.backend import Backend, DeviceInfo

# Launch table of each chip, and bytes of its unified buffer as the vendor's compiler states them.
TABLES = {"Ascend910_95": "a5", "Ascend950": "a5", "Ascend910": "a2"}
BUFFERS = {"a2": 196608, "a5": 253952}


_UNSEEN = "nobody has seen it hold on Ascend hardware"


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _probe() -> str | None:
    if importlib.util.find_spec("torch_npu") is None:
        return "needs torch_npu, which is not installed"
    if not hasattr(torch, "npu") or not torch.npu.is_available():
        return "torch_npu sees no device"
    if _version("triton-ascend") is None:
        return "needs triton-ascend (pip install triton-ascend), which is not installed"
    return None


def _supports(device: torch.device, dtype: torch.dtype) -> str | None:
    return "computes in fp32, not in fp64" if dtype == torch.float64 else None


def _device_info(device: torch.device) -> DeviceInfo:
    module: Any = torch.get_device_module("npu")
    name = module.get_device_name(device)
    table = next((t for prefix, t in TABLES.items() if name.startswith(prefix)), "a2")
    limits = getattr(module, "get_device_limit", None)
    cores = int(limits(device.index or 0)["vector_core_num"]) if limits is not None else 40
    return DeviceInfo("npu", name, 1, 1, BUFFERS[table], cores, table)


def _describe() -> dict[str, str]:
    versions = {n: _version(n) for n in ("torch_npu", "triton-ascend")}
    facts = {name: version or "not installed" for name, version in versions.items()}
    if _probe() is None:
        info = _device_info(torch.device("npu", 0))
        facts["chip"] = info.arch
        facts["vector cores"] = str(info.cores)
        facts["unified buffer"] = f"{info.shared_bytes // 1024} KiB"
        cann = getattr(getattr(torch, "version", None), "cann", None)
        facts["CANN"] = str(cann) if cann else "unknown"
    return facts


BACKEND = Backend(
    "npu",
    device_type="npu",
    probe=_probe,
    supports=_supports,
    device_info=_device_info,
    describe=_describe,
    not_bitwise={"rows": _UNSEEN, "cards": _UNSEEN},
    aliases=("ascend",),
)
