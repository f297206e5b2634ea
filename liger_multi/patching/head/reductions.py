"""Reductions of every row over the vocabulary, a chunk of rows at a time and differentiable.

The logits of a chunk live while its reduction runs; backward computes them once more and sums the
gradient of the weight in fp32, so that the number of chunks does not show in it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from liger_multi.checks import autocast, autocast_dtype
from liger_multi.dispatch.double_backward import first_derivatives_only
from liger_multi.parameters import Job
from liger_multi.patching.head.deferred import DeferredLogits

CHUNK_BYTES = 64 * 2**20
"""Bytes of fp32 logits that a reduction may hold at a time, on a device with little memory."""
DEVICE_BYTES, FREE_SHARE = 2**29, 32
"""On another one, where every chunk costs a pass over the weight and its gradient: at most so many,
and this part of the free memory."""

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
        with self.called():
            return self.function(logits, *(e[rows] for e in self.extras))

    def called(self) -> contextlib.AbstractContextManager[Any]:
        """Autocast of the reduction's call; the head's was that of the forward pass."""
        device_type, dtype = self.device_type, self.autocast_dtype
        if dtype == autocast_dtype(device_type):
            return contextlib.nullcontext()
        return autocast(device_type, dtype)

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
        asked = [i for i, need in enumerate(needs) if need]
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
                [leaves[i] for i in asked],
                [g for _, g in pairs],
                allow_unused=True,
            )
            for i, g in zip(asked, gradients, strict=True):
                into = sums[i] if i else (sums[0][rows] if sums[0] is not None else None)
                if g is not None and into is not None:
                    into += g
        return [s if s is None else s.to(x.dtype) for s, x in zip(sums, saved, strict=True)]


def _rows_at_once(deferred: DeferredLogits) -> int:
    """Rows of a chunk."""
    from liger_multi.reference.common.chunking import free_bytes

    device, free = deferred.hidden.device, 0
    if device.type not in ("cpu", "meta") and not torch.compiler.is_compiling():
        free = free_bytes(device)
    room = max(CHUNK_BYTES, min(DEVICE_BYTES, free // FREE_SHARE))
    return max(1, room // (4 * deferred.vocabulary))


def by_rows(
    deferred: DeferredLogits, function: RowFunction, *extras: Tensor, step: int = 0
) -> list[Tensor]:
    """Results of ``function`` on the rows of the logits, each of shape (rows..., k).

    Args:
        deferred: The logits.
        function: From logits (n, V) and the rows of ``extras`` to tensors (n, k).
        extras: Tensors (rows..., k) that go along.
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
            outputs: tuple[Tensor, ...] = _by_rows(plan, hidden, *weights)
            return outputs
        return plan.forward(hidden, *weights)

    with flat.mode():
        results = flat.run(Job(run), flat.hidden)
    return [r.reshape(*shape, r.shape[-1]) for r in results]


def along_classes(deferred: DeferredLogits, dim: Any) -> bool:
    """Whether ``dim``, perhaps in a list, is the last axis."""
    dim = dim[0] if isinstance(dim, (tuple, list)) and len(dim) == 1 else dim
    return (
        isinstance(dim, int) and not isinstance(dim, bool) and dim in (-1, deferred.hidden.ndim - 1)
    )


def shaped(result: Tensor, keepdim: bool) -> Tensor:
    """The result (rows..., 1) as it was asked for."""
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
    return torch.return_types.max((shaped(values, keepdim), shaped(indices, keepdim)))


def amax(deferred: DeferredLogits, dim: Any = (), keepdim: bool = False) -> Any:
    """``logits.amax(-1)``."""
    if not along_classes(deferred, dim):
        return NotImplemented
    return shaped(by_rows(deferred, lambda z: (z.amax(-1, keepdim=True),))[0], keepdim)


def logsumexp(deferred: DeferredLogits, dim: Any, keepdim: bool = False) -> Any:
    """``logits.logsumexp(-1)``."""
    if not along_classes(deferred, dim):
        return NotImplemented
    return shaped(by_rows(deferred, lambda z: (z.logsumexp(-1, keepdim=True),))[0], keepdim)


def topk(
    deferred: DeferredLogits, k: int, dim: Any = -1, largest: bool = True, sorted: bool = True
) -> Any:
    """``logits.topk(k)``."""
    if not along_classes(deferred, dim):
        return NotImplemented
    return _TopK(by_rows(deferred, lambda z: tuple(z.topk(k, -1, largest, sorted))))


def gather(deferred: DeferredLogits, dim: Any, index: Tensor, *, sparse_grad: bool = False) -> Any:
    """``logits.gather(-1, index)`` with an index for every row; after ``log_softmax`` as well."""
    if not along_classes(deferred, dim) or index.shape[:-1] != deferred.hidden.shape[:-1]:
        return NotImplemented
    return by_rows(deferred, lambda z, i: (z.gather(-1, i),), index)[0]


def total(
    deferred: DeferredLogits, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Any:
    """``logits.sum(-1)``: of an entropy, or of probabilities."""
    if not along_classes(deferred, dim):
        return NotImplemented
    sums = by_rows(deferred, lambda z: (z.sum(-1, keepdim=True, dtype=dtype),))[0]
    return shaped(sums, keepdim)


def mean(
    deferred: DeferredLogits, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Any:
    """``logits.mean(-1)``."""
    if not along_classes(deferred, dim):
        return NotImplemented
    means = by_rows(deferred, lambda z: (z.mean(-1, keepdim=True, dtype=dtype),))[0]
    return shaped(means, keepdim)


REDUCTIONS: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((Tensor.argmax, torch.argmax), argmax),
    **dict.fromkeys((Tensor.max, torch.max), maximum),
    **dict.fromkeys((Tensor.amax, torch.amax), amax),
    **dict.fromkeys((Tensor.sum, torch.sum), total),
    **dict.fromkeys((Tensor.mean, torch.mean), mean),
    **dict.fromkeys((Tensor.logsumexp, torch.logsumexp, torch.special.logsumexp), logsumexp),
    **dict.fromkeys((Tensor.topk, torch.topk), topk),
    **dict.fromkeys((Tensor.gather, torch.gather), gather),
}
