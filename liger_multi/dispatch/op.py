"""Operators: forward and backward, joined by autograd by argument name.

A contract (``liger_multi/ops/<op>.py``) declares forward as a stub: the signature is the torch
schema and the body the shape rule. Backward is declared by names, from which both are derived: in
``reads="dy x weight rstd"``, ``dy`` is the gradient of output ``y``, ``x`` and ``weight`` are
inputs of forward, and ``rstd`` is an output of forward kept as a residual. The returned ``dx``
belongs to ``x``. ``needs_x`` tells whether anybody wants the gradient of ``x``, and ``x_dtype`` is
the dtype of ``x``; so a name also tells a type. The gradient ``dx`` is as large as ``x``; one that
nobody wants, or that no upstream gradient reaches, is an empty tensor and becomes None.

Forward and backward are each a ``torch.library`` operator, so that compilers, fake tensors and
dispatch modes see one named, opaque call. Plain eager tensors skip that boundary and go straight to
the backend's function.

Forward and backward together are a third ``torch.library`` operator, which is what Dynamo puts into
its graph. AOTAutograd expands it by the same ``autograd.Function`` as in eager mode. Dynamo itself
does not trace that Function: it refuses one tensor in two arguments, and loses symbolic sizes that
forward keeps for backward.

With DTensor inputs, row-wise operators run on local rows, others are refused with the reason.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter

from liger_multi._torch_private import is_functorch_wrapped, is_tracing
from liger_multi.dispatch import flat
from liger_multi.dispatch.autograd import anchor_of, make_function
from liger_multi.dispatch.bitwise import NO_PROMISE, Bitwise
from liger_multi.dispatch.config import Configuration
from liger_multi.dispatch.primitive import (
    LIBRARY,
    Primitive,
    automatic,
    inline_ops,
    mode_in_force,
    sources,
)
from liger_multi.dispatch.registry import OPS
from liger_multi.dispatch.transforms import is_transformed
from liger_multi.errors import ContractError, TransformError

__all__ = ["OPS", "Op", "inline_ops"]

# --- backward, from names ---

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


# --- the operator ---


Declared = TypeVar("Declared", bound=Callable[..., Any])


class Op:
    """A named operator: its forward, its backward, and how autograd joins them.

    Args:
        name: The operator's name; backends implement it in a module of this name.
        family: The room of its modules: ``backends/<backend>/<family>/``, ``reference/<family>/``.
        compile: ``opaque`` keeps the op one call under ``torch.compile``; ``trace`` lets the
            compiler see the reference, which pays for elementwise operators that Inductor fuses
            with their neighbors.
        inplace: The input of forward that is overwritten by its own gradient, if any.
        rows: For DTensors: names of tensors that share their leading axes (sharding those is fine).
        replicated: For DTensors: names of tensors every rank needs whole; their gradients are
            partial sums.
        bitwise: What it promises about bits, and which of its tensors have rows.
    """

    def __init__(
        self,
        name: str,
        *,
        family: str = "",
        compile: str = "opaque",
        inplace: str | None = None,
        rows: Sequence[str] = (),
        replicated: Sequence[str] = (),
        bitwise: Bitwise = NO_PROMISE,
    ) -> None:
        self.name, self.family, self.compile, self.inplace = name, family, compile, inplace
        self.rows, self.replicated, self.bitwise = tuple(rows), tuple(replicated), bitwise
        OPS[name] = self

    def forward(
        self, returns: str, residuals: str = "", non_differentiable: str = ""
    ) -> Callable[[Declared], Declared]:
        """Declare forward.

        Args:
            returns: Names of all outputs, those for the caller first.
            residuals: The last of them, kept for backward and hidden from the caller.
            non_differentiable: Visible outputs that have no gradient.
        """

        def declare(fake: Declared) -> Declared:
            self.fwd = Primitive(
                self, "forward", fake, returns, (self.inplace,) if self.inplace else ()
            )
            self.residuals, self.non_differentiable = (
                tuple(residuals.split()),
                tuple(non_differentiable.split()),
            )
            return fake

        return declare

    def backward(
        self,
        reads: str,
        returns: str,
        *,
        shapes: Mapping[str, Shape] = {},
        beside: Mapping[str, str] = {},
        rule: Rule | None = None,
        not_saved: Callable[..., Sequence[str]] | None = None,
        same_grad_as: Mapping[str, str] = {},
        identity_grads: Mapping[str, str] = {},
        added: Sequence[str] = (),
        values_for: Mapping[str, str] = {},
    ) -> None:
        """Declare backward and wire it to forward.

        Signature and shape rule are derived from the names: a gradient is as large as its input,
        or empty where nobody needs it.

        Args:
            reads: Names of all arguments; ``x?`` for an input that ``not_saved`` may omit. Flags
                of several gradients are added where none is named.
            returns: Names of the gradients, ``d`` and the name of an input of forward.
            shapes: For inputs that backward does not read: the argument whose shape and dtype the
                gradient has, or the shape as a function of arguments by name. The dtype is then
                that of the first input; an argument ``x_dtype`` overrides it.
            beside: For optional inputs: the argument whose dtype the empty gradient of an absent
                one has; the first input, if not given.
            rule: Shapes that follow no such rule: a function of arguments by name that returns
                all gradients.
            not_saved: Given arguments of forward by name, which tensors backward will not read;
                they are not kept alive.
            same_grad_as: Inputs of forward whose gradient is that of another one, by name (the
                terms of a sum); it is cast where the dtypes differ.
            identity_grads: Inputs of forward whose gradient is that of an output as it comes, by
                name (what is only added to).
            added: Inputs of forward that are only added to its outputs: no residual depends on
                them, and backward does not read them.
            values_for: For inputs of which backward else reads shape and dtype only: the inputs
                whose gradients need the values.
        """
        fake = backward_of(self, reads, returns, same_grad_as, shapes, beside, rule)
        mutated = (self.inplace,) if self.inplace else ()
        self.bwd = Primitive(self, "backward", fake, returns, mutated)
        self.same_grad_as, self.identity_grads = dict(same_grad_as), dict(identity_grads)
        self.values_for = dict(values_for)
        self.anchor = anchor_of(self, not_saved is not None, added)
        self.not_saved = not_saved
        if not self.inplace:
            self.whole = self._define()
        names = [self.fwd.params[i] for i in self.fwd.places]
        needs = [p[len("needs_") :] for p in self.fwd.params if p.startswith("needs_")]
        self.flags = [names.index(name) for name in needs]

    # written and compiled when first asked for: most programs call few operators

    @functools.cached_property
    def function(self) -> Any:
        """The ``autograd.Function`` that calls backends."""
        return make_function(self, self.fwd.run_in, self.bwd.run_in)

    @functools.cached_property
    def traced(self) -> Any:
        """The one that a compiler looks into, where it may."""
        if self.compile != "trace":
            return self.function
        traces = (functools.partial(_anywhere, prim.trace) for prim in self.primitives)
        return make_function(self, *traces)

    @functools.cached_property
    def apply(self) -> Any:
        """The part in C++; what Python does around it serves functorch and setup_context."""
        return super(torch.autograd.Function, self.function).apply  # type: ignore[misc]

    @functools.cached_property
    def run(self) -> Callable[..., Any]:
        """The call, for what is usual."""
        names = {"general": self.general, "apply": self.apply, "forward": self.fwd.run}
        return flat.compiled(flat.call_source(self), f"{self.name} call", names)

    @property
    def primitives(self) -> tuple[Primitive, Primitive]:
        """Forward and backward."""
        return self.fwd, self.bwd

    def _define(self) -> Any:
        """The operator that compilers see: the arguments of ``__call__`` and how to expand it."""
        given, _, made = self.fwd.schema.partition(" -> ")
        wanted = [a for a in given.strip("()").split(", ") if not a.split()[1].startswith("needs_")]
        visible = len(self.fwd.returns) - len(self.residuals)
        outs = made.strip("()").split(", ")[:visible]
        result = outs[0] if visible == 1 else f"({', '.join(outs)})"
        arguments = ", ".join([*wanted, "bool traced", "str sources"])
        LIBRARY.define(f"{self.name}({arguments}) -> {result}", tags=(torch.Tag.pt2_compliant_tag,))
        LIBRARY.impl(self.name, self._expand, "CompositeImplicitAutograd")
        return getattr(torch.ops.liger_multi, self.name).default

    def _expand(self, *arguments: Any) -> Any:
        """Run as forward and backward, for whoever looks below autograd."""
        *given, traced, _ = arguments
        args = tuple(given)
        self._special(args)
        function = self.traced if traced else self.function
        forward = self.fwd.trace if traced else self.fwd.run
        return self._run(args, function.apply, forward)

    def __call__(self, *args: Any) -> Any:
        """Call with the arguments of forward in order, without the ``needs_*`` flags."""
        return self.general(*args) if torch.compiler.is_compiling() else self.run(*args)

    def general(self, *args: Any) -> Any:
        """The same, for whoever looks on and for tensors of any kind."""
        if torch.compiler.is_compiling():
            traced = self.compile == "trace" and not mode_in_force() and automatic(self.name)
            return self.whole(*args, traced, sources())
        if is_tracing() and not self.inplace:  # torch.jit.trace, which sees no kernels
            return self.whole(*args, False, sources())
        apply = self.function.apply if self._special(args) else self.apply
        return self._run(args, apply, self.fwd.run)

    def _run(self, args: tuple[Any, ...], apply: Any, forward: Any) -> Any:
        if is_transformed(args[i] for i in self.fwd.places):
            raise TransformError(
                f"liger_multi.{self.name} does not support functorch transforms "
                f"(torch.func.grad, vmap, jvp) and forward-mode derivatives (dual tensors); "
                "call it outside of them, or use plain PyTorch operations there"
            )
        grad = torch.is_grad_enabled()
        tensors = [args[i] for i in self.fwd.places]
        wanted = [grad and a is not None and a.requires_grad for a in tensors]
        flags = [wanted[i] for i in self.flags]
        if True in wanted:
            outs = apply(*args, *flags)
            return outs if not self.anchor else outs[0] if len(outs) == 2 else outs[:-1]
        outs = forward(*args, *flags)
        visible = len(self.fwd.returns) - len(self.residuals)
        return (
            outs if isinstance(outs, Tensor) else outs[0] if visible == 1 else tuple(outs[:visible])
        )

    def _special(self, args: tuple[Any, ...]) -> bool:
        """Whether a tensor needs more care than plain ones; DTensors are prepared."""
        found = False
        for i in self.fwd.places:
            kind = type(args[i])
            if kind is Tensor or kind is Parameter:
                found |= is_functorch_wrapped(args[i])  # dead wrappers, which leak out
            elif kind.__name__ == "DTensor":
                prepare(self, args)
                return True
        return found


def _anywhere(function: Callable[..., Any], _: Configuration, *args: Any) -> Any:
    """A function that asks for no configuration, for a caller that hands it one."""
    return function(*args)


# --- DTensor inputs ---


def prepare(op: Op, args: tuple[Any, ...]) -> None:
    """Refuse placements that the operator cannot run on, and register the others once.

    Raises:
        NotImplementedError: The operator has no row-wise form, or its last axis is sharded.
    """
    from torch.distributed.tensor import DTensor, Shard

    if not op.rows:
        raise NotImplementedError(
            f"liger_multi.{op.name} does not take DTensors; pass local or full tensors (FSDP's "
            f"forward hooks do, where the "
            "loss is reached through the head's own call)"
        )
    for name, arg in zip(op.fwd.params, args, strict=False):
        if not isinstance(arg, DTensor):
            continue
        for placement in arg.placements:
            if isinstance(placement, Shard) and (
                name in op.replicated or placement.dim % arg.ndim == arg.ndim - 1
            ):
                raise NotImplementedError(
                    f"liger_multi.{op.name}: {name} is sharded on axis {placement.dim} of "
                    f"{arg.ndim}, which every rank needs "
                    "whole; redistribute it to Replicate() or shard another axis"
                )
    _register(op)


@functools.cache
def _register(op: Op) -> None:
    for prim in op.primitives:
        _register_direction(op, prim)


def _register_direction(op: Op, prim: Primitive) -> None:
    """Accept replicas, or rows sharded on a leading axis with partial sums of shared gradients."""
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor.experimental import register_sharding

    def strategy(*args: Any) -> list[tuple[list[Any], list[Any]]]:
        specs = dict(zip(prim.params, args, strict=False))
        axes = next(
            len(s.tensor_meta.shape)
            for n, s in specs.items()
            if n in op.rows and hasattr(s, "tensor_meta")
        )
        rows = set(op.rows) | {f"d{name}" for name in op.rows} | {"y"}
        accepted = []
        for axis in (None, *range(axes - 1)):
            row = Replicate() if axis is None else Shard(axis)
            shared = Replicate() if axis is None else Partial()
            outs = [row if name in rows else shared for name in prim.returns]
            ins = [
                None if not hasattr(spec, "tensor_meta") else row if name in rows else Replicate()
                for name, spec in specs.items()
            ]
            accepted.append((outs, ins))
        return accepted

    register_sharding(prim.overload)(strategy)
