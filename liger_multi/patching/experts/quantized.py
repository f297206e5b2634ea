"""Stacks of experts in 4 bits: some experts at a time are dequantized.

bitsandbytes (``replace_parameter_4bit``) keeps a stack packed, and dequantizes all of it whenever a
forward reads the parameter. Here the experts run in groups. An index of another group adds nothing,
so the sum over groups, taken in fp32, is the sum over all experts. Backward computes each group
again, its weights included, so that only the weights of one group exist at a time. One autograd
function runs all groups and writes the gradients of a group's factors into their place.
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
from liger_multi.checks import autocast, autocast_dtype
from liger_multi.dispatch.autograd import first_derivatives_only
from liger_multi.dispatch.config import current
from liger_multi.ops import QuantizedWeight
from liger_multi.ops._quantized import PIECE_BYTES
from liger_multi.parameters import declared

GROUP_BYTES = PIECE_BYTES
"""The host needs some ms a group."""
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
        """The shape of the stack."""
        return cast(torch.Size, self.state.shape)

    @property
    def dtype(self) -> torch.dtype:
        """What it is dequantized to."""
        return cast(torch.dtype, self.state.dtype)

    @property
    def expert(self) -> int:
        """The number of elements of one expert."""
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


def most_bytes() -> int:
    """Of dequantized weights at a time."""
    return current().chunk_bytes or GROUP_BYTES


def _bytes(stack: Any) -> int:
    return int(math.prod(stack.shape)) * cast(int, stack.dtype.itemsize)


def in_one_piece(parts: Sequence[Any]) -> bool:
    """Whether every stack may be dequantized whole, or operators do it by pieces.

    Stacks are not dequantized at the same time.
    """
    return all(_bytes(p) <= most_bytes() for p in parts if isinstance(p, Stack))


def viewed(part: Any) -> Any:
    """A packed stack as the weight that operators take; whatever else as it is."""
    if not isinstance(part, Stack):
        return part
    state, more = part.state, {}
    if state.nested:
        own = state.state2
        more = {"scale_levels": own.code, "scale_absmax": own.absmax, "scale_offset": state.offset}
    return QuantizedWeight(
        part.packed.view(torch.uint8).view(*part.shape[:-1], part.shape[-1] // 2),
        state.absmax,
        format=state.quant_type,
        dtype=part.dtype,
        group=state.blocksize,
        **more,
    )


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
    module_class = type(every[name][0])
    if (module_class.__module__, module_class.__name__) != _PARAMETRIZATION:
        return None
    stack = Stack(every[name].original, every[name][0].quant_state)
    return None if stack.expert % (2 * stack.state.blocksize) else stack


def stacked(module: nn.Module, name: str) -> Any:
    """A parameter, or its packed stack."""
    stack = stack_of(module, name)
    return getattr(module, name, None) if stack is None else stack


def stack_declared(module: nn.Module, name: str) -> Any:
    """The same to look at: a parametrization is not evaluated."""
    stack = stack_of(module, name)
    return declared(module, name) if stack is None else stack


def unparametrized(module: nn.Module, module_class: type[nn.Module]) -> type[nn.Module]:
    """The class that PyTorch derived another one from for the parametrizations of an instance."""
    return (
        cast("type[nn.Module]", module_class.__base__)
        if "parametrizations" in module._modules
        else module_class
    )


def is_watched_by_others(module: nn.Module) -> bool:
    """Whether a module has hooks other than those that bitsandbytes sets for its cache."""
    attributes = module.__dict__
    before, after = attributes["_forward_pre_hooks"], attributes["_forward_hooks"]
    hooks = [*before.values(), *after.values()]
    own = all(str(_function(h).__module__).startswith("bitsandbytes.") for h in hooks)
    backward = attributes["_backward_hooks"] or attributes["_backward_pre_hooks"]
    return not own or bool(backward) or "forward" in attributes


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
        autocast: Device, and the dtype of its autocast.
    """

    run: Callable[..., Tensor]
    parts: Sequence[Any]
    names: tuple[str, ...]
    others: Mapping[str, Any]
    autocast: tuple[str, torch.dtype | None]

    def slices(self) -> Iterator[tuple[slice, list[Tensor]]]:
        """Every group: its experts, and their weights, which exist until the next is asked for."""
        experts = self.parts[1].shape[0]
        each = sum(_bytes(p) // experts for p in self.parts if isinstance(p, Stack))
        step = max(1, min(experts, most_bytes() // each))
        parts = [p.opened() if isinstance(p, Stack) else p for p in self.parts]
        for first in range(0, experts, step):
            some = slice(first, min(experts, first + step))
            yield some, [p[some] for p in parts]

    def of(
        self,
        some: slice,
        weights: list[Tensor],
        x: Tensor,
        index: Tensor,
        routing: Tensor,
        thin: Sequence[Tensor],
    ) -> Tensor:
        """The sum of a group, of whose experts ``thin`` are the factors."""
        named = {**self.others, **dict(zip(self.names, thin, strict=True))}
        with autocast(*self.autocast):
            return self.run(weights, x, index - some.start, routing, named)


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
            y = groups.of(some, weights, x, index, routing, [t[some] for t in thin])
            y = y.to(torch.promote_types(y.dtype, torch.float32))
            total = y if total is None else total.add_(y)
            del weights
        return cast(Tensor, total)

    @staticmethod
    @first_derivatives_only("mixture of experts")
    def backward(ctx: Any, saved: tuple[Tensor, ...], dy: Tensor) -> tuple[Tensor | None, ...]:
        """Sums over groups for what all have, and slices of the factors' gradients."""
        x, index, routing, *thin = saved
        needs = ctx.needs_input_grad[1:]
        wide = [
            torch.zeros_like(t, dtype=torch.promote_types(t.dtype, torch.float32)) if need else None
            for t, need in ((x, needs[0]), (routing, needs[2]))
        ]
        sliced = [torch.zeros_like(t) if n else None for t, n in zip(thin, needs[3:], strict=True)]
        for some, weights in ctx.groups.slices():
            own = [t[some].detach() for t in thin]
            leaves = [x.detach(), routing.detach(), *own]
            places = [*wide, *(None if t is None else t[some] for t in sliced)]
            for leaf, place in zip(leaves, places, strict=True):
                leaf.requires_grad_(place is not None)
            with torch.enable_grad():
                y = ctx.groups.of(some, weights, leaves[0], index, leaves[1], own)
            differentiable = [
                (leaf, p) for leaf, p in zip(leaves, places, strict=True) if p is not None
            ]
            gradients = torch.autograd.grad(y, [leaf for leaf, _ in differentiable], dy.to(y.dtype))
            for (_, place), gradient in zip(differentiable, gradients, strict=True):
                place.add_(gradient)
            del weights, y, gradients
        dx, drouting = (
            None if s is None else s.to(t.dtype) for s, t in zip(wide, (x, routing), strict=True)
        )
        return (None, dx, None, drouting, *sliced)


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
    device_type = x.device.type
    under = device_type, autocast_dtype(device_type)
    groups = _Groups(run, parts, tuple(thin), others, under)
    return cast(Tensor, cast(Any, _InGroups).apply(groups, x, index, routing, *thin.values()))


outside_of_graphs(in_groups, "the host prepares groups")
