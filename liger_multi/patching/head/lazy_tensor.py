"""Logits that are computed when something needs them, and are a tensor to everybody else.

``LazyLogits`` has the shape, strides and dtype of the logits and no storage. Row and scalar
operations give lazy logits again, ``F.cross_entropy`` becomes the fused loss, reductions over the
vocabulary run in chunks. Everything else materializes: the lazy tensor and all that were derived
from it become ordinary tensors, the very same Python objects (``torch.utils.swap_tensors``). So
logits are lazy only while nobody holds a real tensor of them, and whatever is done to a real one,
by whatever name, is plain PyTorch.

Code below Python's function protocol (collectives, ``autograd.Function``) is served by the dispatch
protocol, and gradients that arrive that way go through the node of :class:`_Connect`.
"""

from __future__ import annotations

import functools
import sys
import threading
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
    is_functorch_wrapped,
    make_wrapper_subclass,
    tensor_base,
    throw_on_mutable_data_ptr,
    transforms_active,
    tree_map,
)
from liger_multi.dispatch.double_backward import not_differentiable
from liger_multi.patching.head.deferred import DeferredLogits, Job, finished
from liger_multi.patching.head.log_probs import REDUCTIONS
from liger_multi.patching.head.loss import (
    SWAPS,
    CrossEntropyCall,
    LogitsShape,
    fused,
    loss_logits,
    negative_log_likelihood,
    without_hooks,
)
from liger_multi.patching.head.rules import (
    GRADIENT_BY_LOGITS,
    HOOKS,
    METADATA,
    WRITTEN_BELOW,
    WRITTEN_SINCE,
    as_saved_by_the_head,
    asked_for,
    asking,
    called,
    is_infrastructure,
    recording,
    refuse_late_hook,
    warn_above_budget,
)
from liger_multi.patching.head.steps import JOINS, RECORDED, ROWS, WRITES
from liger_multi.patching.options import run_bound

Derive = Callable[..., Tensor]


class Group:
    """The lazy tensors that come from one call of a head; they become real together.

    Attributes:
        members: Weak references to them, parents first.
        consumed: Whether a result was computed that does not pass by the logits.
    """

    def __init__(self) -> None:
        self.members: list[weakref.ref[LazyLogits]] = []
        self.made: dict[Slot, Tensor] = {}  # real logits, while members become real
        self.consumed = False
        self.lock = threading.RLock()

    def living(self) -> list[LazyLogits]:
        """The members that somebody still holds."""
        return [member for ref in self.members if (member := ref()) is not None]

    def materialize(self) -> None:
        """Turn every member into an ordinary tensor, parents first."""
        with self.lock, recording(), as_saved_by_the_head():
            living = self.living()
            self.members.clear()  # weak references forbid the swap
            try:
                for member in living:
                    slot = member._slot
                    _promote(member, slot.compute(self.made))
                    self.made[slot] = member if slot.cached is None else slot.cached
            except BaseException:
                self.members += [weakref.ref(m) for m in living if isinstance(m, LazyLogits)]
                raise
            self.made.clear()


class Slot:
    """How the values of one lazy tensor come about.

    Args:
        deferred: How to compute them from hidden states.
        parents: The slots that this one was derived from.
        derive: From the parents' real logits to this one's.
        shares: Whether the result shares memory with that of the first parent.
    """

    def __init__(
        self,
        deferred: DeferredLogits,
        parents: tuple[Slot, ...] = (),
        derive: Derive | None = None,
        shares: bool = False,
    ) -> None:
        self.deferred, self.parents, self.derive = deferred, parents, derive
        self.group: Group = parents[0].group if parents else Group()
        self.memory: object = parents[0].memory if shares else object()
        # a view taken under no_grad: it requires grad, by its base, and has no history
        self.bound = False
        self.hooks: list[Callable[[Tensor], Any]] = []
        # real logits, where the tensor could not become them because autograd holds it
        self.cached: Tensor | None = None
        self.version, self.own = 0, True
        # values that an autograd.Function returned as they came; their history is the lazy tensor's
        self.exposed: Tensor | None = None

    def compute(self, made: dict[Slot, Tensor]) -> Tensor:
        """The real logits, by those of the parents; differentiable where the deferred logits is.

        Args:
            made: What was computed already; the result is added.
        """
        if self not in made:
            if self.derive is None:
                warn_above_budget(self.deferred)
            with torch.set_grad_enabled(self.deferred.grad):
                if self.derive is None:
                    deferred = self.deferred
                    real = deferred.compute()
                    made[self] = loss_logits(real, deferred.settings, deferred.grad)
                else:
                    made[self] = self.derive(*[parent.compute(made) for parent in self.parents])
        return made[self]

    def needs(self, other: Slot) -> bool:
        """Whether a write to ``other`` would show in this one, or in what it is computed from."""
        return self.memory is other.memory or any(
            p is other or p.needs(other) for p in self.parents
        )

    def unwritten(self) -> DeferredLogits:
        """The deferred logits, for the gradients that arrive at :class:`_Connect`.

        Raises:
            RuntimeError: Logits that an autograd.Function saved were written since.
        """
        if self.cached is not None and self.cached._version != self.version:
            raise RuntimeError(WRITTEN_SINCE)
        return self.deferred


