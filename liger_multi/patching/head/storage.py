"""Storage of lazy tensors: how their values are computed, and how they become ordinary tensors.

Every lazy tensor has a :class:`Slot`, which computes its values. The lazy tensors of one call of a
head form a :class:`Group`. If one of them is materialized, all are, and the Python objects stay the
same (``torch.utils.swap_tensors``). So there is never a lazy tensor beside a real one of the same
memory, and operations on real logits are plain PyTorch. Gradients from below Python's function
protocol arrive at the autograd node of :class:`_Connect`.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from liger_multi._torch_private import (
    DisableTorchFunctionSubclass,
    is_functorch_wrapped,
    make_wrapper_subclass,
    throw_on_mutable_data_ptr,
    transforms_active,
    without_saved_tensor_hooks,
)
from liger_multi.dispatch.autograd import not_differentiable
from liger_multi.patching.head.deferred import (
    WRITTEN_BELOW,
    WRITTEN_SINCE,
    DeferredLogits,
    recording,
    warn_above_budget,
)
from liger_multi.patching.head.loss import SWAPS, loss_logits, without_hooks

Derive = Callable[..., Tensor]


REGISTER_HOOK: Any = Tensor.register_hook


class Group:
    """The lazy tensors of one call of a head, which are materialized together.

    Args:
        tensor_class: Their class.

    Attributes:
        members: Weak references to them, parents first.
        consumed: Whether a result was computed without the logits.
    """

    def __init__(self, tensor_class: type[LazyTensor]) -> None:
        self.tensor_class = tensor_class
        self.members: list[weakref.ref[LazyTensor]] = []
        self.computed: dict[Slot, Tensor] = {}  # real logits, during materialize()
        self.consumed = False
        self.lock = threading.RLock()

    def living(self) -> list[LazyTensor]:
        """The members that are still referenced."""
        return [member for ref in self.members if (member := ref()) is not None]

    def materialize(self) -> None:
        """Turn every member into an ordinary tensor, parents first."""
        # Without hooks on saved tensors, since the head's forward ran outside of them. Else a
        # checkpointed function would count tensors that its recomputation, on real logits, does
        # not save.
        with self.lock, recording(), without_saved_tensor_hooks():
            living = self.living()
            self.members.clear()  # weak references forbid the swap
            try:
                for member in living:
                    slot = member._slot
                    _promote(member, slot.compute(self.computed))
                    self.computed[slot] = member if slot.cached is None else slot.cached
            except BaseException:
                self.members += [weakref.ref(m) for m in living if isinstance(m, LazyTensor)]
                raise
            self.computed.clear()


class Slot:
    """How the values of one lazy tensor are computed.

    Args:
        deferred: How to compute them from hidden states.
        parents: The slots that this one was derived from.
        derive: From the parents' real logits to this one's.
        shares: Whether the result shares memory with that of the first parent.
        tensor_class: The class of the lazy tensor, where it has no parents.
    """

    def __init__(
        self,
        deferred: DeferredLogits,
        parents: tuple[Slot, ...] = (),
        derive: Derive | None = None,
        shares: bool = False,
        tensor_class: type[LazyTensor] | None = None,
    ) -> None:
        self.deferred, self.parents, self.derive = deferred, parents, derive
        if not parents:
            assert tensor_class is not None
            self.group = Group(tensor_class)
        else:
            self.group = parents[0].group
        self.memory: object = parents[0].memory if shares else object()
        # whether it is a view that was created under no_grad: it requires grad through its base
        self.bound = False
        # hooks of sharding libraries, which everything that is computed from logits runs
        hooks = (hook for parent in parents for hook in parent.hooks)
        self.hooks: list[Callable[[Tensor], Any]] = list(dict.fromkeys(hooks))
        # real logits, if the tensor could not become them because autograd saved it
        self.cached: Tensor | None = None
        self.version, self.own = 0, True
        # values that an autograd.Function returned unchanged, with the lazy tensor's history
        self.exposed: Tensor | None = None

    def compute(self, computed: dict[Slot, Tensor]) -> Tensor:
        """The real logits, from those of the parents; with gradients if the deferred logits have.

        Args:
            computed: Results so far, to which this one is added.
        """
        if self not in computed:
            if self.derive is None:
                warn_above_budget(self.deferred)
            with torch.set_grad_enabled(self.deferred.grad):
                if self.derive is None:
                    deferred = self.deferred
                    logits = deferred.compute()
                    computed[self] = loss_logits(logits, deferred.settings, deferred.grad)
                else:
                    logits = self.derive(*[parent.compute(computed) for parent in self.parents])
                    computed[self] = self.deferred.with_answers(logits)
        return computed[self]

    def needs(self, other: Slot) -> bool:
        """Whether a write to ``other`` would change these values."""
        return self.memory is other.memory or any(
            p is other or p.needs(other) for p in self.parents
        )

    def unwritten(self) -> DeferredLogits:
        """The deferred logits, for the backward pass of :class:`_Connect`.

        Raises:
            RuntimeError: Logits that an autograd.Function saved were written since.
        """
        if self.cached is not None and self.cached._version != self.version:
            raise RuntimeError(WRITTEN_SINCE)
        return self.deferred


def _promote(member: LazyTensor, logits: Tensor) -> None:
    """Turn a lazy tensor into the real one, or cache that if autograd has saved the tensor."""
    slot = member._slot
    slot.own = has_own_node(member)
    if slot.exposed is not None or not slot.own:
        values = [logits if slot.exposed is None else slot.exposed]
        with torch.enable_grad():  # the history is that of the tensor, not of its reader
            logits = _Through.apply(member, values)  # type: ignore[no-untyped-call]
    if slot.group.consumed:
        logits = without_hooks(logits)
    for hook in slot.hooks:
        REGISTER_HOOK(logits, hook)
    slot.hooks.clear()
    slot.cached, slot.version = logits, logits._version
    _swap(member, slot)


def _swap(member: LazyTensor, slot: Slot) -> None:
    logits, slot.cached = slot.cached, None
    assert logits is not None
    if not exchanged(member, logits):
        slot.cached = logits


def exchanged(first: Tensor, second: Tensor) -> bool:
    """Swap two tensors; False if an autograd.Function saved one, or a weak reference exists."""
    if not SWAPS:
        return False
    vars(second).update({name: value for name, value in vars(first).items() if name != "_slot"})
    try:
        with DisableTorchFunctionSubclass():
            torch.utils.swap_tensors(first, second)
    except RuntimeError:
        return False
    return True


def describes_itself(value: Any) -> bool:
    """Whether a lazy tensor answers for shape and history itself: it is pending or unusable."""
    if not isinstance(value, LazyTensor):
        return False
    return value._slot.cached is None or (value._slot.own and not has_own_node(value))


def check_unwritten(group: Group) -> None:
    """Refuse logits that were written through a view that C++ created.

    Raises:
        RuntimeError: The version counter of a lazy tensor, which such views share, is not 0.
    """
    with DisableTorchFunctionSubclass():
        for member in group.living():
            if member._version:
                raise RuntimeError(WRITTEN_BELOW)


def has_own_node(member: LazyTensor) -> bool:
    """Whether the tensor's autograd node is its own, not that of a user's autograd.Function."""
    with DisableTorchFunctionSubclass():
        node = member.grad_fn
    return node is None or getattr(node, "slot", None) is member._slot


class _Through(torch.autograd.Function):
    """Real values with the history of a lazy tensor that a user's autograd.Function returned."""

    @staticmethod
    def forward(ctx: Any, member: LazyTensor, values: list[Tensor]) -> Tensor:
        return values[0].data.as_subclass(Tensor).data  # a view would refuse in-place operations

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return grad, None


