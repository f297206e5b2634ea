"""Log-probabilities of tokens and entropies of logits that do not exist: one fused call.

What policy and preference losses ask of logits is one number a row. Written as ``log_softmax`` and
``gather``, ``logsumexp``, or the sum of ``p * log(p)``, it is an output of
``fused_linear_log_prob``, whose row kernels hold no second tensor of the size of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from liger_multi.patching.lazy_logits import reductions
from liger_multi.patching.lazy_logits.deferred import DeferredLogits, Job, Step
from liger_multi.patching.lazy_logits.loss import run_bound

NOTHING = -(2**31)
"""A class id that no row has: every row counts."""

Steps = tuple[Step, ...]


# --- what is asked of logits ---


def gather(deferred: DeferredLogits, dim: Any, index: Tensor, *, sparse_grad: bool = False) -> Any:
    """``log_softmax(logits).gather(-1, index)`` of one index a row; others in chunks of rows."""
    before, name, factor = _ended(deferred.steps)
    one = index.shape[-1:] == (1,) and index.dtype == torch.int64
    if name == "log p" and one and reductions.along_classes(deferred, dim):
        found = _found(deferred, before, "log_prob", index.squeeze(-1))
        if found is not None:
            return (found * factor if factor != 1 else found).unsqueeze(-1)
    return reductions.gather(deferred, dim, index, sparse_grad=sparse_grad)


def logsumexp(deferred: DeferredLogits, dim: Any, keepdim: bool = False) -> Any:
    """``logits.logsumexp(-1)``; that of something else in chunks of rows."""
    found = None
    if reductions.along_classes(deferred, dim):
        found = _found(deferred, deferred.steps, "lse")
    if found is None:
        return reductions.logsumexp(deferred, dim, keepdim)
    return reductions.shaped(found.unsqueeze(-1), keepdim)


def total(
    deferred: DeferredLogits, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Any:
    """``(p * log(p)).sum(-1)``, also times a number; other sums in chunks of rows."""
    found = _entropy(deferred) if reductions.along_classes(deferred, dim) else None
    if found is None:
        return reductions.total(deferred, dim, keepdim, dtype=dtype)
    return reductions.shaped(found.to(dtype or found.dtype).unsqueeze(-1), keepdim)


REDUCTIONS: dict[Any, Callable[..., Any]] = {
    **reductions.REDUCTIONS,
    **dict.fromkeys((Tensor.sum, torch.sum), total),
    **dict.fromkeys((Tensor.logsumexp, torch.logsumexp, torch.special.logsumexp), logsumexp),
    **dict.fromkeys((Tensor.gather, torch.gather), gather),
}

# --- by one fused call ---


def _entropy(deferred: DeferredLogits) -> Tensor | None:
    """The sum of ``p * log(p)`` times a number; None where the steps make something else."""
    steps, factor = _factored(deferred.steps)
    if not steps or steps[-1][0] != "times":
        return None
    (before, name, one), (same, kind, other) = _ended(steps[:-1]), _ended(steps[-1][1])
    if before != same or {name, kind} != {"p", "log p"}:
        return None
    found = _found(deferred, before, "entropy")
    return None if found is None else found * (-factor * one * other)


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
    while (found := deferred.until(steps).epilogue) is None:
        name, value = steps[-1]
        if name == "to" and value.itemsize >= deferred.raw_dtype.itemsize:
            pass
        elif name in ("mul", "div") and value > 0:
            temperature = temperature * value if name == "div" else temperature / value
        else:
            return None
        steps = steps[:-1]
    return (*found, temperature)


def _found(
    deferred: DeferredLogits, before: Steps, output: str, target: Tensor | None = None
) -> Tensor | None:
    """One output of the fused call, in the dtype of ``deferred``."""
    from liger_multi.reference.common.chunking import statistics_dtype

    curve, options = _curve(deferred, before), deferred.settings.fused
    if options is None or curve is None or deferred.sharded or deferred.scales:
        return None
    if deferred.dtype.itemsize > statistics_dtype(deferred.raw_dtype).itemsize:
        return None  # of more digits than the call has
    rows = deferred.hidden.shape[:-1]
    if target is None:
        target = torch.zeros(rows, dtype=torch.int64, device=deferred.hidden.device)
    if target.shape != rows or target.device != deferred.hidden.device:
        return None
    scale, cap, temperature = curve

    def statistics(head: Any, hidden: Tensor) -> Any:
        from liger_multi.ops import fused_linear_log_prob

        return fused_linear_log_prob(
            hidden, head.weight, target, head.bias, temperature=temperature, softcap=cap,
            logit_scale=scale,
            ignore_index=NOTHING, chunk=options.chunk, accumulate=options.accumulate,
            compact=False, validate=options.validate, outputs=(output,),
        )  # fmt: skip

    def run(head: Any, hidden: Tensor) -> Any:
        return run_bound(options, ("fused_linear_log_prob",), statistics, head, hidden)

    with deferred.mode():
        made: Tensor = getattr(deferred.run(Job(run), deferred.hidden), output)
    made = made.to(deferred.dtype)
    return made if deferred.grad else made.detach()
