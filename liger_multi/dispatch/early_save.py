"""Operators that save what backward reads before they compute their result.

Under checkpointing, PyTorch recomputes a layer until all tensors that backward needs are saved, and
then stops. An ``autograd.Function`` saves its tensors at the end of its forward. So the last
operator of a layer would run to its end, and the GEMM of its result would run for nothing.

Here forward is two functions. The first computes what is kept, and gives an empty result of the
right shape, without memory. The second computes the result, and takes the first one's place in the
graph. Where a layer is computed again, it ends in the first.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from liger_multi._torch_private import is_tracing
from liger_multi.dispatch import codegen
from liger_multi.dispatch.autograd import make_function, transforming
from liger_multi.dispatch.config import Configuration
from liger_multi.dispatch.op import Op
from liger_multi.dispatch.stored import StoredWeight, sealed


class _Result(torch.autograd.Function):
    """The result, with the gradient of the empty one."""

    @staticmethod
    def forward(ctx: Any, empty: Tensor, compute: Callable[[], Tensor]) -> Tensor:
        """Compute the result."""
        ctx.set_materialize_grads(False)
        y = compute()
        return y.detach() if y._is_view() else y  # a view made in here could not be written to

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None]:
        """The gradient as it comes."""
        return upstream[0], None


class _Handover(threading.local):
    """Values that the first function leaves for the second."""

    value: Any = None


class EarlySave:
    """An operator with one visible output, in two functions.

    Args:
        op: The operator whose backward is used.
        save: Takes the arguments of forward, and returns its outputs, the result as
            :func:`empty_of` gives it, and what the second function needs.
        finish: Takes what ``save`` left and the arguments of the call; returns the result.
    """

    def __init__(
        self,
        op: Op,
        save: Callable[..., tuple[tuple[Tensor, ...], Any]],
        finish: Callable[..., Tensor],
    ) -> None:
        self._op, self._finish, self._handover = op, finish, _Handover()
        names = op.fwd.params
        self._flags = [names.index(n[6:]) for n in names if n.startswith("needs_")]

        def run(_: Configuration, *args: Any) -> tuple[Tensor, ...]:
            outputs, self._handover.value = save(*args)
            return outputs

        self._function = make_function(op, run, op.bwd.run_configured)

    def __call__(self, *args: Any) -> Tensor:
        """Call with the arguments of the operator."""
        tensors = [a for a in args if isinstance(a, Tensor)]
        needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
        unusual = is_tracing() or transforming()
        if not needs_grad or unusual or any(not _is_plain(t) for t in tensors):
            return self._op(*args)  # type: ignore[no-any-return]
        flagged = (args[i] for i in self._flags)
        flags = [isinstance(a, Tensor) and a.requires_grad for a in flagged]
        try:
            outputs = self._function.apply(*sealed(args), *flags)
            handover = self._handover.value
        finally:
            self._handover.value = None
        empty = outputs[0] if isinstance(outputs, tuple) else outputs
        return _Result.apply(empty, lambda: self._finish(handover, *args))  # type: ignore[no-any-return, no-untyped-call]


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) in codegen.PLAIN or isinstance(tensor, StoredWeight)


def empty_of(x: Tensor, *shape: int) -> Tensor:
    """A tensor like ``x`` of a shape, in the memory of one element."""
    return x.new_empty(1).expand(shape)
