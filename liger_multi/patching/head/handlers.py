"""Operations on lazy logits that need no logits: losses, reductions, and what stays lazy.

Row and scalar operations give lazy logits again, ``F.cross_entropy`` becomes the fused loss,
reductions over the vocabulary run in chunks. A handler returns NotImplemented where the logits are
needed after all.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_multi._torch_private import (
    DisableTorchFunctionSubclass,
    tensor_base,
    tree_leaves,
    tree_map,
)
from liger_multi.patching.head.deferred import DeferredLogits, finished
from liger_multi.patching.head.log_probs import REDUCTIONS
from liger_multi.patching.head.loss import (
    CrossEntropyCall,
    LogitsShape,
    fused,
    negative_log_likelihood,
)
from liger_multi.patching.head.rules import GRADIENT_BY_LOGITS, asked_for, called, is_infrastructure
from liger_multi.patching.head.steps import JOINS, RECORDED, ROWS, WRITES
from liger_multi.patching.head.storage import (
    REGISTER_HOOK,
    Derive,
    LazyTensor,
    Slot,
    exchanged,
    is_lazy,
    lazy_tensor,
)

# --- losses, gradients ---


def _cross_entropy(*args: Any, **kwargs: Any) -> Any:
    call = CrossEntropyCall(*args, **kwargs)
    logits = call.input
    if not is_lazy(logits):
        return NotImplemented
    deferred = logits._slot.deferred
    call.input = LogitsShape(deferred)
    return _consumed(logits, fused(deferred, call))


def _nll_loss(input: Any, *args: Any, **kwargs: Any) -> Any:
    if not is_lazy(input):
        return NotImplemented
    return _consumed(input, negative_log_likelihood(input._slot.deferred, *args, **kwargs))


def _consumed(logits: Any, result: Any) -> Any:
    if result is None or result is NotImplemented:
        return NotImplemented
    logits._slot.group.consumed = True
    for x in tree_leaves(result) if logits._slot.hooks else ():
        if isinstance(x, Tensor) and x.requires_grad:
            for hook in logits._slot.hooks:
                REGISTER_HOOK(x, hook)
    return result


def _grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    """``torch.autograd.grad`` by lazy logits, which no loss passed by."""
    asked = asked_for(outputs, inputs)
    if any(isinstance(x, LazyTensor) and x._slot.cached is None for x in asked):
        raise RuntimeError(GRADIENT_BY_LOGITS)
    return NotImplemented


HANDLERS: dict[Any, Callable[..., Any]] = {
    F.cross_entropy: _cross_entropy,
    F.nll_loss: _nll_loss,
    torch.autograd.grad: _grad,
}


# --- operations that stay lazy ---


def _current(deferred: DeferredLogits) -> DeferredLogits:
    """The deferred logits as an operation called now sees them: under no_grad, without history."""
    return deferred if torch.is_grad_enabled() or not deferred.grad else deferred.detached()


def joined(func: Any, one: LazyTensor, other: LazyTensor) -> Any:
    """Two lazy logits of the same rows as one."""
    if one._slot.group is not other._slot.group:
        return NotImplemented
    several = _current(one._slot.deferred).packed(), _current(other._slot.deferred).packed()
    deferred = several[0].joined(JOINS[func], several[1])
    if deferred is None:
        return NotImplemented
    return lazy_tensor(deferred, (one._slot, other._slot), func)


def _print(func: Any, logits: LazyTensor, args: Any, kwargs: Any) -> Any:
    deferred = logits._slot.deferred
    if deferred.bytes <= _PRINTED_BYTES:
        return NotImplemented
    name = type(logits).__name__
    return f"{name}(shape={tuple(deferred.shape)}, dtype={deferred.dtype}, not computed)"


def _hook(func: Any, logits: LazyTensor, args: Any, kwargs: Any) -> Any:
    """A sharding library's hook, which begins backward: also that of a loss from the logits."""
    if not args or not is_infrastructure(args[0]):
        return NotImplemented
    logits._slot.hooks.append(args[0])
    with DisableTorchFunctionSubclass():
        return func(logits, *args)


def _base(func: Any, logits: LazyTensor, args: Any, kwargs: Any) -> Any:
    """What a tensor is a view of: logits as the head returned them, of nothing."""
    return NotImplemented if logits._slot.parents else None


def _reduced(func: Any, logits: LazyTensor, args: Any, kwargs: Any) -> Any:
    deferred = logits._slot.deferred
    if deferred.sharded:
        return NotImplemented
    return _consumed(logits, called(REDUCTIONS[func], (deferred, *args), kwargs))


