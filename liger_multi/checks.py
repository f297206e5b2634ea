"""Checks of arguments that operators share; a message quotes what came and what was wanted."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from contextvars import ContextVar

import torch
from torch import Tensor

from liger_multi.errors import unknown

meta_autocast: ContextVar[torch.dtype | None] = ContextVar("liger_multi_autocast", default=None)


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """The dtype that autocast asks for on a device, or None; PyTorch has none of meta tensors."""
    if device_type == "meta":
        return meta_autocast.get()
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None


def in_checkpoint() -> bool:
    """Whether PyTorch's checkpointing (not the reentrant one) holds what autograd saves now.

    PyTorch 2.7 cannot be asked, and the answer is no: it decides about time only.
    """
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    if top is None or torch.compiler.is_compiling():
        return False
    hooks = top(False)
    return hooks is not None and getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint"


def describe(x: object) -> str:
    """A short name of an argument: shape, dtype and device of a tensor, or the type and value."""
    if isinstance(x, Tensor):
        dtype = str(x.dtype).removeprefix("torch.")
        return f"a tensor of shape {tuple(x.shape)}, {dtype}, on {x.device}"
    return f"{type(x).__name__} {x!r:.60}"


def floating(op: str, **tensors: Tensor | None) -> None:
    """Every given argument is a floating-point tensor, and all stand on one device."""
    first: Tensor | None = None
    for name, x in tensors.items():
        if x is None and first is not None:
            continue
        if not isinstance(x, Tensor) or not x.is_floating_point():
            raise TypeError(f"{op}: {name} must be a floating-point tensor, got {describe(x)}")
        if first is None:
            first = x
        elif x.device != first.device:
            raise ValueError(
                f"{op}: all tensors must be on one device, got {name} on {x.device} and the "
                f"first on {first.device}"
            )


def one_dtype(op: str, tensors: Mapping[str, Tensor | None]) -> list[Tensor | None]:
    """All tensors in the dtype of the products: autocast's, or the one that all have."""
    given = list(tensors.values())
    wanted = autocast_dtype(given[0].device.type)  # type: ignore[union-attr]
    if wanted is not None:
        return [t if t is None or t.dtype == torch.float64 else t.to(wanted) for t in given]
    if len({t.dtype for t in given if t is not None}) > 1:
        kinds = {
            n: str(t.dtype).removeprefix("torch.") for n, t in tensors.items() if t is not None
        }
        shown = ", ".join(f"{n} {k}" for n, k in kinds.items())
        raise TypeError(f"{op}: one dtype is needed outside of autocast, got {shown}")
    return given


def vector(op: str, name: str, x: Tensor | None, size: int, of: str) -> None:
    """A one-axis tensor of a given size (or None)."""
    if x is not None and (x.ndim != 1 or x.shape[0] != size):
        raise ValueError(f"{op}: {name} must have shape ({size},), the {of}, got {describe(x)}")


def same_shape(op: str, **tensors: Tensor) -> None:
    """All tensors have the same shape."""
    (first, a), *others = tensors.items()
    for name, b in others:
        if not isinstance(b, Tensor):  # None passes for an optional tensor elsewhere
            raise TypeError(f"{op}: {name} must be a floating-point tensor, got {describe(b)}")
        if a.shape != b.shape:
            raise ValueError(
                f"{op}: {first} and {name} must have the same shape, got {tuple(a.shape)} and "
                f"{tuple(b.shape)}"
            )


def targets(
    op: str, target: Tensor, rows: torch.Size, beside: Tensor, name: str = "target"
) -> None:
    """One class id a row: integers of the rows' shape, on the same device."""
    if not isinstance(target, Tensor) or target.dtype not in (
        torch.int64,
        torch.int32,
        torch.int16,
        torch.uint8,
        torch.int8,
    ):
        raise TypeError(
            f"{op}: {name} must be a tensor of integer class ids (int64), got {describe(target)}"
        )
    if target.shape != rows:
        raise ValueError(
            f"{op}: {name} must have shape {tuple(rows)}, one id a row, got {describe(target)}"
        )
    if target.device != beside.device:
        raise ValueError(
            f"{op}: all tensors must be on one device, got {name} on {target.device} and rows on "
            f"{beside.device}"
        )


def one_of(op: str, name: str, value: object, known: Iterable[str]) -> None:
    """A word from a fixed set."""
    if value not in tuple(known):
        raise ValueError(f"{op}: {unknown(name, value, known)}")


def number(
    op: str, name: str, value: object, low: float, high: float | None = None, *, above: bool = False
) -> float:
    """A real number in ``[low, high]``, or above ``low``."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{op}: {name} must be a number, got {describe(value)}")
    inside = (value > low if above else value >= low) and (high is None or value <= high)
    if not inside:
        wanted = (
            f"in [{low:g}, {high:g}]"
            if high is not None
            else f"{'above' if above else 'at least'} {low:g}"
        )
        raise ValueError(f"{op}: {name} must be {wanted}, got {value!r}")
    return float(value)


def integer(op: str, name: str, value: object) -> int:
    """An integer, or what says that it is one."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value  # also a size that a compiler keeps symbolic
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{op}: {name} must be an integer, got {describe(value)}")
    return operator.index(value)


def constant(op: str, name: str, x: Tensor | None) -> None:
    """A tensor that the loss has no gradient for does not ask for one."""
    if x is not None and x.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{op}: {name} has no gradient; pass {name}.detach()")


def names(op: str, outputs: object, known: tuple[str, ...]) -> str:
    """A tuple of output names as one comma-joined word."""
    if isinstance(outputs, str) or not isinstance(outputs, (tuple, list, frozenset, set)):
        raise TypeError(f"{op}: outputs must be a tuple of names, got {describe(outputs)}")
    for name in outputs:
        one_of(op, "output", name, known)
    return ",".join(name for name in known if name in outputs)
