"""Operators: forward and backward, joined by autograd by argument name.

A contract (``liger_multi/ops/<op>.py``) declares forward as a stub: the signature is the torch
schema and the body the shape rule. Backward is declared by names, from which both are derived: in
``reads="dy x weight rstd"``, ``dy`` is the gradient of output ``y``, ``x`` and ``weight`` are
inputs of forward, and ``rstd`` is an output of forward kept as a residual. The returned ``dx``
belongs to ``x``. ``needs_x`` tells whether anybody wants the gradient of ``x``, and ``x_dtype`` is
the dtype of ``x``. A gradient that nobody wants, or that no upstream gradient reaches, is an empty
tensor and becomes None.

Forward and backward are each a ``torch.library`` operator, so that compilers, fake tensors and
dispatch modes see one named, opaque call. Plain eager tensors skip that boundary and go straight to
the backend's function.

Forward and backward together are a third ``torch.library`` operator, which is what Dynamo puts into
its graph. AOTAutograd expands it by the same ``autograd.Function`` as in eager mode. Dynamo itself
does not trace that Function: it refuses one tensor in two arguments, and loses symbolic sizes that
forward keeps for backward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.nn import Parameter

from liger_multi.dispatch.autograd import anchor_of, make_function, wire
from liger_multi.dispatch.derived import Rule, Shape, backward_of
from liger_multi.dispatch.primitive import LIBRARY, Primitive, automatic, inline_ops, sources
from liger_multi.dispatch.registry import OPS
from liger_multi.errors import TransformError

__all__ = ["OPS", "Op", "inline_ops"]

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
    ) -> None:
        self.name, self.family, self.compile, self.inplace = name, family, compile, inplace
        self.rows, self.replicated = tuple(rows), tuple(replicated)
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
        """
        fake = backward_of(self, reads, returns, same_grad_as, shapes, beside, rule)
        mutated = (self.inplace,) if self.inplace else ()
        self.bwd = Primitive(self, "backward", fake, returns, mutated)
        self.same_grad_as, self.identity_grads = dict(same_grad_as), dict(identity_grads)
        self.anchor = anchor_of(self, not_saved is not None, added)
        self.function = make_function(wire(self, self.fwd, self.bwd, not_saved))
        # the part in C++; what Python does around it serves functorch and setup_context
        self.apply = super(torch.autograd.Function, self.function).apply  # type: ignore[misc]
        self.traced = self.function
        if self.compile == "trace":
            self.traced = make_function(wire(self, self.fwd.trace, self.bwd.trace, not_saved))
        if not self.inplace:
            self.whole = self._define()
        names = [self.fwd.params[i] for i in self.fwd.places]
        needs = [p[len("needs_") :] for p in self.fwd.params if p.startswith("needs_")]
        self.flags = [names.index(name) for name in needs]

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
        forward = self.fwd.trace if traced else self.fwd
        return self._run(args, function.apply, forward)

    def __call__(self, *args: Any) -> Any:
        """Call with the arguments of forward in order, without the ``needs_*`` flags."""
        if torch.compiler.is_compiling():
            traced = self.compile == "trace" and automatic(self.name)
            return self.whole(*args, traced, sources())
        if torch._C._is_tracing() and not self.inplace:  # torch.jit.trace, which sees no kernels
            return self.whole(*args, False, sources())
        return self._run(args, self.function.apply if self._special(args) else self.apply, self.fwd)

    def _run(self, args: tuple[Any, ...], apply: Any, forward: Any) -> Any:
        if torch._C._are_functorch_transforms_active():
            raise TransformError(
                f"liger_multi.{self.name} does not support functorch transforms "
                f"(torch.func.grad, vmap, jvp); "
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
                found |= is_functorch_wrapped_tensor(args[i])  # dead wrappers, which leak out
            elif kind.__name__ == "DTensor":
                from liger_multi.dispatch.sharding import prepare

                prepare(self, args)
                return True
        return found
