"""The loop of divergences of two heads: the teacher's logits beside a chunk of the student's."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from liger_multi.reference.common.chunking import MIN_ROWS, row_blocks
from liger_multi.reference.cross_entropy.fused_linear import Chunks, ChunkSpec
from liger_multi.reference.cross_entropy.rows import Objective
from liger_multi.reference.divergences.row_stats import DivergenceSpec

SHARE = 8  # rows of the student's logits for one of the teacher's


def student_budget(budget: int) -> int:
    """The bytes of a budget for both logits that the student's may take."""
    return budget * SHARE // (SHARE + 1)


class Pairs(Chunks):
    """Chunks of the student's rows, and the teacher's logits of their parts."""

    def __init__(
        self, hidden: Tensor, weight: Tensor, target: Tensor | None, bias: Tensor | None,
        teacher: tuple[Tensor, Tensor, Tensor | None], spec: DivergenceSpec, plan: ChunkSpec,
    ) -> None:  # fmt: skip
        every = hidden.new_zeros(hidden.shape[0], dtype=torch.int64) if target is None else target
        ignored = -1 if target is None else spec.ignore_index
        objective = Objective(ignored, 0.0, 0.0, None, spec.scale)
        whole_budget = plan.budget
        plan = ChunkSpec(
            plan.chunk,
            student_budget(whole_budget),
            plan.compute_dtype,
            plan.compact and target is not None,
        )
        super().__init__(hidden, weight, every, bias, objective, plan)
        self.objective, self.marked = objective, target is not None
        kind = plan.compute_dtype or teacher[0].dtype
        self.teacher_hidden = teacher[0]
        self.teacher_weight = teacher[1].to(kind)
        self.teacher_bias = None if teacher[2] is None else teacher[2].to(kind)
        part = max(MIN_ROWS, self.step // SHARE // MIN_ROWS * MIN_ROWS)
        if plan.budget:  # what the student's logits left of it
            row = max(1, weight.shape[0] * kind.itemsize)
            part = min(part, max(1, (whole_budget - self.buffer.nbytes) // row))
        self.part = min(self.step, part)
        shape = (min(self.part, self.rows), weight.shape[0])
        self.teacher_buffer = self.teacher_weight.new_empty(shape)

    def parts(
        self, where: Tensor | slice, target: Tensor, raw: Tensor
    ) -> Iterator[tuple[slice, Tensor, Tensor, Tensor | None]]:
        """Parts of a chunk: place in it, logits of the student, of the teacher, targets."""
        teacher = self.teacher_hidden[where].to(self.teacher_weight.dtype)
        for part in row_blocks(raw.shape[0], 1, self.part):
            out = self.teacher_buffer[: part.stop - part.start]
            if self.teacher_bias is None:
                torch.mm(teacher[part], self.teacher_weight.t(), out=out)
            else:
                torch.addmm(self.teacher_bias, teacher[part], self.teacher_weight.t(), out=out)
            yield part, raw[part], out, target[part] if self.marked else None
