"""Which backend an operator uses, as configured: scopes, calls, a YAML file, and ``auto``.

Precedence: :func:`use` (scoped) over :func:`configure` over the file named by
``LIGER_MULTI_CONFIG`` over ``auto``. Each source is one :class:`Layer`; what a layer does not name
is asked of the next one.

The form of a configuration, in YAML or as a mapping::

    default: auto
    chunk_bytes: 512MiB                 # byte budget of a chunk of logits
    head_gemms: float8                  # GEMMs of heads with a loss; or float8_logits, exact
    deterministic: true                 # equal bits in every run; "rows": for a row in any batch
    ops:
      rms_norm: reference               # a name pins the operator: it runs, or the call fails
      cross_entropy: [npu, reference]   # a list is exactly that order
      "fused_linear_*": triton          # a glob
    devices:
      cuda:                             # narrows what stands above for one device type
        ops: {swiglu: reference}
      cuda/sm90/bfloat16:               # and for an architecture, a dtype, or both
        ops: {geglu: reference}
    quarantine:                         # written by `liger-multi verify --quarantine`
      since: "2026-11-28"
      made_with: "NVIDIA H100, driver 570.86, torch 2.11.0, triton 3.6.0, ptxas 12.8"
      ops:
        cuda/sm90: {"tvd": reference}

A quarantine takes precedence over defaults and patterns of every source, and over operators that
its own file names. A stronger source that names the operator itself is followed.

A key without a value (null) is as good as absent; a choice (``default``, an operator) has one.
"""

from __future__ import annotations

import contextlib
import ctypes
import fnmatch
import functools
import numbers
import os
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import torch

from liger_multi._torch_private import is_stashed, stash_in_thread, stashed
from liger_multi.dispatch import registry
from liger_multi.dtypes import long_name, short_name
from liger_multi.errors import ConfigurationError, check_name, shown, unknown
from liger_multi.files.documents import read_yaml

# --- the form of a configuration ---

AUTO = ("auto",)
KEYS = ("default", "ops", "devices", "chunk_bytes", "head_gemms", "deterministic", "quarantine")
HEAD_GEMMS = ("exact", "float8", "float8_logits")
SECTION_KEYS = ("default", "ops")
QUARANTINE_KEYS = ("since", "made_with", "ops")
_UNITS = {"": 1, "b": 1} | {
    unit: base**power
    for power, letter in enumerate("kmgt", 1)
    for base, units in ((1000, (letter, f"{letter}b")), (1024, (f"{letter}i", f"{letter}ib")))
    for unit in units
}
"""Units of bytes in lower case: ``GB`` and ``G`` are 10**9, ``GiB`` and ``Gi`` are 2**30."""
LEAST_MEMORY = 2**20  # of a device or a host: fewer bytes are a number whose unit was forgotten
_BYTES = re.compile(r"\s*([0-9]{1,19})(\.[0-9]{1,19})?\s*([a-z]*)\s*", re.ASCII)
_ARCH = re.compile(r"[a-z0-9_]{1,32}")
_DTYPES = ("fp64", "fp32", "bf16", "fp16")
_PATTERN = re.compile(r"[a-z0-9_*?\[\]!-]{1,128}")


@dataclass(frozen=True)
class Choice:
    """The backends to try for one operator.

    Attributes: order: Their names. pinned: Whether the choice is a single name, which is binding.
        source: The configuration that makes the choice. named: Whether the operator is named
        itself, and not by a pattern or a default.
    """

    order: tuple[str, ...]
    pinned: bool
    source: str
    named: bool = False


Named = Mapping[str, tuple[str, ...]]
"""Backends by operator or pattern."""


@dataclass(frozen=True)
class Quarantine:
    """Operators that `liger-multi verify` keeps from kernels that were wrong.

    Attributes:
        since: When it was written.
        made_with: The device and versions that it was written for.
        ops: Backends by section and operator.
    """

    since: str
    made_with: str
    ops: Mapping[str, Named]


