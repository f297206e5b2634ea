"""The ``autograd.Function`` that joins forward and backward of an operator, by argument name.

:mod:`liger_multi.dispatch.codegen` writes its code. This module has the rest: where the arguments
of backward come from, and the unusual cases of a backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from liger_multi._torch_private import forward_ad_level, is_legacy_batched, transforms_active
from liger_multi.dispatch import codegen
from liger_multi.dispatch.config import Configuration, current, within
from liger_multi.dispatch.double_backward import not_differentiable
from liger_multi.errors import TransformError

if TYPE_CHECKING:
    from liger_multi.dispatch.op import Op

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
    read, hidden = set(op.bwd.params), [n for n in op.bwd.params if n in op.residuals]
    smooth = set(op.visible) - set(op.non_differentiable)
    with_grad = {*op.identity_grads, *op.same_grad_as, *(name[1:] for name in op.bwd.returns)}
    unread = with_grad - read - set(additive)
    return (hidden[0],) if hidden and not read & smooth and (unread or omits) else ()


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
    with within(ctx.configuration):
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
