"""Compare a replica with a formula in every mode, by its outputs and by its gradients.

A module that is patched in evaluation will train, and the other way round. So a formula has to hold
in both modes, with gradients and without, and the forward may do nothing else: draw no random
numbers, write to no input and to no attribute.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from liger_multi.patching.recognize.probe import random, random_state

Call: TypeAlias = Callable[..., Any]
Close: TypeAlias = Callable[[Tensor, Tensor], bool]


class Watch:
    """The attributes that a replica's forward asks for, and those that it sets."""

    def __init__(self) -> None:
        self.read: set[str] = set()
        self.written: set[str] = set()

    @contextlib.contextmanager
    def over(self, replica: nn.Module) -> Iterator[None]:
        """Give the replica a class that notes them."""
        kind, read, written = type(replica), self.read, self.written

        class Watched(kind):  # type: ignore[valid-type, misc]
            def __getattribute__(self, name: str) -> Any:
                read.add(name)
                return super().__getattribute__(name)

            def __setattr__(self, name: str, value: Any) -> None:
                written.add(name)
                super().__setattr__(name, value)

            def __delattr__(self, name: str) -> None:
                written.add(name)
                super().__delattr__(name)

        replica.__class__ = Watched
        try:
            yield
        finally:
            object.__setattr__(replica, "__class__", kind)


MODES = ((False, True), (True, True), (True, False), (False, False))
"""Training or not, with gradients or without."""


def set_mode(replica: nn.Module, training: bool) -> None:
    """As ``train`` does, which a class may have replaced."""
    for module in replica.modules():
        module.__dict__["training"] = training


def disagreement(
    replica: nn.Module,
    stock: Call,
    ours: Call,
    inputs: Sequence[Tensor],
    close: Close,
    generator: torch.Generator,
) -> str | None:
    """Where a formula leaves a forward: in a mode, in a gradient or in what else happens.

    Args:
        replica: The module of both calls.
        stock: Its own forward, called with the inputs.
        ours: The formula, called with the same.
        inputs: Tensors; gradients by those of floating point are compared.
        close: Whether an output of stock's and one of ours agree.
        generator: For upstream gradients.
    """
    for training, grad in MODES:
        set_mode(replica, training)
        mode = "training" if training else "evaluation"
        with torch.set_grad_enabled(grad):
            found = _found(replica, stock, ours, inputs, close, generator)
        if found:
            return f"{found} in {mode}{'' if grad else ' without gradients'}"
    return None


def _found(
    replica: nn.Module,
    stock: Call,
    ours: Call,
    inputs: Sequence[Tensor],
    close: Close,
    generator: torch.Generator,
) -> str | None:
    grad = torch.is_grad_enabled()
    leaves = [[x.detach().clone() for x in inputs] for _ in range(2)]
    for x in (*leaves[0], *leaves[1]):
        x.requires_grad_(grad and x.is_floating_point())
    # not the leaves themselves, to which nobody may write
    given, mine = ([x * 1 if x.is_floating_point() else x for x in row] for row in leaves)
    versions, drawn = [x._version for x in given], random_state()
    wanted = stock(*given)
    if not _equal_states(drawn, random_state()):
        return "it draws random numbers"
    if [x._version for x in given] != versions:
        return "it writes to its input"
    got = ours(*mine)
    if not isinstance(wanted, Tensor) or wanted.dtype != got.dtype or wanted.shape != got.shape:
        return "its output has another form"
    if wanted.requires_grad != got.requires_grad or not close(wanted, got):
        return "its output differs"
    if not wanted.requires_grad:
        return None
    upstream = random(generator, *wanted.shape, dtype=wanted.dtype)
    weights = [p for p in replica.parameters() if p.requires_grad]
    by_stock, by_ours = (
        torch.autograd.grad(
            y, [*(x for x in row if x.requires_grad), *weights], upstream, allow_unused=True
        )
        for y, row in ((wanted, leaves[0]), (got, leaves[1]))
    )
    for a, b in zip(by_stock, by_ours, strict=True):
        if (a is None) != (b is None):
            return "it stops a gradient"
        if a is not None and (a.dtype != b.dtype or not _near(a, b)):
            return "its gradient differs"
    return None


def _near(a: Tensor, b: Tensor) -> bool:
    """Every row for itself; sums in another order differ by what they cancel."""
    size = a.abs()
    bound = 1e-4 * size.amax(-1, keepdim=True) + 1e-6 * size.max() + 1e-9
    return bool(((a - b).abs() <= bound).all())


def _equal_states(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    return torch.equal(a[0], b[0]) and a[1] == b[1] and pickle.dumps(a[2]) == pickle.dumps(b[2])
