"""Logits that are computed when something needs them, and are a tensor to everybody else.

``LazyLogits`` has the shape and dtype of the logits and no storage. Row and scalar operations give
lazy logits again, ``F.cross_entropy`` becomes the fused loss, reductions over the vocabulary run in
chunks, and everything else computes the real logits once. Code below Python's function protocol
(collectives, ``autograd.Function``) is served by the dispatch protocol, and gradients that arrive
that way go through the node of :class:`_Connect`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map

from liger_multi.patching.loss import CrossEntropyCall, fused, negative_log_likelihood, run_bound
from liger_multi.patching.protocol import (
    GRADIENT_BY_LOGITS,
    METADATA,
    is_infrastructure,
    pins,
    warn_above_budget,
)
from liger_multi.patching.real import loss_logits
from liger_multi.patching.recipe import Job, Recipe
from liger_multi.patching.reductions import REDUCTIONS
from liger_multi.patching.rows import ROWS
from liger_multi.patching.steps import JOINS, RECORDED, WRITES


class Family:
    """What lazy logits that would share storage have in common."""

    def __init__(self) -> None:
        self.members = 0
        self.pinned = False


class Slot:
    """The mutable part of one lazy tensor.

    Args:
        recipe: How to compute the values.
        origin: The slot that this one was derived from.
        derive: From the origin's real logits to this one's.
        alias: Whether the result would share storage with the origin.
    """

    def __init__(
        self,
        recipe: Recipe,
        origin: Slot | None = None,
        derive: Callable[[Tensor], Tensor] | None = None,
        alias: bool = False,
    ) -> None:
        self.recipe = recipe
        self.origin, self.derive, self.alias = origin, derive, alias
        self.family: Family = origin.family if origin and alias else Family()
        self.family.members += 1
        self.cached: Tensor | None = None
        self.hooks: list[Callable[[Tensor], Any]] = []

    def real(self) -> Tensor:
        """The real logits, computed once; differentiable in whatever grad mode the caller is."""
        if self.cached is None:
            with torch.set_grad_enabled(self.recipe.grad):
                if (
                    self.origin
                    and self.derive
                    and (self.origin.available if not self.family.pinned else self.alias)
                ):
                    made = self.derive(self.origin.real())
                else:
                    warn_above_budget(self.recipe)
                    made = self.recipe.compute()
            self.cached = loss_logits(made, self.recipe)
            for hook in self.hooks:
                _HOOK(self.cached, hook)
        return self.cached

    @property
    def available(self) -> bool:
        """Whether real logits exist that nobody wrote to, here or where this slot came from."""
        if self.family.pinned:
            return False
        return self.cached is not None or (self.origin is not None and self.origin.available)


class _Connect(torch.autograd.Function):
    """Ties a lazy tensor to the graph, for consumers that the function protocol does not see."""

    @staticmethod
    def forward(ctx: Any, slot: Slot, *inputs: Tensor | None) -> LazyLogits:
        ctx.slot, ctx.inputs = slot, inputs
        ctx.set_materialize_grads(False)
        return LazyLogits(slot)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Any, ...]:
        wanted = [i for i, need in enumerate(ctx.needs_input_grad[1:]) if need]
        found: list[Any] = [None] * len(ctx.inputs)
        if grad is not None:
            asked = [ctx.inputs[i] for i in wanted]
            grads = torch.autograd.grad(
                ctx.slot.real(), asked, real_tensor(grad), retain_graph=True, allow_unused=True
            )
            for i, g in zip(wanted, grads, strict=True):
                found[i] = g
        return (None, *found)


_connect: Any = _Connect.apply


class LazyLogits(Tensor):
    """See the module's docstring; made by :func:`lazy_logits` only."""

    _slot: Slot

    @staticmethod
    def __new__(cls: type[LazyLogits], slot: Slot) -> LazyLogits:
        """A tensor with the metadata of the logits and no storage."""
        recipe = slot.recipe
        made = Tensor._make_wrapper_subclass(
            cls, recipe.shape, dtype=recipe.dtype, device=recipe.hidden.device
        )
        made._slot = slot
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record, fuse, reduce in chunks, or compute."""
        kwargs = kwargs or {}
        first = args[0] if args and isinstance(args[0], LazyLogits) else None
        if func in METADATA or (func is _GRAD and first is not None and first._slot.cached is None):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func is torch.autograd.grad and any(
            isinstance(x, LazyLogits) and x._slot.cached is None for x in args[1]
        ):
            raise RuntimeError(GRADIENT_BY_LOGITS)
        if func is F.cross_entropy:
            call = CrossEntropyCall(*args, **kwargs)
            loss = fused(call.input._slot.recipe, call) if _is_lazy(call.input) else None
            if loss is not None:
                return loss
        elif func is F.nll_loss and _is_lazy(args[0] if args else None):
            loss = negative_log_likelihood(args[0]._slot.recipe, *args[1:], **kwargs)
            if loss is not None:
                return loss
        elif func in JOINS and len(args) == 2 and not kwargs and all(map(_is_lazy, args)):
            joined = _joined(func, *args)
            if joined is not None:
                return joined
        elif _is_lazy(first) and not any(
            isinstance(a, LazyLogits) for a in (*args[1:], *kwargs.values())
        ):
            assert first is not None
            result = _follow(func, first._slot, first, args[1:], kwargs)
            if result is not NotImplemented:
                return result
        if first is not None and pins(func):
            first._slot.family.pinned = True
        return func(*tree_map(real_tensor, args), **tree_map(real_tensor, kwargs))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Serve code below the function protocol with real values."""
        if func._schema.is_mutable and any(
            isinstance(value, LazyLogits)
            and argument.alias_info is not None
            and argument.alias_info.is_write
            for value, argument in zip(args, func._schema.arguments, strict=False)
        ):
            raise RuntimeError(
                f"{func} writes to logits that were not computed; pass "
                "liger_multi.patching.real_logits(logits) instead"
            )
        return func(*tree_map(_values, args), **tree_map(_values, kwargs or {}))

    def as_head(self) -> dict[str, Any] | None:
        """The arguments of a ``losses.Head`` that gives these logits; None if there are real ones.

        Its weight is a function, which runs a loss in the head's own call.
        """
        slot, options = self._slot, self._slot.recipe.settings.fused
        epilogue = slot.recipe.epilogue
        if options is None or epilogue is None or slot.available or slot.family.pinned:
            return None
        if slot.recipe.sharded or slot.recipe.scales:  # a head is one whole weight there
            return None
        return {
            "hidden": slot.recipe.hidden,
            "weight": functools.partial(_run, slot.recipe),
            "logit_scale": epilogue[0],
            "softcap": epilogue[1],
            "chunk": options.chunk,
            "accumulate": options.accumulate,
            "compact": options.compact,
        }


