"""Checks of arguments that operators share; a message names the requirement and the argument."""

from __future__ import annotations

import contextlib
import functools
import numbers
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, NoReturn, ParamSpec, TypeVar

import torch
from torch import Tensor

from liger_multi._torch_private import top_saved_tensor_hooks
from liger_multi.errors import unknown

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8)
ACCUMULATE = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
"""Dtypes in which gradients of weights are summed."""
meta_autocast: ContextVar[torch.dtype | None] = ContextVar("liger_multi_autocast", default=None)

keeps_products: ContextVar[bool] = ContextVar("liger_multi_keeps_products", default=False)
"""Whether a recompute policy keeps GEMMs one by one, so that each is an operator of its own."""


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """The dtype that autocast asks for on a device, or None; PyTorch has none of meta tensors."""
    if device_type == "meta":
        return meta_autocast.get()
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None


@contextlib.contextmanager
def _autocast_of_meta(dtype: torch.dtype | None) -> Iterator[None]:
    token = meta_autocast.set(dtype)
    try:
        yield
    finally:
        meta_autocast.reset(token)


def autocast(device_type: str, dtype: torch.dtype | None) -> contextlib.AbstractContextManager[Any]:
    """Autocast to a dtype, or none, on a device; PyTorch refuses to have any of meta tensors."""
    if device_type == "meta":
        return _autocast_of_meta(dtype)
    return torch.autocast(device_type, dtype=dtype, enabled=dtype is not None)


def in_checkpoint() -> bool:
    """Whether PyTorch's checkpointing (not the reentrant one) holds what autograd saves now."""
    if torch.compiler.is_compiling():
        return False
    hooks = top_saved_tensor_hooks(False)
    return hooks is not None and getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint"


Parameters = ParamSpec("Parameters")
Checked = TypeVar("Checked")
_VALUES = frozenset({bool, float, int, str, tuple, torch.dtype, type(None)})
_MOST = 1024  # bounded, for programs that draw options anew at every call


def cached_check(check: Callable[Parameters, Checked]) -> Callable[Parameters, Checked]:
    """Cache the results of a check of values, not of tensors.

    Types are part of the key, because Python takes 1 for True and for 1.0. Refusals are not cached,
    nor are calls of a compiler: its integers may be symbols.
    """
    answers: dict[Any, Any] = {}

    @functools.wraps(check)
    def run(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Checked:
        values = (*args, *kwargs.values())
        types = tuple(map(type, values))
        if torch.compiler.is_compiling() or not _VALUES.issuperset(types):
            return check(*args, **kwargs)
        question = (values, types, *kwargs)
        try:
            answer = answers.get(question)
        except TypeError:  # a tuple that holds a list
            return check(*args, **kwargs)
        if answer is None:
            if len(answers) >= _MOST:
                answers.clear()
            answer = answers[question] = check(*args, **kwargs)
        return answer

    return run


def describe(x: object) -> str:
    """A short name of an argument: shape, dtype and device of a tensor, or the type and value."""
    if isinstance(x, int) and abs(x) >= 10**60:
        return f"an integer of {x.bit_length()} bits"  # Python prints no more than 4300 digits
    if isinstance(x, Tensor):
        dtype = str(x.dtype).removeprefix("torch.")
        return f"a tensor of shape {tuple(x.shape)}, {dtype}, on {x.device}"
    return f"{type(x).__name__} {x!r:.60}"


def refuse(op: str, requirement: str, got: object) -> NoReturn:
    """Raise a ValueError that quotes what is required and what came, a text or an argument."""
    raise ValueError(f"{op}: {requirement}, got {got if isinstance(got, str) else describe(got)}")


def floating(op: str, *, optional: tuple[str, ...] = (), **tensors: Tensor | None) -> None:
    """Every argument is a floating-point tensor, or None where ``optional`` names it.

    All stand on the device of the first.
    """
    device: torch.device | None = None
    for name, x in tensors.items():
        if x is None and name in optional:
            continue
        if not isinstance(x, Tensor) or not x.is_floating_point():
            raise TypeError(f"{op}: {name} must be a floating-point tensor, got {describe(x)}")
        if device is None:
            device = x.device
        elif x.device != device:
            raise ValueError(
                f"{op}: all tensors must be on one device, got {name} on {x.device} and the "
                f"first on {device}"
            )


def ids(op: str, name: str, x: object) -> None:
    """A tensor of integers."""
    if not isinstance(x, Tensor) or x.dtype not in _INTEGERS:
        raise TypeError(
            f"{op}: {name} must be a tensor of integer class ids (int64), got {describe(x)}"
        )


def integers(op: str, name: str, x: object) -> None:
    """A tensor of int32 or int64."""
    if not isinstance(x, Tensor) or x.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"{op}: {name} must be a tensor of int64 or int32, got {describe(x)}")


