"""The ``autograd.Function`` that joins the directions of an operator, wired by argument name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
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


TENSORS = ("input", "output")  # sources that are saved for backward


def _sources(op: Op) -> list[tuple[str, int]]:
    """Where every argument of backward comes from: gradient, input, output, flag or dtype."""
    fwd, visible = op.fwd, op.fwd.returns[: len(op.fwd.returns) - len(op.residuals)]
    if op.fwd.returns[len(visible) :] != op.residuals:
        raise ContractError(
            f"{op.name}: the residuals {op.residuals} must be the last of {fwd.returns}"
        )
    pool: dict[str, tuple[str, int]] = {f"needs_{n}": ("flag", i) for i, n in enumerate(fwd.params)}
    pool |= {f"{n}_dtype": ("dtype", i) for i, n in enumerate(fwd.params)}
    pool |= {f"d{n}": ("grad", i) for i, n in enumerate(visible)}
    pool |= {n: ("output", i) for i, n in enumerate(fwd.returns)}
    pool |= {n: ("input" if fwd.tensors[i] else "constant", i) for i, n in enumerate(fwd.params)}
    for name in op.bwd.params:
        if name not in pool:
            raise ContractError(
                f"{op.name}.backward: {name!r} is no gradient, input, output or flag of forward"
            )
    for name in op.bwd.returns:
        if not name.startswith("d") or name[1:] not in fwd.params:
            raise ContractError(
                f"{op.name}.backward returns {name!r}, which is no gradient of an input of forward"
            )
    return [pool[name] for name in op.bwd.params]


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
    smooth = set(op.fwd.returns) - set(op.residuals) - set(op.constants)
    wanted = {*op.passed, *op.shared, *(name[1:] for name in op.bwd.returns)}
    unread = wanted - read - set(added)
    return (hidden[0],) if hidden and not read & smooth and (unread or omits) else ()


def make_function(
    op: Op,
    forward_half: Callable[..., Any],
    backward_half: Callable[..., Any],
    omit: Callable[..., Sequence[str]] | None,
) -> Any:
    """The ``autograd.Function`` that joins two directions of ``op``."""
    fwd, bwd, sources = op.fwd, op.bwd, _sources(op)
    visible, inputs = len(fwd.returns) - len(op.residuals), len(fwd.params)
    single = len(fwd.returns) == 1
    # numbers of arguments and, after them, of outputs that are saved; of other arguments; of dtypes
    kept = {s: (s[1] if s[0] == "input" else inputs + s[1]) for s in sources if s[0] in TENSORS}
    saved, plain = list(kept.values()), [s[1] for s in sources if s[0] == "constant"]
    owners = [op.shared.get(n, n) for n in fwd.params]
    back = [bwd.returns.index(f"d{n}") if f"d{n}" in bwd.returns else None for n in owners]
    cast = [i for i, n in enumerate(fwd.params) if owners[i] != n or n in op.shared.values()]
    typed = sorted({*cast, *(s[1] for s in sources if s[0] == "dtype")})
    anchor = [fwd.returns.index(n) for n in op.anchor]
    order = _order(sources, len(fwd.params), visible + len(anchor), saved, plain, typed, kept)
    fixed = [i for i, n in enumerate(fwd.returns[:visible]) if n in op.constants]
    straight = [(fwd.params.index(n), fwd.returns.index(y)) for n, y in op.passed.items()]
    smooth = [i for i in range(visible) if i not in fixed]
    asked = [fwd.params.index(n) for n in inspect.signature(omit).parameters] if omit else []
    dirty = fwd.params.index(op.inplace) if op.inplace else -1
    name, everything = op.name, (*fwd.params, *fwd.returns)

    def forward(ctx: Any, *args: Any) -> Any:
        outs = (forward_half(*args),) if single else forward_half(*args)
        # views made in here could not be written to
        outs = tuple([y.detach() if y._is_view() else y for y in outs])
        if dirty >= 0:
            increment_version(args[dirty])
        pool = (*args, *outs)
        if omit is None:
            ctx.save_for_backward(*[pool[i] for i in saved])
        else:
            left = omit(*[args[i] for i in asked])
            ctx.save_for_backward(*[None if everything[i] in left else pool[i] for i in saved])
        ctx.plain = [args[i] for i in plain]
        if typed:
            ctx.plain += [None if args[i] is None else args[i].dtype for i in typed]
        ctx.set_materialize_grads(False)
        if fixed:
            ctx.mark_non_differentiable(*[outs[i] for i in fixed])
        ctx.configuration = current()
        if anchor:
            return (*outs[:visible], outs[anchor[0]])
        return outs[0] if visible == 1 else outs[:visible]

    def run(ctx: Any, grads: tuple[Any, ...], tensors: tuple[Any, ...]) -> Any:
        needs = ctx.needs_input_grad
        pool = (*grads, *needs, *tensors, *ctx.plain)
        outs = backward_half(*[pool[i] for i in order])
        if dirty >= 0:  # its buffer is the gradient now; a second backward meets a changed version
            logits = tensors[saved.index(dirty)]
            increment_version(logits)
            return tuple(logits.detach() if j == dirty else None for j in range(inputs))
        outs = (outs,) if isinstance(outs, Tensor) else outs
        found = [outs[i] if i is not None and needs[j] else None for j, i in enumerate(back)]
        for i in smooth:
            if grads[i] is None:  # an input that none reaches has an empty gradient
                found = [None if g is None or g.numel() == 0 else g for g in found]
        for i, y in straight:
            found[i] = grads[y] if needs[i] else None
        for i in cast:
            g = found[i]
            found[i] = None if g is None else g.to(ctx.plain[len(plain) + typed.index(i)])
        return tuple(found)

    def configured(ctx: Any, grads: tuple[Any, ...], tensors: tuple[Any, ...]) -> Any:
        if torch.compiler.is_compiling():
            return run(ctx, grads, tensors)
        for g in grads:
            if g is not None and is_legacy_batchedtensor(g):
                raise TransformError(
                    f"the backward of liger_multi.{name} does not support functorch transforms "
                    "(is_grads_batched, vectorize=True)"
                )
        if ctx.configuration is current():
            return run(ctx, grads, tensors)
        with within(ctx.configuration):
            return run(ctx, grads, tensors)

    def backward(ctx: Any, *grads: Any) -> Any:
        for g in grads:
            if g is not None:
                break
        else:
            return (None,) * inputs
        tensors = ctx.saved_tensors
        if not torch.is_grad_enabled():
            return configured(ctx, grads, tensors)
        with torch.no_grad():
            found = configured(ctx, grads, tensors)
        return not_differentiable(name, found, (*grads, *tensors))

    members = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type(op.name, (torch.autograd.Function,), members)


def _order(
    sources: Sequence[tuple[str, int]],
    inputs: int,
    outputs: int,
    saved: Sequence[int],
    plain: Sequence[int],
    typed: Sequence[int],
    kept: Mapping[tuple[str, int], int],
) -> list[int]:
    """Where every argument of backward stands among gradients, flags, tensors, values, dtypes."""
    flags = outputs
    tensors = flags + inputs
    values = tensors + len(saved)
    dtypes = values + len(plain)
    found = []
    for kind, i in sources:
        if kind in TENSORS:
            found.append(tensors + saved.index(kept[kind, i]))
        elif kind == "constant":
            found.append(values + plain.index(i))
        elif kind == "dtype":
            found.append(dtypes + typed.index(i))
        else:
            found.append((flags if kind == "flag" else 0) + i)
    return found
