"""Memory that shows when it is read unwritten, and when a kernel leaves its tensors.

Uninitialized memory holds NaN. Inputs stand between guards of the same values: what reads past the
end of a tensor meets NaN, or an index that no tensor has, and what writes there is found.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from liger_multi._torch_private import tensor_constructors

GUARD_BYTES = 4096
"""Of each guard: tensors keep the alignment that PyTorch gives them."""

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
        tensor = original(*args, **kwargs)
        value = poison_value(tensor.dtype)
        if value is not None and tensor.numel():
            with torch.no_grad():
                tensor.fill_(value)
        return tensor

    empty.__name__ = original.__name__
    empty.__wrapped__ = original  # type: ignore[attr-defined]
    return empty


def poison_empty() -> None:
    """Fill whatever the ``empty`` family returns, for the rest of the process; idempotent."""
    # cached there: contexts such as torch.device("meta") know the functions that are replaced here
    constructors = tensor_constructors()
    if constructors is not None:
        constructors()
    for owner, names in _EMPTY.items():
        for name in names:
            original = getattr(owner, name)
            if not hasattr(original, "__wrapped__"):
                setattr(owner, name, _poisoned(original))


def guarded(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides between two guards of :func:`poison_value`."""
    spans = zip(tensor.shape, tensor.stride(), strict=True)
    extent = 1 + sum((size - 1) * stride for size, stride in spans) if tensor.numel() else 0
    value, pad = poison_value(tensor.dtype), GUARD_BYTES // tensor.element_size()
    if value is None:
        return tensor
    memory = torch.full((extent + 2 * pad,), value, dtype=tensor.dtype, device=tensor.device)
    source = tensor.detach().as_strided((extent,), (1,)) if extent else tensor.detach().view(-1)
    memory[pad : pad + extent] = source
    copy = memory.as_strided(tensor.shape, tensor.stride(), pad)
    return copy.requires_grad_(tensor.requires_grad)


def overwritten(tensor: torch.Tensor) -> bool:
    """Whether a guard of :func:`guarded` has changed."""
    value, pad = poison_value(tensor.dtype), tensor.storage_offset()
    if value is None or not pad:
        return False
    count = tensor.untyped_storage().nbytes() // tensor.element_size()
    memory = tensor.detach().as_strided((count,), (1,), 0)
    extent = memory.numel() - 2 * pad
    guards = torch.cat([memory[:pad], memory[pad + extent :]])
    return not bool((guards.isnan() if guards.is_floating_point() else guards == value).all())
