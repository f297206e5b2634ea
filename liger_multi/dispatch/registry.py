"""Backends, found by their folders, the choice of one per operator, and devices by name.

The path is the registration. An operator's module in a backend is ``<family>/<op>.py``, or
``<op>.py`` in a backend that has no folder for the family. It exports ``forward`` and ``backward``
(either may be absent) and optionally ``supports`` (per call) or ``supports_static`` (per device and
dtype), which return the reason for a refusal or None. Modules are imported when first asked for and
checked against the operator's schema.
``liger_multi.reference`` ends every automatic chain.

A device name is checked against PyTorch, the backends and the machine.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import pkgutil
import re
from collections.abc import Iterator
from typing import Any

import torch

from liger_multi.dispatch.backend import Backend
from liger_multi.errors import ConfigurationError, first_line, shown, unknown

OPS: dict[str, Any] = {}
"""Every declared operator by name; contracts are registered when they are imported."""
ENTRY_POINTS = "liger_multi.backends"
REFERENCE = "reference"


@functools.cache
def operators() -> tuple[str, ...]:
    """Names of all operators: importing the package has registered every contract."""
    return tuple(sorted(OPS))


@functools.cache
def packages() -> dict[str, str]:
    """Import path of every backend by name: folders first, then installed entry points."""
    root = importlib.import_module("liger_multi.backends")
    paths = {
        m.name: f"{root.__name__}.{m.name}" for m in pkgutil.iter_modules(root.__path__) if m.ispkg
    }
    for point in importlib.metadata.entry_points(group=ENTRY_POINTS):
        if paths.setdefault(point.name, point.value) != point.value:
            raise ConfigurationError(
                f"the entry point {point.name} = {point.value} takes the name of the backend at "
                f"{paths[point.name]}"
            )
    return {**paths, REFERENCE: "liger_multi.reference"}


@functools.cache
def backends() -> dict[str, Backend]:
    """The record of every backend by name."""
    return {name: importlib.import_module(path).BACKEND for name, path in packages().items()}


@functools.cache
def unavailable(name: str) -> str | None:
    """Why a backend cannot be used in this process, or None."""
    return backends()[name].probe()


def chain(name: str) -> Iterator[str]:
    """A backend and all that it inherits from, nearest first."""
    yield name
    for parent in backends()[name].parents:
        yield from chain(parent)


def serving(device_type: str) -> Iterator[Backend]:
    """Backends that declare a device type and are available."""
    for record in backends().values():
        if record.device_type == device_type and unavailable(record.name) is None:
            yield record


@functools.cache
def module(name: str, op: str) -> Any:
    """The module of an operator in a backend (see the top of this file), or None."""
    root, family = packages()[name], OPS[op].family
    folder = _spec(f"{root}.{family}") if family else None
    in_family = folder is not None and folder.submodule_search_locations is not None
    path = f"{root}.{family}.{op}" if in_family else f"{root}.{op}"
    return None if _spec(path) is None else importlib.import_module(path)


def _spec(path: str) -> Any:
    """Where a module of a package comes from; None where there is none. Siblings stay unloaded."""
    parent = importlib.import_module(path.rpartition(".")[0])
    return importlib.util.find_spec(path) if hasattr(parent, "__path__") else None


# --- devices by name ---


def device_types() -> tuple[str, ...]:
    """Device types that backends serve, and the CPU."""
    served = {record.device_type for record in backends().values() if record.device_type}
    return tuple(sorted({"cpu", *served}))


def _usual_spelling(name: str) -> str | None:
    """The device type of the backend that a name, or an alias of its devices, stands for."""
    for record in backends().values():
        if record.device_type and name in (record.name, *record.aliases):
            return record.device_type
    return None


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
    suggestion = _usual_spelling(name) if isinstance(name, str) else None
    if suggestion:
        raise ConfigurationError(
            f"unknown {what} {name!r}; did you mean {suggestion!r}? "
            f"known: {', '.join(device_types())}"
        )
    raise ConfigurationError(unknown(what, name, device_types()))


def device_of(name: str) -> torch.device:
    """The device of a name such as ``"cuda"`` or ``"cuda:1"``.

    Raises:
        ConfigurationError: No such type, or an index that this machine does not have.
    """
    type_name, colon, index = name.partition(":")
    device_type(type_name)
    # PyTorch keeps 8 bits of an index: its device "cuda:300" is another one
    if colon and not re.fullmatch("[0-9]{1,2}", index):
        raise ConfigurationError(
            f"the index of a device must be a number below 100, got {shown(index)}"
        )
    try:
        device = torch.device(name)
    except RuntimeError as error:  # of an extension that is not installed
        raise ConfigurationError(f"this PyTorch has no device type {type_name!r}") from error
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None and accelerator.type == device.type and device.index is not None:
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
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        return torch.device("cpu") if accelerator is None else accelerator
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
