"""Every exception that liger_multi raises on purpose beside ``TypeError`` and ``ValueError``.

::

    LigerMultiError
    ├── ConfigurationError (ValueError)         unknown operator, backend or key; no configuration
    ├── BackendUnavailableError (RuntimeError)  a backend bound by name cannot run this call
    ├── ContractError (TypeError)               a function differs from its operator's schema
    ├── TransformError (RuntimeError)           functorch transforms over an operator
    ├── PatchError (ValueError)                 a model cannot be patched or unpatched as asked
    └── PlanError (RuntimeError)                no way to train fits; carries the nearest one
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any


class LigerMultiError(Exception):
    """Base of all errors of this library."""


class ConfigurationError(LigerMultiError, ValueError):
    """A configuration names something that does not exist or has the wrong form."""


class BackendUnavailableError(LigerMultiError, RuntimeError):
    """A backend that was asked for by name cannot run the call; the message says why."""


class ContractError(LigerMultiError, TypeError):
    """A backend implements a half with another signature than the operator's contract."""


class TransformError(LigerMultiError, RuntimeError):
    """An operator was called under a functorch transform, which it does not support."""


class PatchError(LigerMultiError, ValueError):
    """A model cannot be patched or unpatched as asked."""


class PlanError(LigerMultiError, RuntimeError):
    """No way to train that was weighed fits into the memory given.

    Attributes:
        nearest: The candidate with the lowest peak.
        plan: All candidates, as of a plan that fits.
    """

    def __init__(self, message: str, nearest: Any, plan: Any) -> None:
        super().__init__(message)
        self.nearest, self.plan = nearest, plan


def unknown(kind: str, name: object, known: Iterable[str]) -> str:
    """Word the message for an unknown name, with the nearest known one."""
    names = sorted(known)
    close = difflib.get_close_matches(str(name), names, n=1, cutoff=0.4)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"unknown {kind} {name!r}; {hint}known: {', '.join(names)}"
