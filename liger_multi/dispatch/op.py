"""Operators: forward and backward, joined by autograd by argument name.

A contract (``liger_multi/ops/<op>.py``) declares forward as a stub: the signature is the torch
schema and the body the shape rule. Backward is declared by names, from which both are derived: in
``reads="dy x weight rstd"``, ``dy`` is the gradient of output ``y``, ``x`` and ``weight`` are
inputs of forward, and ``rstd`` is an output of forward kept as a residual. The returned ``dx``
belongs to ``x``. ``needs_x`` tells whether the gradient of ``x`` is needed, and ``x_dtype`` is the
dtype of ``x``; so a name also implies a type. The gradient ``dx`` is as large as ``x``; one that is
not needed, or that no upstream gradient reaches, is an empty tensor and becomes None.

How a call runs:

1. :meth:`Op.__call__` runs :attr:`Op.run`, which :mod:`~liger_multi.dispatch.codegen` wrote for
   this operator. It does what :meth:`Op.slow_path` does, for plain eager tensors without a loop.
2. Where a gradient is needed, :attr:`Op.function` runs forward and saves what backward reads
   (:mod:`~liger_multi.dispatch.autograd`).
3. Forward and backward are each a :class:`~liger_multi.dispatch.torch_ops.Primitive`. Plain eager
   tensors go straight to the backend's function. Everything else goes through ``torch.library``, so
   that compilers, fake tensors and dispatch modes see one named, opaque call.
4. :mod:`~liger_multi.dispatch.resolve` names the function: the first backend in the order of the
   configuration that takes this device, dtype and call.

Under ``torch.compile``, forward and backward together are a third ``torch.library`` operator,
:attr:`Op.torch_op`, which Dynamo puts into its graph. AOTAutograd expands it by the same
``autograd.Function`` as in eager mode. Dynamo itself does not trace that Function: it refuses one
tensor in two arguments, and loses symbolic sizes that forward keeps for backward.

With DTensor inputs, row-wise operators run on local rows.
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
from liger_multi.dispatch import codegen
from liger_multi.dispatch.autograd import is_transformed, make_function, unconnected_residual
from liger_multi.dispatch.bitwise import NO_PROMISE, Bitwise
from liger_multi.dispatch.config import Configuration
from liger_multi.dispatch.registry import OPS
from liger_multi.dispatch.resolve import automatic, mode_in_force
from liger_multi.dispatch.stored import has_stored, sealed
from liger_multi.dispatch.torch_ops import LIBRARY, Primitive, inline_ops, source_hash
from liger_multi.errors import ContractError, TransformError

# --- DTensor inputs: row-wise operators run on local rows, others are refused with the reason ---


def replicated(op: Op) -> tuple[str, ...]:
    """Names of the tensors without rows, which must be replicated."""
    tensors = (op.fwd.params[i] for i in op.fwd.tensor_indices)
    return tuple(name for name in tensors if name not in op.bitwise.batched)


def prepare(op: Op, args: tuple[Any, ...]) -> None:
    """Refuse placements that the operator cannot run on, and register the others once.

    Raises:
        NotImplementedError: The operator has no row-wise form, or its last axis is sharded.
    """
    from torch.distributed.tensor import DTensor, Shard

    if not op.rowwise:
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
                name in replicated(op) or placement.dim % arg.ndim == arg.ndim - 1
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

    with_rows = {*op.bitwise.batched, *(f"d{name}" for name in op.bitwise.batched)}

    def strategy(*args: Any) -> list[tuple[list[Any], list[Any]]]:
        specs = dict(zip(prim.params, args, strict=False))
        axes = next(
            len(spec.tensor_meta.shape)
            for name, spec in specs.items()
            if name in with_rows and hasattr(spec, "tensor_meta")
        )
        accepted = []
        for axis in (None, *range(axes - 1)):
            row = Replicate() if axis is None else Shard(axis)
            shared = Replicate() if axis is None else Partial()
            outs = [row if name in with_rows else shared for name in prim.returns]
            ins = [
                None
                if not hasattr(spec, "tensor_meta")
                else row
                if name in with_rows
                else Replicate()
                for name, spec in specs.items()
            ]
            accepted.append((outs, ins))
        return accepted

    register_sharding(prim.overload)(strategy)


__all__ = ["OPS", "Op", "inline_ops"]

Declared = TypeVar("Declared", bound=Callable[..., Any])
GradientShape = str | Callable[..., Sequence[int] | Tensor]
Shapes = Mapping[str, GradientShape] | Callable[..., tuple[Tensor, ...]]
NO_SHAPES: Shapes = {}


class Op:
    """A named operator: its forward, its backward, and how autograd joins them.

    Args:
        name: The operator's name; backends implement it in a module of this name.
        family: Folder of its modules: ``backends/<backend>/<family>/``, ``reference/<family>/``.
        compile: ``opaque`` keeps the op one call under ``torch.compile``; ``trace`` lets the
            compiler see the reference, which pays for elementwise operators that Inductor fuses
            with their neighbors.
        inplace: The input of forward that is overwritten by its own gradient, if any.
        rowwise: Whether DTensors may be sharded along the leading axes of the tensors that have
            rows (those that ``bitwise`` names). Every rank needs the other tensors whole; their
            gradients are partial sums.
        bitwise: What it promises about bits, and which of its tensors have rows.
        opens: Whether its functions take weights that are stored in another form, and open each
            before its GEMM (:mod:`~liger_multi.dispatch.stored`).
    """

    def __init__(
        self,
        name: str,
        *,
        family: str = "",
        compile: str = "opaque",
        inplace: str | None = None,
        rowwise: bool = False,
        bitwise: Bitwise = NO_PROMISE,
        opens: bool = False,
    ) -> None:
        self.name, self.family, self.compile, self.inplace = name, family, compile, inplace
        self.rowwise, self.bitwise, self.opens = rowwise, bitwise, opens
        self.mutates = (inplace,) if inplace else ()
        OPS[name] = self

    def forward(self, returns: str, residuals: str = "") -> Callable[[Declared], Declared]:
        """Declare forward.

        Args:
            returns: Names of the outputs for the caller.
            residuals: Names of the outputs after them, which are kept for backward.
        """

        def declare(fake: Declared) -> Declared:
            self.visible, self.residuals = tuple(returns.split()), tuple(residuals.split())
            outputs = (*self.visible, *self.residuals)
            self.fwd = Primitive(self, "forward", fake, outputs, self.mutates)
            return fake

        return declare

    def backward(
        self,
        reads: str,
        returns: str,
        *,
        shapes: Shapes = NO_SHAPES,
        not_saved: Callable[..., Sequence[str]] | None = None,
        same_grad_as: Mapping[str, str] = {},
        additive: Sequence[str] = (),
        values_for: Mapping[str, str] = {},
    ) -> None:
        """Declare backward and wire it to forward.

        Signature and shape rule are derived from the names: a gradient is as large as its input,
        or empty where it is not needed. A visible output whose gradient is not read is not
        differentiable.

        Args:
            reads: Names of all arguments; ``x?`` for an input that ``not_saved`` may omit. Flags
                of several gradients are added where none is named.
            returns: Names of the gradients, ``d`` and the name of an input of forward.
            shapes: For inputs that backward does not read: the argument whose shape and dtype the
                gradient has, or a function of arguments by name that returns its shape (the dtype
                is that of the first input) or a tensor like it. An argument ``x_dtype`` overrides
                the dtype. For gradients that follow no such rule: one function that returns all.
            not_saved: Called with arguments of forward by name: the tensors that backward will not
                read; they are not kept alive.
            same_grad_as: Inputs of forward whose gradient is that of another input (the terms of a
                sum; it is cast where the dtypes differ), or that of an output as it comes (what is
                only added to it).
            additive: Inputs of forward that are only added to its outputs: no residual depends on
                them, and backward does not read them.
            values_for: For inputs of which backward else reads shape and dtype only: the inputs
                whose gradients need the values.
        """
        same_grad = dict(same_grad_as)
        self.identity_grads = {x: y for x, y in same_grad.items() if y in self.visible}
        self.same_grad_as = {x: y for x, y in same_grad.items() if y not in self.visible}
        self.values_for, self.not_saved = dict(values_for), not_saved
        used_params = {*(f"d{y}" for y in self.identity_grads.values()), *reads.split()}
        self.non_differentiable = tuple(y for y in self.visible if f"d{y}" not in used_params)
        if len(self.non_differentiable) == len(self.visible):
            raise ContractError(f"{self.name}.backward reads no gradient of {self.visible}")
        fake = backward_rule(self, reads.split(), returns.split(), shapes)
        self.bwd = Primitive(self, "backward", fake, tuple(returns.split()), self.mutates)
        self.edges = unconnected_residual(self, not_saved is not None, additive)
        if not self.inplace:
            self.torch_op = self._define()
        tensors = [self.fwd.params[i] for i in self.fwd.tensor_indices]
        flags = [p.removeprefix("needs_") for p in self.fwd.params if p.startswith("needs_")]
        self.flag_indices = [tensors.index(name) for name in flags]

    # --- the call ---

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call with the arguments of forward, all of them but the ``needs_*`` flags."""
        run = self.slow_path if torch.compiler.is_compiling() else self.run
        return run(*args, **kwargs)

    # Written and compiled when first asked for, as most programs call few operators.

    @functools.cached_property
    def run(self) -> Callable[..., Any]:
        """:meth:`slow_path` for plain eager tensors, written out."""
        names = {"slow_path": self.slow_path, "apply": self.apply, "forward": self.fwd.run}
        return codegen.compiled(codegen.call_source(self), f"{self.name} call", names)

    @functools.cached_property
    def function(self) -> Any:
        """The ``autograd.Function`` that calls backends."""
        return make_function(self, self.fwd.run_configured, self.bwd.run_configured)

    @functools.cached_property
    def traced(self) -> Any:
        """The ``autograd.Function`` that traces the reference, for compilers that may inline it."""
        if self.compile != "trace":
            return self.function
        traces = (functools.partial(_without_configuration, p.trace) for p in self.primitives)
        return make_function(self, *traces)

    @functools.cached_property
    def apply(self) -> Any:
        """``apply`` without its Python wrapper, which serves functorch and setup_context."""
        return super(torch.autograd.Function, self.function).apply  # type: ignore[misc]

    @property
    def primitives(self) -> tuple[Primitive, Primitive]:
        """Forward and backward."""
        return self.fwd, self.bwd

    def slow_path(self, *args: Any, **kwargs: Any) -> Any:
        """The call for every case: compilers, tracers, DTensors, subclasses and plain tensors."""
        args = (*args, *(kwargs[name] for name in self.fwd.params if name in kwargs))
        if torch.compiler.is_compiling():
            traced = self.compile == "trace" and not mode_in_force() and automatic(self.name)
            return self.torch_op(*args, traced, source_hash())
        if is_tracing() and not self.inplace:  # torch.jit.trace does not see kernels
            return self.torch_op(*args, False, source_hash())
        apply = self.function.apply if self._is_special(args) else self.apply
        return self._run(args, apply, self.fwd.run)

    def _run(self, args: tuple[Any, ...], apply: Any, forward: Any) -> Any:
        """Forward with or without autograd, and its outputs for the caller."""
        tensors = [args[i] for i in self.fwd.tensor_indices]
        if is_transformed(tensors):
            raise TransformError(
                f"liger_multi.{self.name} does not support functorch transforms "
                f"(torch.func.grad, vmap, jvp) and forward-mode derivatives (dual tensors); "
                "call it outside of them, or use plain PyTorch operations there"
            )
        grad = torch.is_grad_enabled()
        needs_grad = [grad and t is not None and t.requires_grad for t in tensors]
        flags = [needs_grad[i] for i in self.flag_indices]
        if True in needs_grad:
            outs = apply(*(sealed(args) if has_stored(args) else args), *flags)
        else:
            outs = forward(*args, *flags)
        if isinstance(outs, Tensor):
            return outs
        return outs[0] if len(self.visible) == 1 else tuple(outs[: len(self.visible)])

    def _is_special(self, args: tuple[Any, ...]) -> bool:
        """Whether a tensor needs more care than plain ones; DTensors are prepared."""
        special = False
        for i in self.fwd.tensor_indices:
            tensor_class = type(args[i])
            if tensor_class is Tensor or tensor_class is Parameter:
                special |= is_functorch_wrapped(args[i])  # dead functorch wrappers, which leak out
            elif tensor_class.__name__ == "DTensor":
                prepare(self, args)
                return True
        return special

    # --- the operator that compilers see ---

    def _define(self) -> Any:
        """Define the third operator: the schema of ``__call__``, and its expansion."""
        inputs, _, outputs = self.fwd.schema.partition(" -> ")
        args = [a for a in inputs.strip("()").split(", ") if not a.split()[1].startswith("needs_")]
        outs = outputs.strip("()").split(", ")[: len(self.visible)]
        result = outs[0] if len(outs) == 1 else f"({', '.join(outs)})"
        schema = f"{self.name}({', '.join([*args, 'bool traced', 'str sources'])}) -> {result}"
        LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        LIBRARY.impl(self.name, self._expand, "CompositeImplicitAutograd")
        return getattr(torch.ops.liger_multi, self.name).default

    def _expand(self, *arguments: Any) -> Any:
        """Run forward and backward as operators, for tracers that look below autograd."""
        *args, traced, _ = arguments
        self._is_special(tuple(args))
        function = self.traced if traced else self.function
        forward = self.fwd.trace if traced else self.fwd.run
        return self._run(tuple(args), function.apply, forward)


