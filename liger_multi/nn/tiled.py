"""An MLP that runs a piece of the sequence at a time, forward and backward."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import get_device_states, set_device_states

from liger_multi import checks
from liger_multi.dispatch.double_backward import first_derivatives_only
from liger_multi.nn._shared import size


class _Surroundings:
    """What a second run of a module needs to be the first one again: autocast, random numbers."""

    def __init__(self, x: Tensor, random: bool) -> None:
        kind = x.device.type
        self.kind, self.random = kind, random
        self.autocast = None
        if kind != "meta":  # which has none
            self.autocast = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        if random:
            self.state = torch.get_rng_state()
            self.devices, self.states = get_device_states(x)

    def __enter__(self) -> None:
        self.cast: Any = contextlib.nullcontext()
        if self.autocast is not None:
            self.cast = torch.autocast(self.kind, *self.autocast)
        self.cast.__enter__()
        if self.random:
            accelerator = "cuda" if self.kind == "cpu" else self.kind
            self.fork = torch.random.fork_rng(self.devices, device_type=accelerator)
            self.fork.__enter__()
            torch.set_rng_state(self.state)
            if self.devices:
                set_device_states(self.devices, self.states, device_type=self.kind)

    def __exit__(self, *error: Any) -> None:
        if self.random:
            self.fork.__exit__(*error)
        self.cast.__exit__(*error)


@contextlib.contextmanager
def _quiet(parameters: list[Tensor]) -> Iterator[None]:
    """Keep the hooks of parameters for their whole gradients: those of pieces are no event."""
    hooks = [p._backward_hooks for p in parameters]
    try:
        for p in parameters:
            p._backward_hooks = None
        yield
    finally:
        for p, kept in zip(parameters, hooks, strict=True):
            p._backward_hooks = kept


def _places(length: int, tiles: int) -> Iterator[tuple[int, int]]:
    """Start and length of each piece, the last one perhaps shorter."""
    step = max(1, -(-length // tiles))
    for start in range(0, max(length, 1), step):
        yield start, min(step, length - start)


def _forward(module: nn.Module, x: Tensor, tiles: int) -> Tensor:
    made: Tensor | None = None
    for start, length in _places(x.shape[-2], tiles):
        y = module(x.narrow(-2, start, length))
        if not isinstance(y, Tensor) or y.shape[:-1] != (*x.shape[:-2], length):
            raise TypeError(
                "TiledMLP: the MLP must return one tensor with the leading axes of its input, got "
                f"{checks.describe(y)} for {checks.describe(x.narrow(-2, start, length))}"
            )
        if made is None:
            made = y.new_empty((*x.shape[:-1], y.shape[-1]))
        made.narrow(-2, start, length).copy_(y)
    assert made is not None
    return made


class _Tiled(torch.autograd.Function):
    """All parameters are inputs: each gets one gradient a call, also where x needs none."""

    @staticmethod
    def forward(
        ctx: Any, module: nn.Module, tiles: int, random: bool, x: Tensor, *parameters: Tensor
    ) -> Tensor:
        """Run the module piece by piece; nothing inside of it is kept."""
        ctx.module, ctx.tiles = module, tiles
        ctx.around = _Surroundings(x, random)
        ctx.save_for_backward(x, *parameters)
        return _forward(module, x, tiles)

    @staticmethod
    @first_derivatives_only("nn.TiledMLP")
    def backward(ctx: Any, saved: tuple[Tensor, ...], dy: Tensor) -> Any:
        """Run each piece again, and through it backwards; sums over pieces are in fp32."""
        x, *parameters = saved
        needs_x, wanted = ctx.needs_input_grad[3], [p for p in parameters if p.requires_grad]
        dx = torch.empty_like(x) if needs_x else None
        sums: list[Tensor | None] = [None] * len(wanted)
        with ctx.around, torch.enable_grad(), _quiet(wanted):
            for start, length in _places(x.shape[-2], ctx.tiles):
                piece = x.narrow(-2, start, length).detach().requires_grad_(needs_x)
                y, upstream = ctx.module(piece), dy.narrow(-2, start, length)
                leaves = [*([piece] if needs_x else []), *wanted]
                found = list(torch.autograd.grad(y, leaves, upstream, allow_unused=True))
                if dx is not None:
                    dx.narrow(-2, start, length).copy_(_present(found.pop(0), piece))
                for i, grad in enumerate(found):
                    sums[i] = _added(sums[i], grad)
        grads = iter(sums)
        made = [next(grads) if p.requires_grad else None for p in parameters]
        made = [None if g is None else g.to(p.dtype) for g, p in zip(made, parameters, strict=True)]
        return (None, None, None, dx, *made)


def _present(grad: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if grad is None else grad


def _added(total: Tensor | None, grad: Tensor | None) -> Tensor | None:
    if grad is None:
        return total
    if total is None:
        return grad.to(torch.promote_types(grad.dtype, torch.float32))
    return total.add_(grad)


class TiledMLP(nn.Module):
    """Any MLP, run a piece of the sequence at a time, so that its inner tensors are small.

    Like:
        The sequence-tiled MLP of arXiv:2506.13996.

    Operator:
        that of the MLP

    Args:
        mlp: A module from ``(..., S, H)`` to a tensor with the same leading axes, each token by
            itself. It is called as it is, so that hooks and adapters of it work; its parameters
            get one gradient a call, the sum of the pieces in fp32.
        tiles: In how many pieces the sequence is run; S / H rounded up by default.
        preserve_rng_state: Whether a second run, in backward, draws the random numbers of the
            first (dropout).
    """

    def __init__(
        self, mlp: nn.Module, tiles: int | None = None, *, preserve_rng_state: bool = True
    ) -> None:
        super().__init__()
        if not isinstance(mlp, nn.Module):
            raise TypeError(f"TiledMLP: mlp must be a module, got {checks.describe(mlp)}")
        self.mlp = mlp
        self.preserve_rng_state = checks.boolean(
            "TiledMLP", "preserve_rng_state", preserve_rng_state
        )
        self.tiles = None if tiles is None else size("TiledMLP", "tiles", tiles)

    def forward(self, x: Tensor) -> Tensor:
        """The MLP of every token; in one piece under a compiler, which plans memory itself."""
        if not isinstance(x, Tensor) or x.ndim < 2:
            raise ValueError(f"TiledMLP: x must have shape (..., S, H), got {checks.describe(x)}")
        tiles = self.tiles or max(1, -(-x.shape[-2] // max(x.shape[-1], 1)))
        if torch.compiler.is_compiling() or tiles == 1:
            result: Tensor = self.mlp(x)
            return result
        parameters = list(self.mlp.parameters())
        if torch.is_grad_enabled() and any(t.requires_grad for t in (x, *parameters)):
            random = self.preserve_rng_state and self.mlp.training
            run: Any = _Tiled.apply
            result = run(self.mlp, tiles, random, x, *parameters)
        else:
            result = _forward(self.mlp, x, tiles)
        return result

    def extra_repr(self) -> str:
        """In how many pieces."""
        return f"tiles={self.tiles or 'S / H'}"
