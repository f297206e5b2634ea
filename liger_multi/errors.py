"""Every exception that liger_multi raises on purpose besides ``TypeError`` and ``ValueError``.

::

    LigerMultiError
    ├── ConfigurationError (ValueError)         unknown operator, backend or key; no configuration
    ├── BackendUnavailableError (RuntimeError)  a backend pinned by name cannot run this call
    ├── ContractError (TypeError)               a function differs from its operator's schema
    ├── TransformError (RuntimeError)           functorch transforms over an operator
    ├── DoubleBackwardError (RuntimeError)      a gradient of an operator is differentiated
    ├── MissingPackageError (ImportError)       a package that is needed cannot be imported
    ├── PatchError (ValueError)                 a model cannot be patched or unpatched as asked
    └── PlanError (RuntimeError)                no way to train fits; carries the nearest one
"""

from __future__ import annotations

import contextlib
import difflib
import importlib.util
import os
import reprlib
from collections.abc import Iterable, Iterator
from typing import Any

MOST_NAMES = 10  # names that a message lists; of more, only the nearest


class LigerMultiError(Exception):
    """Base of all errors of this library."""


class ConfigurationError(LigerMultiError, ValueError):
    """A configuration names something that does not exist or has the wrong form."""


class BackendUnavailableError(LigerMultiError, RuntimeError):
    """A backend that was asked for by name cannot run the call; the message says why."""


class ContractError(LigerMultiError, TypeError):
    """A backend's forward or backward has another signature than the operator's contract."""


class TransformError(LigerMultiError, RuntimeError):
    """An operator was called under a functorch transform, which it does not support."""


class DoubleBackwardError(LigerMultiError, RuntimeError):
    """The gradient of an operator was differentiated; operators have first derivatives only."""


class MissingPackageError(LigerMultiError, ImportError):
    """A package that is needed for what was asked cannot be imported; the message installs it."""


class PatchError(LigerMultiError, ValueError):
    """A model cannot be patched or unpatched as asked."""


class PackingError(LigerMultiError, ValueError):
    """Samples of a packed row see each other; the message says what to pass instead."""


class PlanError(LigerMultiError, RuntimeError):
    """No candidate fits into the memory.

    Attributes:
        nearest: The candidate with the lowest peak.
        plan: All candidates, as of a plan that fits.
    """

    def __init__(self, message: str, nearest: Any, plan: Any) -> None:
        super().__init__(message)
        self.nearest, self.plan = nearest, plan


class _Short(reprlib.Repr):
    """``repr`` of any value in about 80 characters."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = self.maxlong = 80

    def repr_int(self, x: int, level: int) -> str:
        """Python refuses to write out integers of more than some thousand digits."""
        if x.bit_length() > 1024:
            return f"an integer of {x.bit_length()} bits"
        return super().repr_int(x, level)


_short = _Short()


@contextlib.contextmanager
def loading(name: str) -> Iterator[None]:
    """Load what the ``__getattr__`` of a module stands for.

    Python takes an AttributeError out of there for a name that the module lacks, and
    ``from module import name`` says no more than that.

    Raises:
        ImportError: Loading raised an AttributeError, which is the cause.
    """
    try:
        yield
    except AttributeError as error:
        raise ImportError(f"{name} cannot be loaded: {error}") from error


def shown(value: object) -> str:
    """``repr`` of what a caller gave, short enough for a message and never an error itself."""
    try:
        return _short.repr(value)
    except Exception:  # its own __repr__, or a type that is named as one it is not
        return f"<{type(value).__name__}>"


def shown_path(path: str | os.PathLike[str]) -> str:
    """``repr`` of a path, whole while a file system could have it: half of it names no file."""
    text = os.fspath(path)
    return repr(text) if isinstance(text, str) and len(text) <= _PATH_MAX else shown(text)


_PATH_MAX = 4096
"""Bytes of the longest path on Linux (``PATH_MAX`` of ``linux/limits.h``)."""


def first_line(error: BaseException) -> str:
    """The first line of what an exception of others says, or its type."""
    text = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return text if len(text) <= 300 else f"{text[:297]}..."


def summary(error: BaseException) -> str:
    """An exception of others in one line, with its type."""
    return f"{type(error).__name__}: {first_line(error)}"


def require_packages(what: str, packages: Iterable[str], extras: str) -> None:
    """Make sure that packages can be imported.

    Args:
        what: That needs them.
        packages: Their names, as they are imported.
        extras: Of this library, that install them.

    Raises:
        MissingPackageError: One is absent; the message has the line that installs it.
    """
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingPackageError(
            f"{what} needs {', '.join(missing)}, which cannot be imported here; "
            f'install with: pip install "liger-multi[{extras}]"'
        )


def unknown(noun: str, name: object, known: Iterable[str], every: str = "") -> str:
    """Word the message for an unknown name, with the nearest known one.

    Where more than :data:`MOST_NAMES` are known, the nearest ones stand for all.

    Args:
        noun: What the name names, such as "backend".
        name: The unknown name.
        known: The known names.
        every: The command that lists all of them.
    """
    names = sorted(known)
    text = name if isinstance(name, str) and len(name) < 200 else ""
    quoted = repr(text) if text else shown(name)
    is_long = len(names) > MOST_NAMES
    close = difflib.get_close_matches(text, names, n=5 if is_long else 1, cutoff=0.4)
    hint = f"did you mean {close[0]!r}? " if close else ""
    if is_long:
        nearest = ", ".join(close) or "none has a similar name"
        pointer = f" ({every} lists them)" if every else ""
        return f"unknown {noun} {quoted}; {hint}nearest of {len(names)} known{pointer}: {nearest}"
    return f"unknown {noun} {quoted}; {hint}known: {', '.join(names)}"


def check_name(
    error: type[Exception], noun: str, name: object, known: Iterable[str], every: str = ""
) -> str:
    """``name``, if it is a text that is known.

    Raises:
        error: It is not; the message is that of :func:`unknown`.
    """
    if not isinstance(name, str) or name not in known:
        raise error(unknown(noun, name, known, every))
    return name