def _promote(member: LazyLogits, real: Tensor) -> None:
    """Make a lazy tensor the real one; if autograd holds it, remember the real one instead."""
    slot = member._slot
    slot.own = _has_own_node(member)
    if slot.exposed is not None or not slot.own:
        values = [real if slot.exposed is None else slot.exposed]
        with torch.enable_grad():  # the history is the tensor's, whatever its reader computes
            real = _Through.apply(member, values)  # type: ignore[no-untyped-call]
    if slot.group.consumed:
        real = without_hooks(real)
    for hook in slot.hooks:
        _HOOK(real, hook)
    slot.hooks.clear()
    slot.cached, slot.version = real, real._version
    _swap(member, slot)


def _swap(member: LazyLogits, slot: Slot) -> None:
    real, slot.cached = slot.cached, None
    assert real is not None
    if not _swapped(member, real):
        slot.cached = real


def _swapped(one: Tensor, other: Tensor) -> bool:
    """Exchange two tensors; not where an autograd.Function saved one, or a weak reference is."""
    if not SWAPS:
        return False
    vars(other).update({name: value for name, value in vars(one).items() if name != "_slot"})
    try:
        with DisableTorchFunctionSubclass():
            torch.utils.swap_tensors(one, other)
    except RuntimeError:
        return False
    return True


def _describes_itself(value: Any) -> bool:
    """Whether shape and history are those of the lazy tensor: it is pending, or refuses its use."""
    if not isinstance(value, LazyLogits):
        return False
    return value._slot.cached is None or (value._slot.own and not _has_own_node(value))


def _check_unwritten(group: Group) -> None:
    """Refuse logits that were written through a view which C++ made of a lazy tensor.

    Raises:
        RuntimeError: A lazy tensor's version counter, which such views share, has moved.
    """
    with DisableTorchFunctionSubclass():
        for member in group.living():
            if member._version:
                raise RuntimeError(WRITTEN_BELOW)


def _has_own_node(member: LazyLogits) -> bool:
    """Whether no other autograd.Function returned the tensor, whose backward it has to pass."""
    with DisableTorchFunctionSubclass():
        node = member.grad_fn
    return node is None or getattr(node, "slot", None) is member._slot


class _Through(torch.autograd.Function):
    """Real values with the history of a lazy tensor that somebody's autograd.Function returned."""

    @staticmethod
    def forward(ctx: Any, member: LazyLogits, values: list[Tensor]) -> Tensor:
        return values[0].data.as_subclass(Tensor).data  # no views, which refuse in-place operations

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return grad, None


class _Connect(torch.autograd.Function):
    """Ties a lazy tensor to the graph, for consumers that the function protocol does not see."""

    @staticmethod
    def forward(ctx: Any, slot: Slot, *inputs: Tensor | None) -> LazyLogits:
        ctx.slot, ctx.inputs = slot, inputs
        ctx.set_materialize_grads(False)
        return LazyLogits(slot)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Any, ...]:
        if grad is None:
            return (None,) * (1 + len(ctx.inputs))
        deferred: DeferredLogits = ctx.slot.unwritten()
        # cut off, since a tied weight has a part in the hidden states as well
        hidden = deferred.hidden.detach().requires_grad_(deferred.hidden.requires_grad)
        with torch.enable_grad():
            real = deferred.rows(hidden).compute()
        inputs = (hidden, *ctx.inputs[1:])
        wanted = [i for i, need in enumerate(ctx.needs_input_grad[1:]) if need]
        grads = torch.autograd.grad(
            real, [inputs[i] for i in wanted], real_tensor(grad), allow_unused=True
        )
        found: list[Any] = [None] * len(inputs)
        for i, g in zip(wanted, grads, strict=True):
            found[i] = g
        if torch.is_grad_enabled():  # create_graph=True
            return (None, *not_differentiable("patching.patch", found, (grad, *ctx.inputs)))
        return (None, *found)


