"""Operators: two halves each, joined by autograd by argument name.

A contract (``liger_multi/ops/<op>.py``) declares both halves as stubs; the signature is the torch
schema and the body the shape rule. In ``backward(dy, x, weight, rstd, ...)``, ``dy`` is the
gradient of output ``y``, ``x`` and ``weight`` are inputs of forward, ``rstd`` an output of forward
kept as a residual, and the returned ``dx`` belongs to ``x``. ``needs_x`` tells a half whether
anybody wants the gradient of ``x``, and ``x_dtype`` is the dtype of ``x``. A gradient that nobody
wants, or that no upstream gradient reaches, is an empty tensor and becomes None.

Each half is a ``torch.library`` operator, so that compilers, fake tensors and dispatch modes see
one named, opaque call; plain eager tensors skip that boundary and go straight to the backend's
function.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from liger_multi.autograd import make_function
from liger_multi.errors import TransformError
from liger_multi.primitive import Primitive, inline_ops

__all__ = ["OPS", "Op", "inline_ops"]

OPS: dict[str, Op] = {}
Half = TypeVar("Half", bound=Callable[..., Any])


class Op:
    """A named pair of halves.

    Args:
        name: The operator's name; backends implement it in a module of this name.
        compile: ``opaque`` keeps the op one call under ``torch.compile``; ``trace`` lets the
            compiler see the reference, which pays for elementwise operators that Inductor fuses
            with their neighbours.
        inplace: The input of forward that is overwritten by its own gradient, if any.
        rows: For DTensors: names of tensors that share their leading axes (sharding those is fine).
        replicated: For DTensors: names of tensors every rank needs whole; their gradients are
            partial sums.
    """

    def __init__(
        self,
        name: str,
        *,
        compile: str = "opaque",
        inplace: str | None = None,
        rows: Sequence[str] = (),
        replicated: Sequence[str] = (),
    ) -> None:
        self.name, self.compile, self.inplace = name, compile, inplace
        self.rows, self.replicated = tuple(rows), tuple(replicated)
        OPS[name] = self

    def forward(
        self, returns: str, residuals: str = "", constants: str = ""
    ) -> Callable[[Half], Half]:
        """Declare the forward half.

        Args:
            returns: Names of all outputs, those for the caller first.
            residuals: The last of them, kept for backward and hidden from the caller.
            constants: Visible outputs that have no gradient.
        """

        def declare(fake: Half) -> Half:
            self.fwd = Primitive(
                self, "forward", fake, returns, (self.inplace,) if self.inplace else ()
            )
            self.residuals, self.constants = tuple(residuals.split()), tuple(constants.split())
            return fake

        return declare

    def backward(
        self,
        returns: str,
        omit: Callable[..., Sequence[str]] | None = None,
        shared: Mapping[str, str] = {},
    ) -> Callable[[Half], Half]:
        """Declare the backward half and wire it to forward.

        Args:
            returns: Names of the gradients, ``d`` and the name of an input of forward.
            shared: Inputs of forward whose gradient is that of another one, by name (the terms of
                a sum); it is cast where the dtypes differ.
            omit: Given arguments of forward by name, which tensors backward will not read; they are
                not kept alive.
        """

        def declare(fake: Half) -> Half:
            self.bwd = Primitive(
                self, "backward", fake, returns, (self.inplace,) if self.inplace else ()
            )
            self.shared = dict(shared)
            self.function = make_function(self, omit)
            return fake

        return declare

    @property
    def primitives(self) -> tuple[Primitive, Primitive]:
        """Both halves."""
        return self.fwd, self.bwd

    def __call__(self, *args: Any) -> Any:
        """Call with the arguments of forward in order, without the ``needs_*`` flags."""
        eager = not torch.compiler.is_compiling()
        if eager and torch._C._are_functorch_transforms_active():
            raise TransformError(
                f"liger_multi.{self.name} does not support functorch transforms "
                f"(torch.func.grad, vmap, jvp); "
                "call it outside of them, or use plain PyTorch operations there"
            )
        if eager and any(type(a).__name__ == "DTensor" for a in args):
            from liger_multi.sharding import prepare

            prepare(self, args)
        grad = torch.is_grad_enabled()
        wanted = [grad and isinstance(a, Tensor) and a.requires_grad for a in args]
        flags = [
            wanted[self.fwd.params.index(p[len("needs_") :])] for p in self.fwd.params[len(args) :]
        ]
        if any(wanted):
            return self.function.apply(*args, *flags)
        outs = self.fwd(*args, *flags)
        visible = len(self.fwd.returns) - len(self.residuals)
        return (
            outs if isinstance(outs, Tensor) else outs[0] if visible == 1 else tuple(outs[:visible])
        )
