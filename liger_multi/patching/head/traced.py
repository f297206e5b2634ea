"""Lazy logits in compiled graphs: an ordinary object, since compilers trace no such subclass.

:class:`TracedLogits` wraps deferred logits. Operations that can be recorded return another one,
``F.cross_entropy`` becomes the fused loss, and everything else computes the real logits. An
``autograd.Function`` takes no gradient of such an object, so :func:`arguments_of_functions` detects
one among its arguments, which raises. :func:`real_logits` is the public way to real logits.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_multi._torch_private import (
    constant_in_graphs,
    disabled,
    function_apply_code,
    instruction_translator,
)
from liger_multi.patching.head import steps
from liger_multi.patching.head.deferred import (
    GRADIENT_BY_LOGITS,
    HOOKS,
    OBJECT_IN_FUNCTION,
    PRODUCT,
    DeferredLogits,
    asked_for,
    refuse_late_hook,
)
from liger_multi.patching.head.loss import CrossEntropyCall, fused, on_real
from liger_multi.patching.head.protocol import LazyLogits, head_of
from liger_multi.patching.head.steps import RECORDED
from liger_multi.patching.head.storage import real_tensor
from liger_multi.patching.report import warn_once

_METHODS = ("forward", "setup_context")


def arguments_of_functions(of_type: type) -> Iterator[Any]:
    """Arguments of type ``of_type`` of all ``autograd.Function`` that run in this thread."""
    look: Callable[[FrameType, type], list[Any]] = disabled(arguments_of_a_forward)
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if function_apply_code is None:
            yield from look(frame, of_type)
        elif frame.f_code is function_apply_code:
            yield from (x for x in frame.f_locals.get("args", ()) if isinstance(x, of_type))
        frame = frame.f_back


def arguments_of_a_forward(frame: FrameType, of_type: type) -> list[Any]:
    """The same of one frame, if that is the forward of an ``autograd.Function``.

    ``Function.apply`` has no frame since PyTorch 2.14, where C++ calls forward.
    """
    names = inspect.getargs(frame.f_code)
    values = [frame.f_locals[n] for n in names.args if n in frame.f_locals]
    values.append(frame.f_locals.get(names.varargs or "", ()))
    elements = [x for value in values if type(value) is tuple for x in value]
    matching = [x for x in (*values, *elements) if isinstance(x, of_type)]
    return matching if matching and _is_forward(frame.f_code) else []


def _is_forward(code: CodeType) -> bool:
    classes: list[Any] = [torch.autograd.Function]
    while classes:
        function_class = classes.pop()
        classes += type.__subclasses__(function_class)
        if any(_code_of(vars(function_class).get(name)) is code for name in _METHODS):
            return True
    return False


def _code_of(method: Any) -> CodeType | None:
    method = getattr(method, "__func__", method)  # of a static or class method
    while hasattr(method, "func"):  # of a partial function
        method = method.func
    return getattr(method, "__code__", None)


_HOOKS = {hook.__name__: hook for hook in HOOKS}
_READ = {Tensor.softmax, torch.softmax, F.softmax, Tensor.exp, torch.exp}


class Shared:
    """The state of logits that share memory.

    Attributes:
        real: Whether real logits exist; all operations are PyTorch's from then on.
        consumed: Whether a result was computed without the logits.
    """

    def __init__(self) -> None:
        self.real = False
        self.consumed = False


class TracedLogits:
    """Lazy logits as an object; attributes that it lacks are those of the real logits.

    Args:
        deferred: How to compute them.
        origin: Logits that these are a view of.
        how: The method of the origin that returned these, with its arguments.
    """

    def __init__(
        self,
        deferred: DeferredLogits,
        origin: TracedLogits | None = None,
        how: tuple[str, tuple[Any, ...]] = ("", ()),
    ) -> None:
        self.deferred, self.origin, self.how = deferred, origin, how
        self.shared: Shared = Shared() if origin is None else origin.shared
        self.cached: Tensor | None = None

    def real(self) -> Tensor:
        """The real logits, computed at most once."""
        self._check()
        if self.cached is None:
            self.shared.real = True
            if torch.compiler.is_compiling() or not torch.is_inference_mode_enabled():
                self.cached = self._computed()
            else:  # a tensor that may be written outside of inference mode
                with torch.inference_mode(False):
                    self.cached = self._computed()
        return self.cached

    def _computed(self) -> Tensor:
        with torch.set_grad_enabled(self.deferred.grad):
            if self.origin is None:
                return self.deferred.compute()
            return getattr(self.origin.real(), self.how[0])(*self.how[1])  # type: ignore[no-any-return]

    def _check(self) -> None:
        """Refuse use within an autograd.Function, which takes no gradient of objects.

        Raises:
            RuntimeError: Such a forward is running with these logits.
        """
        if not self.deferred.grad:
            return
        if torch.compiler.is_compiling():
            refused = _tracing_a_function()
        else:
            refused = not torch.is_grad_enabled() and any(
                x is self for x in arguments_of_functions(TracedLogits)
            )
        if refused:
            raise RuntimeError(OBJECT_IN_FUNCTION)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record or fuse, else compute."""
        kwargs = kwargs or {}
        first = args[0] if args else None
        if func is F.cross_entropy:
            call = CrossEntropyCall(*args, **kwargs)
            if isinstance(call.input, TracedLogits):
                loss = call.input._loss(call)
                if loss is not None:
                    return loss
        elif func is torch.autograd.grad and any(_passed_by(x) for x in asked_for(*args, **kwargs)):
            raise RuntimeError(GRADIENT_BY_LOGITS)
        elif (
            func in RECORDED
            and func not in _READ
            and isinstance(first, TracedLogits)
            and not first.shared.real
        ):
            return first._step(func, *args[1:], **kwargs)
        exchanged = func is Tensor.matmul and not isinstance(first, TracedLogits)
        if exchanged and torch.compiler.is_compiling():  # logits @ w looks as w @ logits does
            raise RuntimeError(PRODUCT)
        return func(
            *[_real_value(a) for a in args], **{k: _real_value(v) for k, v in kwargs.items()}
        )

    def _loss(self, call: CrossEntropyCall) -> Tensor | None:
        self._check()
        loss = None if self._is_real() else fused(self.deferred, call)
        if loss is not None:
            self.shared.consumed = True
            return loss
        options = self.deferred.settings.on_real
        return None if options is None else on_real(self.real(), options, call)

    def as_head(self) -> dict[str, Any] | None:
        """As :meth:`LazyLogits.as_head`."""
        self._check()
        head = None if self._is_real() else head_of(self.deferred)
        self.shared.consumed |= head is not None
        return head

    def _is_real(self) -> bool:
        """Whether operations are PyTorch's: real logits exist, or this is a bound view."""
        return self.shared.real or (torch.is_grad_enabled() and self._is_bound())

    def _is_bound(self) -> bool:
        """Whether these are a view that was created under no_grad: it requires grad by its base."""
        base = self.origin
        if base is None or self.deferred.grad or self.how[0] == "detach":
            return False
        return base.deferred.grad or base._is_bound()

    def _step(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        if self._is_real():
            return func(self.real(), *args, **kwargs)
        deferred = self._deferred
        step = RECORDED[func](deferred, *args, **kwargs)
        if step is None:
            return func(self.real(), *args, **kwargs)
        if step is deferred:
            return self  # as PyTorch does, under no_grad as well
        if step.steps == deferred.steps:
            return type(self)(step)
        self.shared.consumed = True
        return type(self)(RECORDED[func](deferred.packed(), *args, **kwargs))  # type: ignore[arg-type]

    @property
    def _deferred(self) -> DeferredLogits:
        """The deferred logits for an operation now: without history under ``no_grad``."""
        self._check()
        graph = torch.is_grad_enabled() or not self.deferred.grad
        return self.deferred if graph else self.deferred.detached()

    def _rows(self, name: str, hidden: Any, copied: bool, *args: Any) -> Any:
        """The result of a method that selects or shapes rows."""
        if hidden is None:
            return getattr(self.real(), name)(*args)
        deferred = self._deferred.rows(hidden)
        if copied:
            self.shared.consumed = True
            return type(self)(deferred)
        return type(self)(deferred, self, (name, args))

    @property
    def shape(self) -> torch.Size:
        """Shape of the logits."""
        return self.deferred.shape

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the logits."""
        return self.deferred.dtype

    @property
    def device(self) -> torch.device:
        """Device of the logits."""
        return self.deferred.hidden.device

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return self.deferred.hidden.ndim

    def size(self, dim: int | None = None) -> Any:
        """Shape, or the length of one axis."""
        if dim is None:
            return self.shape
        last = dim in (-1, self.ndim - 1)
        return self.deferred.vocabulary if last else self.deferred.hidden.shape[dim]

    def dim(self) -> int:
        """Number of axes."""
        return self.deferred.hidden.ndim

    def detach(self) -> Any:
        """The same values, cut off from autograd."""
        if self._is_real():
            return self.real().detach()
        return type(self)(self.deferred.detached(), self, ("detach", ()))

    def view(self, *sizes: Any) -> Any:
        """Another shape of the rows."""
        return self._shaped("view", Tensor.view, False, sizes)

    def reshape(self, *sizes: Any) -> Any:
        """Another shape of the rows; a copy where there are gaps."""
        return self._shaped("reshape", Tensor.reshape, True, sizes)

    def _shaped(self, name: str, function: Any, may_copy: bool, sizes: Any) -> Any:
        if self._is_real():
            return getattr(self.real(), name)(*sizes)
        flat = sizes[0] if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)) else sizes
        deferred = self._deferred
        row_sizes = steps.sizes_of_rows(deferred.hidden, deferred.vocabulary, tuple(flat))
        if row_sizes is None:
            return getattr(self.real(), name)(*sizes)
        needs_no_copy = not may_copy or deferred.hidden.is_contiguous()
        copied = not needs_no_copy and not steps.is_view(deferred.hidden, row_sizes)
        return self._rows(name, function(deferred.hidden, row_sizes), copied, *sizes)

    def __getitem__(self, index: Any) -> Any:
        if self._is_real():
            return self.real()[index]
        items = index if isinstance(index, tuple) else (index,)
        copied = any(isinstance(item, Tensor) for item in items)
        return self._rows("__getitem__", steps.getitem(self._deferred.hidden, index), copied, index)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("deferred", "cached", "origin", "how", "shared"):
            raise AttributeError(name)
        if name in _HOOKS and self.shared.consumed:
            refuse_late_hook(_HOOKS[name], ())
        return getattr(self.real(), name)

    def __matmul__(self, other: Any) -> Tensor:
        return torch.matmul(self.real(), _real_value(other))

    def __rmatmul__(self, other: Any) -> Tensor:
        return torch.matmul(_real_value(other), self.real())

    def __deepcopy__(self, memo: Any) -> Tensor:
        return copy.deepcopy(self.real(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.real().__reduce_ex__(protocol)

    def __len__(self) -> int:
        return int(self.shape[0])

    def __iter__(self) -> Iterator[Any]:
        return iter([self[i] for i in range(self.shape[0])])

    def __repr__(self) -> str:
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype}, not computed)"


def _recorded(name: str) -> Any:
    def method(self: TracedLogits, *args: Any, **kwargs: Any) -> Any:
        return self._step(getattr(Tensor, name), *args, **kwargs)

    return method


for _name in ("float", "to", "contiguous", "tanh", "__mul__", "__rmul__", "__truediv__"):
    setattr(TracedLogits, _name, _recorded(_name))


def _method(name: str) -> Any:
    def method(self: TracedLogits, *args: Any) -> Any:
        return getattr(self.real(), name)(*[_real_value(o) for o in args])

    return method


_OPERATORS = (
    *("add", "radd", "sub", "rsub", "rtruediv", "pow", "rpow", "neg", "pos", "abs", "invert"),
    *("floordiv", "rfloordiv", "mod", "rmod"),
    *("and", "rand", "or", "ror", "xor", "rxor", "lshift", "rlshift", "rshift", "rrshift"),
    *("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor"),
    *("eq", "ne", "lt", "le", "gt", "ge", "contains", "setitem"),
    *("array", "bool", "int", "float", "complex", "index", "format", "dlpack", "dlpack_device"),
)
for _name in _OPERATORS:
    setattr(TracedLogits, f"__{_name}__", _method(f"__{_name}__"))


def _attribute(name: str) -> property:
    """An attribute of the real logits that can be assigned."""

    def get(self: TracedLogits) -> Any:
        return getattr(self.real(), name)

    def assign(self: TracedLogits, value: Any) -> None:
        setattr(self.real(), name, _real_value(value))

    return property(get, assign)


for _name in ("data", "grad", "requires_grad"):
    setattr(TracedLogits, _name, _attribute(_name))
TracedLogits.__hash__ = object.__hash__  # type: ignore[method-assign]


@constant_in_graphs
def _tracing_a_function() -> bool:
    """Whether the compiler is tracing the forward of an autograd.Function."""
    translator = instruction_translator()
    if translator is None:
        return False
    tracer: Any = translator.current_tx().output.current_tracer
    while tracer is not None:
        if tracer.source_target == "autograd.Function":
            return True
        tracer = tracer.parent
    return any(True for _ in arguments_of_functions(TracedLogits))


@constant_in_graphs
def loss_takes_tensors() -> bool:
    """Whether a function that is being traced mentions ``nn.CrossEntropyLoss``.

    For a loss that is constructed within a graph, the compiler calls ``F.cross_entropy`` itself, on
    tensors only.
    """
    translator = instruction_translator()
    if translator is None:
        return True
    loss: Any = torch.nn.CrossEntropyLoss
    tracing: Any = translator.current_tx().output.current_tx
    while tracing is not None:
        names = tracing.f_code.co_names
        if loss.__name__ in names or any(tracing.f_globals.get(n) is loss for n in names):
            return True
        tracing = tracing.parent
    return False


def _passed_by(value: Any) -> bool:
    """Whether a loss may have been computed without these logits."""
    return isinstance(value, TracedLogits) and (value.shared.consumed or not value.shared.real)


def _real_value(value: Any) -> Any:
    if isinstance(value, TracedLogits):
        return value.real()
    if isinstance(value, (list, tuple)) and any(isinstance(v, TracedLogits) for v in value):
        return type(value)(_real_value(v) for v in value)
    return value


class ReplicaLogits(TracedLogits):
    """Logits in a replica of ``nn.DataParallel``: for the loss there; they are not gathered."""

    def __new__(cls, deferred: Any, *args: Any) -> Any:
        """``gather`` calls the class with an iterator over gathered elements."""
        return super().__new__(cls) if isinstance(deferred, DeferredLogits) else MissingLogits()

    def __iter__(self) -> Iterator[Any]:
        if sys._getframe(1).f_globals.get("__name__") == "torch.nn.parallel.scatter_gather":
            return iter(())
        return super().__iter__()


class MissingLogits:
    """The output of ``nn.DataParallel`` in place of logits; reading an attribute raises."""

    def __init__(self) -> None:
        warn_once(
            "under nn.DataParallel a patched model returns its loss without logits while it "
            "trains; use "
            "DistributedDataParallel, or patch with fused_linear_cross_entropy=False, where the "
            "logits are needed",
            key="nn.DataParallel",
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise RuntimeError(
            f"no logits.{name}: under nn.DataParallel a patched model returns its loss without "
            "logits while it trains; "
            "patch with fused_linear_cross_entropy=False to keep them"
        )


# --- an ordinary tensor ---


def real_logits(logits: Any) -> Tensor:
    """Logits as an ordinary tensor with its autograd history.

    Use it if values must outlive a change of the weights, such as an optimizer step. Lazy logits
    are materialized: the result is the same object, and a later loss is PyTorch's.

    Raises:
        TypeError: ``logits`` is no tensor.
    """
    if isinstance(logits, LazyLogits):
        # as a function of tensors, at which a graph breaks
        return LazyLogits.__torch_function__(real_tensor, (LazyLogits,), (logits,))  # type: ignore[no-any-return]
    if isinstance(logits, TracedLogits):
        return logits.real()
    if isinstance(logits, Tensor):
        return logits
    raise TypeError(f"expected logits (a tensor), got {type(logits).__name__}")
