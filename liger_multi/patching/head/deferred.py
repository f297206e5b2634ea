"""Deferred logits: hidden states, a head, and the steps that turn its output into the logits.

A head creates a :class:`DeferredLogits`. Row operations on it act on the hidden states, where
autograd records them; elementwise operations are appended to its steps. :meth:`~DeferredLogits.run`
computes a loss through the head, and :meth:`~DeferredLogits.compute` the logits themselves. Objects
are immutable.

Both raise if a weight or the hidden states were written since the forward pass. PyTorch's version
counter tells that, except for fused optimizers (the default of the Hugging Face Trainer), which do
not count their writes. So a hook after every optimizer step counts for watched parameters. For
compiled graphs, which run no Python that could watch, it records autograd's sequence number at each
step; these numbers are per thread.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import CodeType, FrameType, FunctionType
from typing import Any, Final, NamedTuple, cast

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from liger_multi._torch_private import (
    DisableTorchFunctionSubclass,
    WithoutAutocast,
    is_any_autocast_enabled,
    next_sequence_nr,
)
from liger_multi.checks import autocast, autocast_dtype
from liger_multi.dispatch.config import use
from liger_multi.dispatch.resolve import mode_in_force
from liger_multi.modules.parameters import Evaluated, Job
from liger_multi.patching.evidence.signature import is_infrastructure
from liger_multi.patching.options import HeadSettings
from liger_multi.patching.report import warn_once
from liger_multi.patching.swap import Patched, buried

# --- versions of parameters ---

# By ``id``, since ``Module.to`` moves DTensors by swapping, which weak references prevent. A later
# tensor with the same id is harmless: it is compared with values from its own lifetime.
_counts: dict[int, int] = {}
_last: dict[int, int] = {}
_lock = threading.Lock()
_hooked = False


def count_optimizer_steps() -> None:
    """Register the hook, once."""
    global _hooked
    with _lock:
        if not _hooked:
            register_optimizer_step_post_hook(_after_step)
            _hooked = True


def watch_version(parameter: Tensor) -> None:
    """Count the optimizer steps that change ``parameter``."""
    if id(parameter) in _counts:
        return
    count_optimizer_steps()
    with _lock:
        _counts[id(parameter)] = 0


def stepped_since(parameter: Tensor, output: Tensor) -> bool:
    """Whether an optimizer has changed ``parameter`` since ``output`` was computed.

    Compares autograd's sequence numbers, so ``output`` must have a ``grad_fn``.
    """
    sequence_nr = None if output.grad_fn is None else output.grad_fn._sequence_nr()
    return sequence_nr is not None and _last.get(id(parameter), -1) > sequence_nr


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    sequence_nr = next_sequence_nr()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                _last[id(parameter)] = sequence_nr
                if id(parameter) in _counts:
                    _counts[id(parameter)] += 1


def version_of(tensor: Tensor) -> tuple[int, int]:
    """A value that changes when ``tensor`` is written."""
    return (-1 if tensor.is_inference() else tensor._version), _counts.get(id(tensor), 0)


# --- deferred logits ---

Step = tuple[str, Any]
"""An elementwise step: ("mul" | "div" | "add", number), ("tanh" | "exp" | "log", None), ("to" |
"softmax" | "log_softmax", dtype), or ("times" | "plus", steps) with the same logits after those
steps as the other operand."""

STEPS: Final[dict[str, Callable[[Tensor, Any], Tensor]]] = {
    "mul": lambda z, by: z * by,
    "div": lambda z, by: z / by,
    "add": lambda z, by: z + by,
    "tanh": lambda z, _: torch.tanh(z),
    "exp": lambda z, _: torch.exp(z),
    "log": lambda z, _: torch.log(z),
    "softmax": lambda z, dtype: torch.softmax(z, dim=-1, dtype=dtype),
    "to": lambda z, dtype: z.to(dtype),
    "log_softmax": lambda z, dtype: torch.log_softmax(z, dim=-1, dtype=dtype),
}


class Recorded:
    """Weight and bias of the forward pass, for jobs if the head has others by now."""

    def __init__(self, deferred: DeferredLogits) -> None:
        self.deferred = deferred
        self.weight: Tensor
        self.bias: Tensor | None
        self.weight, self.bias = deferred.weights[:2]  # type: ignore[assignment]

    def stock_forward(self, hidden: Tensor) -> Tensor:
        """The raw logits: of the weights with their adapters, or by a call of a sharded head."""
        if self.deferred.sharded:
            return self.deferred.head(hidden)  # type: ignore[no-any-return]
        return self.deferred.product(hidden, *self.deferred.weights)


class Answer(NamedTuple):
    """Values of some rows of logits after steps, at indices; see :meth:`DeferredLogits.answered`.

    The hidden states are views of the rows; the reference keeps their memory from being reused.
    """

    hidden: Tensor
    steps: tuple[Step, ...]
    indices: Tensor
    values: Tensor

    def covers(self, hidden: Tensor, index: Tensor) -> bool:
        """Whether the rows are the same ones, and few pairs of indices are to be compared."""
        hidden_of_answer = self.hidden
        few_pairs = self.indices.shape[-1] * index.shape[-1] <= 64
        same_layout = (hidden_of_answer.shape, hidden_of_answer.stride()) == (
            hidden.shape,
            hidden.stride(),
        )
        return few_pairs and same_layout and hidden_of_answer.data_ptr() == hidden.data_ptr()

    def repeat_in(self, index: Tensor, values: Tensor) -> None:
        """Write these values where others of the same rows have the same index."""
        with torch.no_grad():
            matches = index.unsqueeze(-1) == self.indices.unsqueeze(-2)
            repeated = self.values.gather(-1, matches.to(torch.uint8).argmax(-1))
            values.data.copy_(torch.where(matches.any(-1), repeated, values))

    def rows_of(self, hidden: Tensor) -> Tensor | None:
        """The numbers of the rows among those of ``hidden``; None if they are not all of them."""
        width, part = hidden.shape[-1], self.hidden
        distance = (part.data_ptr() - hidden.data_ptr()) // hidden.element_size()
        strides = part.stride()
        sizes = [(n - 1) * s for n, s in zip(part.shape, strides, strict=True)]
        if (
            not hidden.is_contiguous()
            or not part.numel()
            or (part.dtype, part.shape[-1], strides[-1]) != (hidden.dtype, width, 1)
            or any(s % width for s in (distance, *strides[:-1]))
            or not 0 <= distance <= distance + sum(sizes) < hidden.numel()
        ):
            return None
        numbers = torch.arange(hidden.numel() // width, device=hidden.device)
        steps = [s // width for s in strides[:-1]]
        return numbers.as_strided(part.shape[:-1], steps, distance // width)


class DeferredLogits:
    """Logits of ``head(hidden)`` after ``steps``."""

    def __init__(
        self,
        head: Any,
        weights: tuple[Tensor | None, ...],
        hidden: Tensor,
        settings: HeadSettings,
        raw_dtype: torch.dtype,
        grad: bool,
        guard: Guard | TracedGuard | None = None,
        dtype: torch.dtype | None = None,
        steps: tuple[Step, ...] = (),
        scales: tuple[float, ...] = (),
    ) -> None:
        self.head = head
        # weight, bias, and both matrices of every LoRA adapter; ``scales`` has their scales
        self.weights, self.scales = weights, scales
        self.hidden = hidden
        self.settings = settings
        self.raw_dtype = raw_dtype
        self.dtype = dtype or raw_dtype
        self.steps = steps
        self.grad = grad
        self.vocabulary: int = head.out_features
        self.guard = guard
        self._detached: DeferredLogits | None = None
        self._packed: DeferredLogits | None = None

    @property
    def shape(self) -> torch.Size:
        """Shape of the logits."""
        return torch.Size((*self.hidden.shape[:-1], self.vocabulary))

    @property
    def sharded(self) -> bool:
        """Whether the head has some of the classes, and other processes the others."""
        return hasattr(self.weights[0], "placements")

    @property
    def bytes(self) -> int:
        """Bytes of the logits."""
        return self.shape.numel() * self.dtype.itemsize

    def step(self, name: str, value: Any = None) -> DeferredLogits:
        """These logits after one more elementwise step."""
        dtype = value if name in ("to", "softmax", "log_softmax") else self.dtype
        return self._with(self.hidden, dtype, (*self.steps, (name, value)), self.grad)

    def after(self, steps: tuple[Step, ...]) -> DeferredLogits:
        """New deferred logits after other steps, which must result in the same dtype."""
        return self._with(self.hidden, self.dtype, steps, self.grad)

    def rows(self, hidden: Tensor) -> DeferredLogits:
        """The logits of other hidden states."""
        return self._with(hidden, self.dtype, self.steps, self.grad)

    def detached(self) -> DeferredLogits:
        """The same values without autograd history; one object for all calls."""
        if self._detached is None:
            self._detached = self._with(self.hidden.detach(), self.dtype, self.steps, False)
        return self._detached

    def packed(self) -> DeferredLogits:
        """The same values on dense hidden states; one object for all calls.

        Results of elementwise operations are dense. Hidden states have the memory layout that the
        logits would have, so their views tell which operations on logits share memory.
        """
        if is_dense(self.hidden):
            return self
        if self._packed is None:
            self._packed = self.rows(self.hidden.contiguous())
        return self._packed

    @property
    def strides(self) -> tuple[int, ...]:
        """Strides of the logits."""
        width = self.hidden.shape[-1]
        return (*[s // width * self.vocabulary for s in self.hidden.stride()[:-1]], 1)

    def _with(
        self, hidden: Tensor, dtype: torch.dtype, steps: tuple[Step, ...], grad: bool
    ) -> DeferredLogits:
        return DeferredLogits(
            self.head,
            self.weights,
            hidden,
            self.settings,
            self.raw_dtype,
            grad=grad,
            guard=self.guard,
            dtype=dtype,
            steps=steps,
            scales=self.scales,
        )

    def run(self, job: Job, hidden: Tensor) -> Any:
        """Run ``job`` with the weights of the forward pass.

        It runs in the head's call while the patched head has these weights, or a sharding library's
        hooks gather them. It runs with the recorded weights after an unpatch, a replacement of the
        weights, ``functional_call`` or a change of adapters.
        """
        weight = cast(Tensor, self.weights[0])
        if isinstance(self.head, Patched) and (
            self._weights_in(self.head) or _gathered_again(self.head, weight)
        ):
            try:
                return getattr(self.head, "run_job", self.head)(hidden, job)
            except TypeError:
                if isinstance(self.head, Patched):
                    raise
                # another thread has unpatched the head, which takes no jobs then
        if isinstance(self.head, Evaluated) and not torch.compiler.is_compiling():
            layer, freed = self.head.layer, not weight.untyped_storage().nbytes()
            if freed and isinstance(layer, Patched):  # the gathered weight has been freed
                return layer(hidden, job)
        return job.run(Recorded(self), hidden)

    def _weights_in(self, head: Any) -> bool:
        """Whether the head has the weight and the active adapters of the forward pass."""
        module_class = type(head)  # once: another thread may give the class back
        if not hasattr(module_class, "lora_factors") or head.weight is not self.weights[0]:
            return False
        if "forward" in head.__dict__:
            return False  # another forward around ours, such as accelerate's, which has run
        factors, recorded = module_class.lora_factors(head), self.weights[2:]
        if not factors and not recorded:
            return True
        same_count = len(factors) == len(recorded) and module_class.scales(head) == self.scales
        return same_count and all(a is b for a, b in zip(factors, recorded, strict=True))

    def product(
        self, hidden: Tensor, weight: Tensor | None, bias: Tensor | None, *factors: Tensor | None
    ) -> Tensor:
        """Raw logits of hidden states, from tensors in the order of ``weights``."""
        from liger_multi.ops.linear import linear_of_mode

        logits = linear_of_mode(hidden, cast(Tensor, weight), bias)
        for scale, a, b in zip(self.scales, factors[::2], factors[1::2], strict=True):
            from liger_multi.ops import lora_update

            logits = lora_update(logits, hidden, cast(Tensor, a), cast(Tensor, b), scale=scale)
        return logits

    def compute(self) -> Tensor:
        """The real logits, differentiable where the deferred logits are."""
        with self.mode():
            logits = self.with_answers(self.finish(self.run(Job(_stock_forward), self.hidden)))
        return logits if self.grad else logits.detach()

    def answered(self, index: Tensor, values: Tensor) -> None:
        """Keep values at indices ``(rows..., k)`` that were returned before the logits exist.

        They are rounded in their own way, and code compares them with the logits: the rank of a
        token, a filter by the k-th largest. So logits that are computed later get these values, and
        values of the same elements that were returned before are written into ``values``.
        """
        if isinstance(self.guard, Guard) and not self.sharded:
            for answer in self.guard.answers:
                if answer.steps == self.steps and answer.covers(self.hidden, index):
                    answer.repeat_in(index, values)
            pair = index.detach().clone(), values.detach().clone()  # which others may write
            self.guard.answers.append(Answer(self.hidden.detach(), self.steps, *pair))

    def with_answers(self, logits: Tensor) -> Tensor:
        """The real logits with the values that were returned before, written past autograd."""
        for answer in self.guard.answers if isinstance(self.guard, Guard) else ():
            rows = answer.rows_of(self.hidden) if answer.steps == self.steps else None
            if rows is None or not logits.is_contiguous():
                continue
            with torch.no_grad(), DisableTorchFunctionSubclass():
                flat = logits.data.view(-1, self.vocabulary)
                index = answer.indices.reshape(rows.numel(), -1)
                in_vocabulary = (index >= 0) & (index < self.vocabulary)
                index, rows = index.clamp(0, self.vocabulary - 1), rows.reshape(-1, 1)
                values = answer.values.reshape(index.shape).to(logits.dtype)
                flat[rows, index] = torch.where(in_vocabulary, values, flat[rows, index])
        return logits

    def finish(self, logits: Tensor) -> Tensor:
        """Apply the steps to raw logits."""
        return finished(logits, self.steps)

    def joined(self, name: str, other: DeferredLogits) -> DeferredLogits | None:
        """These logits times or plus other ones of the same rows; None if the rows differ."""
        same_rows = other.hidden is self.hidden and other.weights[0] is self.weights[0]
        if not same_rows or other.grad != self.grad or other.raw_dtype != self.raw_dtype:
            return None
        dtype = torch.promote_types(self.dtype, other.dtype)
        return self._with(self.hidden, dtype, (*self.steps, (name, other.steps)), self.grad)

    def mode(self) -> contextlib.AbstractContextManager[Any]:
        """Grad mode and autocast of the forward pass; raises if a tensor was written since."""
        if self.guard is None:
            return contextlib.nullcontext()
        if _tracing(self.guard):
            return traced_autocast(self.guard.device_type, self.guard.autocast_dtype)
        self.guard.check(self.head)
        return self.guard.context(self.grad)

    def circumstances(self) -> contextlib.AbstractContextManager[None]:
        """Autocast of the forward pass, for a backward pass that recomputes."""
        if self.guard is None or _tracing(self.guard):
            return contextlib.nullcontext()
        return self.guard.context(True)

    @property
    def epilogue(self) -> tuple[float, float | None] | None:
        """``(logit_scale, softcap)`` if the steps consist of both, else None."""
        dtype, names = self.raw_dtype, []
        for name, value in self.steps:
            if name != "to":
                names.append((name, value))
            elif value != dtype and value.itemsize <= dtype.itemsize:
                return None  # the loss would not round the logits down
            elif value == torch.float64 != dtype:
                return None  # the loss would not be computed in fp64
            else:
                dtype = value
        cap = None
        if len(names) >= 3 and _is_softcap(names[-3:]):
            cap = float(names[-1][1])
            names = names[:-3]
        scale = 1.0
        for name, value in names:
            if name not in ("mul", "div"):
                return None
            scale = scale * value if name == "mul" else scale / value
        return float(scale), cap


def _stock_forward(head: Any, hidden: Tensor) -> Tensor:
    forward = getattr(head, "stock_forward", None)  # compilers cannot test the truth of a method
    return (head.forward if forward is None else forward)(hidden)  # type: ignore[no-any-return]


def finished(raw: Tensor, steps: tuple[Step, ...]) -> Tensor:
    """Apply steps to logits, in the dtypes that the steps name and without autocast."""
    if steps and is_any_autocast_enabled() and not torch.compiler.is_compiling():
        with WithoutAutocast():
            return finished(raw, steps)
    logits = raw
    for name, value in steps:
        if name in ("times", "plus"):
            operand = finished(raw, value)
            logits = logits * operand if name == "times" else logits + operand
        else:
            logits = STEPS[name](logits, value)
    return logits


def is_dense(tensor: Tensor) -> bool:
    """Whether a tensor's elements fill their memory without gaps and overlaps, in any order."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected = expected * size
    return True


