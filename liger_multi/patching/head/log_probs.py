"""Log-probabilities of tokens and entropies of logits that do not exist: one fused call.

Policy and preference losses need one number per row of the logits. Written as ``log_softmax`` and
``gather``, ``logsumexp``, or the sum of ``p * log(p)``, it is an output of
``fused_linear_log_prob``, whose row kernels hold no second tensor of the size of a chunk. The call
answers for all of them, and what it found is kept with the logits: log-probabilities and entropies
of the same rows take one pass over the vocabulary.

Entropies may come first, when nobody knows the tokens. The call then has targets that stand for
any, and log-probabilities come from the logits that it kept for its backward pass: the first
tokens that somebody asks for take the place of those targets.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_multi._torch_private import top_saved_tensor_hooks
from liger_multi.parameters import Job
from liger_multi.patching.head import reductions
from liger_multi.patching.head.deferred import DeferredLogits, Guard, Step
from liger_multi.patching.options import FusedOptions, run_bound

NOTHING = -(2**31)
"""A class id that no row has: every row counts."""

Steps = tuple[Step, ...]


# --- what is asked of logits ---


def gather(deferred: DeferredLogits, dim: Any, index: Tensor, *, sparse_grad: bool = False) -> Any:
    """``gather(-1, index)`` of one index a row, also after ``log_softmax``; more in chunks."""
    log_prob = None
    one = index.shape[-1:] == (1,) and index.dtype == torch.int64
    if one and reductions.along_classes(deferred, dim):
        with contextlib.suppress(IndexError):  # of no class: PyTorch says it in its own words
            log_prob = _token(deferred, index.squeeze(-1))
    if log_prob is None:
        return reductions.gather(deferred, dim, index, sparse_grad=sparse_grad)
    return log_prob.to(deferred.dtype).unsqueeze(-1)


def logsumexp(deferred: DeferredLogits, dim: Any, keepdim: bool = False) -> Any:
    """``logits.logsumexp(-1)``; that of something else in chunks of rows."""
    statistics = None
    if reductions.along_classes(deferred, dim):
        statistics = _answer(deferred, deferred.steps)
    if statistics is None:
        return reductions.logsumexp(deferred, dim, keepdim)
    own = statistics.lse.to(deferred.dtype, copy=True)  # what is kept is nobody's to write to
    return reductions.shaped(own.unsqueeze(-1), keepdim)


def total(
    deferred: DeferredLogits, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Any:
    """``(p * log(p)).sum(-1)``, also times a number; other sums in chunks of rows."""
    entropy = _entropy(deferred) if reductions.along_classes(deferred, dim) else None
    if entropy is None:
        return reductions.total(deferred, dim, keepdim, dtype=dtype)
    return reductions.shaped(entropy.to(dtype or deferred.dtype).unsqueeze(-1), keepdim)


REDUCTIONS: dict[Any, Callable[..., Any]] = {
    **reductions.REDUCTIONS,
    **dict.fromkeys((Tensor.sum, torch.sum), total),
    **dict.fromkeys((Tensor.logsumexp, torch.logsumexp, torch.special.logsumexp), logsumexp),
    **dict.fromkeys((Tensor.gather, torch.gather), gather),
}

# --- from the steps to outputs of the call ---


def _token(deferred: DeferredLogits, target: Tensor) -> Tensor | None:
    """The value at one class a row: a log-probability, or a logit as one and the normalizer."""
    before, name, factor = _ended(deferred.steps)
    if name == "p":
        return None
    statistics = _answer(deferred, before if name else deferred.steps, target)
    if statistics is None:
        return None
    if not name:
        return statistics.log_prob + statistics.lse
    return statistics.log_prob if factor == 1 else statistics.log_prob * factor


def _entropy(deferred: DeferredLogits) -> Tensor | None:
    """The sum of ``p * log(p)`` times a number; None where the steps make something else."""
    steps, factor = _factored(deferred.steps)
    if not steps or steps[-1][0] != "times":
        return None
    (before, name, one), (same, other_name, other) = _ended(steps[:-1]), _ended(steps[-1][1])
    if before != same or {name, other_name} != {"p", "log p"}:
        return None
    statistics = _answer(deferred, before)
    return None if statistics is None else statistics.entropy * (-factor * one * other)


def _factored(steps: Steps) -> tuple[Steps, float]:
    """The steps without the last products with numbers, and these numbers' product."""
    factor = 1.0
    while steps and steps[-1][0] == "mul":
        factor, steps = factor * steps[-1][1], steps[:-1]
    return steps, factor


