"""Deferred logits: the hidden states, the head and the steps from which logits can be computed.

A :class:`DeferredLogits` is immutable. Row operations act on its hidden states, where autograd sees
them; elementwise operations are kept as steps. It gives the real logits, or the loss without them.

PyTorch's version counter says whether a tensor was written since it was recorded, but for one case:
fused optimizers (the default of the Hugging Face Trainer) write parameters without counting.
A hook after every optimizer step counts for the parameters that are watched, and notes autograd's
number of that moment for all: compiled graphs run no Python that could watch. The numbers are those
of one thread.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import CodeType, FrameType, FunctionType
from typing import Any, Final, cast

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from liger_multi._torch_private import (
    WithoutAutocast,
    is_any_autocast_enabled,
    next_sequence_nr,
)
from liger_multi.checks import autocast, autocast_dtype
from liger_multi.dispatch.config import use
from liger_multi.dispatch.resolve import mode_in_force
from liger_multi.parameters import Evaluated, Job
from liger_multi.patching.evidence.signature import is_infrastructure
from liger_multi.patching.options import HeadSettings
from liger_multi.patching.report import warn_once
from liger_multi.patching.swap import Patched, buried

# --- versions of parameters ---

# By ``id``: a parameter with a weak reference cannot be swapped, which is how ``Module.to`` moves
# DTensors. A later tensor with the same id is no trouble: both are compared with values of its own
# time, a count for equality and a number of autograd with a larger one.
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

    The order is that of autograd's numbers, so ``output`` needs a history.
    """
    number = None if output.grad_fn is None else output.grad_fn._sequence_nr()
    return number is not None and _last.get(id(parameter), -1) > number


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    number = next_sequence_nr()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                _last[id(parameter)] = number
                if id(parameter) in _counts:
                    _counts[id(parameter)] += 1


def version_of(tensor: Tensor) -> tuple[int, int]:
    """A value that changes when ``tensor`` is written."""
    return (-1 if tensor.is_inference() else tensor._version), _counts.get(id(tensor), 0)


# --- deferred logits ---