def _is_softcap(last: list[Step]) -> bool:
    (first, divisor), (second, _), (third, factor) = last
    return (first, second, third) == ("div", "tanh", "mul") and divisor == factor


_NOTHING = contextlib.nullcontext()


class _Circumstances:
    """Autocast, the deterministic mode and the trained weights at the head's forward."""

    def __init__(self, hidden: Tensor, weights: Iterable[Tensor]) -> None:
        device_type = hidden.device.type
        self.device_type = device_type
        self.autocast_dtype = autocast_dtype(device_type)
        self.strict = mode_in_force()
        self.trained = [(t, t.requires_grad) for t in weights]
        self.required = [required for _, required in self.trained]

    def context(self, grad: bool) -> contextlib.AbstractContextManager[None]:
        """A context with these settings, and gradients if ``grad``.

        It is empty if nothing has changed, as for a loss right after the head: entering contexts of
        PyTorch takes longer than these comparisons.
        """
        unchanged = (
            (grad or not torch.is_grad_enabled())
            and self.autocast_dtype == autocast_dtype(self.device_type)
            and (not self.strict or self.strict == mode_in_force())
            and [tensor.requires_grad for tensor, _ in self.trained] == self.required
        )
        return _NOTHING if unchanged else self._restored(grad)

    @contextlib.contextmanager
    def _restored(self, grad: bool) -> Iterator[None]:
        device_type, dtype = self.device_type, self.autocast_dtype
        with contextlib.ExitStack() as stack:
            stack.enter_context(autocast(device_type, dtype))
            if not grad:
                stack.enter_context(torch.no_grad())
            if self.strict and self.strict != mode_in_force():
                stack.enter_context(use(deterministic=True if self.strict != "rows" else "rows"))
            for tensor, required in self.trained:
                if tensor.requires_grad != required and tensor.is_leaf:
                    tensor.requires_grad_(required)
                    stack.callback(tensor.requires_grad_, not required)
            yield


