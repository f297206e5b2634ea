"""Contract of ``tvd``; behind ``inplace=True`` the gradient replaces the student."""

from torch import Tensor

from liger_multi.dispatch.bitwise import PER_ROW, bitwise
from liger_multi.dispatch.op import Op
from liger_multi.ops._divergence import (
    compile_samples_of,
    declare,
    declare_inplace,
    inplace_samples_of,
    run,
    samples_of,
)
from liger_multi.ops._formulas import log_probabilities, reduced_rows, tvd_rows
from liger_multi.ops._work import elementwise

op = Op(
    "tvd",
    family="divergences",
    bitwise=bitwise(
        PER_ROW,
        "student teacher target loss lse lse_low teacher_lse teacher_lse_low slope",
        reference="forward",
    ),
)
declare(op)
inplace_op = Op(
    "tvd_inplace",
    family="divergences",
    inplace="student",
    bitwise=bitwise(PER_ROW, "student teacher target loss"),
)
declare_inplace(inplace_op)


def tvd(
    student: Tensor,
    teacher: Tensor,
    target: Tensor | None = None,
    *,
    form: str = "prob",
    teacher_form: str | None = None,
    temperature: float = 1.0,
    ignore_index: int = -100,
    reduction: str = "mean",
    inplace: bool = False,
) -> Tensor:
    """Total variation distance of a student from a teacher, a number per row.

    Math:
        With q the student's and p the teacher's probabilities of a row:
        ``sum_j |q[j] - p[j]| / 2``. Where both are equal, the gradient by ``q[j]`` is 0.
        ``form`` and ``teacher_form`` say what ``student`` and ``teacher`` are: ``log_prob``,
        ``prob``, or ``logits`` with ``q = softmax(student / temperature)``. ``teacher_form``
        is ``form`` where it is not given. ``mean``
        divides by the number of rows that count, not of elements; without any it is 0. Rows where
        ``target`` is ``ignore_index`` cost nothing and get no gradient, whatever stands in them.

    Shapes:
        student and teacher ``(..., V)`` with any strides, target ``(...)`` of ids, of which only
        ``ignore_index`` matters; loss scalar, or ``(...)`` for ``none``: a number per row, never
        one a class.

    Dtypes:
        In: any floating dtypes. Inside and loss: fp32 (fp64 for fp64). Gradient: that of student.

    Memory:
        Kept for backward: student and teacher; of logits 8 bytes per row for each
        ``lse``, in two numbers, and 4 for ``slope``. Nothing of rows x V but the gradient. The
        teacher is a constant.
        ``inplace=True`` permits writing the gradient over the student's rows, which must then have
        no other reader: one pass over both, nothing kept, no second tensor. The permission is not
        used under ``torch.compile``, nor where the teacher shares memory with the student.

    Raises:
        TypeError: Wrong kinds of arguments.
        ValueError: Shapes, devices or options that do not fit; a temperature without logits; a
        teacher that wants a gradient; ``inplace`` on a leaf or a view of one,
        or on elements that share memory.

    Source:
        Half of ``torch.nn.functional.l1_loss``, summed over classes; distillation: Wen et al.
        2023 (arXiv:2307.15190).
    """
    return run(
        op,
        student,
        teacher,
        target,
        beta=0.0,
        form=form,
        teacher_form=teacher_form,
        temperature=temperature,
        ignore_index=ignore_index,
        reduction=reduction,
        inplace=inplace,
    )


def formula(
    student: Tensor,
    teacher: Tensor,
    target: Tensor | None = None,
    *,
    form: str = "prob",
    teacher_form: str | None = None,
    temperature: float = 1.0,
    ignore_index: int = -100,
    reduction: str = "mean",
    inplace: bool = False,
) -> Tensor:
    """Total variation distance."""
    log_q = log_probabilities(student, form, temperature)
    log_p = log_probabilities(teacher, teacher_form or form, temperature)
    return reduced_rows(tvd_rows(log_q, log_p), target, ignore_index, reduction)


work = elementwise(2, 5)


# student and teacher read; the gradient written, which one pass can do
inplace_work = elementwise(2, 3)


SAMPLES = samples_of()
INPLACE_SAMPLES = inplace_samples_of(SAMPLES)
COMPILE_SAMPLES = compile_samples_of(32000, {"form": "prob", "teacher_form": "prob"})
