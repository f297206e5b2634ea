"""The cross entropy of a patched head, without its logits or from them.

* :func:`fused` takes deferred logits and the arguments of ``F.cross_entropy``, and returns the loss
  of one fused call through the head, or None if only real logits can serve the call.
* :class:`LossLogits` is a tensor of real logits whose ``F.cross_entropy`` is the operator.
* :func:`follow_weight` serves ``F.linear_cross_entropy``, which takes the weight of a head.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from liger_multi import ops
from liger_multi._torch_private import DisableTorchFunctionSubclass, disabled, is_tracing
from liger_multi.checks import autocast_dtype
from liger_multi.dispatch.autograd import transforming
from liger_multi.modules.parameters import Job
from liger_multi.patching.evidence.signature import PLAIN
from liger_multi.patching.head.deferred import (
    GRADIENT_BY_LOGITS,
    HOOKS,
    DeferredLogits,
    asked_for,
    asking,
    refuse_late_hook,
)
from liger_multi.patching.options import FusedOptions, HeadSettings, LossOptions, run_bound
from liger_multi.patching.swap import lock


class CrossEntropyCall:
    """The arguments of a call ``F.cross_entropy(input, target, ...)``."""

    def __init__(
        self,
        input: Any,
        target: Any,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> None:
        self.input = input
        self.target = target
        self.weight = weight
        self.legacy = size_average is not None or reduce is not None
        self.ignore_index = ignore_index
        self.reduction = reduction
        self.label_smoothing = label_smoothing

    @property
    def plain(self) -> bool:
        """Whether logits are rows, targets are class ids, and no argument is deprecated."""
        return (
            not self.legacy
            and isinstance(self.target, Tensor)
            and self.target.dtype == torch.int64
            and self.target.ndim == 1
            and self.input.ndim == 2
            and self.target.shape[0] == self.input.size(0)
            and self.reduction in ("mean", "sum", "none")
        )

    def keywords(self, options: LossOptions, grad: bool) -> dict[str, Any]:
        """Keyword arguments of both operators."""
        return {
            "ignore_index": self.ignore_index,
            "label_smoothing": self.label_smoothing,
            "z_loss": options.z_loss if grad else 0.0,
            "reduction": self.reduction,
            "validate": options.validate,
        }


def fused(deferred: DeferredLogits, call: CrossEntropyCall) -> Tensor | None:
    """The loss without materialized logits, or None if it needs them."""
    loss = _fused(deferred, call)
    if loss is None:
        return None
    loss = _of_dtype(loss, deferred.dtype)
    return loss if deferred.grad else loss.detach()  # compilers trace no other detach


def _fused(deferred: DeferredLogits, call: CrossEntropyCall) -> Tensor | None:
    """The loss by ``fused_linear_cross_entropy``, or None for calls that it does not serve."""
    options, epilogue = deferred.settings.fused, deferred.epilogue
    if options is None or epilogue is None or not call.plain:
        return None
    grad = deferred.grad and torch.is_grad_enabled()
    if deferred.sharded:
        return _of_shards(deferred, call, epilogue, options.chunk, options.z_loss if grad else 0.0)
    if deferred.scales:
        return _through_adapters(deferred, call, options, call.keywords(options, grad))
    scale, cap = epilogue

    def loss(head: Any, hidden: Tensor) -> Any:
        return ops.fused_linear_cross_entropy(
            hidden,
            head.weight,
            call.target,
            head.bias,
            class_weight=call.weight,
            softcap=cap,
            logit_scale=scale,
            chunk=options.chunk,
            accumulate=options.accumulate,
            compact=options.compact,
            **call.keywords(options, grad),
        )

    def run(head: Any, hidden: Tensor) -> Any:
        return run_bound(options, ("fused_linear_cross_entropy",), loss, head, hidden)

    with deferred.mode():
        return deferred.run(Job(run), deferred.hidden)  # type: ignore[no-any-return]


def _of_dtype(loss: Tensor, logits: torch.dtype) -> Tensor:
    """A loss in the dtype of PyTorch's: that of the logits, and fp32 under autocast."""
    autocast = autocast_dtype(loss.device.type) is not None and logits != torch.float64
    dtype = torch.float32 if autocast else logits
    return loss if loss.dtype == dtype else loss.to(dtype)