@dataclass(frozen=True)
class Layer:
    """One configuration source: operator patterns per section (``""`` is any device)."""

    source: str
    ops: Mapping[str, Named] = field(default_factory=dict)
    default: Named = field(default_factory=dict)
    chunk_bytes: int | None = None
    head_gemms: str | None = None
    deterministic: str | None = None
    quarantine: Quarantine | None = None

    @functools.cached_property
    def key(self) -> tuple[Any, ...]:
        """Equal for layers that say the same; patterns count in their order."""
        switches = self.chunk_bytes, self.head_gemms, self.deterministic
        return self.source, repr((self.ops, self.default, self.quarantine)), *switches

    @functools.cached_property
    def narrow(self) -> bool:
        """Whether a section is of an architecture or a dtype."""
        quarantined = self.quarantine.ops if self.quarantine else {}
        return any("/" in section for section in (*self.ops, *self.default, *quarantined))

    def choice(self, op: str, sections: Iterable[str]) -> Choice | None:
        """This layer's choice for ``op``; sections come narrowest first."""
        for section in sections:
            patterns = self.ops.get(section, {})
            matches = [p for p in patterns if p == op] or [
                p for p in patterns if fnmatch.fnmatchcase(op, p)
            ]
            order = patterns[matches[0]] if matches else self.default.get(section)
            if order is not None:
                return self._choice(order, op in patterns)
        return None

    def kept_from(self, op: str, sections: Iterable[str]) -> Choice | None:
        """This layer's quarantine of ``op``."""
        for section in sections if self.quarantine else ():
            order = self.quarantine.ops.get(section, {}).get(op)  # type: ignore[union-attr]
            if order is not None:
                return self._choice(order, True)
        return None

    def _choice(self, order: tuple[str, ...], is_explicit: bool) -> Choice:
        return Choice(order, len(order) == 1 and order != AUTO, self.source, is_explicit)


def load(path: str | os.PathLike[str]) -> Layer:
    """Read a YAML file into a layer."""
    content = read_yaml(path, "the configuration")
    return parse({} if content is None else content, os.fspath(path))


def parse(content: Any, source: str) -> Layer:
    """Check a mapping and turn it into a layer."""
    settings = _section(content, KEYS, source, "key in")
    devices = settings.get("devices", {})
    _expect(devices, Mapping, f"devices in {source}", "a mapping of device types")
    sections: dict[str, Any] = {"": {k: settings[k] for k in SECTION_KEYS if k in settings}}
    for device, section in devices.items():
        name = _device(device, source)
        content = {} if section is None else section
        sections[name] = _section(content, SECTION_KEYS, f"devices.{name} in {source}", "key of")
    ops: dict[str, dict[str, tuple[str, ...]]] = {}
    default: dict[str, tuple[str, ...]] = {}
    for device, section in sections.items():
        where = f"ops of devices.{device} in {source}" if device else f"ops in {source}"
        ops[device] = _orders_by_pattern(section.get("ops", {}), where, source)
        if "default" in section:
            default[device] = _order(section["default"], "default", source)
    readers: dict[str, Callable[[Any, str], Any]] = {
        "chunk_bytes": parse_bytes,
        "head_gemms": lambda text, source: _name(
            text, f"value of head_gemms in {source}", HEAD_GEMMS
        ),
        "deterministic": parse_deterministic,
        "quarantine": _quarantine,
    }
    values = {key: read(settings[key], source) for key, read in readers.items() if key in settings}
    return Layer(source, ops, default, **values)


def _orders_by_pattern(content: Any, where: str, source: str) -> dict[str, tuple[str, ...]]:
    """Operators or patterns with their backends."""
    _expect(content, Mapping, where, "a mapping of operator names to backends")
    patterns = {_pattern(op, source): (op, value) for op, value in content.items()}
    # `~` says nothing, as where a merge key brought what this file leaves to others
    return {
        pattern: _order(value, op, source)
        for pattern, (op, value) in patterns.items()
        if value is not None
    }


def _quarantine(content: Any, source: str) -> Quarantine:
    where = f"quarantine in {source}"
    settings = _section(content, QUARANTINE_KEYS, where, "key of")
    texts = [settings.get(name, "") for name in QUARANTINE_KEYS[:2]]
    for name, text in zip(QUARANTINE_KEYS, texts, strict=False):
        _expect(text, str, f"{name} of {where}", "text")
    sections = settings.get("ops", {})
    _expect(sections, Mapping, f"ops of {where}", "a mapping of sections such as cpu/float32")
    ops = {
        _device(name, source): _orders_by_pattern(
            {} if orders is None else orders, f"{name} of {where}", source
        )
        for name, orders in sections.items()
    }
    return Quarantine(texts[0], texts[1], ops)


