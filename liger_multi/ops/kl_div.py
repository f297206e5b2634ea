"""Contract of ``kl_div``; behind ``inplace=True`` the gradient replaces the student."""

from torch import Tensor

from liger_multi import checks
from liger_multi.dispatch.bitwise import PER_ROW, bitwise
from liger_multi.dispatch.op import Op
from liger_multi.ops._divergence import (
    FORMS,
    compile_samples_of,
    declare,
    declare_inplace,
    inplace_samples_of,
    run,
    samples_of,
)
from liger_multi.ops._formulas import kl_rows, log_probabilities, reduced_rows
from liger_multi.ops._work import Options, Shapes, Work, elementwise

op = Op(
    "kl_div",
    family="divergences",
    bitwise=bitwise(
        PER_ROW,
        "student teacher target loss lse lse_low teacher_lse teacher_lse_low slope",
        reference="forward",
    ),
)
declare(op)
inplace_op = Op(
    "kl_div_inplace",
    family="divergences",
    inplace="student",
    bitwise=bitwise(PER_ROW, "student teacher target loss"),
)
declare_inplace(inplace_op)


def kl_div(
    student: Tensor,
    teacher: Tensor,
    target: Tensor | None = None,
    *,
    form: str = "log_prob",
    teacher_form: str = "prob",
    temperature: float = 1.0,
    ignore_index: int = -100,
    reduction: str = "mean",
    inplace: bool = False,
) -> Tensor:
    """KL divergence of a student from a teacher, a number per row.

    Math:
        With q the student's and p the teacher's probabilities of a row:
        ``sum_j p[j] (log p[j] - log q[j])``, where classes with ``p[j] = 0`` add nothing.
        ``form`` and ``teacher_form`` say what ``student`` and ``teacher`` are: ``log_prob``,
        ``prob``, or ``logits`` with ``q = softmax(student / temperature)``. The
        defaults are those of ``torch.nn.functional.kl_div``, whose ``batchmean`` is ``mean`` here.
        The other direction is :func:`jsd` with ``beta=1``. ``mean``
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
        ``torch.nn.functional.kl_div``; distillation: Hinton et al. 2015 (arXiv:1503.02531).
    """
    checks.one_of("kl_div", "teacher_form", teacher_form, FORMS)
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
    form: str = "log_prob",
    teacher_form: str = "prob",
    temperature: float = 1.0,
    ignore_index: int = -100,
    reduction: str = "mean",
    inplace: bool = False,
) -> Tensor:
    """KL divergence of the student from the teacher."""
    log_q = log_probabilities(student, form, temperature)
    log_p = log_probabilities(teacher, teacher_form, temperature)
    return reduced_rows(kl_rows(log_q, log_p), target, ignore_index, reduction)


# student and teacher read; read again, and the gradient written
def work(shapes: Shapes, size: int, options: Options) -> Work:
    # the gradient of log-probabilities is that of the teacher, and reads nothing else
    return elementwise(2, 5 if options.get("form") == "logits" else 4)(shapes, size, options)


# student and teacher read; the gradient written, which one pass can do
inplace_work = elementwise(2, 3)


SAMPLES = samples_of()
INPLACE_SAMPLES = inplace_samples_of(SAMPLES)
COMPILE_SAMPLES = compile_samples_of(128256, {"form": "log_prob", "teacher_form": "prob"})