def traced_autocast(
    device_type: str, dtype: torch.dtype | None
) -> contextlib.AbstractContextManager[Any]:
    """Autocast of the forward pass, in a form that compilers trace."""
    if dtype == autocast_dtype(device_type):
        return contextlib.nullcontext()
    return autocast(device_type, dtype)


class Guard(_Circumstances):
    """The state of the head's forward, which later use of the logits checks and restores.

    Args:
        head: The linear layer.
        hidden: Its input.
        settled: Whether weights keep their memory between calls: no library gathers and frees them.
    """

    def __init__(self, head: Any, hidden: Tensor, settled: bool = True) -> None:
        weights = _parameters(head)
        super().__init__(hidden, weights.values())
        for tensor in weights.values():
            watch_version(tensor)
        self.weight: Tensor = weights["head's weights"]
        # name, tensor, version, and for settled weights the address of their values
        self.observed: list[tuple[str, Tensor, tuple[int, int], int | None]] = [
            ("hidden states", hidden, version_of(hidden), None)
        ]
        for name, tensor in weights.items():
            address = _storage_address(tensor) if settled else None
            self.observed.append((name, tensor, version_of(tensor), address))
        self.known: list[Any] = []  # statistics that were computed of the logits' rows
        self.answers: list[Answer] = []

    def check(self, head: Any) -> None:
        """Raise if hidden states or recorded weights were written since the forward pass.

        Under libraries that alternate gathered and sharded parameters, weights that are other
        objects now are not checked.
        """
        if getattr(head, "merged", False):  # by PEFT, through .data
            raise RuntimeError(_stale("its head's adapters have been merged into the weights"))
        gathered = _gathered_again(head, self.weight)
        current = _parameters(head) if gathered else {}
        for name, tensor, version, address in self.observed:
            if gathered and current.get(name, tensor) is not tensor:
                continue
            if version_of(tensor) != version:
                raise RuntimeError(_stale(f"its {name} have been modified in place"))
            if not gathered and address is not None and _storage_address(tensor) != address:
                raise RuntimeError(_stale(f"its {name} have been replaced through .data"))


