"""How strictly a caller asks for equal bits; set by dispatch around a call, read in backends.

Settings are ``""``, ``"deterministic"`` and ``"rows"``; the last includes the one before it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from liger_multi._torch_private import set_deterministic

Gemm = Callable[[Tensor, Tensor, Tensor | None, Tensor], None]
"""``out = a @ b (+ bias)`` whose rows do not depend on each other: ``(a, b, bias, out)``."""

_mode: ContextVar[str] = ContextVar("liger_multi_strict", default="")
_gemm: ContextVar[Gemm | None] = ContextVar("liger_multi_gemm_by_rows", default=None)


@contextlib.contextmanager
def in_mode(mode: str, gemm: Gemm | None) -> Iterator[None]:
    """Ask for a setting within a block; ``gemm`` takes the place of the vendor's under "rows"."""
    tokens = _mode.set(mode), _gemm.set(gemm if mode == "rows" else None)
    try:
        yield
    finally:
        _mode.reset(tokens[0])
        _gemm.reset(tokens[1])


def strict() -> bool:
    """Whether a repeated call must give the same bits."""
    return _mode.get() != ""


def by_rows() -> bool:
    """Whether a row must not depend on the others."""
    return _mode.get() == "rows"


def has_own_gemm() -> bool:
    """Whether a GEMM of independent rows stands in the place of the vendor's."""
    return _gemm.get() is not None


def multiply(a: Tensor, b: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    """``out = a @ b (+ bias)``; its rows are independent where that is asked for."""
    gemm = _gemm.get()
    if gemm is not None:
        gemm(a, b, bias, out)
    elif bias is None:
        torch.mm(a, b, out=out)
    else:
        torch.addmm(bias, a, b, out=out)
    return out


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``x @ weight.T (+ bias)`` of rows ``(..., K)``, as :func:`multiply`."""
    if not has_own_gemm():
        return torch.nn.functional.linear(x, weight, bias)
    rows = x.flatten(0, -2) if x.ndim > 1 else x.unsqueeze(0)
    out = x.new_empty(rows.shape[0], weight.shape[0])
    multiply(rows, weight.t(), bias, out)
    return out.view(*x.shape[:-1], weight.shape[0])


def matmul(a: Tensor, b: Tensor, onto: Tensor | None = None) -> Tensor:
    """``a @ b``, added to ``onto`` in its buffer where that is given, as :func:`multiply`."""
    if not has_own_gemm():
        return a @ b if onto is None else onto.addmm_(a, b)
    out = multiply(a, b, None, a.new_empty(a.shape[0], b.shape[1]))
    return out if onto is None else onto.add_(out)


def product(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` in fp32 with independent rows, where :func:`has_own_gemm`."""
    return multiply(a, b, None, a.new_empty(a.shape[0], b.shape[1], dtype=torch.float32))


def addmm(base: Tensor, a: Tensor, b: Tensor, alpha: float, in_place: bool = False) -> Tensor:
    """``base + alpha a @ b``, rounded once, optionally in place; rows as in :func:`multiply`."""
    if not has_own_gemm():
        add = base.addmm_ if in_place else base.addmm
        return add(a, b, alpha=alpha)
    total = torch.add(base, product(a, b), alpha=alpha)
    return base.copy_(total) if in_place else total.to(base.dtype)


# --- settings of the vendor's libraries ---


class SharedSetting:
    """A process-wide setting that several threads may hold at the same time.

    The first to enter changes it, and the last to leave restores it.

    Args:
        change: Makes the change, and returns what undoes it.
    """

    def __init__(self, change: Callable[[], Callable[[], None]]) -> None:
        self._change, self._lock, self._inside = change, threading.Lock(), 0

    def __enter__(self) -> None:
        """Change the setting, unless another block has."""
        with self._lock:
            if not self._inside:
                self._undo = self._change()
            self._inside += 1

    def __exit__(self, *raised: object) -> None:
        """Restore it, unless another block needs it."""
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self._undo()


def _order_convolutions() -> Callable[[], None]:
    settings: Any = torch.backends.cudnn
    previous = settings.deterministic, settings.benchmark
    settings.deterministic, settings.benchmark = True, False

    def undo() -> None:
        settings.deterministic, settings.benchmark = previous

    return undo


def _order_attention() -> Callable[[], None]:
    """Set deterministic algorithms; FlashAttention's backward ignores ``warn_only=True``."""
    was_enabled = torch.are_deterministic_algorithms_enabled()
    warn = torch.is_deterministic_algorithms_warn_only_enabled()
    settings: Any = torch.utils.deterministic
    filled, settings.fill_uninitialized_memory = settings.fill_uninitialized_memory, False
    set_deterministic(True, warn_only=False)

    def undo() -> None:
        set_deterministic(was_enabled, warn_only=warn)
        settings.fill_uninitialized_memory = filled

    return undo


_convolutions, _attention = SharedSetting(_order_convolutions), SharedSetting(_order_attention)


def ordered_convolutions(device: torch.device) -> AbstractContextManager[None]:
    """Make cuDNN and MIOpen convolutions deterministic within a block; those of a CPU are."""
    return contextlib.nullcontext() if device.type == "cpu" else _convolutions


def ordered_attention() -> AbstractContextManager[None]:
    """Make PyTorch's attention deterministic within a block, if the caller asks for it."""
    return _attention if strict() else contextlib.nullcontext()
