"""Backward of an operator, derived from the names of what it reads and what it returns.

A name says where an argument comes from, and with that its type: ``dy`` is the gradient of output
``y``, ``x`` an input of forward, ``rstd`` an output of it, ``x_dtype`` the dtype of ``x`` and
``needs_x`` a flag. The gradient ``dx`` is as large as ``x``, or empty where nobody needs it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from liger_multi.errors import ContractError

if TYPE_CHECKING:
    from liger_multi.dispatch.op import Op

Shape = str | Callable[..., Sequence[int]]
Rule = Callable[..., tuple[Tensor, ...]]


def differentiable(op: Op) -> list[str]:
    """The visible outputs of forward that have a gradient."""
    hidden = {*op.residuals, *op.non_differentiable}
    return [name for name in op.fwd.returns if name not in hidden]


def signature_of(op: Op, reads: str, returns: str, shared: Mapping[str, str]) -> inspect.Signature:
    """The signature of backward.

    Args:
        op: The operator, its forward declared.
        reads: Names of the arguments. ``x?`` marks an input that backward does not always get. The
            flags of several gradients follow at the end where none is named.
        returns: Names of the gradients.
        shared: Inputs whose gradient is that of another one.
    """
    names, inputs = reads.split(), op.fwd.signature.parameters
    gradients = [name[1:] for name in returns.split()]
    for name in returns.split():
        if not name.startswith("d") or name[1:] not in inputs:
            raise ContractError(
                f"{op.name}.backward returns {name!r}, which is no gradient of an input of forward"
            )
    wanted = [name for name in inputs if name in gradients or name in shared]
    if len(wanted) > 1 and not any(name.startswith("needs_") for name in names):
        names += [f"needs_{name}" for name in wanted]
    given = [
        inspect.Parameter(
            name.rstrip("?"), inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=_type(op, name)
        )
        for name in names
    ]
    several = tuple[tuple(Tensor for _ in gradients)] if gradients else None  # type: ignore[misc]
    return inspect.Signature(given, return_annotation=Tensor if len(gradients) == 1 else several)


def _type(op: Op, name: str) -> Any:
    """The type of an argument of backward, from where it comes."""
    inputs = op.fwd.signature.parameters
    if name.endswith("?"):
        return _type(op, name[:-1]) | None
    if name in inputs:
        return inputs[name].annotation
    if name in op.fwd.returns:
        return Tensor
    visible = differentiable(op)
    if name[1:] in visible and name[0] == "d":
        return Tensor if len(visible) == 1 else Tensor | None
    if name.removesuffix("_dtype") in inputs:
        given = inputs[name.removesuffix("_dtype")].annotation
        return torch.dtype if given is Tensor else torch.dtype | None
    if name.removeprefix("needs_") in inputs:
        return bool
    raise ContractError(
        f"{op.name}.backward: {name!r} is no gradient, input, output or flag of forward"
    )


def backward_of(
    op: Op,
    reads: str,
    returns: str,
    shared: Mapping[str, str],
    shapes: Mapping[str, Shape],
    beside: Mapping[str, str],
    rule: Rule | None,
) -> Callable[..., Any]:
    """The shape rule of backward, with its signature; :meth:`Op.backward` says what is given."""
    signature = signature_of(op, reads, returns, shared)
    params = signature.parameters
    first = next(n for n in params if params[n].annotation is Tensor)
    required = (n for n in params if n in op.fwd.params and params[n].annotation is Tensor)
    owner = next(required, first)  # an absent input has an empty gradient of this one's dtype
    rules = {name[1:]: shapes.get(name[1:], name[1:]) for name in returns.split()}
    needs = {n: [f"needs_{m}" for m in (n, *shared) if shared.get(m, m) == n] for n in rules}

    def gradient(name: str, like: Any, given: Mapping[str, Any]) -> Tensor:
        dtype = given.get(f"{name}_dtype")
        wanted = any(given.get(flag, True) for flag in needs[name])
        if isinstance(like, str):
            tensor = given[like]
            if tensor is None:
                return given[beside.get(name, owner)].new_empty(0)  # type: ignore[no-any-return]
            return tensor.new_empty(tensor.shape if wanted else (0,), dtype=dtype)  # type: ignore[no-any-return]
        shape = called(like, given) if wanted else (0,)
        return given[beside.get(name, owner)].new_empty(shape, dtype=dtype)  # type: ignore[no-any-return]

    def fake(*args: Any, **named: Any) -> Any:
        """Shape rule."""
        given = {**dict(zip(params, args, strict=False)), **named}
        if rule is not None:
            return called(rule, given)
        made = tuple([gradient(name, like, given) for name, like in rules.items()])
        return made[0] if len(made) == 1 else made or None

    fake.__signature__ = signature  # type: ignore[attr-defined]
    return fake


def called(rule: Callable[..., Any], given: Mapping[str, Any]) -> Any:
    """Call a rule with those of the arguments that it names, or all for ``**given``."""
    named = inspect.signature(rule).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in named.values()):
        return rule(**given)
    return rule(**{name: given[name] for name in named})
