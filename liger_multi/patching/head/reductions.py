"""Differentiable reductions of lazy logits over the vocabulary, by chunks of rows.

:data:`REDUCTIONS` maps functions of PyTorch to functions of :class:`DeferredLogits`. These return
the reduction, or NotImplemented if it needs the whole logits. Only one chunk of logits exists at a
time. Backward computes each chunk again, and sums the gradient of the weight in fp32, so that
results do not depend on the chunk size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from liger_multi._torch_private import top_saved_tensor_hooks
from liger_multi.checks import autocast_dtype
from liger_multi.dispatch.autograd import first_derivatives_only
from liger_multi.modules.parameters import Job
from liger_multi.patching.head.deferred import DeferredLogits, Guard, Step, traced_autocast
from liger_multi.patching.options import FusedOptions, run_bound

CHUNK_BYTES = 64 * 2**20
"""Bytes of fp32 logits in a chunk, at least."""
DEVICE_BYTES, FREE_SHARE = 2**29, 32
"""Most bytes of a chunk on a device, and their share of its free memory (1 / 32). Each chunk costs
a pass over the weight and its gradient."""

RowFunction: TypeAlias = Callable[..., "tuple[Tensor, ...]"]


class _ByRows(torch.autograd.Function):
    """``function(finish(linear(hidden)), *extras)`` for chunks of rows."""

    @staticmethod
    def forward(
        ctx: Any, plan: _Plan, hidden: Tensor, *weights: Tensor | None
    ) -> tuple[Tensor, ...]:
        ctx.plan = plan
        ctx.save_for_backward(hidden, *weights)
        results = plan.forward(hidden, *weights)
        ctx.mark_non_differentiable(*[r for r in results if not r.is_floating_point()])
        ctx.set_materialize_grads(False)
        return results

    @staticmethod
    @first_derivatives_only("patching (a reduction of logits)")
    def backward(
        ctx: Any, saved: tuple[Any, ...], *grads: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        return (None, *ctx.plan.backward(grads, saved, ctx.needs_input_grad[1:]))


_by_rows: Any = _ByRows.apply
_TopK: Any = torch.return_types.topk


class _Plan:
    def __init__(
        self,
        deferred: DeferredLogits,
        function: RowFunction,
        extras: tuple[Tensor, ...],
        step: int = 0,
    ) -> None:
        self.deferred, self.function, self.extras = deferred, function, extras
        self.step = step or _rows_at_once(deferred)
        self.device_type = deferred.hidden.device.type
        self.autocast_dtype = autocast_dtype(self.device_type)  # the caller's

    def chunk(self, start: int, hidden: Tensor, *weights: Tensor | None) -> tuple[Tensor, ...]:
        rows = slice(start, start + self.step)
        logits = self.deferred.finish(self.deferred.product(hidden, *weights))
        # the head runs under autocast of the forward pass
        with traced_autocast(self.device_type, self.autocast_dtype):
            return self.function(logits, *(e[rows] for e in self.extras))

    def forward(self, hidden: Tensor, *weights: Tensor | None) -> tuple[Tensor, ...]:
        starts = range(0, max(1, hidden.shape[0]), self.step)
        parts = [self.chunk(i, hidden[i : i + self.step], *weights) for i in starts]
        return tuple(torch.cat(column) for column in zip(*parts, strict=True))

    def backward(
        self, grads: tuple[Tensor | None, ...], saved: tuple[Any, ...], needs: tuple[bool, ...]
    ) -> list[Tensor | None]:
        sums: list[Tensor | None] = [
            torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32)) if need else None
            for x, need in zip(saved, needs, strict=True)
        ]
        needed = [i for i, need in enumerate(needs) if need]
        for start in range(0, saved[0].shape[0], self.step):
            rows = slice(start, start + self.step)
            leaves: list[Any] = [
                x.detach().requires_grad_(n) if x is not None else None
                for x, n in zip(saved, needs, strict=True)
            ]
            leaves[0] = saved[0][rows].detach().requires_grad_(needs[0])
            with torch.enable_grad(), self.deferred.circumstances():
                outs = self.chunk(start, *leaves)
            pairs = [(o, g[rows]) for o, g in zip(outs, grads, strict=True) if g is not None]
            gradients = torch.autograd.grad(
                [o for o, _ in pairs],
                [leaves[i] for i in needed],
                [g for _, g in pairs],
                allow_unused=True,
            )
            for i, g in zip(needed, gradients, strict=True):
                total = sums[i] if i else (sums[0][rows] if sums[0] is not None else None)
                if g is not None and total is not None:
                    total += g
        return [s if s is None else s.to(x.dtype) for s, x in zip(sums, saved, strict=True)]


def _rows_at_once(deferred: DeferredLogits) -> int:
    """Rows of a chunk."""
    from liger_multi.reference.common.chunking import free_bytes

    device, free_memory = deferred.hidden.device, 0
    if device.type not in ("cpu", "meta") and not torch.compiler.is_compiling():
        free_memory = free_bytes(device)
    room = max(CHUNK_BYTES, min(DEVICE_BYTES, free_memory // FREE_SHARE))
    return max(1, room // (4 * deferred.vocabulary))


def by_rows(
    deferred: DeferredLogits, function: RowFunction, *extras: Tensor, step: int = 0
) -> list[Tensor]:
    """Results of ``function`` on chunks of the logits, each of shape (rows..., k).

    Args:
        deferred: The logits.
        function: From logits (n, V) and n rows of ``extras`` to tensors (n, k).
        extras: Tensors (rows..., k) that are split into the same chunks.
        step: Rows in a chunk; 0 takes as many as fit into 64 MiB, or 512 MiB on a device.
    """
    shape = deferred.hidden.shape[:-1]
    flat = deferred.rows(deferred.hidden.reshape(-1, deferred.hidden.shape[-1]))
    plan = _Plan(
        flat, function, tuple(e.reshape(flat.hidden.shape[0], e.shape[-1]) for e in extras), step
    )

    def run(head: Any, hidden: Tensor) -> tuple[Tensor, ...]:
        weights = (head.weight, head.bias, *flat.weights[2:])
        if torch.is_grad_enabled():
            return _by_rows(plan, hidden, *weights)  # type: ignore[no-any-return]
        return plan.forward(hidden, *weights)

    with flat.mode():
        results = flat.run(Job(run), flat.hidden)
    return [r.reshape(*shape, r.shape[-1]) for r in results]


def along_classes(deferred: DeferredLogits, dim: Any) -> bool:
    """Whether ``dim``, or the only element of ``dim``, is the last axis."""
    dim = dim[0] if isinstance(dim, (tuple, list)) and len(dim) == 1 else dim
    return (
        isinstance(dim, int) and not isinstance(dim, bool) and dim in (-1, deferred.hidden.ndim - 1)
    )


def shaped(result: Tensor, keepdim: bool) -> Tensor:
    """A result (rows..., 1), with or without its last axis."""
    return result if keepdim else result.squeeze(-1)


def argmax(deferred: DeferredLogits, dim: Any = None, keepdim: bool = False) -> Any:
    """``logits.argmax(-1)``."""
    if not along_classes(deferred, dim):
        return NotImplemented
    (indices,) = by_rows(deferred.detached(), lambda z: (z.argmax(-1, keepdim=True),))
    return shaped(indices, keepdim)


def maximum(deferred: DeferredLogits, dim: Any = None, keepdim: bool = False) -> Any:
    """``logits.max(-1)``: values and indices."""
    if not along_classes(deferred, dim):
        return NotImplemented
    values, indices = by_rows(deferred, lambda z: tuple(z.max(-1, keepdim=True)))
    deferred.answered(indices, values)
    return torch.return_types.max((shaped(values, keepdim), shaped(indices, keepdim)))


def amax(deferred: DeferredLogits, dim: Any = (), keepdim: bool = False) -> Any:
    """``logits.amax(-1)``."""
    if not along_classes(deferred, dim):
        return NotImplemented
    values, indices = by_rows(
        deferred, lambda z: (z.amax(-1, keepdim=True), z.argmax(-1, keepdim=True))
    )
    deferred.answered(indices, values)
    return shaped(values, keepdim)


def topk(
    deferred: DeferredLogits, k: int, dim: Any = -1, largest: bool = True, sorted: bool = True
) -> Any:
    """``logits.topk(k)``."""
    if not along_classes(deferred, dim):
        return NotImplemented
    values, indices = by_rows(deferred, lambda z: tuple(z.topk(k, -1, largest, sorted)))
    deferred.answered(indices, values)
    return _TopK((values, indices))


def mean(
    deferred: DeferredLogits, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Any:
    """``logits.mean(-1)``."""
    if not along_classes(deferred, dim):
        return NotImplemented
    means = by_rows(deferred, lambda z: (z.mean(-1, keepdim=True, dtype=dtype),))[0]
    return shaped(means, keepdim)


# --- log-probabilities of tokens and entropies: one fused call ---

# Policy and preference losses need one number per row of the logits: ``log_softmax`` with
# ``gather``, ``logsumexp``, or the sum of ``p * log(p)``. All three are outputs of
# ``fused_linear_log_prob``. The outputs of a call are cached with the logits, so log-probabilities
# and entropies of the same rows take one pass over the vocabulary.
#
# If entropies are asked for first, the tokens are not known yet. The call then has placeholder
# targets. Later log-probabilities come from the logits that it saved for backward, and the first
# tokens that are asked for replace the placeholders.

NOTHING = -(2**31)
"""An ``ignore_index`` that no target has."""

Steps = tuple[Step, ...]


def gather(deferred: DeferredLogits, dim: Any, index: Tensor, *, sparse_grad: bool = False) -> Any:
    """``gather(-1, index)``: fused for one index per row, also after ``log_softmax``."""
    if not along_classes(deferred, dim):
        return NotImplemented
    log_prob = None
    if index.shape[-1:] == (1,) and index.dtype == torch.int64:
        with contextlib.suppress(IndexError):  # out of range: PyTorch raises its own error
            log_prob = _token(deferred, index.squeeze(-1))
    if log_prob is not None:
        values = log_prob.to(deferred.dtype).unsqueeze(-1)
    elif index.shape[:-1] == deferred.hidden.shape[:-1]:
        values = by_rows(deferred, lambda z, i: (z.gather(-1, i),), index)[0]
    else:
        return NotImplemented
    deferred.answered(index, values)
    return values


def logsumexp(deferred: DeferredLogits, dim: Any, keepdim: bool = False) -> Any:
    """``logits.logsumexp(-1)``: fused, or by chunks of rows after other steps."""
    if not along_classes(deferred, dim):
        return NotImplemented
    statistics = _answer(deferred, deferred.steps)
    if statistics is None:
        return shaped(by_rows(deferred, lambda z: (z.logsumexp(-1, keepdim=True),))[0], keepdim)
    lse = statistics.lse.to(deferred.dtype, copy=True)  # the cached one must not be written
    return shaped(lse.unsqueeze(-1), keepdim)


def total(
    deferred: DeferredLogits, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Any:
    """``(p * log(p)).sum(-1)``, also scaled: fused; other sums by chunks of rows."""
    if not along_classes(deferred, dim):
        return NotImplemented
    entropy = _entropy(deferred)
    if entropy is None:
        sums = by_rows(deferred, lambda z: (z.sum(-1, keepdim=True, dtype=dtype),))[0]
    else:
        sums = entropy.to(dtype or deferred.dtype).unsqueeze(-1)
    return shaped(sums, keepdim)


REDUCTIONS: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((Tensor.argmax, torch.argmax), argmax),
    **dict.fromkeys((Tensor.max, torch.max), maximum),
    **dict.fromkeys((Tensor.amax, torch.amax), amax),
    **dict.fromkeys((Tensor.mean, torch.mean), mean),
    **dict.fromkeys((Tensor.topk, torch.topk), topk),
    **dict.fromkeys((Tensor.sum, torch.sum), total),
    **dict.fromkeys((Tensor.logsumexp, torch.logsumexp, torch.special.logsumexp), logsumexp),
    **dict.fromkeys((Tensor.gather, torch.gather), gather),
}

# --- steps as outputs of the fused call ---


def _token(deferred: DeferredLogits, target: Tensor) -> Tensor | None:
    """The value at one class per row: a log-probability, or a logit as its sum with ``lse``."""
    steps, name, factor = _split_softmax(deferred.steps)
    if name == "p":
        return None
    statistics = _answer(deferred, steps if name else deferred.steps, target)
    if statistics is None:
        return None
    if not name:
        return statistics.log_prob + statistics.lse
    return statistics.log_prob if factor == 1 else statistics.log_prob * factor


def _entropy(deferred: DeferredLogits) -> Tensor | None:
    """The sum of ``p * log(p)`` times a number; None for other steps."""
    steps, factor = _factored(deferred.steps)
    if not steps or steps[-1][0] != "times":
        return None
    (first_steps, name, first_factor), (second_steps, other_name, second_factor) = (
        _split_softmax(steps[:-1]),
        _split_softmax(steps[-1][1]),
    )
    if first_steps != second_steps or {name, other_name} != {"p", "log p"}:
        return None
    statistics = _answer(deferred, first_steps)
    return (
        None
        if statistics is None
        else statistics.entropy * (-factor * first_factor * second_factor)
    )


def _factored(steps: Steps) -> tuple[Steps, float]:
    """The steps without the last multiplications by numbers, and the product of these."""
    factor = 1.0
    while steps and steps[-1][0] == "mul":
        factor, steps = factor * steps[-1][1], steps[:-1]
    return steps, factor


def _split_softmax(steps: Steps) -> tuple[Steps, str, float]:
    """The steps before a softmax or log_softmax, "p", "log p" or "", and a factor on that."""
    steps, factor = _factored(steps)
    names = tuple(name for name, _ in steps[-2:])
    if names == ("log_softmax", "exp"):
        return steps[:-2], "p", factor
    if names[-1:] == ("softmax",):
        return steps[:-1], "p", factor
    return steps[:-1], "log p" if names[-1:] == ("log_softmax",) else "", factor


def _curve(deferred: DeferredLogits, steps: Steps) -> tuple[float, float | None, float] | None:
    """Scale, softcap and the temperature after it; None for other steps."""
    temperature = 1.0
    while (epilogue := deferred.after(steps).epilogue) is None:
        name, value = steps[-1]
        if name == "to" and value.itemsize >= deferred.raw_dtype.itemsize:
            pass
        elif name in ("mul", "div") and value > 0:
            temperature = temperature * value if name == "div" else temperature / value
        else:
            return None
        steps = steps[:-1]
    return (*epilogue, temperature)


# --- the fused call, and cached statistics ---


class Statistics(NamedTuple):
    """Statistics of every row, which one call computes."""

    log_prob: Tensor
    entropy: Tensor
    lse: Tensor


class CachedStatistics(NamedTuple):
    """The cached statistics of some rows.

    Attributes:
        hidden: The hidden states of the rows; the reference keeps their memory from being reused.
        curve: Scale, softcap and temperature of their logits.
        connected: Whether the statistics have gradients.
        statistics: The statistics.
        node: The autograd node of a call with placeholder targets.
    """

    hidden: Tensor
    curve: tuple[float, float | None, float]
    connected: bool
    statistics: Statistics
    node: Any

    def of(self, hidden: Tensor) -> Statistics | None:
        """The statistics of ``hidden``, if that is a contiguous part of the cached rows."""
        cached_rows, width = self.hidden, hidden.shape[-1]
        if cached_rows.dtype != hidden.dtype or cached_rows.shape[-1] != width:
            return None
        distance = hidden.data_ptr() - cached_rows.data_ptr()
        if (
            not distance
            and cached_rows.shape == hidden.shape
            and cached_rows.stride() == hidden.stride()
        ):
            return self.statistics
        first, remainder = divmod(distance, max(1, width * cached_rows.element_size()))
        rows, count = cached_rows.numel() // max(1, width), hidden.numel() // max(1, width)
        packed = cached_rows.is_contiguous() and hidden.is_contiguous()
        if remainder or not packed or first < 0 or first + count > rows:
            return None
        shape = hidden.shape[:-1]
        return Statistics._make(
            x.flatten()[first : first + count].view(shape) for x in self.statistics
        )


def _answer(
    deferred: DeferredLogits, steps: Steps, target: Tensor | None = None
) -> Statistics | None:
    """Statistics of the logits after ``steps``; None if the call does not have them.

    Without a target, log-probabilities are meaningless.
    """
    from liger_multi.reference.common.chunking import statistics_dtype

    curve, options = _curve(deferred, steps), deferred.settings.fused
    if options is None or curve is None or deferred.sharded or deferred.scales:
        return None
    if deferred.dtype.itemsize > statistics_dtype(deferred.raw_dtype).itemsize:
        return None  # with more digits than the call has
    rows, device = deferred.hidden.shape[:-1], deferred.hidden.device
    if target is not None and (target.shape != rows or target.device != device):
        return None
    connected = deferred.grad and torch.is_grad_enabled()
    with deferred.mode():
        cache = _cache_of(deferred)
        if target is None:
            statistics = _cached(cache, deferred.hidden, curve, connected)
        else:
            statistics = _of_tokens(cache, deferred.hidden, curve, target, connected)
        if statistics is None:
            entry = _call(deferred, options, curve, target)
            cache[:], statistics = [*cache[-1:], entry], entry.statistics
    if connected:
        return statistics
    return Statistics._make(x.detach() for x in statistics)


def _cache_of(deferred: DeferredLogits) -> list[CachedStatistics]:
    """The statistics that are cached with the logits.

    There is no cache under hooks on saved tensors: a checkpointed function must save equally many
    tensors when it runs again.
    """
    guard, hooks = deferred.guard, top_saved_tensor_hooks(True)
    return guard.known if isinstance(guard, Guard) and hooks is None else []


def _cached(
    cache: list[CachedStatistics],
    hidden: Tensor,
    curve: tuple[float, float | None, float],
    connected: bool,
) -> Statistics | None:
    for entry in cache:
        if entry.curve == curve and (entry.connected or not connected):
            statistics = entry.of(hidden)
            if statistics is not None:
                return statistics
    return None


class _Connected(torch.autograd.Function):
    """Log-probabilities of tokens with the gradients of a call that had placeholder targets."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, log_prob: Tensor) -> Tensor:
        """The log-probabilities."""
        return log_prob

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None]:
        """The upstream gradient, for the output of the call."""
        return upstream[0], None