class TracedGuard(_Circumstances):
    """The same for logits of a compiled graph, which runs none of this Python code.

    The autograd node of the hidden states has a sequence number, which dates the run. So optimizer
    steps are detected, other writes are not.
    """

    def __init__(self, weight: Tensor, hidden: Tensor) -> None:
        super().__init__(hidden, [weight])
        self.weight, self.hidden = weight, hidden

    def check(self, head: Any) -> None:
        """Raise if an optimizer has changed the weight since the run."""
        if stepped_since(self.weight, self.hidden):
            raise RuntimeError(_stale("its head's weights have been modified in place"))


def _tracing(guard: Guard | TracedGuard) -> bool:
    return isinstance(guard, TracedGuard) and torch.compiler.is_compiling()


def _stale(change: str) -> str:
    return (
        f"these logits were not computed during the forward pass, and {change} since "
        "(an optimizer step does that), so they cannot be computed any more. Read the logits "
        "before the step, keep them with liger_multi.patching.real_logits(outputs.logits), or "
        "patch with fused_linear_cross_entropy=False"
    )


def _gathered_again(head: Any, weight: Tensor) -> bool:
    """Whether a sharding library gathers the weight again in the head's next call."""
    if not isinstance(head, Patched):
        return False
    weight_of_head: Any = head.weight
    return (
        buried(head)
        or hasattr(weight_of_head, "device_mesh")
        or weight.untyped_storage().nbytes() == 0
    )