def _without_configuration(function: Callable[..., Any], _: Configuration, *args: Any) -> Any:
    """Call a function that takes no configuration, for a caller that passes one."""
    return function(*args)


# --- backward, from names ---


def backward_signature(op: Op, reads: list[str], returns: list[str]) -> inspect.Signature:
    """The signature of backward; where no flag of several gradients is named, all are added."""
    inputs = op.fwd.signature.parameters
    for name in returns:
        if not name.startswith("d") or name[1:] not in inputs:
            raise ContractError(
                f"{op.name}.backward returns {name!r}, which is no gradient of an input of forward"
            )
    with_grad = [x for x in inputs if f"d{x}" in returns or x in op.same_grad_as]
    has_flags = any(name.startswith("needs_") for name in reads)
    flags = [f"needs_{x}" for x in with_grad] if len(with_grad) > 1 and not has_flags else []
    parameters = [
        inspect.Parameter(
            name.rstrip("?"), inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=_type(op, name)
        )
        for name in [*reads, *flags]
    ]
    return_type = tuple[tuple(Tensor for _ in returns)] if returns else None  # type: ignore[misc]
    return inspect.Signature(
        parameters, return_annotation=Tensor if len(returns) == 1 else return_type
    )


def _type(op: Op, name: str) -> Any:
    """The type of an argument of backward, from where it comes."""
    inputs = op.fwd.signature.parameters
    if name.endswith("?"):
        return _type(op, name[:-1]) | None
    if name in inputs:
        return inputs[name].annotation
    if name in op.fwd.returns:
        return Tensor
    differentiable = [y for y in op.visible if y not in op.non_differentiable]
    if name[1:] in differentiable and name[0] == "d":
        return Tensor if len(differentiable) == 1 else Tensor | None
    if name.removesuffix("_dtype") in inputs:
        annotation = inputs[name.removesuffix("_dtype")].annotation
        return torch.dtype if annotation is Tensor else torch.dtype | None
    if name.removeprefix("needs_") in inputs:
        return bool
    raise ContractError(
        f"{op.name}.backward: {name!r} is no gradient, input, output or flag of forward"
    )


