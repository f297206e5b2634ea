"""What Triton specializes a kernel's arguments on, asked of Triton and remembered.

Triton compiles another kernel where the specialization of an argument differs. Which facts decide
is Triton's own business, and differs between targets and versions: on AMD, a pointer whose storage
fits 2^31 - 1 bytes gets addresses of 32 bits. So Triton's function for the active target answers.
It takes up to 4 us for a pointer on AMD, so its answers are remembered: those for an integer by its
value, those for a tensor by the facts that Triton was observed to read.
"""

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from triton.runtime.jit import JITFunction

MOST = 65536  # remembered arguments, above which all are forgotten
ADDRESS = 255  # the bits of an address that are remembered; Triton looks at the lowest 4
_PLAIN = (Tensor, Parameter)
_BY_ADDRESS = {"dtype", "data_ptr"}
_BY_STORAGE = {*_BY_ADDRESS, "untyped_storage"}


def _argument(value):  # a kernel that Triton inspects and that never runs
    pass


def specialize_for_target() -> Callable[[Any], Any]:
    """Triton's specialization of an argument for the target of its active driver."""
    *_, binder = JITFunction(_argument).create_binder()
    return lambda argument: binder(argument)[1][0]


class _Observed:
    """Answers like a tensor, and records which of its attributes are read."""

    def __init__(self, x: Tensor) -> None:
        self.x, self.reads = x, set[str]()

    @property  # type: ignore[misc]  # for isinstance
    def __class__(self) -> Any:
        return Tensor

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.x, name)
        self.reads.add(name)
        return value


class ArgumentClasses:
    """Numbers for arguments: two have one number if and only if Triton specializes them alike.

    Attributes:
        integers: Number by integer.
        scalars: Number by type and value, of floats and booleans.
        tensors: Number by dtype and lowest bits of the address, and by bytes of the storage unless
            ``by_address``.
        none: The number of ``None``.
        by_address: Whether dtype and address decide the specialization of a tensor.
        by_storage: Whether they do together with the bytes of the storage. If not, Triton is asked
            about every tensor.
    """

    def __init__(self, specialize: Callable[[Any], Any]) -> None:
        self.specialize = specialize
        self.integers: dict[int, int] = {}
        self.scalars: dict[tuple[type, Any], int] = {}
        self.tensors: dict[tuple[Any, ...], int] = {}
        self.by_address = True
        self.by_storage = True
        self._numbers: dict[Any, int] = {}
        self._next = itertools.count()
        self.none = self.number(None)
        self.number(torch.empty(1))  # what Triton reads of a tensor

    def number(self, argument: Any) -> int:
        """Ask Triton about an argument, and remember the answer where it can be looked up."""
        if type(argument) in _PLAIN:
            return self._number_of_tensor(argument)
        number = self._numbered(self.specialize(argument))
        if type(argument) is int:
            _remember(self.integers, argument, number)
        elif type(argument) in (float, bool):
            _remember(self.scalars, (type(argument), argument), number)
        return number

    def _number_of_tensor(self, x: Tensor) -> int:
        specialization = self.specialize(x)
        number = self._numbered(specialization)
        self._note(x, specialization)
        facts = (x.dtype, x.data_ptr() & ADDRESS)
        if self.by_address:
            _remember(self.tensors, facts, number)
        elif self.by_storage:
            _remember(self.tensors, (*facts, x.untyped_storage().nbytes()), number)
        return number

    def _note(self, x: Tensor, specialization: Any) -> None:
        """Forget what was remembered by fewer facts than those that Triton reads."""
        observed = _Observed(x)
        try:
            is_alike = self.specialize(observed) == specialization
        except (TypeError, ValueError):  # Triton wants a tensor, and tells nothing
            is_alike = False
        by_address = is_alike and observed.reads <= _BY_ADDRESS
        by_storage = is_alike and observed.reads <= _BY_STORAGE
        if by_address < self.by_address or by_storage < self.by_storage:
            self.by_address &= by_address
            self.by_storage &= by_storage
            self.tensors.clear()

    def _numbered(self, specialization: Any) -> int:
        # A counter gives two threads different numbers; the length of the table would not.
        return self._numbers.setdefault(specialization, next(self._next))


def _remember(numbers: dict[Any, int], key: Any, number: int) -> None:
    if len(numbers) >= MOST:
        numbers.clear()
    numbers[key] = number