def one_dtype(op: str, tensors: Mapping[str, Tensor | None]) -> list[Tensor | None]:
    """All tensors in the dtype of the GEMMs: autocast's, or the one that all have."""
    inputs = list(tensors.values())
    dtype = autocast_dtype(inputs[0].device.type)  # type: ignore[union-attr]
    if dtype is not None:
        return [t if t is None or t.dtype == torch.float64 else t.to(dtype) for t in inputs]
    if len({t.dtype for t in inputs if t is not None}) > 1:
        dtypes = {
            n: str(t.dtype).removeprefix("torch.") for n, t in tensors.items() if t is not None
        }
        shown = ", ".join(f"{n} {d}" for n, d in dtypes.items())
        raise TypeError(f"{op}: one dtype is needed outside of autocast, got {shown}")
    return inputs


def vector(op: str, name: str, x: Tensor | None, size: int, of: str) -> None:
    """A one-axis tensor of a given size (or None)."""
    if x is not None and x.shape != (size,):
        raise ValueError(f"{op}: {name} must have shape ({size},), the {of}, got {describe(x)}")


def same_shape(op: str, **tensors: Tensor) -> None:
    """All tensors have the same shape."""
    (first, a), *rest = tensors.items()
    for name, b in rest:
        if not isinstance(b, Tensor):  # None passes for an optional tensor elsewhere
            raise TypeError(f"{op}: {name} must be a floating-point tensor, got {describe(b)}")
        if a.shape != b.shape:
            raise ValueError(
                f"{op}: {first} and {name} must have the same shape, got {tuple(a.shape)} and "
                f"{tuple(b.shape)}"
            )


def targets(
    op: str, target: Tensor, rows: tuple[int, ...], like: Tensor, name: str = "target"
) -> None:
    """One class id per row: integers of the rows' shape, on the device of ``like``."""
    ids(op, name, target)
    if target.shape != rows:
        raise ValueError(
            f"{op}: {name} must have shape {tuple(rows)}, one id a row, got {describe(target)}"
        )
    if target.device != like.device:
        raise ValueError(
            f"{op}: all tensors must be on one device, got {name} on {target.device} and rows on "
            f"{like.device}"
        )


def one_of(op: str, name: str, value: object, allowed: Iterable[str]) -> None:
    """A word from a fixed set."""
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{op}: {unknown(name, value, allowed)}")


def boolean(op: str, name: str, value: object) -> bool:
    """True or False, and nothing that Python takes for them."""
    if value is True or value is False:
        return value
    raise TypeError(f"{op}: {name} must be True or False, got {describe(value)}")


_INFINITY = float("inf")


def number(
    op: str,
    name: str,
    value: object,
    low: float = -_INFINITY,
    high: float = _INFINITY,
    *,
    above: bool = False,
    infinite: bool = False,
) -> float:
    """A finite number in ``[low, high]``, or above ``low``; infinity where it has a meaning."""
    if type(value) is float and low < value < high:
        return value
    if type(value) is not float:
        value = _as_float(op, name, value)
    finite = -_INFINITY < value < _INFINITY or (infinite and value == _INFINITY)
    if finite and (value > low if above else value >= low) and value <= high:
        return value
    requirement = f"{'above' if above else 'at least'} {low:g}"
    if high != _INFINITY:
        requirement = f"in [{low:g}, {high:g}]"
    if not finite:
        requirement = "finite" if low == -_INFINITY else f"finite and {requirement}"
    raise ValueError(f"{op}: {name} must be {requirement}, got {value!r}")


def _as_float(op: str, name: str, value: object) -> float:
    """A number of another type: an integer, or a scalar of NumPy."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{op}: {name} must be a number, got {describe(value)}")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{op}: {name} is too large a number, got {describe(value)}") from None


def integer(op: str, name: str, value: object) -> int:
    """An integer of 64 bits, or what says that it is one."""
    if not isinstance(value, int) or isinstance(value, bool):
        try:
            # a tensor has an index, too, which costs a wait
            value = operator.index(None if isinstance(value, (bool, Tensor)) else value)  # type: ignore[arg-type]
        except TypeError:
            raise TypeError(f"{op}: {name} must be an integer, got {describe(value)}") from None
    if not -(2**63) <= value < 2**63:
        raise ValueError(f"{op}: {name} must be an integer of 64 bits, got {describe(value)}")
    return value  # also a size that a compiler keeps symbolic


def constant(op: str, name: str, x: Tensor | None) -> None:
    """Refuse what is no tensor, and one that requires a gradient which the loss does not have."""
    if x is not None and not isinstance(x, Tensor):
        raise TypeError(f"{op}: {name} must be a tensor, got {describe(x)}")
    if x is not None and x.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{op}: {name} has no gradient; pass {name}.detach()")


def names(op: str, outputs: object, allowed: tuple[str, ...], name: str = "outputs") -> str:
    """A tuple of names as one comma-joined word."""
    if isinstance(outputs, str) or not isinstance(outputs, (tuple, list, frozenset, set)):
        raise TypeError(f"{op}: {name} must be a tuple of names, got {describe(outputs)}")
    for word in outputs:
        one_of(op, f"word in {name}", word, allowed)
    return ",".join(word for word in allowed if word in outputs)
