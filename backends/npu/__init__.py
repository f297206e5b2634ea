"""Ascend: its tensors use the chunked reference where no operator of its own stands here."""

import importlib.util

import torch

from liger_multi.backend import Backend, DeviceInfo


def _probe() -> str | None:
    if importlib.util.find_spec("torch_npu") is None:
        return "needs torch_npu, which is not installed"
    return (
        None if hasattr(torch, "npu") and torch.npu.is_available() else "torch_npu sees no device"
    )


def _device_info(device: torch.device) -> DeviceInfo:
    name = torch.get_device_module("npu").get_device_name(device)
    # 40 vector cores with 192 KiB of unified buffer: Atlas A2 (910B), CANN documentation
    return DeviceInfo("npu", name, 1, 1, 196608, 40)


BACKEND = Backend("npu", device_type="npu", probe=_probe, device_info=_device_info)
