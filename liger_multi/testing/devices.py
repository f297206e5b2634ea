"""Where a backend can be tested on this machine."""

from __future__ import annotations

import os

import torch

from liger_multi.dispatch.registry import REFERENCE, backends, unavailable


def interpreted() -> bool:
    """Whether Triton kernels run on CPU tensors in this process."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def accelerator() -> torch.device | None:
    """The device type of this machine's accelerator, or None; touches no driver context."""
    if not torch.accelerator.is_available():
        return None
    return torch.device(torch.accelerator.current_accelerator())  # type: ignore[arg-type]


def device_of(backend: str) -> torch.device | None:
    """Where a backend's tests put their tensors, or None if this machine has no such device.

    The reference stands on the CPU; a suite may put it on the device of another backend.
    """
    if backend == REFERENCE:
        return torch.device("cpu")
    wanted = backends()[backend].device_type
    if wanted is None:
        return torch.device("cpu") if interpreted() else accelerator()
    if wanted == "cpu":
        return torch.device(wanted)
    found = accelerator()
    return torch.device(wanted) if found is not None and found.type == wanted else None


def refusal(backend: str) -> str | None:
    """Why a backend cannot be tested on this machine, or None."""
    reason = unavailable(backend)
    if reason is None and device_of(backend) is None:
        reason = "this machine has no device for it (kernels on a CPU need TRITON_INTERPRET=1)"
    return reason