Step = tuple[str, Any]
"""An elementwise step: ("mul" | "div" | "add", number), ("tanh" | "exp" | "log", None), ("to" |
"softmax" | "log_softmax", dtype), or ("times" | "plus", steps): with these logits after others."""

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
    """Weight and bias of the forward pass, for jobs whose head no longer holds them."""

    def __init__(self, deferred: DeferredLogits) -> None:
        self.deferred = deferred
        self.weight: Tensor
        self.bias: Tensor | None
        self.weight, self.bias = deferred.weights[:2]  # type: ignore[assignment]

    def stock_forward(self, hidden: Tensor) -> Tensor:
        """The forward of a linear layer with its adapters; the call of one that is sharded."""
        if self.deferred.sharded:
            return self.deferred.head(hidden)  # type: ignore[no-any-return]
        return self.deferred.product(hidden, *self.deferred.weights)


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
        # weight, bias, and both factors of every low-rank adapter, whose scales are ``scales``
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
        """The deferred logits after one more elementwise step."""
        dtype = value if name in ("to", "softmax", "log_softmax") else self.dtype
        return self._with(self.hidden, dtype, (*self.steps, (name, value)), self.grad)

    def undone(self) -> DeferredLogits:
        """The deferred logits without its last step, which kept or widened the dtype."""
        return self._with(self.hidden, self.dtype, self.steps[:-1], self.grad)

    def until(self, steps: tuple[Step, ...]) -> DeferredLogits:
        """The deferred logits after the first of their steps only; their dtype is not known."""
        return self._with(self.hidden, self.dtype, steps, self.grad)

    def rows(self, hidden: Tensor) -> DeferredLogits:
        """The deferred logits of other rows."""
        return self._with(hidden, self.dtype, self.steps, self.grad)

    def detached(self) -> DeferredLogits:
        """The same values, cut off from autograd; the same deferred logits each time."""
        if self._detached is None:
            self._detached = self._with(self.hidden.detach(), self.dtype, self.steps, False)
        return self._detached

    def packed(self) -> DeferredLogits:
        """The same values on hidden states without gaps; the same deferred logits each time.

        The rows of hidden states lie in memory as those of the logits would, so that views of them
        tell which operations on logits would share memory. Results of elementwise operations have
        no gaps.
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

    def copy(self) -> DeferredLogits:
        """Equal deferred logits as another object."""
        return self._with(self.hidden, self.dtype, self.steps, self.grad)

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
        """``job`` with the weights of the forward pass.

        Through the head's call while it is ours and holds them, or a sharding library's hooks will
        gather them; with the recorded ones after an unpatch, a replacement, ``functional_call`` or
        a change of adapters.
        """
        weight = cast(Tensor, self.weights[0])
        if isinstance(self.head, Patched) and (
            self._held_by(self.head) or _gathered_again(self.head, weight)
        ):
            try:
                return getattr(self.head, "asked", self.head)(hidden, job)
            except TypeError:
                if isinstance(self.head, Patched):
                    raise
                # another thread took the patch away in between, and no other layer takes jobs
        if isinstance(self.head, Evaluated) and not torch.compiler.is_compiling():
            layer, freed = self.head.layer, not weight.untyped_storage().nbytes()
            if freed and isinstance(layer, Patched):  # a part of what was gathered
                return layer(hidden, job)
        return job.run(Recorded(self), hidden)

    def _held_by(self, head: Any) -> bool:
        """Whether the head has the weight, and the adapters that act, of the forward pass."""
        module_class = type(head)  # once: another thread may give the class back
        if not hasattr(module_class, "thin") or head.weight is not self.weights[0]:
            return False
        if "forward" in head.__dict__:
            return False  # somebody's, around ours, which has run; accelerate's hooks put one there
        thin, recorded = module_class.thin(head), self.weights[2:]
        if not thin and not recorded:
            return True
        same = len(thin) == len(recorded) and module_class.scales(head) == self.scales
        return same and all(a is b for a, b in zip(thin, recorded, strict=True))

    def product(
        self, hidden: Tensor, weight: Tensor | None, bias: Tensor | None, *thin: Tensor | None
    ) -> Tensor:
        """Raw logits of some rows, from tensors in the order of ``weights``."""
        from liger_multi.ops.linear import linear_of_mode

        logits = linear_of_mode(hidden, cast(Tensor, weight), bias)
        for scale, a, b in zip(self.scales, thin[::2], thin[1::2], strict=True):
            from liger_multi.ops import lora_update

            logits = lora_update(logits, hidden, cast(Tensor, a), cast(Tensor, b), scale=scale)
        return logits

    def compute(self) -> Tensor:
        """The real logits, differentiable where the deferred logits are."""
        with self.mode():
            logits = self.finish(self.run(Job(_stock_forward), self.hidden))
        return logits if self.grad else logits.detach()

    def finish(self, logits: Tensor) -> Tensor:
        """Apply the steps to raw logits."""
        return finished(logits, self.steps)

    def joined(self, name: str, other: DeferredLogits) -> DeferredLogits | None:
        """The deferred logits of ``times`` or ``plus`` another one of the same rows, else None."""
        same = other.hidden is self.hidden and other.weights[0] is self.weights[0]
        if not same or other.grad != self.grad or other.raw_dtype != self.raw_dtype:
            return None
        dtype = torch.promote_types(self.dtype, other.dtype)
        return self._with(self.hidden, dtype, (*self.steps, (name, other.steps)), self.grad)

    def mode(self) -> contextlib.AbstractContextManager[Any]:
        """Grad mode and autocast of the forward pass; checks that nothing was overwritten since."""
        if self.guard is None:
            return contextlib.nullcontext()
        if _tracing(self.guard):
            return traced_autocast(self.guard.device_type, self.guard.autocast_dtype)
        self.guard.check(self.head)
        return self.guard.entered(self.grad)

    def circumstances(self) -> contextlib.AbstractContextManager[None]:
        """Autocast of the forward pass, for a backward pass that computes again."""
        if self.guard is None or _tracing(self.guard):
            return contextlib.nullcontext()
        return self.guard.entered(True)

    @property
    def epilogue(self) -> tuple[float, float | None] | None:
        """``(logit_scale, softcap)`` when the steps are no more than that, else None."""
        dtype, names = self.raw_dtype, []
        for name, value in self.steps:
            if name != "to":
                names.append((name, value))
            elif value != dtype and value.itemsize <= dtype.itemsize:
                return None  # the loss would not round the logits down
            elif value == torch.float64 != dtype:
                return None  # it would not be computed in fp64
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
    own = getattr(head, "stock_forward", None)  # a compiler asks no method for its truth
    return (head.forward if own is None else own)(hidden)  # type: ignore[no-any-return]


def finished(raw: Tensor, steps: tuple[Step, ...]) -> Tensor:
    """Apply steps to logits, in the dtypes that the steps name whatever autocast says now."""
    if steps and is_any_autocast_enabled() and not torch.compiler.is_compiling():
        with WithoutAutocast():
            return finished(raw, steps)
    logits = raw
    for name, value in steps:
        if name in ("times", "plus"):
            other = finished(raw, value)
            logits = logits * other if name == "times" else logits + other
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
    (divide, by), (sinkhorn, _), (multiply, back) = last
    return (divide, sinkhorn, multiply) == ("div", "tanh", "mul") and by == back


_NOTHING = contextlib.nullcontext()


class _Circumstances:
    """Autocast of the head's forward, how equal bits had to be, which weights required grad."""

    def __init__(self, hidden: Tensor, weights: Iterable[Tensor]) -> None:
        device_type = hidden.device.type
        self.device_type = device_type
        self.autocast_dtype = autocast_dtype(device_type)
        self.strict = mode_in_force()
        self.trained = [(t, t.requires_grad) for t in weights]
        self.required = [required for _, required in self.trained]

    def entered(self, grad: bool) -> contextlib.AbstractContextManager[None]:
        """Grad mode, autocast and bits as in the forward pass; weights are frozen as they were.

        A loss right behind the head finds them so, and enters nothing: the contexts of PyTorch take
        longer than all that is asked here.
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
    """Autocast as it was, in a form that a compiler traces."""
    if dtype == autocast_dtype(device_type):
        return contextlib.nullcontext()
    return autocast(device_type, dtype)


class Guard(_Circumstances):
    """The circumstances of the head's forward that later use has to meet or restore.

    Args:
        head: The linear layer.
        hidden: What it got.
        settled: Whether nobody gathers the weights for a call and frees them after it, so that
            their memory stays where it is.
    """

    def __init__(self, head: Any, hidden: Tensor, settled: bool = True) -> None:
        weights = _parameters(head)
        super().__init__(hidden, weights.values())
        for tensor in weights.values():
            watch_version(tensor)
        self.weight: Tensor = weights["head's weights"]
        # name, tensor, version, and for weights that stay where they are the place of their values
        self.observed: list[tuple[str, Tensor, tuple[int, int], int | None]] = [
            ("hidden states", hidden, version_of(hidden), None)
        ]
        for name, tensor in weights.items():
            place = _place(tensor) if settled else None
            self.observed.append((name, tensor, version_of(tensor), place))
        self.known: list[Any] = []  # what was computed of the logits' rows

    def check(self, head: Any) -> None:
        """Raise when hidden states or the recorded weights were written since the forward pass.

        Where sharding libraries put the gathered and the sharded parameter in turns, one that is
        another object now is left alone.
        """
        if getattr(head, "merged", False):  # by PEFT, through .data
            raise RuntimeError(_stale("its head's adapters have been merged into the weights"))
        gathered = _gathered_again(head, self.weight)
        now = _parameters(head) if gathered else {}
        for name, tensor, version, place in self.observed:
            if gathered and now.get(name, tensor) is not tensor:
                continue
            if version_of(tensor) != version:
                raise RuntimeError(_stale(f"its {name} have been modified in place"))
            if not gathered and place is not None and _place(tensor) != place:
                raise RuntimeError(_stale(f"its {name} have been replaced through .data"))


class TracedGuard(_Circumstances):
    """The same for logits of a compiled graph, whose runs execute no Python of ours.

    What tells when a run was is the autograd node of its hidden states: nodes are numbered in the
    order in which they are made. So optimizer steps are noticed, other writes are not.
    """

    def __init__(self, weight: Tensor, hidden: Tensor) -> None:
        super().__init__(hidden, [weight])
        self.weight, self.hidden = weight, hidden

    def check(self, head: Any) -> None:
        """Raise when an optimizer has stepped the weight since the run."""
        if stepped_since(self.weight, self.hidden):
            raise RuntimeError(_stale("its head's weights have been modified in place"))


def _tracing(guard: Guard | TracedGuard) -> bool:
    return isinstance(guard, TracedGuard) and torch.compiler.is_compiling()


def _stale(what: str) -> str:
    return (
        f"these logits were not computed during the forward pass, and {what} since "
        "(an optimizer step does that), so they cannot be computed any more. Read the logits "
        "before the step, keep them with liger_multi.patching.real_logits(outputs.logits), or "
        "patch with fused_linear_cross_entropy=False"
    )


def _gathered_again(head: Any, weight: Tensor) -> bool:
    """Whether a sharding library puts the weight of the forward pass into the head's next call."""
    if not isinstance(head, Patched):
        return False
    weight_of_head: Any = head.weight
    return (
        buried(head)
        or hasattr(weight_of_head, "device_mesh")
        or weight.untyped_storage().nbytes() == 0
    )