def _ended(steps: Steps) -> tuple[Steps, str, float]:
    """The steps before probabilities or their logarithms, which of them it is, times what."""
    steps, factor = _factored(steps)
    names = tuple(name for name, _ in steps[-2:])
    if names == ("log_softmax", "exp"):
        return steps[:-2], "p", factor
    if names[-1:] == ("softmax",):
        return steps[:-1], "p", factor
    return steps[:-1], "log p" if names[-1:] == ("log_softmax",) else "", factor


def _curve(deferred: DeferredLogits, steps: Steps) -> tuple[float, float | None, float] | None:
    """Scale, softcap and the temperature after it; None if the steps are more than that."""
    temperature = 1.0
    while (epilogue := deferred.until(steps).epilogue) is None:
        name, value = steps[-1]
        if name == "to" and value.itemsize >= deferred.raw_dtype.itemsize:
            pass
        elif name in ("mul", "div") and value > 0:
            temperature = temperature * value if name == "div" else temperature / value
        else:
            return None
        steps = steps[:-1]
    return (*epilogue, temperature)


# --- the call, and what it found before ---


class Statistics(NamedTuple):
    """What one call finds of every row."""

    log_prob: Tensor
    entropy: Tensor
    lse: Tensor


class Known(NamedTuple):
    """What one call found of some rows.

    Attributes:
        hidden: The rows, kept so that their memory is not used again.
        curve: Scale, softcap and temperature of their logits.
        connected: Whether gradients may pass.
        statistics: The outputs.
        node: Of the graph, where it waits for the targets.
    """

    hidden: Tensor
    curve: tuple[float, float | None, float]
    connected: bool
    statistics: Statistics
    node: Any

    def of(self, hidden: Tensor) -> Statistics | None:
        """The outputs of ``hidden``, where these are all or some of the rows in their memory."""
        mine, width = self.hidden, hidden.shape[-1]
        if mine.dtype != hidden.dtype or mine.shape[-1] != width:
            return None
        apart = hidden.data_ptr() - mine.data_ptr()
        if not apart and mine.shape == hidden.shape and mine.stride() == hidden.stride():
            return self.statistics
        first, rest = divmod(apart, max(1, width * mine.element_size()))
        rows, count = mine.numel() // max(1, width), hidden.numel() // max(1, width)
        packed = mine.is_contiguous() and hidden.is_contiguous()
        if rest or not packed or first < 0 or first + count > rows:
            return None
        shape = hidden.shape[:-1]
        return Statistics._make(
            x.flatten()[first : first + count].view(shape) for x in self.statistics
        )


def _answer(
    deferred: DeferredLogits, before: Steps, target: Tensor | None = None
) -> Statistics | None:
    """The outputs for the logits after the steps ``before``; None where the call has others.

    Without a target, the log-probabilities are those of any class.
    """
    from liger_multi.reference.common.chunking import statistics_dtype

    curve, options = _curve(deferred, before), deferred.settings.fused
    if options is None or curve is None or deferred.sharded or deferred.scales:
        return None
    if deferred.dtype.itemsize > statistics_dtype(deferred.raw_dtype).itemsize:
        return None  # of more digits than the call has
    rows, device = deferred.hidden.shape[:-1], deferred.hidden.device
    if target is not None and (target.shape != rows or target.device != device):
        return None
    connected = deferred.grad and torch.is_grad_enabled()
    with deferred.mode():
        kept = _kept(deferred)
        if target is None:
            statistics = _before(kept, deferred.hidden, curve, connected)
        else:
            statistics = _of_tokens(kept, deferred.hidden, curve, target, connected)
        if statistics is None:
            known = _call(deferred, options, curve, target)
            kept[:], statistics = [*kept[-1:], known], known.statistics
    if connected:
        return statistics
    return Statistics._make(x.detach() for x in statistics)


