"""Which backend an operator should use, said by people: scopes, calls, a YAML file, and ``auto``.

Precedence: :func:`use` (scoped) over :func:`configure` over the file named by
``LIGER_MULTI_CONFIG`` over ``auto``. Each source is one :class:`Layer`; what a layer does not name
is asked of the next one.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any

from liger_multi.config_file import AUTO, Choice, Layer, load, parse
from liger_multi.errors import ConfigurationError

ENVIRONMENT_VARIABLE = "LIGER_MULTI_CONFIG"


class Configuration:
    """An immutable stack of layers with the plans resolved under it."""

    def __init__(self, layers: tuple[Layer, ...], scopes: tuple[Layer, ...] = ()) -> None:
        self.layers = (*scopes, *layers)
        self.base, self.scopes = layers, scopes
        self.plans: dict[Any, Any] = {}
        self._scopes: dict[tuple[tuple[str, str], ...], Configuration] = {}

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

    def scoped(self, choices: Mapping[str, str | list[str]]) -> Configuration:
        """This configuration under one more layer; equal scopes share their plans."""
        key = tuple(sorted((op, str(order)) for op, order in choices.items()))
        found = self._scopes.get(key)
        if found is None:
            ops = {k: v for k, v in choices.items() if k != "default"}
            mapping: dict[str, Any] = {"ops": ops}
            if "default" in choices:
                mapping["default"] = choices["default"]
            found = Configuration(self.base, (parse(mapping, "use()"), *self.scopes))
            self._scopes[key] = found
        return found


_scope: ContextVar[tuple[Configuration | None, bool]] = ContextVar(
    "liger_multi_scope", default=(None, False)
)
_base: Configuration | None = None


def current() -> Configuration:
    """The configuration in force here and now."""
    base = _base or configure(None)
    scope, pinned = _scope.get()
    if scope is None:
        return base
    if pinned or scope.base is base.layers:
        return scope
    return Configuration(base.layers, scope.scopes)  # configure() was called within the scope


def configure(source: str | os.PathLike[str] | Mapping[str, Any] | None = None) -> Configuration:
    """Set the process-wide configuration from a YAML file or a mapping; None resets it.

    Args:
        source: Path of a YAML file, a mapping of the same form, or None to fall back to the file
            named by ``LIGER_MULTI_CONFIG`` (read again) and ``auto``.

    Raises:
        ConfigurationError: A file that cannot be read or is not YAML, an unknown key, operator or
            backend. The configuration in force stays as it was.
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
    _base = Configuration(tuple(layers))
    return _base


@contextlib.contextmanager
def use(**choices: str | list[str]) -> Iterator[None]:
    """Choose backends within a block, as ``with liger_multi.use(rms_norm="reference"):``.

    Keys are operator names (or ``default``), values a backend's name (binding) or a list of names.
    The scope follows threads and tasks as context variables do; a backward pass uses the
    configuration of its forward pass, wherever it runs (after a compiled forward: the one in force
    when it runs).

    Raises:
        ConfigurationError: Unknown operator or backend.
    """
    token = _scope.set((current().scoped(choices), False))
    try:
        yield
    finally:
        _scope.reset(token)


@contextlib.contextmanager
def within(configuration: Configuration) -> Iterator[None]:
    """Put exactly ``configuration`` in force within a block, whatever is configured meanwhile."""
    token = _scope.set((configuration, True))
    try:
        yield
    finally:
        _scope.reset(token)
