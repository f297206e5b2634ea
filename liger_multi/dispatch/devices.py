"""Devices by name: checked against what PyTorch and the backends know, and what a machine has."""

from __future__ import annotations

import re

import torch

from liger_multi.dispatch.registry import backends
from liger_multi.errors import ConfigurationError, first_line, shown, unknown


def device_types() -> tuple[str, ...]:
    """Device types that backends serve, and the CPU."""
    served = {record.device_type for record in backends().values() if record.device_type}
    return tuple(sorted({"cpu", *served}))


def device_type(name: object, what: str = "device type") -> str:
    """``name``, if it is a device type of a backend or of PyTorch.

    Args:
        name: Such as ``"cuda"``, without an index.
        what: What the name is, for the message.

    Raises:
        ConfigurationError: It is none; the message names the nearest one.
    """
    if isinstance(name, str) and re.fullmatch("[a-z0-9_]+", name):
        if name in device_types():
            return name
        try:
            if torch.device(name).type == name:
                return name
        except RuntimeError:
            pass
    raise ConfigurationError(unknown(what, name, device_types()))


def device_of(name: str) -> torch.device:
    """The device of a name such as ``"cuda"`` or ``"cuda:1"``.

    Raises:
        ConfigurationError: No such type, or an index that this machine does not have.
    """
    kind, colon, index = name.partition(":")
    device_type(kind)
    # PyTorch keeps 8 bits of an index: its device "cuda:300" is another one
    if colon and not re.fullmatch("[0-9]{1,2}", index):
        raise ConfigurationError(
            f"the index of a device must be a number below 100, got {shown(index)}"
        )
    try:
        device = torch.device(name)
    except RuntimeError as error:  # of an extension that is not installed
        raise ConfigurationError(f"this PyTorch has no device type {kind!r}") from error
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is not None and found.type == device.type and device.index is not None:
        count = torch.accelerator.device_count()
        if device.index >= count:
            raise ConfigurationError(f"there is no {name}: this machine has {count} of its type")
    return device


def usable_device(name: str | None) -> torch.device:
    """The device of a name, after a tensor was made there; None: the accelerator, or the CPU.

    Raises:
        ConfigurationError: It is unknown, absent or does not work.
    """
    if name is None:
        found = torch.accelerator.current_accelerator(check_available=True)
        return torch.device("cpu") if found is None else found
    device = device_of(name)
    if device.type == "cpu":
        return device
    try:
        if not torch.get_device_module(device).is_available():
            raise RuntimeError(f"this machine has no {device.type} device")
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, ImportError) as error:  # as backends of PyTorch raise
        raise ConfigurationError(first_line(error)) from error
    return device