def _of_shards(
    deferred: DeferredLogits,
    call: CrossEntropyCall,
    epilogue: tuple[float, float | None],
    chunk: int | str,
    z_loss: float,
) -> Tensor | None:
    """The loss of a head with a part of the classes; None for options that this loss lacks."""
    scale, cap = epilogue
    if call.weight is not None or z_loss or (call.label_smoothing and cap is not None):
        return None
    if hasattr(call.target, "placements"):
        return None  # the caller expects a DTensor

    def run(head: Any, hidden: Tensor) -> Any:
        from liger_multi.nn.vocab_parallel import vocab_parallel_fused_linear_cross_entropy

        return vocab_parallel_fused_linear_cross_entropy(
            hidden,
            head.weight.to_local(),
            call.target,
            head.weight.device_mesh.get_group(),
            vocabulary=deferred.vocabulary,
            bias=None if head.bias is None else head.bias.to_local(),
            ignore_index=call.ignore_index,
            label_smoothing=call.label_smoothing,
            logit_scale=scale,
            softcap=cap,
            reduction=call.reduction,
            chunk=chunk,
        )

    with deferred.mode():
        return deferred.run(Job(run), deferred.hidden)  # type: ignore[no-any-return]


def _through_adapters(
    deferred: DeferredLogits,
    call: CrossEntropyCall,
    options: FusedOptions,
    keywords: dict[str, Any],
) -> Tensor | None:
    """The loss of a head with adapters, by chunks of rows in forward and in backward.

    The fused operator would need the adapters merged into the weight, whose gradient is dense.
    """
    from liger_multi.ops._head import rows_and_budget
    from liger_multi.patching.head.reductions import by_rows
    from liger_multi.reference.common.chunking import chunk_rows

    if call.weight is not None:
        return None  # a mean is divided by the sum of weights
    reduction, target = keywords.pop("reduction"), call.target
    if options.compact and reduction != "none":
        rows = (target != call.ignore_index).nonzero().squeeze(1)
        deferred, target = deferred.rows(deferred.hidden[rows]), target[rows]

    def losses(logits: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
        by_row: Tensor = run_bound(
            options,
            ("cross_entropy",),
            lambda: ops.cross_entropy(logits, ids.squeeze(-1), reduction="none", **keywords),
        )
        return (by_row.unsqueeze(-1),)

    step, budget = rows_and_budget("fused_linear_cross_entropy", options.chunk)
    if not step:
        # a chunk has logits in two dtypes, and two gradients
        step = max(
            1, chunk_rows(target.numel(), deferred.hidden, deferred.vocabulary, 0, budget) // 4
        )
    by_token = by_rows(deferred, losses, target.unsqueeze(-1), step=step)[0].squeeze(-1)
    if reduction == "none":
        return by_token
    if reduction == "sum":
        return by_token.sum()
    count: Tensor = (target != call.ignore_index).sum().clamp(min=1)
    return by_token.sum() / count


def negative_log_likelihood(deferred: DeferredLogits, *args: Any, **kwargs: Any) -> Tensor | None:
    """``F.nll_loss(log_softmax(logits), ...)`` as a cross entropy; None for other inputs."""
    if not deferred.steps or deferred.steps[-1][0] != "log_softmax":
        return None
    logits = deferred.after(deferred.steps[:-1])
    return fused(logits, CrossEntropyCall(LogitsShape(logits), *args, **kwargs))


class LogitsShape:
    """The shape of lazy logits, for checks that bypass their function protocol."""

    def __init__(self, deferred: DeferredLogits) -> None:
        self.shape, self.ndim = deferred.shape, len(deferred.shape)

    def size(self, dim: int) -> int:
        """Length of an axis."""
        return self.shape[dim]


def on_real(logits: Tensor, options: LossOptions, call: CrossEntropyCall) -> Tensor | None:
    """The loss of real logits by the operator; None for calls that PyTorch must serve."""
    if not call.plain:
        return None
    keywords = call.keywords(options, torch.is_grad_enabled())

    def loss() -> Any:
        return ops.cross_entropy(logits, call.target, call.weight, **keywords)

    return _of_dtype(run_bound(options, ("cross_entropy",), loss), logits.dtype)


# --- real logits whose loss is the operator ---

# Whether materialized lazy logits swap places with the real tensor; else they refer to it. Up to
# PyTorch 2.9 a swap lost a reference, and an autograd.Function that had saved the logits read freed
# memory. This was not observed with 2.11 and 2.13.
SWAPS = torch.__version__ >= "2.11"

# Operations between a head and its loss, whose results are logits too.
_KEEP = {
    *(
        Tensor.__getitem__,
        Tensor.view,
        Tensor.reshape,
        Tensor.flatten,
        Tensor.contiguous,
        Tensor.float,
        Tensor.to,
    ),
    *(
        torch.reshape,
        torch.flatten,
        Tensor.mul,
        Tensor.__mul__,
        Tensor.__rmul__,
        torch.mul,
        Tensor.div,
        torch.div,
    ),
    *(
        Tensor.__truediv__,
        torch.true_divide,
        Tensor.tanh,
        torch.tanh,
        Tensor.squeeze,
        torch.squeeze,
    ),
    *(
        Tensor.add,
        Tensor.__add__,
        Tensor.__radd__,
        torch.add,
        Tensor.sub,
        Tensor.__sub__,
        torch.sub,
    ),
    *(Tensor.masked_fill, torch.masked_fill, Tensor.clamp, torch.clamp),
}
_UNWRAP = {
    *(Tensor.__reduce_ex__, Tensor.__deepcopy__, Tensor.__format__),
}


def loss_logits(logits: Tensor, settings: HeadSettings, grad: bool) -> Tensor:
    """Real logits, as :class:`LossLogits` if the settings ask for a loss other than PyTorch's."""
    options = settings.on_real
    if options is None or not grad or hasattr(logits, "placements"):
        return logits
    return LossLogits.wrap(logits, options)


def without_hooks(logits: Tensor) -> Tensor:
    """Real logits that refuse hooks, because a loss was computed without them."""
    if not logits.requires_grad or type(logits) not in (Tensor, LossLogits):
        return logits
    LossLogits.wrap(logits, getattr(logits, "_options", None))._late = True  # type: ignore[attr-defined]
    return logits


_CROSS_ENTROPY = F.cross_entropy


class LossLogits(Tensor):
    """A tensor with another ``F.cross_entropy``, and that may refuse hooks."""

    _options: LossOptions | None
    _late = False

    @staticmethod
    def wrap(logits: Tensor, options: LossOptions | None) -> Tensor:
        """Change the class of ``logits``.

        The tensor stays the same, since autograd refuses some in-place operations on views.
        """
        logits.__class__ = LossLogits
        logits._options = options  # type: ignore[attr-defined]
        return logits

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The operator for ``F.cross_entropy``; results of ``_KEEP`` keep the class.

        Runs between graphs: a compiler cannot change the class of a tensor.
        """
        return disabled(LossLogits._follow)(func, types, args, kwargs or {})

    @staticmethod
    def _follow(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if any(getattr(tensor_class, "_becomes_real", False) for tensor_class in types):
            return NotImplemented  # lazy logits among the arguments are materialized first
        func = asking(func)
        first = args[0] if args and isinstance(args[0], LossLogits) else None
        if func in HOOKS and first is not None and first._late:
            refuse_late_hook(func, args)
        if func is torch.autograd.grad and any(map(_is_late, asked_for(*args, **kwargs))):
            raise RuntimeError(GRADIENT_BY_LOGITS)
        with DisableTorchFunctionSubclass():
            if func is _CROSS_ENTROPY:
                loss = _loss(CrossEntropyCall(*args, **kwargs))
                if loss is not None:
                    return loss
            if func in _UNWRAP:
                args = tuple(_plain(a) for a in args)
            result = func(*args, **kwargs)
            if first is None or first._options is None or "out" in kwargs:
                return result
            if func in _KEEP and type(result) is Tensor:
                return LossLogits.wrap(result, first._options)
        return result


def _is_late(value: Any) -> bool:
    return isinstance(value, LossLogits) and value._late


def _loss(call: CrossEntropyCall) -> Tensor | None:
    options = call.input._options if isinstance(call.input, LossLogits) else None
    return None if options is None else on_real(_plain(call.input), options, call)


def _plain(value: Any) -> Any:
    return value.as_subclass(Tensor) if isinstance(value, LossLogits) else value


# --- ``F.linear_cross_entropy`` of a patched head's weight ---

# Since PyTorch 2.13, this function computes a loss from hidden states and a weight, without a call
# of the head. It is wrapped while a head is patched. The wrapper looks for the weight among patched
# heads, and calls PyTorch's function for other weights. Views of a whole weight count as the
# weight; :class:`torch.nn.LinearCrossEntropyLoss` passes one.

_MARK = "_liger_multi_looks_for_heads"
_heads: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_in_linear_loss: ContextVar[bool] = ContextVar("liger_multi_inside_linear_loss", default=False)

OutputDtype = Callable[[Tensor, Tensor], "torch.dtype | None"]
"""The dtype of the logits of hidden states and a weight."""


def follow_weight(head: nn.Module, output_dtype: OutputDtype) -> None:
    """Let ``F.linear_cross_entropy`` recognize the weight of a patched head."""
    with lock:
        _heads.add(head)
        stock = getattr(F, "linear_cross_entropy", None)
        if stock is None or hasattr(stock, _MARK):
            return

        @functools.wraps(stock)
        def linear_cross_entropy(
            input: Any, linear_weight: Any, target: Any, **options: Any
        ) -> Tensor:
            loss = None
            if not torch.compiler.is_compiling() and _heads and not _in_linear_loss.get():
                loss = _fused_linear(input, linear_weight, target, output_dtype, **options)
            return stock(input, linear_weight, target, **options) if loss is None else loss

        setattr(linear_cross_entropy, _MARK, linear_cross_entropy)
        F.linear_cross_entropy = linear_cross_entropy


def unfollow_weight(head: nn.Module) -> None:
    """Forget a head; the last one restores PyTorch's function, if the wrapper is still in place."""
    with lock:
        _heads.discard(head)
        wrapper: Any = getattr(F, "linear_cross_entropy", None)
        if getattr(wrapper, _MARK, False) is wrapper and not _heads:
            F.linear_cross_entropy = vars(wrapper)["__wrapped__"]


def _fused_linear(
    hidden: Any,
    linear_weight: Any,
    target: Any,
    output_dtype: OutputDtype,
    *,
    linear_bias: Any = None,
    weight: Any = None,
    ignore_index: int | None = None,
    options: Any = None,
    **loss_options: Any,
) -> Tensor | None:
    """The loss by the patched head with this weight, or None for PyTorch's function.

    Without ``options``, PyTorch 2.13 ignores rows only if ``ignore_index`` is -100.
    """
    tensors = [hidden, linear_weight, *(t for t in (linear_bias, weight) if t is not None)]
    if loss_options.keys() - {"reduction", "label_smoothing"}:
        return None
    if any(type(t) not in PLAIN for t in tensors) or linear_weight.ndim != 2 or hidden.ndim != 2:
        return None
    if (options is None and ignore_index not in (None, -100)) or is_tracing() or transforming():
        return None
    head = _head_of(linear_weight, linear_bias)
    dtype = None if head is None else output_dtype(hidden, linear_weight)
    if head is None or dtype is None or hidden.shape[-1] != linear_weight.shape[-1]:
        return None
    grad, settings = torch.is_grad_enabled(), type(head)._liger_multi_swap.settings
    parameters = (head._parameters["weight"], head._parameters.get("bias"))
    deferred = DeferredLogits(head, parameters, hidden, settings, dtype, grad)
    ignored = -100 if ignore_index is None else ignore_index
    call = CrossEntropyCall(
        LogitsShape(deferred), target, weight, ignore_index=ignored, **loss_options
    )
    token = _in_linear_loss.set(True)
    try:
        return fused(deferred, call)
    finally:
        _in_linear_loss.reset(token)


def _head_of(weight: Tensor, bias: Tensor | None) -> Any:
    """The patched head without adapters that has both tensors, or None."""
    with lock:
        heads = list(_heads)
    for head in heads:
        head_weight, head_bias = head._parameters.get("weight"), head._parameters.get("bias")
        if _is_parameter_or_view(weight, head_weight) and (
            _is_parameter_or_view(bias, head_bias) if bias is not None else head_bias is None
        ):
            patched = hasattr(type(head), "stock_forward") and not hasattr(head, "base_layer")
            return head if patched else None
    return None


def _is_parameter_or_view(tensor: Any, parameter: Tensor | None) -> bool:
    """Whether a tensor is a parameter, or a view of the whole of it."""
    if parameter is None or tensor is parameter:
        return parameter is not None
    same_layout = tensor.shape == parameter.shape and tensor.stride() == parameter.stride()
    return same_layout and tensor._base is parameter
