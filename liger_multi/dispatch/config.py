"""Which backend an operator should use, said by people: scopes, calls, a YAML file, and ``auto``.

Precedence: :func:`use` (scoped) over :func:`configure` over the file named by
``LIGER_MULTI_CONFIG`` over ``auto``. Each source is one :class:`Layer`; what a layer does not name
is asked of the next one.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import torch

from liger_multi.dispatch.config_file import AUTO, Choice, Layer, load, order, parse
from liger_multi.errors import ConfigurationError

ENVIRONMENT_VARIABLE = "LIGER_MULTI_CONFIG"
MOST_CONFIGURATIONS = 64  # that keep their plans for when they are configured again


Key = tuple[tuple[str, tuple[str, ...]], ...]


class Configuration:
    """An immutable stack of layers with the plans resolved under it.

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
        self.plans: dict[Any, Any] = {}
        self._scopes: dict[Key, Configuration] = {}
        self._moved: tuple[Configuration, Configuration] | None = None

    def choice(self, op: str, device: str) -> Choice:
        """The backends to try for ``op`` on tensors of ``device``."""
        for layer in self.layers:
            found = layer.choice(op, device)
            if found is not None:
                return found
        return Choice(AUTO, False, "default")

    @property
    def chunk_bytes(self) -> int:
        """Byte budget of a logits chunk; 0 stands for a share of the free memory."""
        return next((x.chunk_bytes for x in self.layers if x.chunk_bytes is not None), 0)

    @property
    def head_gemms(self) -> str:
        """How heads with a loss multiply: ``exact``, ``float8`` or ``float8_logits``."""
        return next((x.head_gemms for x in self.layers if x.head_gemms), "exact")

    def scoped(self, choices: Mapping[str, str | list[str]]) -> Configuration:
        """This configuration under one more layer; equal scopes share their plans."""
        key = tuple(sorted((op, order(value)) for op, value in choices.items()))
        found = self._scopes.get(key)
        if found is None:
            ops = {k: v for k, v in choices.items() if k != "default"}
            mapping: dict[str, Any] = {"ops": ops}
            if "default" in choices:
                mapping["default"] = choices["default"]
            layer = parse(mapping, "use()")
            found = Configuration(self.base, (layer, *self.scopes), (*self.path, key))
            self._scopes[key] = found
        return found

    def over(self, base: Configuration) -> Configuration:
        """The scopes of this configuration over another base, the same object each time."""
        moved = self._moved
        if moved is None or moved[0] is not base:
            found = base
            for key in self.path:
                found = found.scoped({op: list(names) for op, names in key})
            self._moved = moved = (base, found)
        return moved[1]


Scope = tuple["Configuration | None", bool]
_scope: ContextVar[Scope] = ContextVar("liger_multi_scope", default=(None, False))
_base: Configuration | None = None
_known: dict[tuple[Any, ...], Configuration] = {}
HANDED = "liger_multi.scope"
_local = threading.local()


class _Caller:
    """The scope of a thread, for the threads in which autograd works for it.

    Those see none of its context variables, but PyTorch hands them this thread-local object when a
    backward pass starts.
    """

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.scope: Scope = (None, False)
        before = sys.getrefcount(self)
        torch._C._stash_obj_in_tls(HANDED, self)
        if sys.getrefcount(self) == before:  # torch 2.11 and older take a reference uncounted
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))


def _hand_over() -> None:
    """Show the scope of this thread to the threads in which autograd works for it."""
    if not hasattr(_local, "caller"):
        _local.caller = _Caller()
    _local.caller.scope = _scope.get()


def _handed_over() -> Scope:
    caller: _Caller = torch._C._get_obj_in_tls(HANDED)
    return (None, False) if caller.thread == threading.get_ident() else caller.scope


def current() -> Configuration:
    """The configuration in force here and now."""
    base = _base or configure(None)
    scope, pinned = _scope.get()
    if scope is None:
        if not torch._C._is_key_in_tls(HANDED):
            return base
        scope, pinned = _handed_over()
        if scope is None:
            return base
    if pinned or scope.base is base.layers:
        return scope
    return scope.over(base)  # configure() was called within the scope


def configure(source: str | os.PathLike[str] | Mapping[str, Any] | None = None) -> Configuration:
    """Set the process-wide configuration from a YAML file or a mapping; None resets it.

    Saying again what was said before costs nothing: equal configurations share their plans.

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
    named = os.environ.get(ENVIRONMENT_VARIABLE)
    if named:
        try:
            layers.append(load(named))
        except ConfigurationError as error:
            raise ConfigurationError(f"{error} (named by {ENVIRONMENT_VARIABLE})") from error
    key = tuple(layer.key for layer in layers)
    found = _known.get(key)
    if found is None:
        if len(_known) >= MOST_CONFIGURATIONS:
            _known.pop(next(iter(_known)))
        found = _known[key] = Configuration(tuple(layers))
    _base = found
    return found


def forget() -> None:
    """Drop all plans and the configuration in force, as after backends have changed."""
    global _base
    _known.clear()
    _base = None


@contextlib.contextmanager
def use(**choices: str | list[str]) -> Iterator[None]:
    """Choose backends within a block, as ``with liger_multi.use(rms_norm="reference"):``.

    Keys are operator names (or ``default``), values a backend's name (which pins the operator) or a
    list of names. The scope follows threads and tasks as context variables do; a backward pass uses
    the configuration of its forward pass, wherever it runs (after a compiled forward: the one in
    force where ``backward`` is called, which may lie outside of the block).

    Raises:
        ConfigurationError: Unknown operator or backend, or neither a name nor a list of names.
    """
    token = _scope.set((current().scoped(choices), False))
    _hand_over()
    try:
        yield
    finally:
        _scope.reset(token)
        _hand_over()


@contextlib.contextmanager
def within(configuration: Configuration) -> Iterator[None]:
    """Put exactly ``configuration`` in force within a block, whatever is configured meanwhile."""
    token = _scope.set((configuration, True))
    try:
        yield
    finally:
        _scope.reset(token)
