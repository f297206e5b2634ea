"""The ``autograd.Function`` that joins forward and backward of an operator, by argument name.

:mod:`liger_multi.dispatch.flat` writes its code. Here stands what that leaves to others: where the
arguments of backward come from, and what is unusual in a backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from liger_multi._torch_private import is_legacy_batched
from liger_multi.dispatch import flat
from liger_multi.dispatch.config import Configuration, current, within
from liger_multi.dispatch.double_backward import not_differentiable
from liger_multi.errors import ContractError, TransformError

if TYPE_CHECKING:
    from liger_multi.dispatch.op import Op

Given = tuple["Tensor | None", ...]
Gradients = Callable[[Any, Given, Given, Configuration], Given]
"""From the context, the upstream gradients, the saved tensors and the configuration in force."""

# --- what is known when an operator is declared ---


def anchor_of(op: Op, omits: bool, added: Sequence[str]) -> tuple[str, ...]:
    """The residual that autograd is told of, so that gradients have an edge to every input.

    A gradient is computed from what backward reads. Saved inputs and visible outputs bring their
    edges with them. A hidden residual has none, and may depend on inputs that are not saved; it is
    then returned beside the outputs.

    Args:
        op: The operator, forward and backward declared.
        omits: Whether backward does not read all that its signature names.
        added: Inputs that no residual depends on.
    """
    read, hidden = set(op.bwd.params), [n for n in op.bwd.params if n in op.residuals]
    smooth = set(op.fwd.returns) - set(op.residuals) - set(op.non_differentiable)
    wanted = {*op.identity_grads, *op.same_grad_as, *(name[1:] for name in op.bwd.returns)}
    unread = wanted - read - set(added)
    return (hidden[0],) if hidden and not read & smooth and (unread or omits) else ()


def sources_of(op: Op) -> list[tuple[str, str]]:
    """Where every argument of backward comes from, and under which name it is known there."""
    fwd, visible = op.fwd, op.fwd.returns[: len(op.fwd.returns) - len(op.residuals)]
    if op.fwd.returns[len(visible) :] != op.residuals:
        raise ContractError(
            f"{op.name}: the residuals {op.residuals} must be the last of {fwd.returns}"
        )
    pool = {f"needs_{n}": ("flag", n) for n in fwd.params}
    pool |= {f"{n}_dtype": ("dtype", n) for n in fwd.params}
    pool |= {f"d{n}": ("grad", n) for n in visible}
    pool |= {n: ("tensor", n) for n in fwd.returns}
    pool |= {n: ("tensor" if fwd.tensors[i] else "value", n) for i, n in enumerate(fwd.params)}
    return [pool[name] for name in op.bwd.params]


def make_function(op: Op, run_forward: Callable[..., Any], run_backward: Callable[..., Any]) -> Any:
    """The ``autograd.Function`` of an operator, over functions that run forward and backward.

    Both take the configuration in force, and then the arguments of the direction.
    """
    code = flat.joining_code(op, sources_of(op))
    names = {"run_forward": run_forward, "run_backward": run_backward, "not_saved": op.not_saved}
    gradients = flat.compiled(code.gradients, f"{op.name} gradients", names)

    def general(ctx: Any, ups: Given, saved: Given) -> Given:
        return carefully(op.name, gradients, ctx, ups, saved)

    names = {**names, "gradients": gradients, "general": general}
    members = {
        "forward": staticmethod(flat.compiled(code.forward, f"{op.name} forward", names)),
        "backward": staticmethod(flat.compiled(code.backward, f"{op.name} backward", names)),
    }
    return type(op.name, (torch.autograd.Function,), members)


# --- backward passes that are not the usual one ---


def carefully(name: str, gradients: Gradients, ctx: Any, ups: Given, saved: Given) -> Given:
    """Gradients that somebody may differentiate, or under another configuration, or compiled."""
    if not torch.is_grad_enabled():
        return _configured(name, gradients, ctx, ups, saved)
    with torch.no_grad():
        found = _configured(name, gradients, ctx, ups, saved)
    return not_differentiable(name, found, (*ups, *saved))


def _configured(name: str, gradients: Gradients, ctx: Any, ups: Given, saved: Given) -> Given:
    """The gradients, under the configuration of forward."""
    if torch.compiler.is_compiling():
        return gradients(ctx, ups, saved, current())
    for g in ups:
        if g is not None and is_legacy_batched(g):
            raise TransformError(
                f"the backward of liger_multi.{name} does not support functorch transforms "
                "(is_grads_batched, vectorize=True)"
            )
    if ctx.configuration is current():
        return gradients(ctx, ups, saved, ctx.configuration)
    with within(ctx.configuration):
        return gradients(ctx, ups, saved, current())