def _written(func: Any, logits: LazyTensor, args: Any, kwargs: Any) -> Any:
    """A write of which nobody else can know, remembered: the tensor becomes another lazy one."""
    slot = logits._slot
    unseen = (
        slot.deferred.grad and not torch.is_grad_enabled()
    )  # autograd does not see such a write
    others = [m for m in slot.group.living() if m is not logits]
    if unseen or any(other._slot.needs(slot) for other in others):
        return NotImplemented
    deferred = called(WRITES[func], (slot.deferred, *args), kwargs)
    if deferred is NotImplemented:
        return deferred
    after = lazy_tensor(deferred, (slot,), lambda real: func(real, *args, **kwargs))
    members = slot.group.members
    members.clear()  # weak references forbid the swap
    swapped = exchanged(logits, after)
    members += [weakref.ref(m) for m in (*others, logits)]
    return logits if swapped else NotImplemented


def _recorded(func: Any, logits: LazyTensor, args: Any, kwargs: Any) -> Any:
    slot = logits._slot
    deferred = _current(slot.deferred)
    step = called(RECORDED[func], (deferred, *args), kwargs)
    if step is NotImplemented:
        return step
    if step is deferred:
        return logits  # as PyTorch does, under no_grad as well
    added = step.steps[len(deferred.steps) :]
    if not added:  # clone or contiguous
        return lazy_tensor(step, (slot,), lambda real: func(real, *args, **kwargs))
    packed = deferred.packed()
    if packed is not deferred:
        step = called(RECORDED[func], (packed, *args), kwargs)
    return lazy_tensor(step, (slot,), lambda real: finished(real, added))


def _detach(func: Any, logits: LazyTensor, args: Any, kwargs: Any) -> Any:
    slot = logits._slot
    return lazy_tensor(slot.deferred.detached(), (slot,), lambda real: real.detach(), shares=True)


def _iterated(func: Any, logits: LazyTensor, args: Any, kwargs: Any) -> Any:
    return iter(Tensor.unbind(logits)) if logits._slot.deferred.hidden.ndim > 1 else NotImplemented


def _rows(func: Any, logits: LazyTensor, args: Any, kwargs: Any) -> Any:
    slot = logits._slot
    deferred = _current(slot.deferred)
    hidden = called(ROWS[func], (deferred.hidden, deferred.vocabulary, *args), kwargs)
    if hidden is NotImplemented:
        return hidden
    if kwargs or [a for a in args if type(a) is not int]:
        args, kwargs = tree_map(_snapshot, args), tree_map(_snapshot, kwargs)

    def derive(real: Tensor) -> Any:
        return func(real, *args, **kwargs)

    if isinstance(hidden, Tensor):
        memory = deferred.hidden.untyped_storage()._cdata
        if hidden.untyped_storage()._cdata != memory:
            return lazy_tensor(deferred.rows(hidden), (slot,), derive)
        return _view(deferred.rows(hidden), slot, derive)
    return tuple(
        _view(deferred.rows(h), slot, functools.partial(_part, derive, i))
        for i, h in enumerate(hidden)
    )


def _view(deferred: DeferredLogits, base: Slot, derive: Derive) -> LazyTensor:
    view = lazy_tensor(deferred, (base,), derive, shares=True)
    if (base.deferred.grad or base.bound) and not torch.is_grad_enabled():
        view._slot.bound = True
        with DisableTorchFunctionSubclass():
            view.requires_grad = True
    return view


def _part(derive: Callable[[Tensor], Any], index: int, real: Tensor) -> Any:
    return derive(real)[index]


def _snapshot(value: Any) -> Any:
    """An index that its owner may overwrite before the logits are computed."""
    return value.clone() if isinstance(value, Tensor) else value


_PRINTED_BYTES = 2**20
TABLES: tuple[tuple[Any, Callable[..., Any]], ...] = (
    ({Tensor.__repr__}, _print),
    ({REGISTER_HOOK}, _hook),
    ({tensor_base}, _base),
    (REDUCTIONS, _reduced),
    (WRITES, _written),
    ({Tensor.detach, torch.detach}, _detach),
    (RECORDED, _recorded),
    ({Tensor.__iter__}, _iterated),
    (ROWS, _rows),
)
"""What stays lazy: the functions, and what answers ``func(logits, *args, **kwargs)`` for them."""