_connect: Any = super(torch.autograd.Function, _Connect).apply
"""The part of ``apply`` in C++; what Python does around it serves functorch."""


class LazyLogits(Tensor):
    """See the module's docstring; made by :func:`lazy_logits` only."""

    _slot: Slot
    _becomes_real = True

    @staticmethod
    def __new__(cls: type[LazyLogits], slot: Slot) -> LazyLogits:
        """A tensor with the metadata of the logits and no storage."""
        deferred = slot.deferred
        made: LazyLogits = make_wrapper_subclass(
            cls,
            deferred.shape,
            strides=deferred.strides,
            dtype=deferred.dtype,
            device=deferred.hidden.device,
        )
        throw_on_mutable_data_ptr(made)  # else C++ reads from address 0
        made._slot = slot
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record, fuse, reduce in chunks, or materialize."""
        serve = _serve if DYNAMO not in sys.modules or _nobody_traces() else _untraced()
        return serve(func, args, kwargs or {})

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
        if any(result.alias_info is not None for result in func._schema.returns):
            return _viewed(func, args, kwargs or {})
        return func(*tree_map(_values, args), **tree_map(_values, kwargs or {}))

    def as_head(self) -> dict[str, Any] | None:
        """The arguments of a ``losses.Head`` that gives these logits; None if there are real ones.

        Its weight is a function, which runs a loss in the head's own call.
        """
        found = head_of(self._slot.deferred) if is_lazy(self) else None
        self._slot.group.consumed |= found is not None
        return found


def head_of(deferred: DeferredLogits) -> dict[str, Any] | None:
    """The arguments of a ``losses.Head``; None where a head is not one whole weight."""
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


def lazy_logits(
    deferred: DeferredLogits,
    parents: tuple[Slot, ...] = (),
    derive: Derive | None = None,
    shares: bool = False,
) -> LazyLogits:
    """Lazy logits of deferred logits; the other arguments as in :class:`Slot`."""
    slot = Slot(deferred, parents, derive, shares)
    connected = deferred.grad and torch.is_grad_enabled()
    if not connected:
        made = LazyLogits(slot)
    else:
        plain = not (transforms_active() or is_functorch_wrapped(deferred.hidden))
        connect: Any = _connect if plain else _Connect.apply
        made = connect(slot, deferred.hidden, *deferred.weights)
    slot.group.members.append(weakref.ref(made))
    return made


def real_tensor(value: Any) -> Any:
    """The real logits when ``value`` is lazy, else ``value`` itself."""
    if not isinstance(value, LazyLogits):
        return value
    slot = value._slot
    if slot.cached is None:
        slot.group.materialize()
    elif slot.own and not _has_own_node(value):  # a Function marked it as written
        raise RuntimeError(WRITTEN_SINCE)
    else:
        _swap(value, slot)  # who held it may be gone
    return slot.cached if isinstance(value, LazyLogits) else value


def is_lazy(value: Any) -> bool:
    """Whether a value is logits that were not computed."""
    if not isinstance(value, LazyLogits):
        return False
    slot = value._slot
    if slot.cached is not None or slot.exposed is not None or not _has_own_node(value):
        return False
    return not (slot.bound and torch.is_grad_enabled())


def _viewed(func: Any, args: Any, kwargs: Any) -> Any:
    """A view of lazy logits, as autograd makes it of what a Function returns as it came.

    Raises:
        RuntimeError: Others hold logits of the same memory, or it is a view for other purposes.
    """
    slot = args[0]._slot if isinstance(args[0], LazyLogits) else None
    if slot is None or func not in _AS_IT_CAME or slot.cached is not None:
        raise RuntimeError(WRITTEN_BELOW)
    if [m for m in slot.group.living() if m._slot is not slot and m._slot.needs(slot)]:
        raise RuntimeError(WRITTEN_BELOW)
    if slot.exposed is None:
        slot.exposed = _values(args[0])
    return func(slot.exposed, *args[1:], **kwargs)


def _values(value: Any) -> Any:
    """Values without history, for code that runs below autograd."""
    if not isinstance(value, LazyLogits):
        return value
    slot = value._slot
    slot.group.consumed = True
    if slot.exposed is not None:
        return slot.exposed
    if slot.cached is None:
        with torch.no_grad():
            return slot.deferred.compute()
    return slot.cached.detach().as_subclass(Tensor)


def _nobody_traces() -> bool:
    """Whether neither this frame is being compiled nor the ones that it calls will be."""
    if torch.compiler.is_compiling():
        return False
    return frame_callback is not None and frame_callback() is None


def _untraced() -> Callable[..., Any]:
    """:func:`_serve` for a process with a compiler.

    A compiled function that gets lazy logits from outside breaks its graph where it uses them.
    """
    _made_untraced()
    return _made[0]


@constant_in_graphs
def _made_untraced() -> bool:
    """Make the function, also while Dynamo traces: it ignores functools.cache."""
    if not _made:
        _made.append(sys.modules[DYNAMO].disable(_serve))
    return True


_made: list[Callable[..., Any]] = []


def _visible(function: Any) -> Any:
    """A method of Tensor for Dynamo to look into, which finds :func:`_untraced` there.

    It takes lazy logits for an object of any class, and cannot follow some methods of tensors.
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
    kept = func in METADATA or (not pending and getattr(func, "__name__", "") == "__set__")
    if (pending and func is _GRAD) or (kept and _describes_itself(first)):
        with DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    if pending:
        _check_unwritten(first._slot.group)
    result = _answer(func, first, args, kwargs)
    if result is not NotImplemented:
        return result
    if func in HOOKS and pending and first._slot.group.consumed:
        refuse_late_hook(func, args)
    args, kwargs = tree_map(real_tensor, args), tree_map(real_tensor, kwargs)
    return func(*args, **kwargs)


