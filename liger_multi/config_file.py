"""The form of a configuration, in YAML or as a mapping, and its checks.

::

    default: auto
    chunk_bytes: 512MiB                 # byte budget of a chunk of logits
    head_products: float8               # of heads with a loss, in 8 bits; float8_logits; exact
    ops:
      rms_norm: reference               # a name binds: it runs or the call fails with the reason
      cross_entropy: [npu, reference]   # a list is exactly that order
      "fused_linear_*": triton          # a glob
    devices:
      cuda:                             # narrows what stands above for one device type
        ops: {swiglu: reference}
"""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from liger_multi.errors import ConfigurationError, unknown

AUTO = ("auto",)
KEYS = ("default", "ops", "devices", "chunk_bytes", "head_products")
HEAD_PRODUCTS = ("exact", "float8", "float8_logits")
_UNITS = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30}


@dataclass(frozen=True)
class Choice:
    """The backends to try for one operator; ``binding`` when a single name was given."""

    order: tuple[str, ...]
    binding: bool
    source: str


@dataclass(frozen=True)
class Layer:
    """What one source says: operator patterns per device (``""`` is any device)."""

    source: str
    ops: Mapping[str, Mapping[str, tuple[str, ...]]] = field(default_factory=dict)
    default: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    chunk_bytes: int | None = None
    head_products: str | None = None

    def choice(self, op: str, device: str) -> Choice | None:
        """What this layer says of ``op`` on ``device``; the device's section goes first."""
        for section in (device, ""):
            patterns = self.ops.get(section, {})
            matches = [p for p in patterns if p == op] or [
                p for p in patterns if fnmatch.fnmatchcase(op, p)
            ]
            order = patterns[matches[0]] if matches else self.default.get(section)
            if order is not None:
                return Choice(order, len(order) == 1 and order != AUTO, self.source)
        return None


def load(path: str | os.PathLike[str]) -> Layer:
    """Read a YAML file into a layer."""
    import yaml

    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(
            f"cannot read the configuration {os.fspath(path)!r}: {error}"
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{os.fspath(path)!r} is not YAML: {error}") from error
    return parse({} if content is None else content, os.fspath(path))


def parse(content: Any, source: str) -> Layer:
    """Check a mapping and turn it into a layer."""
    _expect(content, Mapping, source, f"a mapping with the keys {', '.join(KEYS)}")
    _known(content, KEYS, f"key in {source}")
    devices = content.get("devices") or {}
    _expect(devices, Mapping, f"devices in {source}", "a mapping of device types")
    sections: dict[str, Any] = {"": {k: content[k] for k in ("default", "ops") if k in content}}
    for device, section in devices.items():
        _device(device, source)
        _expect(section, Mapping, f"devices.{device} in {source}", "a mapping with default and ops")
        _known(section, ("default", "ops"), f"key of devices.{device} in {source}")
        sections[str(device)] = section
    ops: dict[str, dict[str, tuple[str, ...]]] = {}
    default: dict[str, tuple[str, ...]] = {}
    for device, section in sections.items():
        named = section.get("ops") or {}
        _expect(named, Mapping, f"ops in {source}", "a mapping of operator names to backends")
        ops[device] = {_pattern(op, source): _order(v, op, source) for op, v in named.items()}
        if "default" in section:
            default[device] = _order(section["default"], "default", source)
    budget = content.get("chunk_bytes")
    size = None if budget is None else parse_bytes(budget, source)
    products = content.get("head_products")
    if products is not None and products not in HEAD_PRODUCTS:
        raise ConfigurationError(
            unknown(f"value of head_products in {source}", products, HEAD_PRODUCTS)
        )
    return Layer(source, ops, default, size, products)


def parse_bytes(value: Any, source: str) -> int:
    """A number of bytes from an integer or a text such as ``512MiB``."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", str(value).lower())
    count = 0 if not match or match[2] not in _UNITS else int(float(match[1]) * _UNITS[match[2]])
    if isinstance(value, bool) or count < 1:
        raise ConfigurationError(
            f"a byte count in {source} must be a positive number such as 536870912 or '512MiB', "
            f"got {value!r}"
        )
    return count


def _expect(value: object, kind: type, where: str, wanted: str) -> None:
    if not isinstance(value, kind):
        raise ConfigurationError(
            f"{where} must be {wanted}, got {type(value).__name__} {value!r:.80}"
        )


def _known(mapping: Mapping[Any, Any], keys: tuple[str, ...], kind: str) -> None:
    for key in mapping:
        if key not in keys:
            raise ConfigurationError(unknown(kind, key, keys))


def _device(name: Any, source: str) -> None:
    from liger_multi.registry import backends

    served = {record.device_type for record in backends().values() if record.device_type}
    try:
        known = str(name) in served or torch.device(str(name)).type == name
    except RuntimeError:
        known = False
    if not known:
        raise ConfigurationError(unknown(f"device type in {source}", name, {"cpu", *served}))


def _pattern(op: Any, source: str) -> str:
    from liger_multi.registry import operators

    if not any(fnmatch.fnmatchcase(name, str(op)) for name in operators()):
        raise ConfigurationError(unknown(f"operator in {source}", op, operators()))
    return str(op)


def _order(value: Any, op: Any, source: str) -> tuple[str, ...]:
    from liger_multi.registry import backends

    names = [value] if isinstance(value, str) else value
    if (
        not isinstance(names, list | tuple)
        or not names
        or not all(isinstance(n, str) for n in names)
    ):
        raise ConfigurationError(
            f"the choice for {op!r} in {source} must be a backend's name or a list of names, got "
            f"{value!r}"
        )
    for name in names:
        if name not in (*backends(), "auto"):
            raise ConfigurationError(
                unknown(f"backend for {op!r} in {source}", name, (*backends(), "auto"))
            )
    if "auto" in names and len(names) > 1:
        raise ConfigurationError(
            f"the choice for {op!r} in {source} mixes 'auto' with names: {names!r}"
        )
    return tuple(names)