class _Connect(torch.autograd.Function):
    """The autograd node of a lazy tensor, for code below the function protocol."""

    @staticmethod
    def forward(ctx: Any, slot: Slot, *inputs: Tensor | None) -> LazyTensor:
        ctx.slot, ctx.inputs = slot, inputs
        ctx.set_materialize_grads(False)
        return slot.group.tensor_class(slot)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Any, ...]:
        if grad is None:
            return (None,) * (1 + len(ctx.inputs))
        deferred: DeferredLogits = ctx.slot.unwritten()
        # detached, since hidden states may depend on the weight too (tied embeddings)
        hidden = deferred.hidden.detach().requires_grad_(deferred.hidden.requires_grad)
        with torch.enable_grad():
            logits = deferred.rows(hidden).compute()
        inputs = (hidden, *ctx.inputs[1:])
        required = [i for i, need in enumerate(ctx.needs_input_grad[1:]) if need]
        grads = torch.autograd.grad(
            logits, [inputs[i] for i in required], real_tensor(grad), allow_unused=True
        )
        gradients: list[Any] = [None] * len(inputs)
        for i, g in zip(required, grads, strict=True):
            gradients[i] = g
        if torch.is_grad_enabled():  # create_graph=True
            return (None, *not_differentiable("patching.patch", gradients, (grad, *ctx.inputs)))
        return (None, *gradients)