def _answer(func: Any, first: Any, args: Any, kwargs: Any) -> Any:
    """The result of an operation that needs no real logits, else NotImplemented."""
    handler = _HANDLERS.get(func)
    if handler is not None:
        return handler(*args, **kwargs)
    if not is_lazy(first):
        return NotImplemented
    if torch.is_inference_mode_enabled() and func not in REDUCTIONS:
        return NotImplemented  # such tensors have no versions
    others = (*args[1:], *kwargs.values())
    if func in JOINS and len(args) == 2 and not kwargs and is_lazy(args[1]):
        return _joined(func, *args)
    for other in others:
        if isinstance(other, LazyLogits):
            return NotImplemented
    for table, follow in _TABLES:
        if func in table:
            return follow(func, first, args[1:], kwargs)
    return NotImplemented


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
    return result


def _grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    """``torch.autograd.grad`` by lazy logits, which no loss passed by."""
    asked = asked_for(outputs, inputs)
    if any(isinstance(x, LazyLogits) and x._slot.cached is None for x in asked):
        raise RuntimeError(GRADIENT_BY_LOGITS)
    return NotImplemented


_HANDLERS: dict[Any, Callable[..., Any]] = {
    F.cross_entropy: _cross_entropy,
    F.nll_loss: _nll_loss,
    torch.autograd.grad: _grad,
}


# --- operations that stay lazy ---


def _current(deferred: DeferredLogits) -> DeferredLogits:
    """The deferred logits as an operation called now sees them: under no_grad, without history."""
    return deferred if torch.is_grad_enabled() or not deferred.grad else deferred.detached()


def _joined(func: Any, one: LazyLogits, other: LazyLogits) -> Any:
    """Two lazy logits of the same rows as one."""
    if one._slot.group is not other._slot.group:
        return NotImplemented
    several = _current(one._slot.deferred).packed(), _current(other._slot.deferred).packed()
    deferred = several[0].joined(JOINS[func], several[1])
    if deferred is None:
        return NotImplemented
    return lazy_logits(deferred, (one._slot, other._slot), func)


def _print(func: Any, logits: LazyLogits, args: Any, kwargs: Any) -> Any:
    deferred = logits._slot.deferred
    if deferred.bytes <= _PRINTED_BYTES:
        return NotImplemented
    name = type(logits).__name__
    return f"{name}(shape={tuple(deferred.shape)}, dtype={deferred.dtype}, not computed)"


