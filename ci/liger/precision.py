"""In which dtype the inputs of cases are drawn, and in which the cases compute."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Precision:
    """Inputs are rounded to ``given`` and handed over in ``computed``.

    ``Precision(torch.bfloat16, torch.float32)`` is what results in bf16 are compared with.
    """

    given: torch.dtype
    computed: torch.dtype

    def of(self, drawn: Tensor) -> Tensor:
        """An input of a case."""
        return drawn.to(self.given).to(self.computed)


def drawn(make: Callable[..., Tensor], *args: Any, generator: torch.Generator) -> Tensor:
    """Numbers that are drawn on a CPU, the same for every device, on the device of the run."""
    return make(*args, generator=generator, device="cpu").to(torch.get_default_device())


_FLOAT = Precision(torch.float32, torch.float32)
_now = [_FLOAT]


def now() -> Precision:
    """The precision of the case that runs."""
    return _now[-1]


@contextlib.contextmanager
def using(given: torch.dtype, computed: torch.dtype) -> Iterator[None]:
    """Run cases in a precision."""
    _now.append(Precision(given, computed))
    try:
        yield
    finally:
        _now.pop()