def _storage_address(tensor: Tensor) -> int | None:
    """The address of an ordinary tensor's values; None for subclasses."""
    plain = type(tensor) in (Tensor, torch.nn.Parameter)
    return tensor.data_ptr() if plain else None


def _parameters(head: Any) -> dict[str, Tensor]:
    """The parameters of a linear head by their names in messages."""
    parameters, bias = {"head's weights": head.weight}, head.bias
    if bias is not None:
        parameters["head's bias"] = bias
    if isinstance(head, Evaluated):  # which may be an original, or a part of one
        storages = {t.untyped_storage()._cdata for t in parameters.values() if t.numel()}
        originals = [p for p in head.layer.parameters() if p.untyped_storage()._cdata in storages]
        return parameters | {f"head's original weights ({i})": p for i, p in enumerate(originals)}
    factors = getattr(head, "lora_factors", None)  # an adapter's factors
    for i, tensor in enumerate(factors() if factors else ()):
        parameters[f"head's adapters ({i})"] = tensor
    return parameters


# --- PyTorch's functions and hooks on lazy logits ---

_PROPERTIES = (
    "shape dtype device layout ndim requires_grad grad_fn is_leaf is_cuda is_cpu is_meta "
    "is_sparse is_quantized is_nested "
    "is_mkldnn is_xpu is_mps is_xla itemsize nbytes output_nr retains_grad names"
)
_METHODS = (
    "size dim ndimension numel nelement stride is_contiguous is_floating_point is_complex "
    "is_signed is_inference "
    "element_size get_device __len__ __hash__ is_conj is_neg has_names"
)
METADATA: set[Any] = {
    *(getattr(Tensor, name).__get__ for name in _PROPERTIES.split() if hasattr(Tensor, name)),
    *(getattr(Tensor, name) for name in _METHODS.split() if hasattr(Tensor, name)),
    *(torch.numel, torch.is_floating_point, torch.is_complex, torch.is_conj, torch.is_inference),
}
"""Functions that need only the shape and dtype of logits."""