_connect: Any = super(torch.autograd.Function, _Connect).apply
"""The C++ part of ``apply``; its Python part is for functorch."""


class LazyTensor(Tensor):
    """A tensor with the metadata of logits and no storage; its subclass serves functions."""

    _slot: Slot

    @staticmethod
    def __new__(cls: type[LazyTensor], slot: Slot) -> LazyTensor:
        """A tensor of the shape, strides, dtype and device of the logits."""
        deferred = slot.deferred
        tensor: LazyTensor = make_wrapper_subclass(
            cls,
            deferred.shape,
            strides=deferred.strides,
            dtype=deferred.dtype,
            device=deferred.hidden.device,
        )
        throw_on_mutable_data_ptr(tensor)  # C++ would read from address 0
        tensor._slot = slot
        return tensor


def lazy_tensor(
    deferred: DeferredLogits,
    parents: tuple[Slot, ...] = (),
    derive: Derive | None = None,
    shares: bool = False,
    tensor_class: type[LazyTensor] | None = None,
) -> LazyTensor:
    """A lazy tensor of deferred logits; the arguments are those of :class:`Slot`."""
    slot = Slot(deferred, parents, derive, shares, tensor_class)
    connected = deferred.grad and torch.is_grad_enabled()
    if not connected:
        tensor = slot.group.tensor_class(slot)
    else:
        plain = not (transforms_active() or is_functorch_wrapped(deferred.hidden))
        connect: Any = _connect if plain else _Connect.apply
        tensor = connect(slot, deferred.hidden, *deferred.weights)
    slot.group.members.append(weakref.ref(tensor))
    return tensor


def real_tensor(value: Any) -> Any:
    """The real logits if ``value`` is lazy, else ``value`` itself."""
    if not isinstance(value, LazyTensor):
        return value
    slot = value._slot
    if slot.cached is None:
        slot.group.materialize()
    elif slot.own and not has_own_node(value):  # a Function marked it as written
        raise RuntimeError(WRITTEN_SINCE)
    else:
        _swap(value, slot)  # what saved it may be freed by now
    return slot.cached if isinstance(value, LazyTensor) else value


def is_lazy(value: Any) -> bool:
    """Whether a value is a lazy tensor that is not materialized."""
    if not isinstance(value, LazyTensor):
        return False
    slot = value._slot
    if slot.cached is not None or slot.exposed is not None or not has_own_node(value):
        return False
    return not (slot.bound and torch.is_grad_enabled())


def values_of(value: Any) -> Any:
    """Real values without history, for code below autograd."""
    if not isinstance(value, LazyTensor):
        return value
    slot = value._slot
    slot.group.consumed = True
    if slot.exposed is not None:
        return slot.exposed
    if slot.cached is None:
        with torch.no_grad():
            return slot.deferred.compute()
    return slot.cached.detach().as_subclass(Tensor)
