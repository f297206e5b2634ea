"""Lazy logits: a tensor subclass that computes logits only if an operation needs them.

:class:`LazyLogits` has the shape, strides and dtype of logits, and no storage. Its function
protocol looks up each operation in :data:`HANDLERS` and :data:`TABLES`. These return another lazy
tensor, a fused loss, or a reduction by chunks. All other operations materialize the logits. Code
below the function protocol (collectives, ``autograd.Function``) gets real values from the dispatch
protocol.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_multi._torch_private import (
    DYNAMO,
    DisableTorchFunctionSubclass,
    constant_in_graphs,
    frame_callback,
    tensor_base,
    tree_leaves,
    tree_map,
)
from liger_multi.modules.parameters import Job
from liger_multi.patching.evidence.signature import is_infrastructure
from liger_multi.patching.head.deferred import (
    GRADIENT_BY_LOGITS,
    HOOKS,
    METADATA,
    WRITTEN_BELOW,
    DeferredLogits,
    asked_for,
    asking,
    call_if_accepted,
    finished,
    refuse_late_hook,
)
from liger_multi.patching.head.loss import (
    CrossEntropyCall,
    LogitsShape,
    fused,
    negative_log_likelihood,
)
from liger_multi.patching.head.reductions import REDUCTIONS
from liger_multi.patching.head.steps import JOINS, RECORDED, ROWS, WRITES
from liger_multi.patching.head.storage import (
    REGISTER_HOOK,
    Derive,
    LazyTensor,
    Slot,
    check_unwritten,
    describes_itself,
    exchanged,
    is_lazy,
    lazy_tensor,
    real_tensor,
    values_of,
)
from liger_multi.patching.options import run_bound

# --- losses and gradients ---

# A handler returns NotImplemented if it needs the logits after all.


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
    """``torch.autograd.grad`` by lazy logits, which are not part of the graph of a fused loss."""
    requested = asked_for(outputs, inputs)
    if any(isinstance(x, LazyTensor) and x._slot.cached is None for x in requested):
        raise RuntimeError(GRADIENT_BY_LOGITS)
    return NotImplemented


HANDLERS: dict[Any, Callable[..., Any]] = {
    F.cross_entropy: _cross_entropy,
    F.nll_loss: _nll_loss,
    torch.autograd.grad: _grad,
}


# --- operations that stay lazy ---


def _current(deferred: DeferredLogits) -> DeferredLogits:
    """The deferred logits for an operation now: without history under ``no_grad``."""
    return deferred if torch.is_grad_enabled() or not deferred.grad else deferred.detached()


def joined(func: Any, first: LazyTensor, second: LazyTensor) -> Any:
    """The sum or product of two lazy logits of the same rows."""
    if first._slot.group is not second._slot.group:
        return NotImplemented
    operands = _current(first._slot.deferred).packed(), _current(second._slot.deferred).packed()
    deferred = operands[0].joined(JOINS[func], operands[1])
    if deferred is None:
        return NotImplemented
    return lazy_tensor(deferred, (first._slot, second._slot), func)


def _print(func: Any, logits: LazyTensor, args: Any, kwargs: Any) -> Any:
    deferred = logits._slot.deferred
    if deferred.bytes <= _PRINTED_BYTES:
        return NotImplemented
    name = type(logits).__name__
    return f"{name}(shape={tuple(deferred.shape)}, dtype={deferred.dtype}, not computed)"


def _hook(func: Any, logits: LazyTensor, args: Any, kwargs: Any) -> Any:
    """Accept the hook of a sharding library, and add it to losses of these logits too."""
    if not args or not is_infrastructure(args[0]):
        return NotImplemented
    logits._slot.hooks.append(args[0])
    with DisableTorchFunctionSubclass():
        return func(logits, *args)


def _base(func: Any, logits: LazyTensor, args: Any, kwargs: Any) -> Any:
    """``_base``: None for logits as the head returned them."""
    return NotImplemented if logits._slot.parents else None


def _reduced(func: Any, logits: LazyTensor, args: Any, kwargs: Any) -> Any:
    deferred = logits._slot.deferred
    if deferred.sharded:
        return NotImplemented
    return _consumed(logits, call_if_accepted(REDUCTIONS[func], (deferred, *args), kwargs))


def _in_place(func: Any, logits: LazyTensor, args: Any, kwargs: Any) -> Any:
    """An in-place operation as a step, if no other living tensor shares the memory."""
    slot = logits._slot
    unseen = (
        slot.deferred.grad and not torch.is_grad_enabled()
    )  # autograd does not record such a write
    members_left = [m for m in slot.group.living() if m is not logits]
    if unseen or any(member._slot.needs(slot) for member in members_left):
        return NotImplemented
    deferred = call_if_accepted(WRITES[func], (slot.deferred, *args), kwargs)
    if deferred is NotImplemented:
        return deferred
    result = lazy_tensor(deferred, (slot,), lambda values: func(values, *args, **kwargs))
    members = slot.group.members
    members.clear()  # weak references forbid the swap
    swapped = exchanged(logits, result)
    members += [weakref.ref(m) for m in (*members_left, logits)]
    return logits if swapped else NotImplemented


def _recorded(func: Any, logits: LazyTensor, args: Any, kwargs: Any) -> Any:
    slot = logits._slot
    deferred = _current(slot.deferred)
    step = call_if_accepted(RECORDED[func], (deferred, *args), kwargs)
    if step is NotImplemented:
        return step
    if step is deferred:
        return logits  # as PyTorch does, under no_grad as well
    added = step.steps[len(deferred.steps) :]
    if not added:  # clone or contiguous
        return lazy_tensor(step, (slot,), lambda values: func(values, *args, **kwargs))
    packed = deferred.packed()
    if packed is not deferred:
        step = call_if_accepted(RECORDED[func], (packed, *args), kwargs)
    return lazy_tensor(step, (slot,), lambda values: finished(values, added))


def _detach(func: Any, logits: LazyTensor, args: Any, kwargs: Any) -> Any:
    slot = logits._slot
    return lazy_tensor(
        slot.deferred.detached(), (slot,), lambda values: values.detach(), shares=True
    )


def _iterated(func: Any, logits: LazyTensor, args: Any, kwargs: Any) -> Any:
    return iter(Tensor.unbind(logits)) if logits._slot.deferred.hidden.ndim > 1 else NotImplemented


def _rows(func: Any, logits: LazyTensor, args: Any, kwargs: Any) -> Any:
    slot = logits._slot
    deferred = _current(slot.deferred)
    hidden = call_if_accepted(ROWS[func], (deferred.hidden, deferred.vocabulary, *args), kwargs)
    if hidden is NotImplemented:
        return hidden
    if kwargs or [a for a in args if type(a) is not int]:
        args, kwargs = tree_map(_snapshot, args), tree_map(_snapshot, kwargs)

    def derive(values: Tensor) -> Any:
        return func(values, *args, **kwargs)

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


def _part(derive: Callable[[Tensor], Any], index: int, values: Tensor) -> Any:
    return derive(values)[index]


def _snapshot(value: Any) -> Any:
    """A copy of an index, which its owner may overwrite before logits are computed."""
    return value.clone() if isinstance(value, Tensor) else value


_PRINTED_BYTES = 2**20
TABLES: tuple[tuple[Any, Callable[..., Any]], ...] = (
    ({Tensor.__repr__}, _print),
    ({REGISTER_HOOK}, _hook),
    ({tensor_base}, _base),
    (REDUCTIONS, _reduced),
    (WRITES, _in_place),
    ({Tensor.detach, torch.detach}, _detach),
    (RECORDED, _recorded),
    ({Tensor.__iter__}, _iterated),
    (ROWS, _rows),
)
"""Functions by table, and the handler of ``func(logits, *args, **kwargs)`` for each table."""


class LazyLogits(LazyTensor):
    """A tensor of logits that are not computed; see the module. Created by :func:`lazy_logits`."""

    _becomes_real = True

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record a step, fuse a loss, reduce by chunks, or materialize."""
        serve = _serve if DYNAMO not in sys.modules or _nobody_traces() else _untraced()
        return serve(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Pass real values to code below the function protocol."""
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
        if any(result.alias_info is not None for result in func._schema.returns):
            return _viewed(func, args, kwargs or {})
        return func(*tree_map(values_of, args), **tree_map(values_of, kwargs or {}))

    def as_head(self) -> dict[str, Any] | None:
        """Arguments of a ``losses.Head`` with these logits; None once they are materialized.

        The weight is a function that runs a loss in the head's own call.
        """
        head = head_of(self._slot.deferred) if is_lazy(self) else None
        self._slot.group.consumed |= head is not None
        return head


def head_of(deferred: DeferredLogits) -> dict[str, Any] | None:
    """Arguments of a ``losses.Head``; None for sharded heads, adapters and other steps."""
    options, epilogue = deferred.settings.fused, deferred.epilogue
    if options is None or epilogue is None or deferred.sharded or deferred.scales:
        return None
    return {
        "hidden": deferred.hidden,
        "weight": functools.partial(_run, deferred),
        "logit_scale": epilogue[0],
        "softcap": epilogue[1],
        "chunk": options.chunk,
        "accumulate": options.accumulate,
        "compact": options.compact,
    }


def _run(deferred: DeferredLogits, hidden: Tensor, loss: Callable[..., Any]) -> Any:
    def run(head: Any, rows: Tensor) -> Any:
        return loss(rows, head.weight, head.bias)

    options = deferred.settings.fused
    assert options is not None
    with deferred.mode():
        return deferred.run(
            Job(lambda *args: run_bound(options, ("fused_linear_log_prob",), run, *args)), hidden
        )


def lazy_logits(deferred: DeferredLogits) -> LazyLogits:
    """The lazy logits that a head returns."""
    return cast(LazyLogits, lazy_tensor(deferred, tensor_class=LazyLogits))


def _viewed(func: Any, args: Any, kwargs: Any) -> Any:
    """The view that autograd creates when an ``autograd.Function`` returns an input unchanged.

    Raises:
        RuntimeError: Another view, or other living logits share the memory.
    """
    slot = args[0]._slot if isinstance(args[0], LazyLogits) else None
    if slot is None or func not in _IDENTITY_VIEWS or slot.cached is not None:
        raise RuntimeError(WRITTEN_BELOW)
    if [m for m in slot.group.living() if m._slot is not slot and m._slot.needs(slot)]:
        raise RuntimeError(WRITTEN_BELOW)
    if slot.exposed is None:
        slot.exposed = values_of(args[0])
    return func(slot.exposed, *args[1:], **kwargs)


def _nobody_traces() -> bool:
    """Whether Dynamo traces neither this frame nor the frames that it calls."""
    if torch.compiler.is_compiling():
        return False
    return frame_callback is not None and frame_callback() is None


def _untraced() -> Callable[..., Any]:
    """:func:`_serve`, not traced: graphs break where they use lazy logits from outside."""
    _make_untraced()
    return _untraced_serve[0]


@constant_in_graphs
def _make_untraced() -> bool:
    """Create the function, also while Dynamo traces, which ignores functools.cache."""
    if not _untraced_serve:
        _untraced_serve.append(sys.modules[DYNAMO].disable(_serve))
    return True


_untraced_serve: list[Callable[..., Any]] = []


def _visible(function: Any) -> Any:
    """A method of Tensor in Python, which Dynamo traces until :func:`_untraced`.

    Dynamo treats lazy logits as an object of an unknown class, without some methods of tensors.
    """

    def method(self: LazyLogits, *args: Any, **kwargs: Any) -> Any:
        return LazyLogits.__torch_function__(function, (LazyLogits,), (self, *args), kwargs)

    return functools.update_wrapper(method, function)


_AUGMENTED = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
for _name in ("register_hook", *[f"__i{name}__" for name in _AUGMENTED]):
    setattr(LazyLogits, _name, _visible(getattr(Tensor, _name)))


def _serve(func: Any, args: Any, kwargs: Any) -> Any:
    func = asking(func)
    first: Any = args[0] if args else None
    pending = isinstance(first, LazyLogits) and first._slot.cached is None
    is_attribute = func in METADATA or (not pending and getattr(func, "__name__", "") == "__set__")
    if (pending and func is _GRAD) or (is_attribute and describes_itself(first)):
        with DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    if pending:
        check_unwritten(first._slot.group)
    result = _answer(func, first, args, kwargs)
    if result is not NotImplemented:
        return result
    if func in HOOKS and pending and first._slot.group.consumed:
        refuse_late_hook(func, args)
    args, kwargs = tree_map(real_tensor, args), tree_map(real_tensor, kwargs)
    return func(*args, **kwargs)


def _answer(func: Any, first: Any, args: Any, kwargs: Any) -> Any:
    """The result of an operation that needs no real logits, else NotImplemented."""
    handler = HANDLERS.get(func)
    if handler is not None:
        return handler(*args, **kwargs)
    if not is_lazy(first):
        return NotImplemented
    if torch.is_inference_mode_enabled() and func not in REDUCTIONS:
        return NotImplemented  # such tensors have no versions
    operands = (*args[1:], *kwargs.values())
    if func in JOINS and len(args) == 2 and not kwargs and is_lazy(args[1]):
        return joined(func, *args)
    for operand in operands:
        if isinstance(operand, LazyLogits):
            return NotImplemented
    for table, follow in TABLES:
        if func in table:
            return follow(func, first, args[1:], kwargs)
    return NotImplemented


_GRAD: Any = cast(Any, Tensor).grad.__get__
_IDENTITY_VIEWS = {torch.ops.aten.view.default, torch.ops.aten.view_as.default}