def _hook(func: Any, logits: LazyLogits, args: Any, kwargs: Any) -> Any:
    """A sharding library's hook, which it puts on the loss as well."""
    if not args or not is_infrastructure(args[0]):
        return NotImplemented
    logits._slot.hooks.append(args[0])
    with DisableTorchFunctionSubclass():
        return func(logits, *args)


def _base(func: Any, logits: LazyLogits, args: Any, kwargs: Any) -> Any:
    """What a tensor is a view of: logits as the head returned them, of nothing."""
    return NotImplemented if logits._slot.parents else None


def _reduced(func: Any, logits: LazyLogits, args: Any, kwargs: Any) -> Any:
    deferred = logits._slot.deferred
    if deferred.sharded:
        return NotImplemented
    return _consumed(logits, called(REDUCTIONS[func], (deferred, *args), kwargs))


def _written(func: Any, logits: LazyLogits, args: Any, kwargs: Any) -> Any:
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
    after = lazy_logits(deferred, (slot,), lambda real: func(real, *args, **kwargs))
    members = slot.group.members
    members.clear()  # weak references forbid the swap
    swapped = _swapped(logits, after)
    members += [weakref.ref(m) for m in (*others, logits)]
    return logits if swapped else NotImplemented


def _recorded(func: Any, logits: LazyLogits, args: Any, kwargs: Any) -> Any:
    slot = logits._slot
    deferred = _current(slot.deferred)
    step = called(RECORDED[func], (deferred, *args), kwargs)
    if step is NotImplemented:
        return step
    if step is deferred:
        return logits  # as PyTorch does, under no_grad as well
    added = step.steps[len(deferred.steps) :]
    if not added:  # clone or contiguous
        return lazy_logits(step, (slot,), lambda real: func(real, *args, **kwargs))
    packed = deferred.packed()
    if packed is not deferred:
        step = called(RECORDED[func], (packed, *args), kwargs)
    return lazy_logits(step, (slot,), lambda real: finished(real, added))


def _detach(func: Any, logits: LazyLogits, args: Any, kwargs: Any) -> Any:
    slot = logits._slot
    return lazy_logits(slot.deferred.detached(), (slot,), lambda real: real.detach(), shares=True)


def _iterated(func: Any, logits: LazyLogits, args: Any, kwargs: Any) -> Any:
    return iter(Tensor.unbind(logits)) if logits._slot.deferred.hidden.ndim > 1 else NotImplemented


def _rows(func: Any, logits: LazyLogits, args: Any, kwargs: Any) -> Any:
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
            return lazy_logits(deferred.rows(hidden), (slot,), derive)
        return _view(deferred.rows(hidden), slot, derive)
    return tuple(
        _view(deferred.rows(h), slot, functools.partial(_part, derive, i))
        for i, h in enumerate(hidden)
    )


def _view(deferred: DeferredLogits, base: Slot, derive: Derive) -> LazyLogits:
    made = lazy_logits(deferred, (base,), derive, shares=True)
    if (base.deferred.grad or base.bound) and not torch.is_grad_enabled():
        made._slot.bound = True
        with DisableTorchFunctionSubclass():
            made.requires_grad = True
    return made


def _part(derive: Callable[[Tensor], Any], index: int, real: Tensor) -> Any:
    return derive(real)[index]


def _snapshot(value: Any) -> Any:
    """An index that its owner may overwrite before the logits are computed."""
    return value.clone() if isinstance(value, Tensor) else value


_HOOK: Any = Tensor.register_hook
_GRAD: Any = cast(Any, Tensor).grad.__get__
_PRINTED_BYTES = 2**20
_AS_IT_CAME = {torch.ops.aten.view.default, torch.ops.aten.view_as.default}
_TABLES: tuple[tuple[Any, Callable[..., Any]], ...] = (
    ({Tensor.__repr__}, _print),
    ({_HOOK}, _hook),
    ({tensor_base}, _base),
    (REDUCTIONS, _reduced),
    (WRITES, _written),
    ({Tensor.detach, torch.detach}, _detach),
    (RECORDED, _recorded),
    ({Tensor.__iter__}, _iterated),
    (ROWS, _rows),
)
"""What stays lazy: the functions, and what answers ``func(logits, *args, **kwargs)`` for them."""
