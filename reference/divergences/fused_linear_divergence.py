"""Divergences of two linear heads without rows x vocabulary in memory.

The student's logits of a chunk become their gradient, beside which a few of the teacher's rows
stand at a time. A scalar loss computes its gradients in the forward pass, as of the sum over rows,
and divides them in backward; ``none`` computes the logits once more there.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from liger_multi.reference.common.chunking import MIN_ROWS, row_blocks
from liger_multi.reference.common.retry import retried
from liger_multi.reference.common.stored import linear_into, opened_if_small
from liger_multi.reference.cross_entropy.fused_linear import (
    Accumulator,
    Chunks,
    ChunkSpec,
    Gradients,
    scale_to,
)
from liger_multi.reference.cross_entropy.reduction import divide
from liger_multi.reference.cross_entropy.rows import Objective, Upstream, within_range
from liger_multi.reference.divergences.divergence import (
    DivergenceKernels,
    DivergenceSpec,
    DivergenceStats,
    divisor,
    reduced,
    spec_of,
)

# --- the loop over both heads ---

SHARE = 8  # rows of the student's logits for one of the teacher's


def student_budget(budget: int) -> int:
    """The part of the byte budget for both logits that goes to the student's."""
    return budget * SHARE // (SHARE + 1)


class Pairs(Chunks):
    """Chunks of the student's rows, and the teacher's logits of their parts."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        target: Tensor | None,
        bias: Tensor | None,
        teacher: tuple[Tensor, Tensor, Tensor | None],
        spec: DivergenceSpec,
        chunk_spec: ChunkSpec,
    ) -> None:
        targets = hidden.new_zeros(hidden.shape[0], dtype=torch.int64) if target is None else target
        ignored = -1 if target is None else spec.ignore_index
        objective = Objective(ignored, 0.0, 0.0, None, spec.scale)
        whole_budget = chunk_spec.budget
        chunk_spec = ChunkSpec(
            chunk_spec.chunk,
            student_budget(whole_budget),
            chunk_spec.compute_dtype,
            chunk_spec.compact and target is not None,
        )
        super().__init__(hidden, weight, targets, bias, objective, chunk_spec)
        self.objective, self.marked = objective, target is not None
        dtype = chunk_spec.compute_dtype or teacher[0].dtype
        self.teacher_hidden = teacher[0]
        self.teacher_weight = opened_if_small(teacher[1].to(dtype))
        self.teacher_bias = None if teacher[2] is None else teacher[2].to(dtype)
        self.whole_budget = whole_budget

    @functools.cached_property
    def part(self) -> int:
        """Rows of the teacher's logits at a time."""
        part = max(MIN_ROWS, self.step // SHARE // MIN_ROWS * MIN_ROWS)
        if self.chunk_spec.budget:  # what the student's logits leave of the budget
            row = max(1, self.weight.shape[0] * self.teacher_weight.dtype.itemsize)
            part = min(part, max(1, (self.whole_budget - self.buffer.nbytes) // row))
        return min(self.step, part)

    @functools.cached_property
    def teacher_buffer(self) -> Tensor:
        """The buffer for the teacher's logits of a part."""
        rows, dtype = min(self.part, self.rows), self.teacher_weight.dtype
        return self.teacher_hidden.new_empty(rows, self.weight.shape[0], dtype=dtype)

    def parts(
        self, rows_of_chunk: Tensor | slice, target: Tensor, raw: Tensor
    ) -> Iterator[tuple[slice, Tensor, Tensor, Tensor | None]]:
        """Parts of a chunk: place in it, logits of the student, of the teacher, targets."""
        teacher = self.teacher_hidden[rows_of_chunk].to(self.teacher_weight.dtype)
        for part in row_blocks(raw.shape[0], 1, self.part):
            out = self.teacher_buffer[: part.stop - part.start]
            linear_into(teacher[part], self.teacher_weight, self.teacher_bias, out)
            yield part, raw[part], out, target[part] if self.marked else None


# --- forward and backward ---

FP16_GAIN = 16.0  # probabilities of a class are small for fp16


def _forward_of(
    name: str, kernels: DivergenceKernels, scaled: Callable[..., Tensor]
) -> Callable[..., Any]:
    """The forward pass of the contract, as a function of tensors."""

    @retried
    def forward(
        hidden: Tensor,
        weight: Tensor,
        teacher_hidden: Tensor,
        teacher_weight: Tensor,
        target: Tensor | None,
        bias: Tensor | None,
        teacher_bias: Tensor | None,
        beta: float,
        scale: float,
        ignore_index: int,
        reduction: str,
        chunk: int,
        budget: int,
        accumulate: torch.dtype,
        compute_dtype: torch.dtype | None,
        compact: bool,
        needs_hidden: bool,
        needs_weight: bool,
        needs_bias: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        spec = spec_of(name, beta, "logits", "logits", scale, ignore_index)
        chunk_spec, rowwise = ChunkSpec(chunk, budget, compute_dtype, compact), reduction == "none"
        needs = tuple(n and not rowwise for n in (needs_hidden, needs_weight, needs_bias))
        teacher = (teacher_hidden, teacher_weight, teacher_bias)
        chunks = Pairs(hidden, weight, target, bias, teacher, spec, chunk_spec)
        loss = DivergenceStats.empty(hidden.shape[0], spec, chunks.like).loss.zero_()
        count = divisor(target, loss.shape[0], loss.dtype, ignore_index)
        gain = loss.new_full((), FP16_GAIN if chunks.dtype == torch.float16 else 1.0)
        accumulator = Accumulator(chunks, hidden, weight, accumulate, needs)
        for chunk_slice, rows_of_chunk, h, t, raw in chunks:
            chunk_loss = loss.new_empty(raw.shape[0])
            for part, student, teacher_logits, marks in chunks.parts(rows_of_chunk, t, raw):
                if any(needs):
                    losses = kernels.loss_and_gradient_(student, teacher_logits, marks, spec, gain)
                else:
                    losses = kernels.statistics(student, teacher_logits, marks, spec).loss
                chunk_loss[part] = losses
            loss[rows_of_chunk] = chunk_loss
            if any(needs):
                accumulator.add(chunk_slice, rows_of_chunk, h, raw)
        divided = gain * count if reduction == "mean" else gain
        return reduced(loss, count, reduction), *accumulator.gradients, divided

    return forward


def _backward_of(
    name: str, kernels: DivergenceKernels, scaled: Callable[..., Tensor]
) -> Callable[..., Any]:
    """The backward pass of the contract, as a function of tensors."""

    @retried
    def backward(
        dloss: Tensor,
        hidden: Tensor | None,
        weight: Tensor | None,
        teacher_hidden: Tensor | None,
        teacher_weight: Tensor | None,
        target: Tensor | None,
        bias: Tensor | None,
        teacher_bias: Tensor | None,
        hidden_gradient: Tensor,
        weight_gradient: Tensor,
        bias_gradient: Tensor,
        denominator: Tensor,
        beta: float,
        scale: float,
        ignore_index: int,
        reduction: str,
        chunk: int,
        budget: int,
        accumulate: torch.dtype,
        compute_dtype: torch.dtype | None,
        compact: bool,
        needs_hidden: bool,
        needs_weight: bool,
        needs_bias: bool,
        hidden_dtype: torch.dtype,
        weight_dtype: torch.dtype,
        bias_dtype: torch.dtype | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        gradients = Gradients(hidden_gradient, weight_gradient, bias_gradient)
        factor: Tensor | None = divide(dloss, denominator) if reduction != "none" else None
        if hidden is not None and weight is not None:
            assert teacher_hidden is not None
            assert teacher_weight is not None
            spec = spec_of(name, beta, "logits", "logits", scale, ignore_index)
            chunk_spec = ChunkSpec(chunk, budget, compute_dtype, compact)
            teacher = (teacher_hidden, teacher_weight, teacher_bias)
            chunks = Pairs(hidden, weight, target, bias, teacher, spec, chunk_spec)
            needs = (needs_hidden, needs_weight, needs_bias)
            accumulator = Accumulator(chunks, hidden, weight, accumulate, needs)
            # upstream gradients of ignored rows are dropped, even if NaN
            row_gradients = (
                dloss if target is None else torch.where(target == ignore_index, 0, dloss)
            )
            arrived = Upstream(row_gradients, row_gradients, None)
            upstream, factor = within_range(arrived, chunks.objective, chunks.dtype)
            for chunk_slice, rows_of_chunk, h, t, raw in chunks:
                ups = upstream.grad_target[rows_of_chunk].contiguous()
                for part, student, teacher_logits, marks in chunks.parts(rows_of_chunk, t, raw):
                    kernels.loss_and_gradient_(student, teacher_logits, marks, spec, ups[part])
                accumulator.add(chunk_slice, rows_of_chunk, h, raw)
            gradients = accumulator.gradients
        dtypes = (hidden_dtype, weight_dtype, bias_dtype or weight_dtype)
        return tuple(scaled(g, factor, dtype) for g, dtype in zip(gradients, dtypes, strict=True))  # type: ignore[return-value]

    return backward


def forward_and_backward(
    name: str, kernels: DivergenceKernels, scaled: Callable[..., Tensor] = scale_to
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Forward and backward of the contract ``name`` over a backend's row kernels."""
    return _forward_of(name, kernels, scaled), _backward_of(name, kernels, scaled)