def parse_deterministic(value: Any, source: str) -> str:
    """The setting of the switch: ``""``, ``deterministic`` or ``rows``."""
    if isinstance(value, bool):
        return "deterministic" if value else ""
    if isinstance(value, str) and value == "rows":
        return "rows"
    raise ConfigurationError(
        f"deterministic in {source} must be true, false or 'rows', got {shown(value)}"
    )


def parse_bytes(value: Any, source: str) -> int:
    """A number of bytes from an integer or a text such as ``512MiB`` or ``80GB``."""
    count = 0
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        count = int(value)
    elif isinstance(value, str):
        match = _BYTES.fullmatch(value.lower())
        unit = _UNITS.get(match[3], 0) if match else 0
        if match and unit and not (match[2] and unit == 1):
            count = int(Fraction(match[1] + (match[2] or "")) * unit)
    if not 1 <= count < 2**63:
        raise ConfigurationError(
            f"a byte count in {source} must be a positive number below 2**63 such as 536870912 or "
            f"'512MiB', got {shown(value)}"
        )
    return count


def parse_memory(value: Any, source: str) -> int:
    """The memory of a device or a host, as :func:`parse_bytes` reads it.

    Raises:
        ConfigurationError: It is no number of bytes, or so few that a unit is missing.
    """
    count = parse_bytes(value, source)
    if count < LEAST_MEMORY:
        number = str(value).strip()
        hint = f"; did you mean '{number}GiB' or '{number}GB'?" if number.isdigit() else ""
        raise ConfigurationError(f"{source} of {shown(value)} is {count} bytes{hint}")
    return count


def _expect(value: object, expected_type: type, where: str, description: str) -> None:
    if not isinstance(value, expected_type):
        raise ConfigurationError(
            f"{where} must be {description}, got {type(value).__name__} {shown(value)}"
        )


def _section(content: Any, keys: tuple[str, ...], where: str, label: str) -> dict[str, Any]:
    """A mapping of some keys, without those that have no value."""
    _expect(content, Mapping, where, f"a mapping with the keys {', '.join(keys)}")
    values = {_name(key, f"{label} {where}", keys): value for key, value in content.items()}
    return {key: value for key, value in values.items() if value is not None}


def _name(name: object, label: str, allowed: Iterable[str]) -> str:
    """``name``, if it is a text that is known."""
    return str.__str__(check_name(ConfigurationError, label, name, allowed))


def _device(name: object, source: str) -> str:
    """The name of a section: a device type, perhaps with an architecture and a dtype behind it."""
    first, *parts = name.split("/") if isinstance(name, str) else (name,)
    device = registry.device_type(first, f"device type in {source}")
    dtypes = [part for part in map(short_name, parts) if part in _DTYPES]
    archs = [part for part in parts if short_name(part) not in _DTYPES]
    if len(dtypes) > 1 or len(archs) > 1 or not all(map(_ARCH.fullmatch, archs)):
        raise ConfigurationError(
            f"a section of devices in {source} must be a device type, and may name an architecture "
            f"and a dtype, such as cpu/float32; got {shown(name)}"
        )
    return "/".join([device, *archs, *map(long_name, dtypes)])


def sections_of(device: torch.device, dtype: torch.dtype) -> tuple[str, ...]:
    """The sections that hold for tensors of a device and dtype, the narrowest first."""
    from liger_multi.dispatch.launch import device_info

    type_name, dtype_name = device.type, str(dtype).removeprefix("torch.")
    try:
        arch = device_info(device).arch
    except ConfigurationError:  # a device that no backend serves
        return f"{type_name}/{dtype_name}", type_name, ""
    narrow = (
        f"{type_name}/{arch}/{dtype_name}",
        f"{type_name}/{arch}",
        f"{type_name}/{dtype_name}",
    )
    return *narrow, type_name, ""


def _pattern(op: object, source: str) -> str:
    if isinstance(op, str) and _PATTERN.fullmatch(op):
        try:
            if any(fnmatch.fnmatchcase(name, op) for name in registry.operators()):
                return str.__str__(op)
        except re.error:  # a range such as [z-a], before Python 3.12
            pass
    raise ConfigurationError(
        unknown(f"operator in {source}", op, registry.operators(), "liger-multi explain")
    )


