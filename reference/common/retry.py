"""Out of memory inside a fused linear operator: once more, with a quarter of the rows at a time."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TypeVar, cast

import torch

from liger_multi.reference.common.strict import strict

DIVISOR = 4
Half = TypeVar("Half", bound=Callable[..., object])


@dataclass
class Attempt:
    """One run of an operator: the divisor of its chunks, and whether they can be made smaller."""

    divisor: int = 1
    rows: int = 0


_attempt: ContextVar[Attempt | None] = ContextVar("liger_multi_attempt", default=None)
_warned: set[str] = set()


def divided(step: int) -> int:
    """Rows of a chunk in the attempt that is running."""
    attempt = _attempt.get()
    if attempt is None:
        return step
    step = max(1, step // attempt.divisor)
    attempt.rows = max(attempt.rows, step)
    return step


def retried(half: Half) -> Half:
    """Run forward or backward once more, with smaller chunks, after the device ran out of memory.

    It has written to nothing of its caller's, and its buffers are gone by then.
    """

    @functools.wraps(half)
    def run(*args: object) -> object:
        first = Attempt()
        token = _attempt.set(first)
        try:
            return half(*args)
        except torch.OutOfMemoryError:
            if first.rows <= 1 or strict():  # another chunk size gives other bits
                raise
        finally:
            _attempt.reset(token)
        _warn(half.__module__.rpartition(".")[2], first.rows)
        token = _attempt.set(Attempt(DIVISOR))
        try:
            return half(*args)
        finally:
            _attempt.reset(token)

    return cast(Half, run)


def _warn(name: str, rows: int) -> None:
    if name in _warned:
        return
    _warned.add(name)
    warnings.warn(
        f"liger_multi {name}: out of memory with {rows} rows of logits at a time; computed with "
        f"{max(1, rows // DIVISOR)} instead. Set chunk_bytes to keep below the limit (said once)",
        RuntimeWarning,
        stacklevel=3,
    )
