"""Launch configurations: a formula in the kernel's file, measured numbers in the vendor's folder.

A kernel file states its launch configuration as a frozen dataclass and computes a default from the
device's limits; ``backends/<backend>/launch/<arch>.yaml`` replaces fields where a measured entry
fits the shape. Nothing is tuned at run time, and a device without a table runs on the formula.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.resources
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, TypeVar

import torch

from liger_multi.dispatch import registry
from liger_multi.dispatch.backend import DeviceInfo
from liger_multi.errors import ConfigurationError, check_name
from liger_multi.files.documents import yaml_of

__all__ = ["DeviceInfo", "device_info", "launch_config", "simulate", "table"]

Config = TypeVar("Config")
INTERPRETER = DeviceInfo("interpreter", "cpu", 32, 1024, 65536, 2)
_simulated: list[DeviceInfo] = []
_forced: list[Mapping[str, Any]] = []
_observers: list[set[tuple[str, int]]] = []
any_rows: ContextVar[bool] = ContextVar("liger_multi_any_rows", default=False)
"""Whether entries that hold for some numbers of rows are left out: they order a row's sums.

An entry stays that says ``equal_bits``: a device gave the bits of the entry for all other rows.
"""


@contextlib.contextmanager
def simulate(info: DeviceInfo) -> Iterator[None]:
    """Answer :func:`device_info` with ``info``: launch formulas of any device, on any machine."""
    _simulated.append(info)
    try:
        yield
    finally:
        _simulated.pop()


@contextlib.contextmanager
def forced(
    entries: Mapping[str, Mapping[str, int]], when: Mapping[str, tuple[int, int]] | None = None
) -> Iterator[None]:
    """Launch tables that have these numbers, by kernel, and nothing else.

    Args:
        entries: Fields of the launch configuration by key of the table.
        when: Bounds of the shapes that get them; every shape gets them by default.
    """
    _forced.append({k: ({"when": when or {}, "config": dict(v)},) for k, v in entries.items()})
    _configs.clear()
    try:
        yield
    finally:
        _forced.pop()
        _configs.clear()


@contextlib.contextmanager
def observed() -> Iterator[set[tuple[str, int]]]:
    """Collect the entries of the launch table, by key and number, whose kernels start in a block.

    An entry counts although its bounds leave the sizes out: see :func:`variant_of`.
    """
    entries: set[tuple[str, int]] = set()
    _observers.append(entries)
    _configs.clear()
    try:
        yield entries
    finally:
        _observers.pop()  # not remove(): another set may be equal


def variant_of(entry: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """The axes that an entry wants one value of: the variant of the kernel that it is for.

    Such an axis is the size of an element, or a flag. With sizes beyond its bounds an entry is
    slower, but right; another variant may not even compile with it.
    """
    return {axis: bounds for axis, bounds in entry["when"].items() if bounds[0] == bounds[1]}


def _holds(when: Mapping[str, Any], shape: Mapping[str, int]) -> bool:
    return all(low <= shape[axis] <= high for axis, (low, high) in when.items())


def device_info(device: torch.device) -> DeviceInfo:
    """The limits of ``device``, asked once of the backend that serves it."""
    return _simulated[-1] if _simulated else _device_info(device)


@functools.cache
def _device_info(device: torch.device) -> DeviceInfo:
    if device.type == "cpu":
        return INTERPRETER
    for record in registry.serving(device.type):
        if record.device_info is not None:
            return record.device_info(device)
    raise ConfigurationError(f"no available backend knows the limits of the device {device}")


_configs: dict[tuple[Any, ...], Any] = {}
_MOST = 16384  # programs with more shapes than this rarely see one again


def cached_config(question: tuple[Any, ...], make: Callable[[], Config]) -> Config:
    """Cache a result by hashable values.

    They must name the kernel and everything that the result depends on: sizes, strides, dtypes, the
    device. Launch configurations may be part of the result.
    """
    if _simulated:
        return make()
    key = (*question, any_rows.get())
    answer: Config | None = _configs.get(key)
    if answer is None:
        if len(_configs) > _MOST:
            _configs.clear()
        answer = _configs[key] = make()
    return answer


def launch_config(
    name: str, formula: Callable[..., Config], device: torch.device, **shape: int
) -> Config:
    """The launch configuration of kernel ``name``: the table's fields over the formula's.

    Args:
        name: Key in the table, such as ``rms_norm.forward``.
        formula: Makes the default, a frozen dataclass, from the device's limits and the shape.
        device: Where the kernel will run.
        shape: Sizes that the formula takes and entries bound, such as ``rows=8192, cols=4096``.
    """
    if _simulated:
        return _config(name, formula, _simulated[-1], shape)  # type: ignore[no-any-return]
    key = (name, device, any_rows.get(), *shape.values())
    cached: Config | None = _configs.get(key)
    if cached is None:
        if len(_configs) > _MOST:
            _configs.clear()
        cached = _configs[key] = _config(name, formula, device_info(device), shape)
    return cached


def _config(name: str, formula: Callable[..., Any], info: DeviceInfo, shape: dict[str, int]) -> Any:
    for reached in _observers:
        entries = enumerate(table_of(info).get(name, ()))
        reached.update(
            (name, i) for i, e in entries if _holds(variant_of(e), _lookup_values(info, shape))
        )
    config = dataclasses.replace(formula(info, **shape), **tabled(name, info, **shape))
    warps = getattr(config, "num_warps", None)
    if warps is not None and warps * info.warp_size > info.max_threads:
        config = dataclasses.replace(config, num_warps=info.max_threads // info.warp_size)
    return config


def _lookup_values(info: DeviceInfo, shape: Mapping[str, int]) -> dict[str, int]:
    """Names of sizes that entries may bound."""
    return {**shape, "warp_size": info.warp_size, "shared_bytes": info.shared_bytes}


def tabled(name: str, info: DeviceInfo, **shape: int) -> dict[str, int]:
    """What a device's launch table says of kernel ``name`` and a shape; empty for the formula."""
    values = _lookup_values(info, shape)
    entries = _forced[-1] if _forced else table_of(info)
    for entry in entries.get(name, ()):
        if any_rows.get() and _orders_sums(entry):
            continue
        if _holds(entry["when"], values):
            return entry["config"]  # type: ignore[no-any-return]
    return {}