def _order(value: Any, op: object, source: str) -> tuple[str, ...]:
    names = order(value)
    if not names:
        raise ConfigurationError(
            f"the choice for {shown(op)} in {source} must be a backend's name or a list of names, "
            f"got {shown(value)}"
        )
    label, allowed = f"backend for {shown(op)} in {source}", (*registry.backends(), "auto")
    names = tuple(_name(name, label, allowed) for name in names)
    if len(set(names)) < len(names):
        raise ConfigurationError(
            f"the choice for {shown(op)} in {source} names a backend twice: {shown(value)}"
        )
    if "auto" in names and len(names) > 1:
        raise ConfigurationError(
            f"the choice for {shown(op)} in {source} mixes 'auto' with names: {shown(value)}"
        )
    return names


def order(value: object) -> tuple[str, ...]:
    """The names of a choice, unchecked; empty for what is neither a text nor a list of texts."""
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list | tuple) and all(isinstance(name, str) for name in value):
        return tuple(value)
    return ()


# --- scopes, calls and the file ---

ENVIRONMENT_VARIABLE = "LIGER_MULTI_CONFIG"
MOST_CONFIGURATIONS = 64  # configurations whose dispatches are kept for another use


Key = tuple[tuple[str, tuple[str, ...]], ...]
USE, SOURCE = "use()", ""  # who names a scope's choices, and its place in a key of another one


class Configuration:
    """An immutable stack of layers, and the dispatches resolved under it.

    Args:
        layers: What :func:`configure` and the file say, the strongest first.
        scopes: What enclosing :func:`use` blocks say, the innermost first.
        path: Keys of the same blocks, the outermost first.
    """

    def __init__(
        self, layers: tuple[Layer, ...], scopes: tuple[Layer, ...] = (), path: tuple[Key, ...] = ()
    ) -> None:
        self.layers = (*scopes, *layers)
        self.base, self.scopes, self.path = layers, scopes, path
        self.dispatches: dict[Any, Any] = {}
        self._scopes: dict[Key, Configuration] = {}
        self._moved: tuple[Configuration, Configuration] | None = None

    def choice(self, op: str, device: torch.device, dtype: torch.dtype) -> Choice:
        """The backends to try for ``op`` on tensors of a device and dtype."""
        narrow = any(layer.narrow for layer in self.layers)
        return self.choice_in(op, sections_of(device, dtype) if narrow else (device.type, ""))

    def choice_in(self, op: str, sections: tuple[str, ...]) -> Choice:
        """The choice for some sections; a quarantine yields only to sources naming the operator."""
        choices = [(layer.choice(op, sections), layer) for layer in self.layers]
        for choice, layer in choices if self.quarantined else ():
            quarantine_choice = layer.kept_from(op, sections)
            if quarantine_choice is not None or (choice is not None and choice.named):
                return quarantine_choice or choice  # type: ignore[return-value]
        default = Choice(AUTO, False, "default")
        return next((choice for choice, _ in choices if choice is not None), default)

    @functools.cached_property
    def quarantined(self) -> tuple[tuple[str, Quarantine], ...]:
        """The quarantines in force, with their sources."""
        return tuple((x.source, x.quarantine) for x in self.layers if x.quarantine is not None)

    @functools.cached_property
    def chunk_bytes(self) -> int:
        """Byte budget of a logits chunk; 0 stands for a share of the free memory."""
        return next((x.chunk_bytes for x in self.layers if x.chunk_bytes is not None), 0)

    @functools.cached_property
    def head_gemms(self) -> str:
        """Precision of the GEMMs of fused losses: ``exact``, ``float8`` or ``float8_logits``."""
        return next((x.head_gemms for x in self.layers if x.head_gemms), "exact")

    @functools.cached_property
    def deterministic(self) -> str | None:
        """The setting that a layer names; None where PyTorch's own switch is followed."""
        return _innermost(self.layers)

    def scoped(self, choices: Mapping[str, Any], source: str = USE) -> Configuration:
        """This configuration under one more layer; equal scopes share their dispatches.

        Args:
            choices: What the layer names.
            source: Who names it, for messages.
        """
        choices = dict(choices)
        mode = choices.pop("deterministic", None)
        key = tuple(sorted((op, order(value)) for op, value in choices.items()))
        if mode is not None:
            key += (("deterministic", (parse_deterministic(mode, source),)),)
        if source != USE:
            key += ((SOURCE, (source,)),)
        configuration = self._scopes.get(key)
        if configuration is None:
            for op, value in choices.items():
                _order(value, op, source)  # None is allowed in a file, and is an error here
            ops = {k: v for k, v in choices.items() if k != "default"}
            mapping: dict[str, Any] = {"ops": ops}
            if "default" in choices:
                mapping["default"] = choices["default"]
            if mode is not None:
                mapping["deterministic"] = mode
            layer = parse(mapping, source)
            configuration = Configuration(self.base, (layer, *self.scopes), (*self.path, key))
            self._scopes[key] = configuration
        return configuration

    def over(self, base: Configuration) -> Configuration:
        """The scopes of this configuration over another base, the same object each time."""
        cached = self._moved
        if cached is None or cached[0] is not base:
            configuration = base
            for key in self.path:
                choices = {op: _setting_of(op, names) for op, names in key if op != SOURCE}
                configuration = configuration.scoped(choices, dict(key).get(SOURCE, (USE,))[0])
            self._moved = cached = (base, configuration)
        return cached[1]