def _of_tokens(
    cache: list[CachedStatistics],
    hidden: Tensor,
    curve: tuple[float, float | None, float],
    target: Tensor,
    connected: bool,
) -> Statistics | None:
    """Log-probabilities from the logits that a call saved for backward; None without one."""
    from liger_multi.reference.cross_entropy.rows import LogSumExp, Objective, scaled

    for index, entry in enumerate(cache):
        saved: Any = ()
        with contextlib.suppress(RuntimeError):  # freed by a backward pass
            saved = getattr(entry.node, "saved_tensors", ())
        if entry.curve != curve or not saved or entry.of(hidden) is not entry.statistics:
            continue
        if connected and not entry.connected:
            continue
        _, weight, placeholder, _, _, lse, lse_low, logits = saved
        in_vocabulary = ((target >= 0) & (target < weight.shape[0])).flatten()
        if not logits.numel() or (target.device.type == "cpu" and not in_vocabulary.all()):
            continue
        scale, cap, temperature = curve
        spec = Objective(NOTHING, 0.0, 0.0, cap and cap / temperature, scale / temperature)
        with torch.no_grad():
            label = torch.where(in_vocabulary, target.flatten(), 0).unsqueeze(1)
            log_probs = (
                LogSumExp(lse, lse_low).below(scaled(logits.gather(1, label), spec)).squeeze(1)
            )
            log_probs = torch.where(in_vocabulary, log_probs, float("nan")).view(target.shape)
            if connected:
                placeholder.data.copy_(target.flatten())
        if not connected:
            return entry.statistics._replace(log_prob=log_probs)
        log_prob: Any = _Connected.apply(entry.statistics.log_prob, log_probs)  # type: ignore[no-untyped-call]
        statistics = entry.statistics._replace(log_prob=log_prob)
        cache[index] = entry._replace(statistics=statistics, node=None)
        return statistics
    return None