def _place(tensor: Tensor) -> int | None:
    """Where the values of an ordinary tensor are."""
    plain = type(tensor) in (Tensor, torch.nn.Parameter)
    return tensor.data_ptr() if plain else None


def _parameters(head: Any) -> dict[str, Tensor]:
    """The parameters of a linear head, under the words that messages use."""
    parameters, bias = {"head's weights": head.weight}, head.bias
    if bias is not None:
        parameters["head's bias"] = bias
    if isinstance(head, Evaluated):  # which may be an original, or a part of one
        places = {t.untyped_storage()._cdata for t in parameters.values() if t.numel()}
        originals = [p for p in head.layer.parameters() if p.untyped_storage()._cdata in places]
        return parameters | {f"head's original weights ({i})": p for i, p in enumerate(originals)}
    thin = getattr(head, "thin", None)  # an adapter's factors
    for i, tensor in enumerate(thin() if thin else ()):
        parameters[f"head's adapters ({i})"] = tensor
    return parameters


# --- what lazy logits know about PyTorch's functions and hooks ---

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
"""Functions that are answered from shape and dtype alone."""

GRADIENT_BY_LOGITS = (
    "the gradient by logits that were not computed was asked for: the loss did not pass by them. "
    "Compute it on logits = liger_multi.patching.real_logits(outputs.logits), and ask for the "
    "gradient by these"
)
"""Why ``torch.autograd.grad`` refuses."""