def _orders_sums(entry: Mapping[str, Any]) -> bool:
    """Whether an entry lets the bits of a row depend on the number of rows."""
    return "rows" in entry["when"] and not entry.get("equal_bits")


def table_of(info: DeviceInfo) -> Mapping[str, Any]:
    """The entries that apply to a device."""
    return table(info.backend, info.arch) or table(info.backend, info.table or info.arch)


def proved_with(info: DeviceInfo) -> Mapping[str, Sequence[str]]:
    """Compiler versions, by name, that the entries of a device's table were checked with.

    Empty without a table, or if its entries were not checked.
    """
    names = (info.arch, info.table or info.arch)
    contents = (_content(info.backend, name) for name in names)
    content = next((c for c in contents if c.get("entries")), {})
    return {name: tuple(versions) for name, versions in (content.get("proved") or {}).items()}


def _content(backend: str, arch: str) -> Mapping[str, Any]:
    """What ``backends/<backend>/launch/<arch>.yaml`` holds; empty without a file."""
    if backend not in registry.packages():
        return {}
    file = importlib.resources.files(registry.packages()[backend]) / "launch" / f"{arch}.yaml"
    if not file.is_file():
        return {}
    content = yaml_of(file.read_text(encoding="utf-8"), str(file)) or {}
    for section, allowed in _SECTIONS.items():
        for key in content.get(section) or {}:
            check_name(ConfigurationError, f"key of {section} in {file}", key, allowed)
    return {**content, "file": str(file)}


_ENTRY = ("when", "config", "equal_bits", "source")
_SECTIONS = {"device": ("warp_size", "shared_bytes"), "proved": ("triton", "ptxas")}


@functools.cache
def table(backend: str, arch: str) -> Mapping[str, Any]:
    """The checked entries of ``backends/<backend>/launch/<arch>.yaml``; empty without a file.

    What the file says of its ``device``, a warp size and the least on-chip memory, is a condition
    of every entry: the same name with other limits is another device.
    """
    content = _content(backend, arch)
    device = dict(content.get("device") or {})
    limits = {"warp_size": (device.get("warp_size", 1), device.get("warp_size", 2**31))}
    limits["shared_bytes"] = (device.get("shared_bytes", 0), 2**31)
    return {
        name: tuple(_entry(e, name, content["file"], limits) for e in entries)
        for name, entries in (content.get("entries") or {}).items()
    }


@functools.cache
def bounded_by_rows() -> frozenset[str]:
    """Kernels for which some table's entries make bits depend on the number of rows."""
    names = set()
    for backend, package in registry.packages().items():
        folder = importlib.resources.files(package) / "launch"
        for file in folder.iterdir() if folder.is_dir() else ():
            entries = table(backend, file.name.removesuffix(".yaml"))
            names |= {
                n for n, kernel_entries in entries.items() if any(map(_orders_sums, kernel_entries))
            }
    return frozenset(names)


def _entry(
    entry: Mapping[str, Any], name: str, file: str, limits: Mapping[str, tuple[int, int]]
) -> dict[str, Any]:
    for key in entry:
        check_name(ConfigurationError, f"key of {name} in {file}", key, _ENTRY)
    when = {axis: (int(low), int(high)) for axis, (low, high) in (entry.get("when") or {}).items()}
    equal_bits = bool(entry.get("equal_bits", False))
    return {"when": {**when, **limits}, "config": dict(entry["config"]), "equal_bits": equal_bits}
