"""First derivatives only: a gradient that our backward functions return cannot be differentiated.

With ``create_graph=True`` such a gradient gets a node in the graph, with edges to everything that
it was computed from. Whoever differentiates it, by any tensor, reaches that node, and it raises.
``torch.autograd.function.once_differentiable`` is no substitute. It adds its node only where an
upstream gradient requires grad, which that of a loss does not. Its node also has no edges, so that
``torch.autograd.grad`` with named inputs never runs it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from liger_multi.errors import DoubleBackwardError


class _Raises(torch.autograd.Function):
    """Returns its first tensors unchanged; the others are what these depend on."""

    @staticmethod
    def forward(
        ctx: Any, error_class: type[Exception], message: str, count: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.error_class, ctx.message = error_class, message
        ctx.set_materialize_grads(False)
        return tuple([t.data for t in tensors[:count]])  # no views, which could not be written to

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        raise ctx.error_class(ctx.message)


_raises: Any = _Raises.apply
_SECOND = (
    "liger_multi.{} has first derivatives only, and a gradient of it was "
    "differentiated (a gradient penalty or a product with the Hessian, after "
    "create_graph=True). Compute that term with plain PyTorch operations: an unpatched "
    "model, or the function of torch.nn.functional in place of the operator"
)
_PART = (
    "torch.ops.liger_multi.{0}_{1} has no gradient. It is a part of torch.ops.liger_multi.{0}, "
    "which has one. A program of torch.export is to be trained before run_decompositions(), which "
    "splits operators into forward and backward"
)


def not_differentiable(
    name: str, grads: Sequence[Tensor | None], origins: Iterable[Tensor | None]
) -> tuple[Tensor | None, ...]:
    """The same gradients, which raise when they are differentiated.

    Args:
        name: What returned them, for the message.
        grads: What a backward function returns.
        origins: What it read: the upstream gradients and the tensors saved by forward.
    """
    return _marked(DoubleBackwardError, _SECOND.format(name), grads, origins)


def only_whole(
    name: str, direction: str, outs: Sequence[Tensor | None], origins: Iterable[Tensor | None]
) -> tuple[Tensor | None, ...]:
    """Mark what forward or backward returned to a caller of ``torch.ops``: it has no gradient.

    Args:
        name: The operator.
        direction: ``forward`` or ``backward``.
        outs: What it returned.
        origins: Its arguments.
    """
    return _marked(RuntimeError, _PART.format(name, direction), outs, origins)


def _marked(
    error_class: type[Exception],
    message: str,
    tensors: Sequence[Tensor | None],
    origins: Iterable[Tensor | None],
) -> tuple[Tensor | None, ...]:
    """The same tensors, which raise when they are differentiated."""
    present = [t for t in tensors if t is not None]
    edges = [t for t in origins if t is not None and t.requires_grad]
    if not present or not edges:  # nothing to differentiate, or constants
        return tuple(tensors)
    marked = iter(_raises(error_class, message, len(present), *present, *edges))
    return tuple([None if t is None else next(marked) for t in tensors])


def first_derivatives_only(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate the backward of an ``autograd.Function``, which gets ``ctx.saved_tensors`` as well.

    What the gradients are computed from is among the saved tensors or the upstream gradients. Where
    forward computes gradients ahead, one of its outputs is saved, which stands for all inputs.

    Args:
        name: What the function is part of, for the message.
    """

    def decorate(backward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(backward)
        def once(ctx: Any, *grads: Any) -> Any:
            tensors = ctx.saved_tensors  # read once: under checkpointing they cannot be read again
            if not torch.is_grad_enabled():
                return backward(ctx, tensors, *grads)
            with torch.no_grad():
                grads_of_inputs = backward(ctx, tensors, *grads)
            return not_differentiable(name, grads_of_inputs, (*grads, *tensors))

        return once

    return decorate