OBJECT_IN_FUNCTION = (
    "the logits of a compiled model are no tensor, so an autograd.Function gives them no gradient; "
    "pass liger_multi.patching.real_logits(outputs.logits) to it"
)
"""Why logits of a compiled model refuse to be the input of an autograd.Function."""

PRODUCT = (
    "in a compiled function PyTorch does not tell which factor of @ the logits are; write "
    "torch.matmul(logits, w) or torch.matmul(w, logits)"
)
"""Why a product in a graph is refused."""

WRITTEN_BELOW = (
    "C++ makes a view of logits that were not computed, or has written to one; as_subclass and "
    "nn.Parameter do that. Pass liger_multi.patching.real_logits(outputs.logits)"
)
"""Why lazy logits refuse to be viewed below Python's function protocol."""

WRITTEN_SINCE = (
    "an autograd.Function got logits that were not computed, and they were modified in place while "
    "it holds them, or by itself; pass "
    "liger_multi.patching.real_logits(outputs.logits) to it"
)
"""Why a backward refuses."""


def asked_for(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    """What ``torch.autograd.grad`` is to differentiate by."""
    return inputs if isinstance(inputs, (tuple, list)) else (inputs,)


HOOKS: set[Any] = {Tensor.register_hook, Tensor.retain_grad}
"""What shows somebody the gradient by logits."""


def refuse_late_hook(func: Any, args: Sequence[Any]) -> None:
    """Refuse a hook on logits from which something was computed already without them.

    Sharding libraries put theirs on the loss as well, so they miss nothing.

    Raises:
        RuntimeError: It is somebody else's hook, which would see a part of the gradient, or none.
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
    """Say, once a line, that large logits are being computed whole."""
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
    """The function that asks, where PyTorch names the wrapper that now stands under its name.

    A function of PyTorch hands over what it finds under its own name. Where somebody's wrapper
    stands there, that is the wrapper, which has run already and would run a second time.
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
"""Frames between a function that asks and ours."""
_functions: dict[CodeType, Any] = {
    f.__code__: f for f in vars(torch.nn.functional).values() if isinstance(f, FunctionType)
}


def called(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
    """``function(*args)``; NotImplemented for None, and for arguments that it does not know."""
    known = _signatures.get(function)
    if known is None:
        known = _signatures[function] = _counted(inspect.signature(function))
    signature, least, most = known
    if kwargs or not least <= len(args) <= most:
        try:
            signature.bind(*args, **kwargs)
        except TypeError:
            return NotImplemented
    result = function(*args, **kwargs)
    return NotImplemented if result is None else result


def _counted(signature: inspect.Signature) -> tuple[inspect.Signature, int, float]:
    """A signature, and how few and how many positional arguments alone fit it for certain."""
    kinds = inspect.Parameter
    parameters = signature.parameters.values()
    named = [p for p in parameters if p.kind is kinds.POSITIONAL_OR_KEYWORD]
    least = sum(p.default is kinds.empty for p in named)
    several = any(p.kind is kinds.VAR_POSITIONAL for p in parameters)
    asks_more = any(p.kind is kinds.KEYWORD_ONLY and p.default is kinds.empty for p in parameters)
    return signature, least, -1 if asks_more else math.inf if several else len(named)


_signatures: dict[Callable[..., Any], tuple[inspect.Signature, int, float]] = {}


def recording() -> contextlib.AbstractContextManager[Any]:
    """Ordinary tensors with a version, also where the caller is in inference mode."""
    if torch.is_inference_mode_enabled():
        return torch.inference_mode(False)
    return contextlib.nullcontext()