def backward_rule(
    op: Op, reads: list[str], returns: list[str], shapes: Shapes
) -> Callable[..., Any]:
    """The shape rule of backward, with its signature; :meth:`Op.backward` says what is passed."""
    signature = backward_signature(op, reads, returns)
    if callable(shapes):
        rule: Callable[[Mapping[str, Any]], Any] = functools.partial(call_by_name, shapes)
    else:
        rule = _rule_by_input(op, signature.parameters, returns, shapes)

    def fake(*args: Any, **kwargs: Any) -> Any:
        """Shape rule."""
        return rule({**dict(zip(signature.parameters, args, strict=False)), **kwargs})

    fake.__signature__ = signature  # type: ignore[attr-defined]
    return fake


def _rule_by_input(
    op: Op,
    params: Mapping[str, inspect.Parameter],
    returns: list[str],
    shapes: Mapping[str, GradientShape],
) -> Callable[[Mapping[str, Any]], Any]:
    """Every gradient by the shape of its input, or by what ``shapes`` names for it."""
    required = [name for name in params if params[name].annotation is Tensor]
    # The empty gradient of an absent input has the dtype of this one.
    first = next((name for name in required if name in op.fwd.params), required[0])
    rules = {name[1:]: shapes.get(name[1:], name[1:]) for name in returns}
    same_grad_as = op.same_grad_as
    flags = {
        x: [f"needs_{n}" for n in (x, *same_grad_as) if same_grad_as.get(n, n) == x] for x in rules
    }

    def gradient(x: str, rule: GradientShape, args: Mapping[str, Any]) -> Tensor:
        like = args[rule] if isinstance(rule, str) else call_by_name(rule, args)
        is_needed = any(args.get(flag, True) for flag in flags[x])
        shape = like.shape if isinstance(like, Tensor) else like
        if like is None or not is_needed:
            shape = (0,)
        owner = like if isinstance(like, Tensor) else args[first]
        dtype = None if like is None else args.get(f"{x}_dtype")
        return owner.new_empty(shape, dtype=dtype)

    def gradients(args: Mapping[str, Any]) -> Any:
        grads = tuple([gradient(x, rule, args) for x, rule in rules.items()])
        return grads[0] if len(grads) == 1 else grads or None

    return gradients


def call_by_name(function: Callable[..., Any], args: Mapping[str, Any]) -> Any:
    """Call a function with those of the arguments that it names, or all for ``**args``."""
    params = inspect.signature(function).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in params.values()):
        return function(**args)
    return function(**{name: args[name] for name in params})
