"""Uninitialized memory that shows itself: whatever the ``empty`` family returns holds NaN."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._device import _device_constructors

_EMPTY: dict[Any, tuple[str, ...]] = {
    torch: ("empty", "empty_like", "empty_strided", "empty_permuted"),
    torch.Tensor: ("new_empty", "new_empty_strided"),
}


def poison_value(dtype: torch.dtype) -> float | int | bool | None:
    """What uninitialized memory of a dtype holds under test: NaN, the largest integer, or True."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    if dtype is torch.bool:
        return True
    try:
        return torch.iinfo(dtype).max
    except TypeError:
        return None  # quantized and sub-byte dtypes cannot be filled


def _poisoned(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def empty(*args: Any, **kwargs: Any) -> torch.Tensor:
        made = original(*args, **kwargs)
        value = poison_value(made.dtype)
        if value is not None and made.numel():
            with torch.no_grad():
                made.fill_(value)
        return made

    empty.__name__ = original.__name__
    empty.__wrapped__ = original  # type: ignore[attr-defined]
    return empty


def poison_empty() -> None:
    """Fill whatever the ``empty`` family returns, for the rest of the process; idempotent."""
    # cached there: contexts such as torch.device("meta") know the functions that are replaced here
    _device_constructors()
    for owner, names in _EMPTY.items():
        for name in names:
            original = getattr(owner, name)
            if not hasattr(original, "__wrapped__"):
                setattr(owner, name, _poisoned(original))
