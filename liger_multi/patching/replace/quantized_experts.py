"""Stacks of experts in 4 bits: some experts at a time are dequantized.

bitsandbytes (``replace_parameter_4bit``) keeps a stack packed, and dequantizes all of it whenever a
forward reads the parameter. Here the experts run in groups. An index of another group adds nothing,
so the sum over groups is that over all experts; it is taken in fp32. Backward computes a group
again, its weights included, so that no more than those of one group exist at a time.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

GROUP_BYTES = 2**29  # of dequantized weights at a time; the host needs 3 to 6 ms a group
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
    def __getitem__(self, some: slice) -> Tensor:
        """The experts of a slice without a step."""
        theirs = importlib.import_module("bitsandbytes.functional")
        first, last, _ = some.indices(self.shape[0])
        state, blocks = self.state, self.expert // self.state.blocksize
        absmax = state.absmax
        if state.nested:
            absmax = theirs.dequantize_blockwise(absmax, state.state2) + state.offset
        part = theirs.QuantState(
            absmax[first * blocks : last * blocks],
            shape=torch.Size((last - first, *self.shape[1:])),
            code=state.code,
            blocksize=state.blocksize,
            quant_type=state.quant_type,
            dtype=state.dtype,
        )
        bytes_ = self.packed.view(-1)[first * self.expert // 2 : last * self.expert // 2]
        return cast(Tensor, theirs.dequantize_4bit(bytes_.unsqueeze(1), part))


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
    experts = parts[1].shape[0]
    each = sum(p.expert * p.dtype.itemsize for p in parts if isinstance(p, Stack))
    step = max(1, min(experts, GROUP_BYTES // each))
    names = [n for n, f in factors.items() if isinstance(f, Tensor)]
    total: Tensor | None = None
    for first in range(0, experts, step):
        some = slice(first, min(experts, first + step))

        def group(
            x: Tensor, index: Tensor, routing: Tensor, *thin: Tensor, some: slice = some
        ) -> Tensor:
            own = dict(zip(names, [t[some] for t in thin], strict=True))
            return run([p[some] for p in parts], x, index - some.start, routing, {**factors, **own})

        given = (x, index, routing, *[factors[n] for n in names])
        kept: Any = {"use_reentrant": False, "preserve_rng_state": False}
        made = checkpoint(group, *given, **kept) if torch.is_grad_enabled() else group(*given)
        made = made.to(torch.promote_types(made.dtype, torch.float32))
        total = made if total is None else total + made
    return cast(Tensor, total)