def _kept(deferred: DeferredLogits) -> list[Known]:
    """What is kept with the logits.

    Nothing where saved tensors are packed by somebody: a checkpointed function has to save as many
    when it runs again.
    """
    guard, hooks = deferred.guard, top_saved_tensor_hooks(True)
    return guard.known if isinstance(guard, Guard) and hooks is None else []


def _before(
    kept: list[Known], hidden: Tensor, curve: tuple[float, float | None, float], connected: bool
) -> Statistics | None:
    for known in kept:
        if known.curve == curve and (known.connected or not connected):
            statistics = known.of(hidden)
            if statistics is not None:
                return statistics
    return None


class _Connected(torch.autograd.Function):
    """Log-probabilities of tokens, whose gradients are those of a call that had no targets yet."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, log_prob: Tensor) -> Tensor:
        """The log-probabilities."""
        return log_prob

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None]:
        """Gradients as they come."""
        return upstream[0], None


def _of_tokens(
    kept: list[Known],
    hidden: Tensor,
    curve: tuple[float, float | None, float],
    target: Tensor,
    connected: bool,
) -> Statistics | None:
    """From the logits that a call kept for its backward; None where there is no such call."""
    from liger_multi.reference.cross_entropy.rows import LogSumExp, Objective, scaled

    for place, known in enumerate(kept):
        saved: Any = ()
        with contextlib.suppress(RuntimeError):  # freed by a backward pass
            saved = getattr(known.node, "saved_tensors", ())
        if known.curve != curve or not saved or known.of(hidden) is not known.statistics:
            continue
        if connected and not known.connected:
            continue
        _, weight, stand_in, _, _, lse, lse_low, logits = saved
        inside = ((target >= 0) & (target < weight.shape[0])).flatten()
        if not logits.numel() or (target.device.type == "cpu" and not inside.all()):
            continue
        scale, cap, temperature = curve
        spec = Objective(NOTHING, 0.0, 0.0, cap and cap / temperature, scale / temperature)
        with torch.no_grad():
            label = torch.where(inside, target.flatten(), 0).unsqueeze(1)
            own = LogSumExp(lse, lse_low).below(scaled(logits.gather(1, label), spec)).squeeze(1)
            own = torch.where(inside, own, float("nan")).view(target.shape)
            if connected:
                stand_in.data.copy_(target.flatten())
        if not connected:
            return known.statistics._replace(log_prob=own)
        log_prob: Any = _Connected.apply(known.statistics.log_prob, own)  # type: ignore[no-untyped-call]
        statistics = known.statistics._replace(log_prob=log_prob)
        kept[place] = known._replace(statistics=statistics, node=None)
        return statistics
    return None


def _may_keep(deferred: DeferredLogits) -> bool:
    """Whether a call without gradients may run with them, which nobody around it sees."""
    watched = getattr(deferred.head, "_forward_pre_hooks", None)  # by sharding, for one
    plain = not watched and top_saved_tensor_hooks(True) is None
    return plain and not (deferred.hidden.is_inference() or torch.compiler.is_compiling())


def _call(
    deferred: DeferredLogits,
    options: FusedOptions,
    curve: tuple[float, float | None, float],
    target: Tensor | None,
) -> Known:
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
        rows = hidden.detach().requires_grad_()  # for which the call keeps the logits
    with torch.enable_grad() if rows is not hidden else contextlib.nullcontext():
        output = deferred.run(Job(run), rows)
    node = output.lse.grad_fn if waits and not torch.compiler.is_compiling() else None
    while node is not None and not type(node).__name__.startswith("fused_linear_log_prob"):
        node = next(iter(node.next_functions), (None,))[0]  # of views
    row_statistics = Statistics(output.log_prob, output.entropy, output.lse)
    return Known(hidden, curve, connected, row_statistics, node)
