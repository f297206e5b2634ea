"""Stacked experts in 4 bits, which are dequantized a group at a time.

bitsandbytes (``replace_parameter_4bit``) keeps a stack packed, and dequantizes all of it whenever
the parameter is read. :func:`in_groups` runs the experts in groups instead. Indices of other groups
contribute nothing, so the fp32 sum over groups is the sum over all experts. Backward dequantizes
and computes each group again, so that only the weights of one group exist at a time.
"""

from __future__ import annotations

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
from liger_multi.modules.parameters import declared
from liger_multi.ops import QuantizedWeight
from liger_multi.ops._quantized import PIECE_BYTES
from liger_multi.patching.evidence.signature import is_infrastructure

GROUP_BYTES = PIECE_BYTES
"""Bytes of a group, each of which costs milliseconds of host time."""
_PARAMETRIZATION = ("bitsandbytes.nn.parametrize", "Bnb4bitParametrization")


@dataclass(frozen=True)
class Stack:
    """A packed stack; indexing by a slice returns dequantized experts.

    Attributes:
        packed: Two values per byte, in the order of the experts.
        state: The quantization state of bitsandbytes.
    """

    packed: Tensor
    state: Any

    @property
    def shape(self) -> torch.Size:
        """The shape of the stack."""
        return cast(torch.Size, self.state.shape)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype after dequantization."""
        return cast(torch.dtype, self.state.dtype)

    @property
    def expert(self) -> int:
        """Elements of one expert."""
        return math.prod(self.shape[1:])

    @torch.no_grad()
    def opened(self) -> Stack:
        """The same stack with dequantized scales."""
        state = self.state
        if not state.nested:
            return self
        absmax = _bnb_functional().dequantize_blockwise(state.absmax, state.state2) + state.offset
        return Stack(self.packed, _state_with(state, absmax, state.shape))

    @torch.no_grad()
    def __getitem__(self, experts: slice) -> Tensor:
        """The experts of a slice without a step."""
        first, last, _ = experts.indices(self.shape[0])
        state, blocks = self.opened().state, self.expert // self.state.blocksize
        shape = torch.Size((last - first, *self.shape[1:]))
        part = _state_with(state, state.absmax[first * blocks : last * blocks], shape)
        bytes_ = self.packed.view(-1)[first * self.expert // 2 : last * self.expert // 2]
        return cast(Tensor, _bnb_functional().dequantize_4bit(bytes_.unsqueeze(1), part))


def most_bytes() -> int:
    """Most bytes of dequantized weights at a time."""
    return current().chunk_bytes or GROUP_BYTES


def _bytes(stack: Any) -> int:
    return int(math.prod(stack.shape)) * cast(int, stack.dtype.itemsize)


def in_one_piece(parts: Sequence[Any]) -> bool:
    """Whether each stack alone fits, so that operators may dequantize it."""
    return all(_bytes(p) <= most_bytes() for p in parts if isinstance(p, Stack))


def viewed(part: Any) -> Any:
    """A packed stack as a weight for operators; other values unchanged."""
    if not isinstance(part, Stack):
        return part
    state, nested = part.state, {}
    if state.nested:
        nested_state = state.state2
        nested = {
            "scale_levels": nested_state.code,
            "scale_absmax": nested_state.absmax,
            "scale_offset": state.offset,
        }
    return QuantizedWeight(
        part.packed.view(torch.uint8).view(*part.shape[:-1], part.shape[-1] // 2),
        state.absmax,
        format=state.quant_type,
        dtype=part.dtype,
        group=state.blocksize,
        **nested,
    )


def _bnb_functional() -> Any:
    return importlib.import_module("bitsandbytes.functional")


def _state_with(state: Any, absmax: Tensor, shape: torch.Size) -> Any:
    """A quantization state with other scales and another shape."""
    return _bnb_functional().QuantState(
        absmax,
        shape=shape,
        code=state.code,
        blocksize=state.blocksize,
        quant_type=state.quant_type,
        dtype=state.dtype,
    )


def stack_of(module: nn.Module, name: str) -> Stack | None:
    """A parameter that bitsandbytes keeps in 4 bits, every expert in whole blocks."""
    parametrizations: Any = module._modules.get("parametrizations")
    if parametrizations is None or name not in parametrizations or len(parametrizations[name]) != 1:
        return None
    module_class = type(parametrizations[name][0])
    if (module_class.__module__, module_class.__name__) != _PARAMETRIZATION:
        return None
    stack = Stack(parametrizations[name].original, parametrizations[name][0].quant_state)
    return None if stack.expert % (2 * stack.state.blocksize) else stack


def stacked(module: nn.Module, name: str) -> Any:
    """A parameter, or its packed stack."""
    stack = stack_of(module, name)
    return getattr(module, name, None) if stack is None else stack


def stack_declared(module: nn.Module, name: str) -> Any:
    """The same without evaluating a parametrization."""
    stack = stack_of(module, name)
    return declared(module, name) if stack is None else stack


def unparametrized(module: nn.Module, module_class: type[nn.Module]) -> type[nn.Module]:
    """The class of an instance without the subclass that PyTorch creates for parametrizations."""
    return (
        cast("type[nn.Module]", module_class.__base__)
        if "parametrizations" in module._modules
        else module_class
    )


def is_watched_by_others(module: nn.Module) -> bool:
    """Whether a module has hooks other than those of bitsandbytes's cache."""
    attributes = module.__dict__
    pre_hooks, hooks = attributes["_forward_pre_hooks"], attributes["_forward_hooks"]
    backward = attributes["_backward_hooks"] or attributes["_backward_pre_hooks"]
    user_hooks = [
        hook
        for hook in (*pre_hooks.values(), *hooks.values())
        if not is_infrastructure(hook, ("bitsandbytes.",))
    ]
    return bool(user_hooks or backward) or "forward" in attributes