def _innermost(layers: tuple[Layer, ...]) -> str | None:
    return next((x.deterministic for x in layers if x.deterministic is not None), None)


def _setting_of(op: str, names: tuple[str, ...]) -> Any:
    """The value of a scope's key, as it was passed to :func:`use`."""
    return _SWITCH[names[0]] if op == "deterministic" else list(names)


_SWITCH = {"": False, "deterministic": True, "rows": "rows"}
Scope = tuple["Configuration | None", bool]
_scope: ContextVar[Scope] = ContextVar("liger_multi_scope", default=(None, False))
_base: Configuration | None = None
_configurations: dict[tuple[Any, ...], Configuration] = {}
HANDED = "liger_multi.scope"


class _Local(threading.local):
    """Thread-local state of threads that have entered a scope."""

    caller: _Caller | None = None


_local = _Local()


class _OfProcess:
    """``deterministic`` as the process-wide configuration and the last ``use`` set it."""

    def __init__(self) -> None:
        self.deterministic: str | None = None
        self.scope: str | None = None


class _OfThread(threading.local):
    """``deterministic`` as the enclosing ``use`` blocks of a thread set it.

    Autograd recomputes checkpointed layers in threads that Python did not start. These follow the
    last ``use``, because the thread that waits for them is inside of it.
    """

    def __init__(self) -> None:
        self.deterministic: str | None = None
        self.is_foreign = isinstance(threading.current_thread(), threading._DummyThread)


_of_process, _of_thread = _OfProcess(), _OfThread()


def deterministic_setting() -> str | None:
    """``deterministic`` of the innermost layer that sets it, from attributes compilers guard on.

    Compilers cannot look into context variables. A graph that read these is compiled again where
    another setting is in force.
    """
    mode = _of_process.scope if _of_thread.is_foreign else _of_thread.deterministic
    return _of_process.deterministic if mode is None else mode


class _Caller:
    """The scope of a thread, for autograd threads that run its backward.

    Those see none of its context variables, but PyTorch hands them this thread-local object when a
    backward pass starts.
    """

    def __init__(self) -> None:
        self.scope: Scope = (None, False)
        references = sys.getrefcount(self)
        stash_in_thread(HANDED, self)
        if sys.getrefcount(self) == references:  # torch 2.11 and older take a reference uncounted
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))


def _hand_over() -> None:
    """Show the scope of this thread to compilers, and to threads in which autograd works for it."""
    scope = _scope.get()[0]
    mode = None if scope is None else _innermost(scope.scopes)
    _of_thread.deterministic = _of_process.scope = mode
    if _local.caller is None:
        _local.caller = _Caller()
    _local.caller.scope = _scope.get()