def _run(recipe: Recipe, hidden: Tensor, loss: Callable[..., Any]) -> Any:
    def run(head: Any, rows: Tensor) -> Any:
        return loss(rows, head.weight, head.bias)

    options = recipe.settings.fused
    assert options is not None
    with recipe.mode():
        return recipe.run(
            Job(lambda *args: run_bound(options, ("fused_linear_log_prob",), run, *args)), hidden
        )


def lazy_logits(
    recipe: Recipe,
    origin: Slot | None = None,
    derive: Callable[[Tensor], Tensor] | None = None,
    alias: bool = False,
) -> LazyLogits:
    """Lazy logits of a recipe; the other arguments as in :class:`Slot`."""
    slot = Slot(recipe, origin, derive, alias)
    if recipe.grad and torch.is_grad_enabled():
        made: LazyLogits = _connect(slot, recipe.hidden, *recipe.weights)
        return made
    return LazyLogits(slot)


def real_tensor(value: Any) -> Any:
    """The real logits when ``value`` is lazy, else ``value`` itself."""
    return value._slot.real() if isinstance(value, LazyLogits) else value


def _values(value: Any) -> Any:
    """Values without history, for code that runs below autograd."""
    if not isinstance(value, LazyLogits):
        return value
    slot = value._slot
    if slot.cached is None:
        with torch.no_grad():
            return slot.recipe.compute()
    return slot.cached.detach().as_subclass(Tensor)


def _is_lazy(value: Any) -> bool:
    return isinstance(value, LazyLogits) and not value._slot.family.pinned


def _joined(func: Any, one: LazyLogits, other: LazyLogits) -> LazyLogits | None:
    """Two lazy logits of the same rows as one."""
    if one._slot.available or other._slot.available:
        return None
    recipe = one._slot.recipe.joined(JOINS[func], other._slot.recipe)
    return None if recipe is None else lazy_logits(recipe)


def _follow(func: Any, slot: Slot, logits: LazyLogits, args: Any, kwargs: Any) -> Any:
    """The result of an operation that keeps logits lazy or reduces them, else NotImplemented."""
    recipe = slot.recipe

    def derive(real: Tensor) -> Any:
        return func(real, *args, **kwargs)

    if func is Tensor.__repr__ and not slot.available and recipe.bytes > _PRINTED_BYTES:
        name = type(logits).__name__
        return f"{name}(shape={tuple(recipe.shape)}, dtype={recipe.dtype}, not computed)"
    if func is _HOOK and is_infrastructure(args[0]):
        slot.hooks.append(args[0])  # a sharding library's, which hooks the loss as well
        with torch._C.DisableTorchFunctionSubclass():
            return func(logits, *args)
    if func in REDUCTIONS and not slot.available and not recipe.sharded:
        return _understood(REDUCTIONS[func], (recipe, *args), kwargs)
    if func in WRITES and slot.cached is None and slot.family.members == 1:
        step = _understood(WRITES[func], (recipe, *args), kwargs)
        if step is NotImplemented:
            return step
        slot.recipe = step
        return logits
    if func in RECORDED:
        step = _understood(RECORDED[func], (recipe, *args), kwargs)
        if step is NotImplemented or step is recipe:
            return logits if step is recipe else NotImplemented
        return lazy_logits(step, slot, derive, alias=func in _ALIASES)
    if func is Tensor.__iter__ and recipe.hidden.ndim > 1:
        return iter(Tensor.unbind(logits))
    if func in ROWS:
        hidden = _understood(ROWS[func], (recipe.hidden, recipe.vocabulary, *args), kwargs)
        if hidden is NotImplemented:
            return hidden
        if isinstance(hidden, Tensor):
            return lazy_logits(recipe.rows(hidden), slot, derive, alias=True)
        return tuple(
            lazy_logits(recipe.rows(h), slot, functools.partial(_part, derive, i), alias=True)
            for i, h in enumerate(hidden)
        )
    return NotImplemented


def _part(derive: Callable[[Tensor], Any], index: int, real: Tensor) -> Any:
    return derive(real)[index]


def _understood(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
    """``function(*args)``; NotImplemented for None, and for arguments that it does not know."""
    signature = _signatures.get(function)
    if signature is None:
        signature = _signatures[function] = inspect.signature(function)
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return NotImplemented
    result = function(*args, **kwargs)
    return NotImplemented if result is None else result


_signatures: dict[Callable[..., Any], inspect.Signature] = {}


_ALIASES = {Tensor.detach, torch.detach}
_HOOK: Any = Tensor.register_hook
_GRAD: Any = cast(Any, Tensor).grad.__get__
_PRINTED_BYTES = 2**20
