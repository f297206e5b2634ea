"""Stacks of experts in 4 bits: some experts at a time are dequantized.

bitsandbytes (``replace_parameter_4bit``) keeps a stack packed, and dequantizes all of it whenever a
forward reads the parameter. Here the experts run in groups. An index of another group adds nothing,
so the sum over groups is that over all experts; it is taken in fp32. Backward computes a group
again, its weights included, so that no more than those of one group exist at a time. One autograd
function has all groups: gradients of a group's factors are written into their place.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from liger_multi._torch_private import outside_of_graphs
from liger_multi.dispatch.double_backward import first_derivatives_only
from liger_multi.parameters import declared

GROUP_BYTES = 2**29  # of dequantized weights at a time; the host needs some ms a group
_PARAMETRIZATION = ("bitsandbytes.nn.parametrize", "Bnb4bitParametrization")


@dataclass(frozen=True)
class Stack:
    """A packed stack; slices of it are dequantized experts.

    Attributes:
        packed: Two numbers a byte, in the order of the experts.
        state: How bitsandbytes reads them.
    """

    packed: Tensor
    state: Any

    @property
    def shape(self) -> torch.Size:
        """That of the stack."""
        return cast(torch.Size, self.state.shape)

    @property
    def dtype(self) -> torch.dtype:
        """What it is dequantized to."""
        return cast(torch.dtype, self.state.dtype)

    @property
    def expert(self) -> int:
        """Numbers of one expert."""
        return math.prod(self.shape[1:])

    @torch.no_grad()
    def opened(self) -> Stack:
        """The same, with scales that are not quantized themselves."""
        state = self.state
        if not state.nested:
            return self
        absmax = _theirs().dequantize_blockwise(state.absmax, state.state2) + state.offset
        return Stack(self.packed, _like(state, absmax, state.shape))

    @torch.no_grad()
    def __getitem__(self, some: slice) -> Tensor:
        """The experts of a slice without a step."""
        first, last, _ = some.indices(self.shape[0])
        state, blocks = self.opened().state, self.expert // self.state.blocksize
        shape = torch.Size((last - first, *self.shape[1:]))
        part = _like(state, state.absmax[first * blocks : last * blocks], shape)
        bytes_ = self.packed.view(-1)[first * self.expert // 2 : last * self.expert // 2]
        return cast(Tensor, _theirs().dequantize_4bit(bytes_.unsqueeze(1), part))


def _theirs() -> Any:
    return importlib.import_module("bitsandbytes.functional")


def _like(state: Any, absmax: Tensor, shape: torch.Size) -> Any:
    """A state of bitsandbytes with other scales, for other numbers."""
    return _theirs().QuantState(
        absmax,
        shape=shape,
        code=state.code,
        blocksize=state.blocksize,
        quant_type=state.quant_type,
        dtype=state.dtype,
    )


def stack_of(module: nn.Module, name: str) -> Stack | None:
    """A parameter that bitsandbytes keeps in 4 bits, every expert in whole blocks."""
    every: Any = module._modules.get("parametrizations")
    if every is None or name not in every or len(every[name]) != 1:
        return None
    kind = type(every[name][0])
    if (kind.__module__, kind.__name__) != _PARAMETRIZATION:
        return None
    found = Stack(every[name].original, every[name][0].quant_state)
    return None if found.expert % (2 * found.state.blocksize) else found


def stacked(module: nn.Module, name: str) -> Any:
    """A parameter, or its packed stack."""
    found = stack_of(module, name)
    return getattr(module, name, None) if found is None else found


def stack_declared(module: nn.Module, name: str) -> Any:
    """The same to look at: a parametrization is not evaluated."""
    found = stack_of(module, name)
    return declared(module, name) if found is None else found


def unparametrized(module: nn.Module, kind: type[nn.Module]) -> type[nn.Module]:
    """The class that PyTorch derived another one from for the parametrizations of an instance."""
    return cast("type[nn.Module]", kind.__base__) if "parametrizations" in module._modules else kind


def is_watched_by_others(module: nn.Module) -> bool:
    """Whether hooks stand on a module beside those that bitsandbytes puts there for its cache."""
    held = module.__dict__
    before, after = held["_forward_pre_hooks"], held["_forward_hooks"]
    hooks = [*before.values(), *after.values()]
    own = all(str(_function(h).__module__).startswith("bitsandbytes.") for h in hooks)
    backward = held["_backward_hooks"] or held["_backward_pre_hooks"]
    return not own or bool(backward) or "forward" in held


def _function(hook: Any) -> Any:
    return _function(hook.func) if isinstance(hook, functools.partial) else hook


@dataclass(frozen=True)
class _Groups:
    """What does not change from one group to the next.

    Attributes:
        run: From parameters, hidden states, experts, weights and factors to the sum of a group.
        parts: Parameters, stacks or tensors.
        names: Of the factors that are tensors, with an expert each on the first axis.
        others: The rest of the factors.
        autocast: Device, whether it is on, and its dtype.
    """

    run: Callable[..., Tensor]
    parts: Sequence[Any]
    names: tuple[str, ...]
    others: Mapping[str, Any]
    autocast: tuple[str, bool, torch.dtype]

    def slices(self) -> Iterator[tuple[slice, list[Tensor]]]:
        """Every group: its experts, and their weights, which exist until the next is asked for."""
        experts = self.parts[1].shape[0]
        each = sum(p.expert * p.dtype.itemsize for p in self.parts if isinstance(p, Stack))
        step = max(1, min(experts, GROUP_BYTES // each))
        parts = [p.opened() if isinstance(p, Stack) else p for p in self.parts]
        for first in range(0, experts, step):
            some = slice(first, min(experts, first + step))
            yield some, [p[some] for p in parts]

    def of(
        self, some: slice, weights: list[Tensor], x: Tensor, index: Tensor, routing: Tensor,
        thin: Sequence[Tensor],
    ) -> Tensor:  # fmt: skip
        """The sum of a group, of whose experts ``thin`` are the factors."""
        given = {**self.others, **dict(zip(self.names, thin, strict=True))}
        device, on, dtype = self.autocast
        with torch.autocast(device, dtype, enabled=on):
            return self.run(weights, x, index - some.start, routing, given)


class _InGroups(torch.autograd.Function):
    """The sum over groups; backward computes each again."""

    @staticmethod
    def forward(
        ctx: Any, groups: _Groups, x: Tensor, index: Tensor, routing: Tensor, *thin: Tensor
    ) -> Tensor:
        """In fp32 at least, in the order of the groups."""
        ctx.groups = groups
        ctx.save_for_backward(x, index, routing, *thin)
        total: Tensor | None = None
        for some, weights in groups.slices():
            made = groups.of(some, weights, x, index, routing, [t[some] for t in thin])
            made = made.to(torch.promote_types(made.dtype, torch.float32))
            total = made if total is None else total.add_(made)
            del weights
        return cast(Tensor, total)

    @staticmethod
    @first_derivatives_only("mixture of experts")
    def backward(ctx: Any, saved: tuple[Tensor, ...], dy: Tensor) -> tuple[Tensor | None, ...]:
        """Sums over groups for what all have, and slices of the factors' gradients."""
        x, index, routing, *thin = saved
        needs = ctx.needs_input_grad[1:]
        wide = [_sums(t) if need else None for t, need in ((x, needs[0]), (routing, needs[2]))]
        sliced = [torch.zeros_like(t) if n else None for t, n in zip(thin, needs[3:], strict=True)]
        for some, weights in ctx.groups.slices():
            own = [t[some].detach() for t in thin]
            leaves = [x.detach(), routing.detach(), *own]
            places = [*wide, *(None if t is None else t[some] for t in sliced)]
            for leaf, place in zip(leaves, places, strict=True):
                leaf.requires_grad_(place is not None)
            with torch.enable_grad():
                made = ctx.groups.of(some, weights, leaves[0], index, leaves[1], own)
            wanted = [(leaf, p) for leaf, p in zip(leaves, places, strict=True) if p is not None]
            found = torch.autograd.grad(made, [leaf for leaf, _ in wanted], dy.to(made.dtype))
            for (_, place), gradient in zip(wanted, found, strict=True):
                place.add_(gradient)
            del weights, made, found
        dx, drouting = (
            None if s is None else s.to(t.dtype) for s, t in zip(wide, (x, routing), strict=True)
        )
        return (None, dx, None, drouting, *sliced)


def _sums(like: Tensor) -> Tensor:
    return torch.zeros_like(like, dtype=torch.promote_types(like.dtype, torch.float32))


def in_groups(
    run: Callable[..., Tensor],
    parts: Sequence[Any],
    x: Tensor,
    index: Tensor,
    routing: Tensor,
    factors: Mapping[str, Any],
) -> Tensor:
    """The sum of ``run`` over groups of experts.

    Args:
        run: From parameters, hidden states, experts, weights and factors to the sum of a group.
        parts: Parameters, stacks or tensors.
        x: Hidden states.
        index: Experts of every row.
        routing: Their weights.
        factors: Of adapters, with an expert each on the first axis, and scales.
    """
    thin = {name: f for name, f in factors.items() if isinstance(f, Tensor)}
    others = {name: f for name, f in factors.items() if name not in thin}
    device = x.device.type
    autocast = device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    groups = _Groups(run, parts, tuple(thin), others, autocast)
    return cast(Tensor, cast(Any, _InGroups).apply(groups, x, index, routing, *thin.values()))


outside_of_graphs(in_groups, "the host prepares groups")
