"""Logits that are computed when something needs them, and are a tensor to everybody else.

``LazyLogits`` has the shape, strides and dtype of the logits and no storage. What a handler of
:mod:`liger_multi.patching.head.handlers` answers needs no logits. Everything else materializes.
Code below Python's function protocol (collectives, ``autograd.Function``) is served by the dispatch
protocol.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from liger_multi._torch_private import (
    DYNAMO,
    DisableTorchFunctionSubclass,
    constant_in_graphs,
    frame_callback,
    tree_map,
)
from liger_multi.parameters import Job
from liger_multi.patching.head.deferred import DeferredLogits
from liger_multi.patching.head.handlers import HANDLERS, TABLES, joined
from liger_multi.patching.head.log_probs import REDUCTIONS
from liger_multi.patching.head.rules import HOOKS, METADATA, WRITTEN_BELOW, asking, refuse_late_hook
from liger_multi.patching.head.steps import JOINS
from liger_multi.patching.head.storage import (
    LazyTensor,
    check_unwritten,
    describes_itself,
    is_lazy,
    lazy_tensor,
    real_tensor,
    values_of,
)
from liger_multi.patching.options import run_bound


class LazyLogits(LazyTensor):
    """See the module's docstring; made by :func:`lazy_logits` only."""

    _becomes_real = True

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
        return func(*tree_map(values_of, args), **tree_map(values_of, kwargs or {}))

    def as_head(self) -> dict[str, Any] | None:
        """The arguments of a ``losses.Head`` that gives these logits; None if there are real ones.

        Its weight is a function, which runs a loss in the head's own call.
        """
        head = head_of(self._slot.deferred) if is_lazy(self) else None
        self._slot.group.consumed |= head is not None
        return head


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


def lazy_logits(deferred: DeferredLogits) -> LazyLogits:
    """Lazy logits, as a head returns them."""
    return cast(LazyLogits, lazy_tensor(deferred, tensor_class=LazyLogits))


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
        slot.exposed = values_of(args[0])
    return func(slot.exposed, *args[1:], **kwargs)


def _nobody_traces() -> bool:
    """Whether neither this frame is being compiled nor the ones that it calls will be."""
    if torch.compiler.is_compiling():
        return False
    return frame_callback is not None and frame_callback() is None


def _untraced() -> Callable[..., Any]:
    """:func:`_serve` for a process with a compiler.

    A compiled function that gets lazy logits from outside breaks its graph where it uses them.
    """
    _make_untraced()
    return _untraced_serve[0]


@constant_in_graphs
def _make_untraced() -> bool:
    """Make the function, also while Dynamo traces: it ignores functools.cache."""
    if not _untraced_serve:
        _untraced_serve.append(sys.modules[DYNAMO].disable(_serve))
    return True


_untraced_serve: list[Callable[..., Any]] = []


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
    if (pending and func is _GRAD) or (kept and describes_itself(first)):
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
    others = (*args[1:], *kwargs.values())
    if func in JOINS and len(args) == 2 and not kwargs and is_lazy(args[1]):
        return joined(func, *args)
    for other in others:
        if isinstance(other, LazyLogits):
            return NotImplemented
    for table, follow in TABLES:
        if func in table:
            return follow(func, first, args[1:], kwargs)
    return NotImplemented


_GRAD: Any = cast(Any, Tensor).grad.__get__
_AS_IT_CAME = {torch.ops.aten.view.default, torch.ops.aten.view_as.default}
