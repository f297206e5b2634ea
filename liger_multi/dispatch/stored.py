"""Weights that are stored in another form than operators compute with.

An operator sees such a weight as one of its dtype. What autograd keeps is the stored form; numbers
exist while forward or backward runs. Operators that say so (``opens`` of
:class:`~liger_multi.dispatch.op.Op`) get the weight itself and open it right before its GEMM, so
that the numbers of one weight exist at a time. All others get numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, ClassVar

from torch import Tensor

from liger_multi._torch_private import no_torch_function, tree_map_only

assumed_memory: ContextVar[int] = ContextVar("liger_multi_assumed_memory", default=0)
"""Bytes of the device that tensors without memory stand for; 0: plenty."""


class FrozenTensor(Tensor):
    """A tensor in another form, which nobody writes to; PyTorch's operations see its numbers.

    Attributes:
        handlers: Operations of the form itself. Where a handler returns None, and for all other
            operations, the tensor is dequantized.
    """

    handlers: ClassVar[Mapping[Any, Callable[..., Any]]] = {}

    def dequantized(self) -> Tensor:
        """The numbers, as a new tensor."""
        raise NotImplementedError

    def write_error(self, action: object) -> Exception:
        """The error of an operation that writes to the tensor."""
        raise NotImplementedError

    __torch_function__ = no_torch_function

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Operations of :attr:`handlers`, and all others on numbers.

        Raises:
            Exception: That of :meth:`write_error`, where the operation writes to the tensor.
        """
        kwargs = kwargs or {}
        handler = cls.handlers.get(func)
        if handler is not None and isinstance(args[0], cls):
            output = handler(*args, **kwargs)
            if output is not None:
                return output
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[place] if place < len(args) else kwargs.get(argument.name)
                for target in value if isinstance(value, (list, tuple)) else (value,):
                    if isinstance(target, cls):
                        raise target.write_error(func)
        args, kwargs = tree_map_only(cls, cls.dequantized, (args, kwargs))
        return func(*args, **kwargs)


def same_strides(
    tensor: Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None = None
) -> Tensor | None:
    """``as_strided`` of a :class:`FrozenTensor` with the strides that it has; None for others."""
    unchanged = list(size) == list(tensor.shape) and list(stride) == list(tensor.stride())
    return tensor.detach() if unchanged and not offset else None


class StoredWeight(FrozenTensor):
    """A weight in another form; :meth:`dequantized` has its numbers."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The stored tensors."""
        raise NotImplementedError

    def pieces(self) -> Sequence[StoredWeight]:
        """Parts by rows, whose numbers an operator has in memory one after the other."""
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
