"""The ``autograd.Function`` that joins forward and backward of an operator, by argument name.

:func:`wire` turns the names of a contract into places, once: a :class:`Wiring` says which arguments
and outputs forward keeps, and where backward finds each of its arguments. What runs per call are
:func:`forward` and :func:`backward`, which know nothing but the wiring.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor
from torch.autograd.graph import increment_version

from liger_multi.dispatch.config import current, within
from liger_multi.dispatch.double_backward import not_differentiable
from liger_multi.errors import ContractError, TransformError

if TYPE_CHECKING:
    from liger_multi.dispatch.op import Op

Pick = Callable[[Any], "tuple[Any, ...]"]


@dataclass(frozen=True)
class Wiring:
    """Where every argument and result of forward and backward stands.

    Attributes:
        name: Of the operator.
        run_forward: Forward, from the arguments to its outputs.
        run_backward: Backward, from its arguments to the gradients.
        inputs: Number of forward's arguments.
        single: Whether forward returns one tensor.
        visible: Number of outputs for the caller.
        overwritten: The argument that is replaced by its gradient, or -1.
        buffer: Its place among the saved tensors.
        non_differentiable: Outputs without a gradient.
        hidden: The residual that is returned beside the outputs, or -1; :func:`anchor_of` says why.
        kept: Picks, of arguments and outputs, the tensors that are saved.
        names: Names of those tensors.
        not_saved: Given some arguments, the names of tensors that are not saved after all.
        asked: Picks these arguments.
        values: Picks the arguments that backward reads and that are no tensors.
        dtypes: Arguments whose dtype backward reads, or to which a gradient is cast.
        reads: Picks backward's arguments, of upstream gradients, flags, saved tensors, values and
            dtypes in this order.
        grads: For every argument of forward, which of backward's results is its gradient, or None.
        smooth: Visible outputs with a gradient.
        identity_grads: Pairs of an argument and the output whose gradient it gets as it comes.
        casts: Pairs of an argument and the place of the dtype to which its gradient is cast.
    """

    name: str
    run_forward: Callable[..., Any]
    run_backward: Callable[..., Any]
    inputs: int
    single: bool
    visible: int
    overwritten: int
    buffer: int
    non_differentiable: tuple[int, ...]
    hidden: int
    kept: Pick
    names: tuple[str, ...]
    not_saved: Callable[..., Sequence[str]] | None
    asked: Pick
    values: Pick
    dtypes: tuple[int, ...]
    reads: Pick
    grads: tuple[int | None, ...]
    smooth: tuple[int, ...]
    identity_grads: tuple[tuple[int, int], ...]
    casts: tuple[tuple[int, int], ...]


# --- what runs per call ---


def forward(w: Wiring, ctx: Any, *args: Any) -> Any:
    """Run forward, and keep what backward reads."""
    outs = (w.run_forward(*args),) if w.single else w.run_forward(*args)
    # views made in here could not be written to
    outs = tuple([y.detach() if y._is_view() else y for y in outs])
    if w.overwritten >= 0:
        increment_version(args[w.overwritten])
    tensors = w.kept((*args, *outs))
    ctx.save_for_backward(*(tensors if w.not_saved is None else _without_omitted(w, tensors, args)))
    ctx.plain = w.values(args)
    if w.dtypes:
        ctx.plain += tuple([None if args[i] is None else args[i].dtype for i in w.dtypes])
    ctx.set_materialize_grads(False)
    if w.non_differentiable:
        ctx.mark_non_differentiable(*[outs[i] for i in w.non_differentiable])
    ctx.configuration = current()
    if w.hidden >= 0:
        return (*outs[: w.visible], outs[w.hidden])
    return outs[0] if w.visible == 1 else outs[: w.visible]


def _without_omitted(w: Wiring, tensors: Sequence[Any], args: Any) -> list[Any]:
    """The tensors to save, with None for those that backward will not read this time."""
    left = w.not_saved(*w.asked(args))  # type: ignore[misc]
    return [None if n in left else t for n, t in zip(w.names, tensors, strict=True)]


def backward(w: Wiring, ctx: Any, *grads: Any) -> Any:
    """Run backward where an upstream gradient arrives, once."""
    for g in grads:
        if g is not None:
            break
    else:
        return (None,) * w.inputs
    tensors = ctx.saved_tensors
    if not torch.is_grad_enabled():
        return _configured(w, ctx, grads, tensors)
    with torch.no_grad():
        found = _configured(w, ctx, grads, tensors)
    return not_differentiable(w.name, found, (*grads, *tensors))


def _configured(w: Wiring, ctx: Any, grads: tuple[Any, ...], tensors: tuple[Any, ...]) -> Any:
    """The gradients, under the configuration of forward."""
    if torch.compiler.is_compiling():
        return _gradients(w, ctx, grads, tensors)
    for g in grads:
        if g is not None and is_legacy_batchedtensor(g):
            raise TransformError(
                f"the backward of liger_multi.{w.name} does not support functorch transforms "
                "(is_grads_batched, vectorize=True)"
            )
    if ctx.configuration is current():
        return _gradients(w, ctx, grads, tensors)
    with within(ctx.configuration):
        return _gradients(w, ctx, grads, tensors)


def _gradients(w: Wiring, ctx: Any, grads: tuple[Any, ...], tensors: tuple[Any, ...]) -> Any:
    """One gradient or None for every argument of forward."""
    needs = ctx.needs_input_grad
    outs = w.run_backward(*w.reads((*grads, *needs, *tensors, *ctx.plain)))
    if w.overwritten >= 0:
        return _in_its_buffer(w, tensors)
    outs = (outs,) if isinstance(outs, Tensor) else outs
    found = [None if i is None or not needs[j] else outs[i] for j, i in enumerate(w.grads)]
    for i in w.smooth:
        if grads[i] is None:  # an input that none reaches has an empty gradient
            found = [None if g is None or g.numel() == 0 else g for g in found]
    for i, y in w.identity_grads:
        found[i] = grads[y] if needs[i] else None
    for i, dtype in w.casts:
        g = found[i]
        found[i] = None if g is None else g.to(ctx.plain[dtype])
    return tuple(found)


def _in_its_buffer(w: Wiring, tensors: tuple[Any, ...]) -> tuple[Any, ...]:
    """The gradient that replaced an input; a second backward meets a changed version."""
    buffer = tensors[w.buffer]
    increment_version(buffer)
    return tuple(buffer.detach() if j == w.overwritten else None for j in range(w.inputs))


# --- what is known when an operator is declared ---


def picked(places: Sequence[int]) -> Pick:
    """A function from a sequence to the tuple of what stands at these places."""
    if len(places) > 1:
        return itemgetter(*places)
    return (lambda pool: (pool[places[0]],)) if places else (lambda pool: ())


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


def wire(
    op: Op,
    run_forward: Callable[..., Any],
    run_backward: Callable[..., Any],
    not_saved: Callable[..., Sequence[str]] | None,
) -> Wiring:
    """The wiring of forward and backward of ``op``."""
    fwd, bwd, sources = op.fwd, op.bwd, sources_of(op)
    params, returns, everything = fwd.params, fwd.returns, (*op.fwd.params, *op.fwd.returns)
    visible = returns[: len(returns) - len(op.residuals)]
    named = {kind: list(dict.fromkeys(n for k, n in sources if k == kind)) for kind, _ in sources}
    saved, values = named.get("tensor", []), named.get("value", [])
    owners = {n: op.same_grad_as.get(n, n) for n in params}
    casts = [n for n in params if owners[n] != n or n in op.same_grad_as.values()]
    dtypes = [n for n in params if n in (*casts, *named.get("dtype", []))]
    # the order of what backward picks its arguments from
    pool = [("grad", n) for n in (*visible, *op.anchor)] + [("flag", n) for n in params]
    pool += [("tensor", n) for n in saved] + [("value", n) for n in values]
    pool += [("dtype", n) for n in dtypes]
    return Wiring(
        name=op.name,
        run_forward=run_forward,
        run_backward=run_backward,
        inputs=len(params),
        single=len(returns) == 1,
        visible=len(visible),
        overwritten=params.index(op.inplace) if op.inplace else -1,
        buffer=saved.index(op.inplace) if op.inplace else -1,
        non_differentiable=tuple(i for i, n in enumerate(visible) if n in op.non_differentiable),
        hidden=returns.index(op.anchor[0]) if op.anchor else -1,
        kept=picked([everything.index(n) for n in saved]),
        names=tuple(saved),
        not_saved=not_saved,
        asked=picked(
            [params.index(n) for n in inspect.signature(not_saved).parameters] if not_saved else []
        ),
        values=picked([params.index(n) for n in values]),
        dtypes=tuple(params.index(n) for n in dtypes),
        reads=picked([pool.index(source) for source in sources]),
        grads=tuple(_place(bwd.returns, f"d{owners[n]}") for n in params),
        smooth=tuple(i for i, n in enumerate(visible) if n not in op.non_differentiable),
        identity_grads=tuple(
            (params.index(n), returns.index(y)) for n, y in op.identity_grads.items()
        ),
        casts=tuple((params.index(n), len(values) + dtypes.index(n)) for n in casts),
    )


def _place(names: Sequence[str], name: str) -> int | None:
    return names.index(name) if name in names else None


def make_function(wiring: Wiring) -> Any:
    """The ``autograd.Function`` of a wiring."""

    def run(ctx: Any, *grads: Any) -> Any:  # compiled autograd traces it, and takes no partial
        return backward(wiring, ctx, *grads)

    members = {"forward": staticmethod(partial(forward, wiring)), "backward": staticmethod(run)}
    return type(wiring.name, (torch.autograd.Function,), members)
