"""Values that can be compared at every call, since nobody changes them in place."""

from __future__ import annotations

import enum
import functools
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

_VALUES = (int, float, bool, complex, str, bytes, type(None), torch.dtype, torch.device, type)


def is_plain(value: Any) -> bool:
    """Whether a value is a number, a text or another one that is equal in another process."""
    if isinstance(value, tuple):
        return all(map(is_plain, value))
    return isinstance(value, (*_VALUES, enum.Enum)) and not isinstance(value, type)


def token(value: Any, owner: nn.Module | None = None) -> tuple[type, Any] | None:
    """Type and value of an attribute that can be compared at every call, or None.

    The owner of a bound method is left out, so that equal modules have equal tokens.
    """
    kind = type(value)
    if isinstance(value, (*_VALUES, enum.Enum)):
        return kind, value
    if kind is tuple:
        return (kind, value) if all(token(v) for v in value) else None
    if kind is FunctionType:
        inside = (_held(cell) for cell in value.__closure__ or ())
        return (kind, value) if all(token(v) for v in inside) else None
    if kind is BuiltinFunctionType:
        of = getattr(value, "__self__", None)
        return (kind, value) if isinstance(of, (type(None), ModuleType, type)) else None
    if kind is MethodType:
        same = value.__self__ is owner and owner is not None
        return (kind, value.__func__) if same else None
    if kind is functools.partial:
        parts = (value.func, value.args, *value.keywords.items())
        return (kind, parts) if all(token(v) for v in parts) else None
    return None


def _held(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return None
