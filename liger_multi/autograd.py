"""The ``autograd.Function`` that joins the halves of an operator, wired by argument name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import increment_version

from liger_multi.config import current, within
from liger_multi.errors import ContractError, TransformError

if TYPE_CHECKING:
    from liger_multi.op import Op
    from liger_multi.primitive import Primitive


# What the functions below need of each operator. Dynamo of torch 2.7 follows globals, not closures,
# to objects that it does not know.
WIRED: dict[str, tuple[Primitive, Primitive, Callable[..., Sequence[str]] | None]] = {}


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


def make_function(op: Op, omit: Callable[..., Sequence[str]] | None) -> Any:
    """The ``autograd.Function`` that joins the halves of ``op``."""
    fwd, bwd, sources = op.fwd, op.bwd, _sources(op)
    visible = len(fwd.returns) - len(op.residuals)
    keep = [s for s in sources if s[0] in ("input", "output")]
    kept = {s: i for i, s in enumerate(keep)}
    owners = [op.shared.get(n, n) for n in fwd.params]
    back = [bwd.returns.index(f"d{n}") if f"d{n}" in bwd.returns else None for n in owners]
    fixed = [i for i, n in enumerate(fwd.returns[:visible]) if n in op.constants]
    asked = [fwd.params.index(n) for n in inspect.signature(omit).parameters] if omit else []
    dirty = fwd.params.index(op.inplace) if op.inplace else -1

    name, inputs, returned = op.name, fwd.params, fwd.returns
    WIRED[name] = (fwd, bwd, omit)

    def forward(ctx: Any, *args: Any) -> Any:
        half, _, unread = WIRED[name]
        outs = half(*args)
        outs = (outs,) if isinstance(outs, Tensor) else outs
        if dirty >= 0:
            increment_version(args[dirty])
        left = unread(*[args[i] for i in asked]) if unread is not None else ()
        pool = {"input": args, "output": outs}
        names = {"input": inputs, "output": returned}
        ctx.save_for_backward(*[None if names[k][i] in left else pool[k][i] for k, i in keep])
        ctx.args = [None if isinstance(a, Tensor) else a for a in args]
        ctx.dtypes = [a.dtype if isinstance(a, Tensor) else None for a in args]
        ctx.axes = [a.ndim if isinstance(a, Tensor) else None for a in args]
        ctx.set_materialize_grads(False)
        if fixed:
            ctx.mark_non_differentiable(*[outs[i] for i in fixed])
        if not torch.compiler.is_compiling():
            ctx.configuration = current()
        return outs[0] if visible == 1 else tuple(outs[:visible])

    def run(ctx: Any, grads: tuple[Any, ...]) -> Any:
        saved = ctx.saved_tensors
        pools = {
            "grad": grads,
            "flag": ctx.needs_input_grad,
            "dtype": ctx.dtypes,
            "constant": ctx.args,
        }
        args = [saved[kept[s]] if s in kept else pools[s[0]][s[1]] for s in sources]
        outs = WIRED[name][1](*args)
        needs = ctx.needs_input_grad
        if (
            dirty >= 0
        ):  # its buffer holds the gradient now; a second backward meets a changed version
            increment_version(saved[kept["input", dirty]])
            return tuple(
                saved[kept["input", dirty]].detach() if j == dirty else None
                for j in range(len(back))
            )
        outs = (outs,) if isinstance(outs, Tensor) else outs
        # an empty tensor in place of a gradient: nothing upstream of this input had one
        found = [
            outs[i] if i is not None and needs[j] and outs[i].ndim == ctx.axes[j] else None
            for j, i in enumerate(back)
        ]
        return tuple(
            g if g is None or g.dtype == ctx.dtypes[j] else g.to(ctx.dtypes[j])
            for j, g in enumerate(found)
        )

    def backward(ctx: Any, *grads: Any) -> Any:
        if all(g is None for g in grads):
            return (None,) * len(back)
        if torch.compiler.is_compiling():
            return run(ctx, grads)
        if any(g is not None and is_legacy_batchedtensor(g) for g in grads):
            raise TransformError(
                f"the backward of liger_multi.{name} does not support functorch transforms "
                "(is_grads_batched, vectorize=True)"
            )
        with within(ctx.configuration):
            return run(ctx, grads)

    members = {
        "forward": staticmethod(forward),
        "backward": staticmethod(once_differentiable(backward)),
    }
    return type(op.name, (torch.autograd.Function,), members)