GRADIENT_BY_LOGITS = (
    "the gradient by logits that were not computed was asked for: the loss did not pass by them. "
    "Compute it on logits = liger_multi.patching.real_logits(outputs.logits), and ask for the "
    "gradient by these"
)
"""The message of ``torch.autograd.grad``."""

OBJECT_IN_FUNCTION = (
    "the logits of a compiled model are no tensor, so an autograd.Function gives them no gradient; "
    "pass liger_multi.patching.real_logits(outputs.logits) to it"
)
"""The message for logits of a compiled model as the input of an autograd.Function."""

PRODUCT = (
    "in a compiled function PyTorch does not tell which factor of @ the logits are; write "
    "torch.matmul(logits, w) or torch.matmul(w, logits)"
)
"""The message for ``@`` in a graph."""

WRITTEN_BELOW = (
    "C++ makes a view of logits that were not computed, or has written to one; as_subclass and "
    "nn.Parameter do that. Pass liger_multi.patching.real_logits(outputs.logits)"
)
"""The message for views below Python's function protocol."""

WRITTEN_SINCE = (
    "an autograd.Function got logits that were not computed, and they were modified in place while "
    "it holds them, or by itself; pass "
    "liger_multi.patching.real_logits(outputs.logits) to it"
)
"""The message of a backward pass."""