def _may_keep(deferred: DeferredLogits) -> bool:
    """Whether a call under ``no_grad`` may run with gradients, without a visible difference."""
    watched = getattr(deferred.head, "_forward_pre_hooks", None)  # of sharding, for example
    plain = not watched and top_saved_tensor_hooks(True) is None
    inference = deferred.hidden.is_inference() or torch.is_inference_mode_enabled()
    return plain and not (inference or torch.compiler.is_compiling())


def _call(
    deferred: DeferredLogits,
    options: FusedOptions,
    curve: tuple[float, float | None, float],
    target: Tensor | None,
) -> CachedStatistics:
    """Log-probabilities, entropies and log-sum-exps of all rows, in one pass over the head."""
    hidden, waits = deferred.hidden, target is None
    if target is None:
        target = torch.zeros(hidden.shape[:-1], dtype=torch.int64, device=hidden.device)

    def statistics(head: Any, hidden: Tensor) -> Any:
        from liger_multi.ops import fused_linear_log_prob

        scale, cap, temperature = curve
        return fused_linear_log_prob(
            hidden,
            head.weight,
            target,
            head.bias,
            temperature=temperature,
            softcap=cap,
            logit_scale=scale,
            ignore_index=NOTHING,
            chunk=options.chunk,
            accumulate=options.accumulate,
            compact=False,
            validate=options.validate,
            outputs=("log_prob", "entropy", "lse"),
        )

    def run(head: Any, hidden: Tensor) -> Any:
        return run_bound(options, ("fused_linear_log_prob",), statistics, head, hidden)

    rows, connected = hidden, torch.is_grad_enabled()
    if waits and not connected and _may_keep(deferred):
        rows = hidden.detach().requires_grad_()  # so that the call saves its logits
    with torch.enable_grad() if rows is not hidden else contextlib.nullcontext():
        output = deferred.run(Job(run), rows)
    node = output.lse.grad_fn if waits and not torch.compiler.is_compiling() else None
    while node is not None and not type(node).__name__.startswith("fused_linear_log_prob"):
        node = next(iter(node.next_functions), (None,))[0]  # views
    row_statistics = Statistics(output.log_prob, output.entropy, output.lse)
    return CachedStatistics(hidden, curve, connected, row_statistics, node)