def current() -> Configuration:
    """The configuration in force here and now."""
    base = _base or configure(None)
    scope, pinned = _scope.get()
    if scope is None:
        if not is_stashed(HANDED):
            return base
        caller: _Caller = stashed(HANDED)
        if caller is _local.caller:
            return base  # what this thread handed over itself, for a scope that it has left
        scope, pinned = caller.scope
        if scope is None:
            return base
    if pinned or scope.base is base.layers:
        return scope
    return scope.over(base)  # configure() was called within the scope


def configure(source: str | os.PathLike[str] | Mapping[str, Any] | None = None) -> Configuration:
    """Set the process-wide configuration from a YAML file or a mapping; None resets it.

    Repeating a configuration costs nothing: equal ones share their dispatches.

    Args:
        source: Path of a YAML file, a mapping of the same form, or None to fall back to the file
            named by ``LIGER_MULTI_CONFIG`` (read again) and ``auto``.

    Raises:
        ConfigurationError: A file that cannot be read or is not YAML, an unknown key, operator or
            backend, a value of the wrong form. The configuration in force stays as it was.
    """
    global _base
    layers: list[Layer] = []
    if isinstance(source, Mapping):
        layers.append(parse(source, "configure()"))
    elif source is not None:
        layers.append(load(source))
    path = os.environ.get(ENVIRONMENT_VARIABLE)
    if path:
        try:
            layers.append(load(path))
        except ConfigurationError as error:
            raise ConfigurationError(f"{error} (named by {ENVIRONMENT_VARIABLE})") from error
    key = tuple(layer.key for layer in layers)
    configuration = _configurations.get(key)
    if configuration is None:
        if len(_configurations) >= MOST_CONFIGURATIONS:
            _configurations.pop(next(iter(_configurations)))
        configuration = _configurations[key] = Configuration(tuple(layers))
    _base = configuration
    _of_process.deterministic = configuration.deterministic
    return configuration


def in_quarantine(ops: Iterable[str] | None = None) -> list[str]:
    """A sentence for each quarantine in force: what it keeps from which backend, and since when.

    Args:
        ops: The operators of interest; None for all. Quarantines of others are passed by.
    """
    requested, sentences = None if ops is None else set(ops), []
    for source, quarantine in current().quarantined:
        sent = [
            f"{op} on {section} runs on {', '.join(order)}"
            for section, orders in quarantine.ops.items()
            for op, order in orders.items()
            if requested is None or op in requested
        ]
        if sent:
            written_for = f" (written for {quarantine.made_with})" if quarantine.made_with else ""
            since = f" since {quarantine.since}" if quarantine.since else ""
            sentences.append(
                f"quarantine{since}{written_for}, from {source}: {'; '.join(sent)}; "
                "`liger-multi verify` says what may be lifted"
            )
    return sentences


def forget() -> None:
    """Drop all dispatches and the configuration in force, as after a change of the backends."""
    global _base
    _configurations.clear()
    _base = None
    _of_process.deterministic = None


@contextlib.contextmanager
def use(*, deterministic: bool | str | None = None, **choices: str | list[str]) -> Iterator[None]:
    """Choose backends within a block, as ``with liger_multi.use(rms_norm="reference"):``.

    Keys are operator names (or ``default``), values a backend's name (which pins the operator) or a
    list of names. The scope follows threads and tasks as context variables do; a backward pass uses
    the configuration of its forward pass, wherever it runs (after a compiled forward: the one in
    force where ``backward`` is called, which may lie outside of the block).

    Args:
        deterministic: True for operators that give the same bits in every run; ``"rows"`` for those
            whose rows do not depend on each other either; False to ignore PyTorch's own switch.
        choices: Backends by operator.

    Raises:
        ConfigurationError: Unknown operator or backend, or neither a name nor a list of names.
    """
    with scope({**choices, "deterministic": deterministic}, USE):
        yield


@contextlib.contextmanager
def scope(choices: Mapping[str, Any], source: str) -> Iterator[None]:
    """The block of :func:`use`, with the name of who chose for messages."""
    token = _scope.set((current().scoped(choices, source), False))
    _hand_over()
    try:
        yield
    finally:
        _scope.reset(token)
        _hand_over()


@contextlib.contextmanager
def using_configuration(configuration: Configuration) -> Iterator[None]:
    """Use exactly ``configuration`` within a block, whatever is configured meanwhile."""
    token = _scope.set((configuration, True))
    try:
        yield
    finally:
        _scope.reset(token)
