"""Weights that are stored in another form than operators compute with.

An operator sees such a weight as one of its dtype. What autograd keeps is the stored form; numbers
exist while forward or backward runs. Operators that say so (``opens`` of
:class:`~liger_multi.dispatch.op.Op`) get the weight itself and open it right before its GEMM, so
that the numbers of one weight exist at a time. All others get numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

from torch import Tensor

assumed_memory: ContextVar[int] = ContextVar("liger_multi_assumed_memory", default=0)
"""Bytes of the device that tensors without memory stand for; 0: plenty."""


class StoredWeight(Tensor):
    """A weight in another form; :meth:`dequantized` has its numbers."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The stored tensors."""
        raise NotImplementedError

    def pieces(self) -> Sequence[StoredWeight]:
        """Parts by rows, whose numbers an operator has in memory one after the other."""
        raise NotImplementedError

    def dequantized(self) -> Tensor:
        """The dequantized weight, as a new tensor."""
        raise NotImplementedError

    def sealed(self) -> StoredWeight:
        """The same for one backward pass, which raises once what is stored has been written to.

        Autograd counts writes to the tensors that it saves, not to those inside of them.
        """
        raise NotImplementedError


def has_stored(args: Sequence[Any]) -> bool:
    """Whether any argument is such a weight."""
    return any(isinstance(a, StoredWeight) for a in args)


def sealed(args: Sequence[Any]) -> tuple[Any, ...]:
    """The arguments of a call that autograd records; a weight that is trained stays itself."""
    return tuple(
        a.sealed() if isinstance(a, StoredWeight) and not a.requires_grad else a for a in args
    )


def with_numbers(args: Sequence[Any]) -> list[Any]:
    """The arguments with numbers in the place of such weights."""
    return [a.dequantized() if isinstance(a, StoredWeight) else a for a in args]