@dataclass(frozen=True)
class _Groups:
    """The common data of all groups.

    Attributes:
        run: From parameters, hidden states, indices, routing weights and arguments of adapters to
            the sum of a group.
        parts: Parameters, packed or not.
        names: Names of the arguments of adapters that are tensors with an axis of experts.
        others: The other arguments of adapters.
        autocast: Device type, and the dtype of autocast.
    """

    run: Callable[..., Tensor]
    parts: Sequence[Any]
    names: tuple[str, ...]
    others: Mapping[str, Any]
    autocast: tuple[str, torch.dtype | None]

    def slices(self) -> Iterator[tuple[slice, list[Tensor]]]:
        """The slice of every group, and its dequantized weights."""
        experts = self.parts[1].shape[0]
        bytes_per_expert = sum(_bytes(p) // experts for p in self.parts if isinstance(p, Stack))
        step = max(1, min(experts, most_bytes() // bytes_per_expert))
        parts = [p.opened() if isinstance(p, Stack) else p for p in self.parts]
        for first in range(0, experts, step):
            group = slice(first, min(experts, first + step))
            yield group, [p[group] for p in parts]

    def of(
        self,
        group: slice,
        weights: list[Tensor],
        x: Tensor,
        index: Tensor,
        routing: Tensor,
        factors: Sequence[Tensor],
    ) -> Tensor:
        """The sum of a group; ``factors`` are the adapters of its experts."""
        factors_by_name = {**self.others, **dict(zip(self.names, factors, strict=True))}
        with autocast(*self.autocast):
            return self.run(weights, x, index - group.start, routing, factors_by_name)


class _InGroups(torch.autograd.Function):
    """The sum over groups; backward computes each group again."""

    @staticmethod
    def forward(
        ctx: Any, groups: _Groups, x: Tensor, index: Tensor, routing: Tensor, *factors: Tensor
    ) -> Tensor:
        """In fp32 at least, in the order of the groups."""
        ctx.groups = groups
        ctx.save_for_backward(x, index, routing, *factors)
        total: Tensor | None = None
        for group, weights in groups.slices():
            y = groups.of(group, weights, x, index, routing, [t[group] for t in factors])
            y = y.to(torch.promote_types(y.dtype, torch.float32))
            total = y if total is None else total.add_(y)
            del weights
        return cast(Tensor, total)

    @staticmethod
    @first_derivatives_only("mixture of experts")
    def backward(ctx: Any, saved: tuple[Tensor, ...], dy: Tensor) -> tuple[Tensor | None, ...]:
        """Sums over groups for what all have, and slices of the factors' gradients."""
        x, index, routing, *factors = saved
        needs = ctx.needs_input_grad[1:]
        wide = [
            torch.zeros_like(t, dtype=torch.promote_types(t.dtype, torch.float32)) if need else None
            for t, need in ((x, needs[0]), (routing, needs[2]))
        ]
        sliced = [
            torch.zeros_like(t) if n else None for t, n in zip(factors, needs[3:], strict=True)
        ]
        for group, weights in ctx.groups.slices():
            group_factors = [t[group].detach() for t in factors]
            leaves = [x.detach(), routing.detach(), *group_factors]
            totals = [*wide, *(None if t is None else t[group] for t in sliced)]
            for leaf, total in zip(leaves, totals, strict=True):
                leaf.requires_grad_(total is not None)
            with torch.enable_grad():
                y = ctx.groups.of(group, weights, leaves[0], index, leaves[1], group_factors)
            differentiable = [
                (leaf, p) for leaf, p in zip(leaves, totals, strict=True) if p is not None
            ]
            gradients = torch.autograd.grad(y, [leaf for leaf, _ in differentiable], dy.to(y.dtype))
            for (_, total), gradient in zip(differentiable, gradients, strict=True):
                total.add_(gradient)
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
    tensors = {name: f for name, f in factors.items() if isinstance(f, Tensor)}
    other_options = {name: f for name, f in factors.items() if name not in tensors}
    device_type = x.device.type
    autocast_setting = device_type, autocast_dtype(device_type)
    groups = _Groups(run, parts, tuple(tensors), other_options, autocast_setting)
    return cast(Tensor, cast(Any, _InGroups).apply(groups, x, index, routing, *tensors.values()))


outside_of_graphs(in_groups, "the host prepares groups")
