"""The ``autograd.Function`` that joins forward and backward of an operator, by argument name.

:mod:`liger_multi.dispatch.codegen` writes its code. This module has the rest: where the arguments
of backward come from, and the unusual cases of a backward pass.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from liger_multi._torch_private import forward_ad_level, is_legacy_batched, transforms_active
from liger_multi.dispatch import codegen
from liger_multi.dispatch.config import Configuration, current, using_configuration
from liger_multi.errors import DoubleBackwardError, TransformError

if TYPE_CHECKING:
    from liger_multi.dispatch.op import Op

# --- a second backward ---

# With ``create_graph=True`` such a gradient gets a node in the graph, with edges to everything
# that it was computed from. Whoever differentiates it, by any tensor, reaches that node, and it
# raises. ``torch.autograd.function.once_differentiable`` is no substitute. It adds its node only
# where an upstream gradient requires grad, which that of a loss does not. Its node also has no
# edges, so that ``torch.autograd.grad`` with named inputs never runs it.


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
        def run_backward(ctx: Any, *grads: Any) -> Any:
            tensors = ctx.saved_tensors  # read once: under checkpointing they cannot be read again
            if not torch.is_grad_enabled():
                return backward(ctx, tensors, *grads)
            with torch.no_grad():
                grads_of_inputs = backward(ctx, tensors, *grads)
            return not_differentiable(name, grads_of_inputs, (*grads, *tensors))

        return run_backward

    return decorate


Tensors = tuple["Tensor | None", ...]
Gradients = Callable[[Any, Tensors, Tensors, Configuration], Tensors]
"""From the context, the upstream gradients, the saved tensors and the configuration in force."""

# --- what is known when an operator is declared ---


def unconnected_residual(op: Op, omits: bool, additive: Sequence[str]) -> tuple[str, ...]:
    """The residual that autograd has to know, so that gradients have an edge to every input.

    A gradient is computed from what backward reads. Saved inputs and visible outputs bring their
    edges with them. A hidden residual has none, and may depend on inputs that are not saved; it is
    then returned after the outputs.

    Args:
        op: The operator, forward and backward declared.
        omits: Whether backward does not read all that its signature names.
        additive: Inputs that no residual depends on.
    """
    used_params, hidden = set(op.bwd.params), [n for n in op.bwd.params if n in op.residuals]
    smooth = set(op.visible) - set(op.non_differentiable)
    with_grad = {*op.identity_grads, *op.same_grad_as, *(name[1:] for name in op.bwd.returns)}
    unread = with_grad - used_params - set(additive)
    return (hidden[0],) if hidden and not used_params & smooth and (unread or omits) else ()


def argument_origins(op: Op) -> list[tuple[str, str]]:
    """Where every argument of backward comes from, and under which name it is known there."""
    fwd, tensors = op.fwd, {op.fwd.params[i] for i in op.fwd.tensor_indices}
    pool = {f"needs_{n}": ("flag", n) for n in fwd.params}
    pool |= {f"{n}_dtype": ("dtype", n) for n in fwd.params}
    pool |= {f"d{n}": ("grad", n) for n in op.visible}
    pool |= {n: ("tensor", n) for n in fwd.returns}
    pool |= {n: ("tensor" if n in tensors else "value", n) for n in fwd.params}
    return [pool[name] for name in op.bwd.params]


def make_function(op: Op, run_forward: Callable[..., Any], run_backward: Callable[..., Any]) -> Any:
    """The ``autograd.Function`` of an operator, over functions that run forward and backward.

    Both take the configuration in force, and then the arguments of the direction.
    """
    code = codegen.joining_code(op, argument_origins(op))
    names = {"run_forward": run_forward, "run_backward": run_backward, "not_saved": op.not_saved}
    gradients = codegen.compiled(code.gradients, f"{op.name} gradients", names)

    def slow_path(ctx: Any, upstream: Tensors, saved: Tensors) -> Tensors:
        return backward_slow_path(op.name, gradients, ctx, upstream, saved)

    names = {**names, "gradients": gradients, "slow_path": slow_path}
    members = {
        "forward": staticmethod(codegen.compiled(code.forward, f"{op.name} forward", names)),
        "backward": staticmethod(codegen.compiled(code.backward, f"{op.name} backward", names)),
    }
    return type(op.name, (torch.autograd.Function,), members)


# --- backward passes that are not the usual one ---


def backward_slow_path(
    name: str, gradients: Gradients, ctx: Any, upstream: Tensors, saved: Tensors
) -> Tensors:
    """Backward for every case: double backward, another configuration in force, compilers."""
    if not torch.is_grad_enabled():
        return _configured(name, gradients, ctx, upstream, saved)
    with torch.no_grad():
        grads = _configured(name, gradients, ctx, upstream, saved)
    return not_differentiable(name, grads, (*upstream, *saved))


def _configured(
    name: str, gradients: Gradients, ctx: Any, upstream: Tensors, saved: Tensors
) -> Tensors:
    """The gradients, under the configuration of forward."""
    if torch.compiler.is_compiling():
        return gradients(ctx, upstream, saved, current())
    for g in upstream:
        if g is not None and is_legacy_batched(g):
            raise TransformError(
                f"the backward of liger_multi.{name} does not support functorch transforms "
                "(is_grads_batched, vectorize=True)"
            )
    if ctx.configuration is current():
        return gradients(ctx, upstream, saved, ctx.configuration)
    with using_configuration(ctx.configuration):
        return gradients(ctx, upstream, saved, current())


# --- transforms of torch.func and forward-mode derivatives, neither of which operators have ---


def transforming() -> bool:
    """Whether a functorch transform runs or a level of forward-mode derivatives is open."""
    return transforms_active() or forward_ad_level() >= 0


def is_transformed(tensors: Iterable[Any]) -> bool:
    """Whether a call is under a transform, or has a dual tensor, whose tangent it would lose."""
    if transforms_active():
        return True
    return forward_ad_level() >= 0 and any(
        isinstance(t, Tensor) and forward_ad.unpack_dual(t).tangent is not None for t in tensors
    )