def asked_for(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    """The inputs of a call of ``torch.autograd.grad``."""
    return inputs if isinstance(inputs, (tuple, list)) else (inputs,)


HOOKS: set[Any] = {Tensor.register_hook, Tensor.retain_grad}
"""Functions that expose the gradient by logits."""


def refuse_late_hook(func: Any, args: Sequence[Any]) -> None:
    """Refuse a hook on logits after a result was computed without them.

    Hooks of sharding libraries are accepted: they are added to the loss too.

    Raises:
        RuntimeError: Another hook, which would miss the gradient of that result.
    """
    if len(args) > 1 and is_infrastructure(args[1]):
        return
    raise RuntimeError(
        f"{func.__name__} puts a hook on logits from which something was computed already without "
        "them, such as the fused loss: that gradient does not pass by the logits. Put it on logits "
        "= liger_multi.patching.real_logits(outputs.logits) before the loss is computed from "
        "these, or patch with fused_linear_cross_entropy=False"
    )


def warn_above_budget(deferred: DeferredLogits) -> None:
    """Warn, once per line of code, that large logits are materialized."""
    fused = deferred.settings.fused
    if fused is not None and deferred.bytes > fused.materialize_bytes:
        warn_once(
            f"{{place}} needs the whole logits {tuple(deferred.shape)}, "
            f"{deferred.bytes / 2**20:.0f} MiB, which the fused loss had avoided. "
            "The loss itself, argmax, max, topk, gather, logsumexp and slices of "
            "rows do without; see materialize_bytes "
            "of fused_linear_cross_entropy to move the threshold"
        )


def asking(func: Any) -> Any:
    """The function of PyTorch that called the protocol, if a wrapper has replaced it.

    A function passes to the protocol what its module has under its name. If a user replaced that by
    a wrapper, this is the wrapper, which has run already and would run a second time.
    """
    if not isinstance(func, FunctionType) or _is_of_torch(func.__globals__):
        return func
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_NEAR):
        if frame is None or frame.f_code is torch.overrides.handle_torch_function.__code__:
            break
        frame = frame.f_back
    else:
        return func
    if frame is None or frame.f_back is None:
        return func
    code, names = frame.f_back.f_code, frame.f_back.f_globals
    if code is func.__code__ or code.co_freevars or not _is_of_torch(names):
        return func
    function = _functions.get(code)
    if function is None:
        function = _functions[code] = FunctionType(code, names)
    return function


def _is_of_torch(names: dict[str, Any]) -> bool:
    return str(names.get("__name__")).split(".")[0] == "torch"


_NEAR = 8
"""Most frames between a function of PyTorch and this code."""
_functions: dict[CodeType, Any] = {
    f.__code__: f for f in vars(torch.nn.functional).values() if isinstance(f, FunctionType)
}


def call_if_accepted(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
    """``function(*args)``; NotImplemented if it returns None or has other parameters."""
    signature, minimum, maximum = _signature_of(function)
    if kwargs or not minimum <= len(args) <= maximum:
        try:
            signature.bind(*args, **kwargs)
        except TypeError:
            return NotImplemented
    result = function(*args, **kwargs)
    return NotImplemented if result is None else result


@functools.cache
def _signature_of(function: Callable[..., Any]) -> tuple[inspect.Signature, int, float]:
    """A signature, and the least and the most positional arguments that fit it on their own."""
    signature = inspect.signature(function)
    parameters = signature.parameters.values()
    positional = [p for p in parameters if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    minimum = sum(p.default is inspect.Parameter.empty for p in positional)
    variadic = any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters)
    needs_keywords = any(
        p.kind is inspect.Parameter.KEYWORD_ONLY and p.default is inspect.Parameter.empty
        for p in parameters
    )
    return signature, minimum, -1 if needs_keywords else math.inf if variadic else len(positional)


def recording() -> contextlib.AbstractContextManager[Any]:
    """A context in which tensors have versions, also within inference mode."""
    if torch.is_inference_mode_enabled():
        return torch.inference_mode(False)
    return contextlib.nullcontext()
