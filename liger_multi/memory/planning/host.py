"""The memory of a host, which what does not stand on its devices takes."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import torch

from liger_multi.dispatch.config import parse_memory

UNKNOWN = 128 * 2**30  # bytes for a device, where this machine has no devices to plan for
LIMIT = Path("/sys/fs/cgroup/memory.max")  # of a container


def host_memory(value: str | int | None) -> int:
    """Bytes of the host's memory for each device.

    Args:
        value: A size such as ``"128GiB"``. None: the share of each device of this machine, or
            128 GiB where it has none.

    Raises:
        ConfigurationError: It is no size.
    """
    if value is not None:
        return parse_memory(value, "host memory")
    devices = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    return _whole() // devices if devices else UNKNOWN


def _whole() -> int:
    """What this machine has, or this container of it."""
    sizes = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    with contextlib.suppress(OSError, ValueError):  # no container, or one without a limit
        sizes.append(int(LIMIT.read_text(encoding="ascii")))
    return min(sizes)
